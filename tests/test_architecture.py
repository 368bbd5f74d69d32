"""The map of the code, enforced."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mars

SOURCE = Path(__file__).parents[1] / "src" / "mars"
FILES = sorted(SOURCE.rglob("*.py"))

# Who may import whom: everything imports from its own line or from one above. By module prefix,
# of which the longest counts.
LINES = (
    "rule table",
    "engines options sharding",
    "state",
    "exchange dispatch clipping exact roles loading schedules",
    "plan advice groups",
    "collect",
    "optimizer",
    "convert diagnostics explain",
    "",  # mars itself
    "bench lab",
    "lab.errors lab.config",
    "lab.rundir lab.plainfile lab.sealed lab.tensorfile lab.sinks lab.safefile lab.differences "
    "lab.own lab.parallel lab.dtensors lab.retention lab.optimizer_state",
    "lab.data lab.images lab.models lab.report lab.checkpoint lab.log lab.signals lab.clock "
    "lab.schedule lab.muon lab.optimizers lab.recipes lab.sharded lab.saver",
    "lab.hardware lab.workers lab.crew lab.tasks lab.huggingface",
    "lab.loading lab.wrapping lab.loop lab.session",
    "lab.train lab.progress lab.sample lab.converting",
    "lab.describe lab.moved lab.pool lab.arguments lab.unread lab.evaluation "
    "lab.huggingface.command lab.huggingface.writing",
    "lab.train_command lab.race lab.tune lab.search lab.trial lab.findings lab.planner lab.study",
    "lab.doctor",
    "lab.cli",
    "lab.__main__",
)
LAYERS = {
    f"mars.{name}".removesuffix("."): number
    for number, line in enumerate(LINES)
    for name in line.split() or [""]
}
# What the lab may import besides torch and NumPy; only inside functions (see below).
LAB = {
    "numpy", "matplotlib", "tyro", "rich", "tiktoken", "tensorboard", "optuna",
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
    public = {
        "mars.diagnostics", "mars.explain", "mars.sharding", "mars.rule.estimator",
        "mars.bench.shapes", "mars.table",
    }  # fmt: skip
    names = {f"mars.{name}" for name in (*mars.__all__, "lab", "__version__")}
    for path in (SOURCE / "lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found: set[str] = set()
            if isinstance(node, ast.Import):
                found = {a.name for a in node.names if a.name.split(".")[0] == "mars"} - {"mars"}
            elif isinstance(node, ast.ImportFrom) and node.module == "mars":
                found = {f"mars.{alias.name}" for alias in node.names} - names
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mars."):
                found = {node.module or ""}
            odd = {name for name in found - public if not name.startswith("mars.lab")}
            assert not odd, f"{module(path)} imports {odd}"


def test_the_rule_knows_no_groups_devices_or_ranks() -> None:
    for path in (SOURCE / "rule").glob("*.py"):
        text = path.read_text()
        for word in ("param_groups", ".cuda", "distributed", "state_dict", "state["):
            assert word not in text, (path, word)
