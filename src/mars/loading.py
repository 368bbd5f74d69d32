"""State dicts: what is saved beside torch's, what is refused, and what torch would cast."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars.options import PAIRS, SETTLED, as_float, check_differentiable, check_values, plain_numbers
from mars.rule.formats import GROUP
from mars.sharding import is_sharded
from mars.state import EXPONENT, LATER, LOW_HALF, OURS, SHAPED, buffers, kind_of, new_buffer

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

logger = logging.getLogger("mars")

# Options that no scheduler moves and that are not of the machine: told if loading changes them.
TOLD = tuple(
    name
    for name in SETTLED
    if name not in (*PAIRS, "foreach", "fused", "capturable", "differentiable")
)

# Of exact mode: the protocol keeps one of them, step(closure) the other.
EXACT = ("previous_grad", "last_param")


def save(optimizer: Optimizer, save_by_torch: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """torch's state_dict, completed before the user's hooks see it."""
    handle = optimizer.register_state_dict_post_hook(as_saved, prepend=True)
    try:
        return save_by_torch()
    finally:
        handle.remove()


def as_saved(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict with the buffers that the next step will begin with, and which ranks can send
    each other: nothing in it is of a dtype that does not travel. NumPy's numbers, as a schedule by
    hand may write, are Python's in it, which weights_only loading takes.
    """
    for saved_group in saved["param_groups"]:
        plain_numbers(saved_group, differentiable=True)
    places = {id(own): index for index, own in saved["state"].items()}
    for p, own, group in _matched(optimizer, saved):
        wanted = buffers(kind_of(p, group), p, group)
        missing = LATER & wanted.keys() - own.keys() if "step" in own else set()
        made = {name: new_buffer(name, wanted[name], p) for name in missing}
        low = LOW_HALF.get(p.dtype)
        if low in own and dist.is_available() and dist.is_initialized():
            made[low] = own[low].to(torch.int32)  # neither NCCL nor gloo takes int16
        if made:
            saved["state"][places[id(own)]] = {**own, **made}
    return saved


def load(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    load_by_torch: Callable[[dict[str, Any]], None],
) -> None:
    """torch's load_state_dict between a check of what it gets and a repair of what it casts."""
    if not isinstance(state_dict, dict):
        raise TypeError(f"load_state_dict takes a state dict, not {type(state_dict).__name__}")
    accepted: dict[str, Any] = {}

    def check(_: Optimizer, candidate: dict[str, Any]) -> dict[str, Any]:
        accepted.update(_checked(optimizer, candidate))
        _tell(optimizer, accepted)
        return accepted

    def restore(_: Optimizer) -> None:
        for p, saved, group in _matched(optimizer, accepted):
            own = optimizer.state[p]
            wanted = buffers(kind_of(p, group), p, group)
            for name, value in saved.items():
                if name not in OURS:  # a note, of which torch casts what it finds
                    own[name] = value.to(p.device) if isinstance(value, Tensor) else value
                    continue
                if name == "step" and isinstance(value, Tensor):
                    # Counted on a device: on this one, then. Torch's own counts are float32.
                    on_device = group["capturable"] or group["fused"] or value.device.type != "cpu"
                    to = p.device if on_device else value.device
                    own[name] = value.to(to) if value.is_floating_point() else value.to(to).float()
                if name == "step" or not isinstance(value, Tensor):
                    continue
                if name in LOW_HALF.values() and name not in wanted:
                    del own[name]  # saved beside parameters of another dtype
                    continue
                # Torch copied nothing that it did not have to cast or move.
                own[name] = value.to(p.device, wanted.get(name, value.dtype))

    # The user's hooks run first on the way in and last on the way out.
    handles = (
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    )
    try:
        load_by_torch(state_dict)
    finally:
        for handle in handles:
            handle.remove()


def _tell(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Groups are loaded as torch loads them, with their options: say so where that shows."""
    pairs = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    told = {
        f"{name}={saved[name]!r} (it was {group[name]!r})": None
        for group, saved in pairs
        for name in TOLD
        if group[name] != saved[name]
    }
    if told:
        logger.warning("load_state_dict: the saved options hold, %s", ", ".join(told))


def _matched(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> list[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
    """(parameter, saved state, the group as it will be) for each parameter with saved state."""
    matched = []
    for group, saved_group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        options = {**optimizer.defaults, **saved_group}
        for p, index in zip(group["params"], saved_group["params"], strict=True):
            if state_dict["state"].get(index):
                matched.append((p, state_dict["state"][index], options))
    return matched


def _some(names: Collection[Any], most: int = 8) -> str:
    """Names, of which there may be thousands."""
    found = sorted(map(str, names))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return str(found[:most]) + more


def _check_form(state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError if this is no state dict at all."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"state dict without {key!r}: it has {_some(state_dict)}. Pass what "
                "optimizer.state_dict() returned"
            )
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping) or not all(isinstance(s, Mapping) for s in states.values()):
        raise ValueError("state dict: 'state' must be a dict of dicts, one a parameter")
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))
        for group in groups
    ):
        raise ValueError(
            "state dict: 'param_groups' must be a list of dicts that have a list of 'params'"
        )


def _completed(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group with the options of ours that it does not know: another optimizer saved it."""
    kept = {name: value for name, value in own.items() if name not in ("params", "param_names")}
    whole = {**kept, **saved}
    foreign = "lr" in saved and not {"base_lr", "lr_1d", "mars_type"} & saved.keys()
    if foreign and whole["mars_type"] != "plain-adamw":
        raise ValueError(
            "the state dict has no options of MARS: it was saved by another optimizer, whose "
            f"moments {whole['mars_type']} cannot continue. MARS.from_adamw makes a MARS of an "
            "AdamW; groups of mars_type='plain-adamw' go on with its state"
        )
    coupled = saved.get("decoupled_weight_decay") is False and saved.get("weight_decay", 0) != 0
    if foreign and (coupled or "momentum_decay" in saved):
        raise ValueError(
            "the state dict was saved by NAdam, or by an Adam that adds its decay to the gradient: "
            "plain-adamw goes on with the state of an AdamW alone"
        )
    if foreign:
        check_values(whole)
        whole["lr_1d"] = whole["base_lr"] = as_float(whole["lr"])  # AdamW's, whose rate is lr
    return whole


def _checked(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with whole groups. ValueError if it cannot be this optimizer's."""
    _check_form(state_dict)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if len(sizes) != len(saved_sizes):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: "
            f"{len(saved_sizes)}, the optimizer has {len(sizes)}"
        )
    if sizes != saved_sizes:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            f"optimizer's group: {saved_sizes} parameters, the optimizer has {sizes}"
        )
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    state_dict = {**state_dict, "param_groups": [_completed(*pair) for pair in groups]}
    for group in state_dict["param_groups"]:
        check_values({**optimizer.defaults, **group}, moved=True)
        check_differentiable(group, optimizer.defaults)
    names = _names(optimizer.param_groups)
    both = [
        (i, name, saved)
        for i, (name, saved) in enumerate(
            zip(names, _names(state_dict["param_groups"]), strict=True)
        )
        if name and saved
    ]
    moved = next((known for known in both if known[1] != known[2]), None)
    if moved and sorted(name for _, name, _ in both) == sorted(saved for *_, saved in both):
        i, name, saved_name = moved
        raise ValueError(
            f"the parameters have another order here: number {i} is {name!r}, and in the state "
            f"dict {saved_name!r}. Give them to the optimizer in the order of then"
        )
    order = {id(p): i for i, p in enumerate(chain.from_iterable(
        g["params"] for g in optimizer.param_groups))}  # fmt: skip
    for p, saved, group in _matched(optimizer, state_dict):
        i = order[id(p)]
        who = f"parameter {i}" + (f" ({names[i]})" if names[i] else "")
        _check_buffers(who, p, saved, group)
    return state_dict


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of all parameters in order; empty in a group that somebody has changed by hand since."""
    names: list[str] = []
    for group in groups:
        count, known = len(group["params"]), group.get("param_names", ())
        names += known if len(known) == count else [""] * count
    return names


def _check_buffers(who: str, p: Tensor, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    optional = set(LOW_HALF.values())  # absent where the state comes from a float32 run
    wanted = buffers(kind_of(p, group), p, group)
    required = {"step", *wanted} - optional
    if set(saved) == {"previous_grad"}:
        required = set()  # exact mode, saved between update_previous_grad and the first step
    missing = sorted(required - set(saved))
    if missing:
        raise ValueError(
            f"state of {who} lacks {missing}: the state dict is truncated, or was saved by "
            f"another optimizer, whose moments cannot be continued. It has {_some(saved)}"
        )
    for name, value in saved.items():
        if name == "step":
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"state of {who}: step has {value.numel()} elements, not one")
            if not isinstance(value, (Tensor, Real)) or not 0 <= as_float(value) < math.inf:
                raise ValueError(f"state of {who}: step is {value!r}, not a count")
        elif name in wanted and not isinstance(value, Tensor):
            raise ValueError(f"state of {who}: {name} is {value!r}, not a tensor")
        elif name in wanted and (value.dtype == torch.uint8) != (wanted[name] == torch.uint8):
            raise ValueError(
                f"state of {who}: {name} is saved in {value.dtype}, and {wanted[name]} would be "
                "needed: load it with the state_dtype and is_approx that it was saved with"
            )
        elif isinstance(value, Tensor) and name in EXPONENT.values():
            if value.numel() != -(-p.numel() // GROUP):
                raise ValueError(
                    f"state of {who}: {name} has {value.numel()} elements for {p.numel()} codes"
                )
        elif name in required and is_sharded(p) and not is_sharded(value):
            raise ValueError(
                f"state of {who}: {name} is a plain tensor, and the parameter a DTensor. Load by "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards it"
            )
        elif name in EXACT and is_sharded(p) and not is_sharded(value):
            raise ValueError(
                f"state of {who}: {name} is a plain tensor, and the parameter a DTensor. "
                "set_optimizer_state_dict shards only what the optimizer has: take one step in the "
                "way of exact mode that saved this, step(closure) or the protocol, and load then"
            )
        elif name in SHAPED and isinstance(value, Tensor) and value.shape != p.shape:
            raise ValueError(
                f"state of {who}: {name} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(p.shape)}. The state belongs to another model, or parameters were "
                "given in another order"
            )
