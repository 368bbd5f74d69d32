"""An optimizer's state as a checkpoint sees it: whose it is, and tensors by name.

In one file the state stays as the optimizer gives it, parameters numbered. In a sharded checkpoint
each tensor has a name (``optimizer.state.NAME OF PARAMETER.exp_avg``, as torch's own tools would
call it), and what is left of the state_dict, rates and options, is a small file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mars.lab.dtensors import shard_like
from mars.lab.sealed import CheckpointError
from mars.sharding import is_sharded

PREFIX = "optimizer.state."


def parts(optimizer: Any) -> list[Any]:
    """The optimizers that one consists of; itself, if it is one."""
    found: list[Any] = getattr(optimizer, "optimizers", [optimizer])
    return found


def _members(optimizer: Any) -> list[list[Tensor]]:
    """Parameters of each optimizer (one may be several), in the order its state_dict numbers."""
    return [[p for g in part.param_groups for p in g["params"]] for part in parts(optimizer)]


def _states(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The state_dict of each."""
    found: list[dict[str, Any]] = state.get("together", [state])
    return found


def names(model: nn.Module, optimizer: Any) -> list[list[str]]:
    """The model's names of the parameters, as numbered."""
    known: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return [[known[p] for p in members] for members in _members(optimizer)]


def numbered(state: Mapping[str, Any], by_group: list[list[str]]) -> list[list[str]]:
    """``names`` of a state_dict without its optimizer, from the names in a signature."""
    found, groups = [], iter(by_group)
    for one in _states(state):
        own: dict[int, str] = {}
        for group in one["param_groups"]:
            own.update(zip(group["params"], next(groups), strict=True))
        found.append([own[number] for number in sorted(own)])
    return found


def split(name: str) -> tuple[str, str]:
    """Parameter and key of a tensor's name in a sharded checkpoint."""
    parameter, _, key = name.removeprefix(PREFIX).rpartition(".")
    return parameter, key


def take_apart(state: dict[str, Any], called: list[list[str]]) -> tuple[dict[str, Tensor], Any]:
    """A state_dict as tensors by name, and the same without them."""
    tensors: dict[str, Tensor] = {}
    rests = []
    for one, own in zip(_states(state), called, strict=True):
        rest: dict[int, Any] = {}
        for number, values in one["state"].items():
            rest[number] = {}
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"{PREFIX}{own[number]}.{key}"] = value
                else:
                    rest[number][key] = value
        rests.append({**one, "state": rest})
    return tensors, {"together": rests} if "together" in state else rests[0]


def put_together(rest: Any, called: list[list[str]], tensors: Mapping[str, Tensor]) -> Any:
    """The opposite of ``take_apart``."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, key = split(name)
        by_name.setdefault(parameter, {})[key] = tensor
    for one, own in zip(_states(rest), called, strict=True):
        for number, name in enumerate(own):
            if name in by_name:
                one["state"][number] = {**one["state"].get(number, {}), **by_name[name]}
    return rest


def distribute(state: dict[str, Any], optimizer: Any) -> None:
    """Lay whole tensors of a state_dict out as this optimizer's parameters are."""
    for one, members in zip(_states(state), _members(optimizer), strict=True):
        for number, p in enumerate(members):
            if not is_sharded(p):
                continue
            for key, value in one["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    one["state"][number][key] = shard_like(value, p)


def restore(path: Path, optimizer: Any, state: Any) -> None:
    """Load a state_dict; what does not fit is a CheckpointError and changes nothing."""
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(state)
    except Exception as error:
        optimizer.load_state_dict(before)  # of several optimizers in one, some may have loaded
        raise CheckpointError(f"{path} is not of this optimizer: {error}") from error


def signature(model: Any, optimizer: Any) -> dict[str, Any]:
    """By which a checkpoint of another optimizer, or of other groups, is recognised."""
    groups = getattr(optimizer, "param_groups", [])
    shapes = [[list(p.shape) for p in group["params"]] for group in groups]
    known = {p: name for name, p in getattr(model, "named_parameters", dict)()}
    numbered = [[known.get(p) for p in group["params"]] for group in groups]
    return {"class": type(optimizer).__qualname__, "groups": shapes, "names": numbered}


def difference(saved: dict[str, Any], own: dict[str, Any]) -> str | None:
    """The first thing in which two signatures differ."""
    if saved["class"] != own["class"]:
        return f"it was saved by {saved['class']}, this is {own['class']}"
    theirs, ours = saved["groups"], own["groups"]
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} parameter groups, this one {len(ours)}"
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if len(a) != len(b):
            return f"its group {i} has {len(a)} parameters, this one's {len(b)}"
        for j, (shape, other) in enumerate(zip(a, b, strict=True)):
            if shape != other:
                return (
                    f"parameter {j} of its group {i} has shape {tuple(shape)}, this one's "
                    f"{tuple(other)}"
                )
    return None
