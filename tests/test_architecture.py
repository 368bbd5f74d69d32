"""The map of the code, enforced."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "mars"
FILES = sorted(SOURCE.rglob("*.py"))

# Who may import whom, by module prefix; the longest match counts. Everything imports downwards.
LAYERS = {
    "mars.rule": 0,
    "mars.engines": 1,
    "mars.options": 1,
    "mars.state": 2,
    "mars.sharding": 1,
    "mars.exchange": 3,
    "mars.dispatch": 3,
    "mars.exact": 3,
    "mars.groups": 3,
    "mars.loading": 3,
    "mars.schedules": 3,
    "mars.plan": 4,
    "mars.collect": 5,
    "mars.optimizer": 6,
    "mars.convert": 7,
    "mars.diagnostics": 7,
    "mars.explain": 7,
    "mars": 8,
    "mars.bench": 9,
    "mars.lab": 9,
    **{f"mars.lab.{name}": 10 for name in ("errors", "config")},
    **{f"mars.lab.{name}": 11 for name in ["rundir", "plainfile", "sealed", "tensorfile", "sinks"]},
    **{f"mars.lab.{name}": 11 for name in ("safefile", "differences")},
    "mars.lab.huggingface": 13,
    **{f"mars.lab.huggingface.{name}": 16 for name in ("command", "writing")},
    "mars.lab.loading": 14,
    "mars.lab.evaluation": 16,
    **{f"mars.lab.{name}": 11 for name in ["parallel", "dtensors", "retention", "optimizer_state"]},
    **{f"mars.lab.{name}": 12 for name in ("data", "models", "report", "checkpoint", "log")},
    **{
        f"mars.lab.{name}": 12 for name in ["signals", "clock", "schedule", "optimizers", "recipes"]
    },
    **{f"mars.lab.{name}": 12 for name in ("sharded", "saver")},
    "mars.lab.images": 12,
    **{f"mars.lab.{name}": 13 for name in ("hardware", "workers", "tasks")},
    "mars.lab.wrapping": 14,
    **{f"mars.lab.{name}": 14 for name in ("loop", "session")},
    **{f"mars.lab.{name}": 15 for name in ("train", "progress", "sample", "converting")},
    **{f"mars.lab.{name}": 16 for name in ("describe", "pool", "arguments")},
    **{
        f"mars.lab.{name}": 17
        for name in ("race", "tune", "search", "trial", "findings", "planner", "study")
    },
    "mars.lab.doctor": 18,
    "mars.lab.cli": 19,
    "mars.lab.__main__": 20,
}
# What the lab may import besides torch and NumPy; only inside functions (see below).
LAB = {
    "numpy", "matplotlib", "tyro", "rich", "tiktoken", "safetensors", "tensorboard", "optuna",
    "datasets", "pyarrow", "wandb", "pytorch_optimizer", "zstandard", "PIL",
    "lm_eval",
}  # fmt: skip


def module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(name: str) -> int:
    fits = [prefix for prefix in LAYERS if name == prefix or name.startswith(prefix + ".")]
    return LAYERS[max(fits, key=len)]


def imports(path: Path) -> set[str]:
    """Modules of ours that are imported when this one is (not inside functions or for types)."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mars"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("mars")}
    return found


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_go_one_way(path: Path) -> None:
    own = layer(module(path))
    for name in imports(path):
        assert layer(name) <= own, f"{module(path)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module)
def test_a_file_holds_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert ast.get_docstring(ast.parse(path.read_text())), "say what the file is for"


def test_the_library_needs_torch_alone() -> None:
    always = {"torch", "mars", "__future__"} | set(__import__("sys").stdlib_module_names)
    for path in FILES:
        allowed = always | ({"triton"} if "fused" in path.parts else set())
        allowed |= {"matplotlib"} if "bench" in path.parts else set()
        allowed |= LAB | {"triton"} if "lab" in path.parts else set()
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= allowed, path


def test_the_lab_imports_its_packages_late() -> None:
    """The training path runs where there is only torch and NumPy."""
    for path in (SOURCE / "lab").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & (LAB - {"numpy"}), path


def test_the_lab_uses_the_librarys_public_names() -> None:
    public = ("mars", "mars.lab", "mars.diagnostics", "mars.sharding", "mars.bench.shapes")
    for path in (SOURCE / "lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mars"):
                module_name = node.module or ""
                assert module_name in public or module_name.startswith("mars.lab."), path


def test_the_rule_knows_no_groups_devices_or_ranks() -> None:
    for path in (SOURCE / "rule").glob("*.py"):
        text = path.read_text()
        for word in ("param_groups", ".cuda", "distributed", "state_dict", "state["):
            assert word not in text, (path, word)
