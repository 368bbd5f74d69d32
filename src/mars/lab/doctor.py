"""`mars doctor`: what is here, what is missing, which engine steps what, and if it is right.

It runs where there is torch alone: what it needs besides is imported where it is used.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import mars
from mars.explain import engine_rows
from mars.lab import recipes
from mars.lab.config import Model, Optimizer
from mars.lab.errors import LabError, first_line
from mars.lab.hardware import choose_device
from mars.lab.models import GPT, peak_flops
from mars.lab.optimizers import REGISTRY, build
from mars.table import format_table

# Packages and what they are for; the first are needed to train.
NEEDED = (
    ("torch", "everything"),
    ("numpy", "data"),
)
OPTIONAL = (
    ("tiktoken", "GPT-2's tokenizer: gpt-50m and all gpt2 recipes"),
    ("triton", "the fused engine, torch.compile on a GPU"),
    ("tyro", "the command line"),
    ("rich", "progress bars"),
    ("pytorch_optimizer", "lion, soap and adopt in races"),
    ("optuna", "mars tune"),
    ("datasets", "mars data from the hub"),
    ("pyarrow", "mars data from .parquet"),
    ("tensorboard", "--keep.tensorboard"),
    ("wandb", "--keep.wandb"),
)
TYPES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
SMALL = Model(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=64)

# Engines round differently, by some 1e-6 of an update; one that computes something else is off by
# about all of it.
TOLERANCE = 1e-2


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """What is installed, what is the device, which engine steps what, and why."""

    device: str = "auto"
    """The device to look at: auto, cpu, cuda, cuda:1"""
    compile: bool = False
    """Try torch.compile too: it takes a while."""


def arguments_of(words: list[str]) -> DoctorArgs:
    """What the words ask for; where tyro is missing, by what Python itself has."""
    prog, about = "mars doctor", DoctorArgs.__doc__ or ""
    if all(find_spec(name) for name in ("tyro", "numpy")):
        from mars.lab.arguments import parse

        return parse(DoctorArgs, words, prog, about)
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("--device", default="auto", help="the device to look at")
    parser.add_argument("--compile", action="store_true", help="try torch.compile too")
    return DoctorArgs(**vars(parser.parse_args(words)))


def doctor_command(args: DoctorArgs) -> None:
    """Print the findings; a LabError at the end names what is needed and broken."""
    device = choose_device(args.device, option="--device")
    broken: list[str] = []
    missing: list[str] = []
    parts: list[tuple[str, Iterator[str]]] = [
        ("versions", versions()),
        ("packages", packages(broken, missing)),
        ("devices", devices()),
        ("engines of MARS", engines(device)),
        ("self-check", self_check(device, args.compile, broken)),
        ("optimizers", optimizers(device)),
        ("recipes", (f"{name:28} {recipe.about}" for name, recipe in recipes.RECIPES.items())),
        ("disk", disk()),
    ]
    for title, lines in parts:
        sys.stdout.write(f"{title}\n")
        for line in lines:
            sys.stdout.write(f"  {line}\n")
        sys.stdout.write("\n")
    if missing:
        sys.stdout.write(f"optional and missing: pip install {' '.join(missing)}\n")
    if broken:
        raise LabError(f"training does not work here: {'; '.join(broken)}")
    if "tyro" in missing:
        sys.stdout.write("without tyro you can train from Python; every other command needs it\n")
    else:
        sys.stdout.write("everything needed to train is here\n")


def versions() -> Iterator[str]:
    """The software that numbers and speed depend on."""
    yield f"mars {mars.__version__}"
    yield f"python {platform.python_version()} on {platform.platform(terse=True)}"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    hip = f", ROCm {torch.version.hip}" if torch.version.hip else ""
    yield f"torch {torch.__version__}, {cuda}{hip}"


def packages(broken: list[str], missing: list[str]) -> Iterator[str]:
    """What is installed, and what that is for."""
    for name, purpose in NEEDED:
        found = _version(name)
        try:
            importlib.import_module(name)
        except Exception as error:
            broken.append(f"{name} is needed: pip install {name}")
            found = f"broken ({error})" if found else None
        yield f"{name:18} {found or 'MISSING':14} {purpose}"
    for name, purpose in OPTIONAL:
        found = _version(name)
        if found is None and (name != "triton" or torch.cuda.is_available()):
            missing.append(name)
        yield f"{name:18} {found or '–':14} {purpose}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"


def devices() -> Iterator[str]:
    """Processor and GPUs."""
    name = platform.processor() or platform.machine()
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f", {_gib(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}"
    yield f"cpu     {name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{memory}"
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        peak = peak_flops(f"cuda:{i}")
        speed = f"{peak / 1e12:.0f} TFLOP/s (bf16)" if peak else "peak FLOP/s unknown"
        capability = ".".join(map(str, torch.cuda.get_device_capability(i)))
        yield (
            f"cuda:{i}  {torch.cuda.get_device_name(i)}, compute {capability}, "
            f"{_gib(free)} of {_gib(total)} free, {speed}"
        )
    if not torch.cuda.is_available():
        yield "cuda    none: gpt-tiny trains on the CPU in half a minute, GPT-2 wants a GPU"


def engines(device: torch.device) -> Iterator[str]:
    """`mars.explain` of each type on a small GPT."""
    table = [["type"]]
    for name in TYPES:
        optimizer = build(GPT(SMALL).to(device), Optimizer(name=name))
        assert isinstance(optimizer, mars.MARS)
        header, *rows = ((*row[:3], *row[5:]) for row in engine_rows(optimizer))  # without rates
        table[0][1:] = header
        table += [[name, *row] for row in rows]
    yield from format_table(table).split("\n")


def self_check(device: torch.device, compile_: bool, broken: list[str]) -> Iterator[str]:
    """Things that must work, tried."""
    checks: list[tuple[str, Callable[[], str]]] = [
        *((f"{name} on {device}", partial(compare, name, device)) for name in TYPES),
    ]
    data = find_spec("numpy") is not None
    if data:
        checks.append(("the embedded corpus", _corpus))
    if data and _version("tiktoken"):
        checks.append(("GPT-2's tokenizer", _gpt2))
    if compile_:
        checks.append(("torch.compile", lambda: _compile(device)))
    for name, check in checks:
        try:
            yield f"{name:24} {check()}"
        except Exception as error:
            yield f"{name:24} FAILS: {first_line(error)}"
            if name != "torch.compile":
                broken.append(f"{name} fails")
            elif device.type == "cuda":
                broken.append("torch.compile fails: train with --no-loop.compile")


def compare(name: str, device: torch.device) -> str:
    """Two steps by the engine of choice and by foreach, against the reference engine."""
    reference, start = _stepped(name, device, {"foreach": "False", "fused": "False"})
    length = torch.linalg.vector_norm(reference - start)
    said = []
    for engine, options in (("own choice", {}), ("foreach", {"foreach": "True", "fused": "False"})):
        other, _ = _stepped(name, device, options)
        off = float(torch.linalg.vector_norm(other - reference) / length)
        if not off < TOLERANCE:
            raise LabError(f"{engine} is off by {off:.2g} of the update")
        said.append(f"{engine} {off:.0e}")
    return f"right; off from the reference engine: {', '.join(said)}"


def _stepped(
    name: str, device: torch.device, options: dict[str, str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A small model's parameters after two steps on fixed gradients, and before."""
    model = GPT(SMALL).to(device)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    # In bfloat16 the Newton–Schulz iteration itself differs by more than an error would show.
    optimizer = build(model, Optimizer(name=name, options={"ns_dtype": "float32", **options}))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), start


def _corpus() -> str:
    from mars.lab.data import open_tokens

    return f"{len(open_tokens('tinyshakespeare', 'train', 'bytes')):,} tokens to train on"


def _gpt2() -> str:
    from mars.lab.data import tokenizer

    words, text = tokenizer("gpt2"), "To be, or not to be"
    if words.decode(words.encode(text)) != text:
        raise LabError("decoding does not undo encoding")
    return "right"


def _compile(device: torch.device) -> str:
    model, tokens = GPT(SMALL).to(device), torch.arange(8, device=device)[None]
    with torch.no_grad():
        off = (torch.compile(model)(tokens) - model(tokens)).abs().max()
    if not off < 1e-2:
        raise LabError(f"a compiled model's logits are off by {float(off):.2g}")
    return "works"


def optimizers(device: torch.device) -> Iterator[str]:
    """Every registered optimizer, and whether it can be had."""
    for name, entry in REGISTRY.items():
        try:
            build(GPT(SMALL).to(device), Optimizer(name=name))
            text = entry.about
        except Exception as error:
            text = f"not available: {error}"
        yield f"{name:14} {entry.label:14} {text}"


def disk() -> Iterator[str]:
    """Room where runs are kept by default."""
    folder = Path("runs") if Path("runs").is_dir() else Path()
    free = shutil.disk_usage(folder).free
    yield f"{_gib(free)} free in {folder.resolve()}"
    if not os.access(folder, os.W_OK):
        yield "it is not writable: give --keep.out, or --out"
