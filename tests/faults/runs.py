"""Runs to harm, and whether two of them ended alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from miniature import run
from safetensors.torch import load_file

from mars.lab import checkpoint
from mars.lab.config import Run, to_json
from mars.lab.log import read

TEXT = Path(__file__).with_name("text.txt")


def config(out: Path, optimizer: str = "mars-adamw", **loop: Any) -> Run:
    """A miniature run on a text that is there at once.

    The rate is constant, so that a run can be made longer and stay the same as far as it was.
    """
    changes = {"schedule": {"shape": "constant"}, "data": {"source": str(TEXT)}}
    return run(out, optimizer, **loop).replace(**changes)


def given(out: Path, optimizer: str = "mars-adamw", **loop: Any) -> Path:
    """A file with the configuration of such a run, beside its directory-to-be."""
    return written(config(out, optimizer, **loop))


def written(config: Run) -> Path:
    """The file of a configuration."""
    out = Path(config.directory)
    path = out.with_name(out.name + ".json")
    path.write_text(json.dumps(to_json(config)))
    return path


def flip(path: Path) -> None:
    """Harm one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def set_length(folder: Path, length: int) -> None:
    """Let a run end at another step than it was begun for, without a word.

    Its rate is constant, so nothing else is changed by that.
    """
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["loop"]["steps"] = length
    path.write_text(json.dumps(values))


def steps(folder: Path) -> list[int]:
    """Steps of which there is a checkpoint, intact or not."""
    return sorted(int(path.name[5:13]) for path in (folder / "checkpoints").glob("step-*"))


def newest(folder: Path) -> Path:
    """The newest intact checkpoint."""
    path = checkpoint.newest(folder, lambda text: None)
    assert path is not None
    return path


def leaves(value: Any) -> list[Any]:
    """The leaves of a nest, tensors as lists."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value.tolist() if isinstance(value, torch.Tensor) else value]


def losses(folder: Path) -> list[tuple[int, float]]:
    """Every loss of a log."""
    return [(r["step"], r["loss"]) for r in read(folder) if r["kind"] in ("train", "valid")]


def texts(folder: Path, what: str) -> list[str]:
    """What the log says of one kind of event."""
    return [r["text"] for r in read(folder) if r.get("what") == what]


def assert_alike(folder: Path, other: Path) -> None:
    """To the bit: weights, optimizer, random numbers, and every loss of the log."""
    one, two = newest(folder), newest(other)
    assert one.name == two.name
    weights, expected = (load_file(path / "model.safetensors") for path in (one, two))
    assert list(weights) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    for name in ("optimizer.pt", "training.pt"):
        states = [torch.load(path / name, weights_only=True) for path in (one, two)]
        for state in states:
            state.pop("seconds", None)
            state.pop("best", None)  # of what was saved: a run that was stopped saved once more
            state.get("rng", {}).pop("python", None)  # each process has its own; we draw nothing
        assert leaves(states[0]) == leaves(states[1]), name
    assert losses(folder) == losses(other)
