"""What a tensor carries: which buffers, of which dtype, and whether a step can go on from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mars.options import LEAN_BUFFERS, state_format
from mars.rule import KINDS, formats
from mars.rule.formats import GROUP
from mars.sharding import here, is_sharded

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer


# The low half of a 16-bit parameter; the two formats are not interchangeable, so neither are names.
LOW_HALF = {torch.bfloat16: "param_low_bf16", torch.float16: "param_low_fp16"}


# The exponents of a buffer of 8 bits, one a group of elements.
EXPONENT = {name: f"{name}_exponent" for name in LEAN_BUFFERS}

# What the step that first needs it makes, of zeros; and a state dict, if it is saved before.
LATER = {"last_grad", EXPONENT["last_grad"], "max_exp_avg_sq"}

# The buffers of a row of a batch, after (x, g, t) and before the low half; see engines.COLUMNS.
ROW = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "last_grad", *EXPONENT.values())

# The tensors of a parameter's state that have its shape, and all of it. What else is there: notes.
SHAPED = {*LEAN_BUFFERS, *LOW_HALF.values(), "max_exp_avg_sq", "previous_grad", "last_param"}
OURS = {*SHAPED, *EXPONENT.values(), "step"}


def kind_of(p: Tensor, group: Mapping[str, Any]) -> str:
    """The rule that trains this tensor of this group.

    A complex tensor counts as its real view (one more dimension), as in all of torch.optim.
    """
    mars_type: str = group["mars_type"]
    if mars_type not in KINDS:
        raise ValueError(f"Invalid mars_type: {mars_type!r} (it must be one of {list(KINDS)})")
    ndim = p.ndim + int(p.is_complex())
    is_matrix = ndim == 2 or (ndim > 2 and group["matrix_rule"] != "2d")
    if is_matrix or not KINDS[mars_type].corrected:
        return mars_type
    if not group["optimize_1d"]:
        return "plain-adamw"
    return "mars-adamw" if KINDS[mars_type].matrix else mars_type


def beside(kind: str, group: Mapping[str, Any]) -> bool:
    """Whether AdamW trains this kind beside the group's own type, by the options of 1-D tensors."""
    return not KINDS[kind].corrected and group["mars_type"] != kind


def needs_last_grad(kind: str, group: Mapping[str, Any]) -> bool:
    """Whether c itself is needed: if it is clipped, squared, or made of a foreign gradient."""
    return KINDS[kind].corrected and (
        not group["is_approx"]
        or group["clip"] is not None
        or (KINDS[kind].second_moment and group["second_moment"] == "corrected")
    )


def buffers(kind: str, p: Tensor, group: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Every buffer beside ``step`` that a step of this tensor reads, with its dtype."""
    wide = torch.float32 if p.dtype in LOW_HALF else p.dtype
    needed = {"exp_avg": wide}
    if KINDS[kind].second_moment:
        needed["exp_avg_sq"] = wide
    if needs_last_grad(kind, group):
        needed["last_grad"] = p.dtype
    for name in list(needed):
        form = state_format(group, name)
        if form == "bfloat16":
            needed[name] = torch.bfloat16
        elif form == "8bit":
            needed[name] = needed[EXPONENT[name]] = torch.uint8
    if group["amsgrad"] and KINDS[kind].second_moment:
        needed["max_exp_avg_sq"] = wide
    if p.dtype in LOW_HALF:
        needed[LOW_HALF[p.dtype]] = torch.int16
    return needed


def check_gradient(p: Tensor, group: Mapping[str, Any]) -> None:
    """Refuse what no engine can step."""
    if p.grad is not None and p.grad.shape != p.shape:
        raise RuntimeError(
            f"the gradient has shape {tuple(p.grad.shape)}, its parameter {tuple(p.shape)}: the "
            "parameter was changed after the backward pass"
        )
    if is_sharded(p) and getattr(p, "placements", None) == getattr(p.grad, "placements", None):
        cut, own = here(p.grad).shape, here(p).shape
        if cut != own:
            raise RuntimeError(
                f"the part of the gradient that is here has shape {tuple(cut)}, that of its "
                f"parameter {tuple(own)}: they are cut in different places"
            )
    if not (p.is_floating_point() or p.is_complex()):
        raise RuntimeError(f"a parameter of {p.dtype} cannot be trained: use a floating dtype")
    if p.grad is not None and p.grad.layout != torch.strided:
        raise RuntimeError(
            "MARS does not support sparse gradients. Use nn.Embedding(sparse=False), or train this "
            "parameter with torch.optim.SparseAdam"
        )
    if group["differentiable"] and p.dtype in LOW_HALF:
        raise RuntimeError(
            f"differentiable=True needs float32 or float64 parameters, not {p.dtype}: autograd "
            "cannot follow the bits of its low half"
        )


def check_state(own: Mapping[str, Any], p: Tensor, names: Mapping[str, torch.dtype]) -> None:
    """Refuse a step that cannot go on from this state, before anything is changed."""
    for name, dtype in names.items():
        held = own.get(name)
        if held is None:
            _check_new(name, dtype, own, p)
        elif held.dtype != dtype:
            raise RuntimeError(
                f"{name} is kept in {held.dtype}, and {dtype} is needed now: convert the model "
                "before you make the optimizer, and set state_dtype and is_approx before the first "
                "step"
            )
        elif held.device != p.device:
            raise RuntimeError(
                f"{name} is on {held.device}, its parameter on {p.device}: move the model before "
                "the first step, or load the state dict again after moving it"
            )
        elif held.shape != p.shape and name not in EXPONENT.values():
            raise RuntimeError(
                f"{name} has shape {tuple(held.shape)}, its parameter {tuple(p.shape)}: the "
                "parameter was changed after its first step; make a new optimizer for it"
            )


def _check_new(name: str, dtype: torch.dtype, own: Mapping[str, Any], p: Tensor) -> None:
    """Refuse a buffer that cannot begin now, or not in this dtype."""
    if name == "exp_avg_sq" and "exp_avg" in own:
        raise RuntimeError(
            "exp_avg_sq cannot begin in mid-run: mars_type, matrix_rule or optimize_1d was changed "
            "after the first step of this parameter; make a new optimizer for it"
        )
    lean = dtype in (torch.uint8, torch.bfloat16) and dtype != p.dtype
    halved = is_sharded(p) and not p.is_complex()  # 16 bits of it can be kept, but not 8
    plain = type(p.data) is Tensor or (halved and dtype == torch.bfloat16)
    if lean and (not plain or p.is_complex()):
        raise RuntimeError(
            f"state_dtype: {name} of a {type(p.data).__name__} of {p.dtype} cannot be kept in "
            + ('8 bits; use "bfloat16"' if halved else "fewer bits; use state_dtype=None")
            + " for it"
        )


def check_group(group: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]) -> None:
    """`check_state` for all that this step will touch."""
    needed: dict[Any, dict[str, torch.dtype]] = {}
    for p in group["params"]:
        if p.grad is not None:
            key = kind_of(p, group), p.dtype
            if key not in needed:
                needed[key] = buffers(key[0], p, group)
            check_state(states.get(p, {}), p, needed[key])


def complete(own: dict[str, Any], p: Tensor, names: Mapping[str, torch.dtype]) -> None:
    """Make the buffers that are missing."""
    if torch.compiler.is_compiling():  # else `check_group` has done so
        check_state(own, p, names)
    for name, dtype in names.items():
        if name not in own:
            own[name] = new_buffer(name, dtype, p)


def drop_unused(
    own: dict[str, Any], kind: str, group: Mapping[str, Any], names: Mapping[str, torch.dtype]
) -> None:
    """Of buffers that were needed before: nobody would keep them up to date."""
    if "last_grad" not in names:
        _drop_last_grad(own, kind, group)
    for name in ROW:
        if name not in names:
            own.pop(name, None)
    if group["is_approx"]:
        own.pop("previous_grad", None)


def _drop_last_grad(own: dict[str, Any], kind: str, group: Mapping[str, Any]) -> None:
    """exp_avg has been m, and is n = m − γ·h from now on."""
    h, exponents = own.pop("last_grad", None), own.pop(EXPONENT["last_grad"], None)
    if h is None or not KINDS[kind].corrected or "exp_avg" not in own:
        return
    h = h if exponents is None else formats.decode(h, exponents, True)
    gamma = group["gamma"]
    share = h * (gamma.reshape(()).to(h.device) if isinstance(gamma, Tensor) else gamma)
    share = -share if group["maximize"] else share
    m, exponents = own["exp_avg"], own.get(EXPONENT["exp_avg"])
    if exponents is None:
        m.sub_(share.to(m.dtype))
        return
    moved = formats.decode(m, exponents, True) - share
    bits = formats.random_bits(m, own["step"], 1)
    own["exp_avg"], own[EXPONENT["exp_avg"]] = formats.encode(moved.float(), bits, signed=True)


def straighten(own: dict[str, Any], p: Tensor) -> None:
    """Lay the state out as kernels read it: dense in order, steps counted beside it in float32."""
    for name, value in own.items():
        if name in OURS and not here(value).is_contiguous():
            own[name] = value.clone(memory_format=torch.contiguous_format)
    own["step"] = own["step"].to(p.device, torch.float32)


def new_buffer(name: str, dtype: torch.dtype, p: Tensor) -> Tensor:
    if name in EXPONENT.values():
        return torch.zeros(-(-p.numel() // GROUP), dtype=dtype, device=p.device)
    return torch.zeros_like(p, dtype=dtype)


def takes_gradients(group: Mapping[str, Any]) -> bool:
    """Whether consumed gradients become the last gradients themselves, not copies: those have no
    other format, and no compiled step guards on their identity (dynamo sets ``capturable``).
    """
    plain = state_format(group, "last_grad") == "float32" and not group["capturable"]
    return bool(group["consume_grads"] and plain)


def consume_gradients(optimizer: Optimizer, copied: bool = False) -> None:
    """For groups with consume_grads: gradients become last gradients, without a copy.

    With ``copied``, or where last gradients are kept in fewer bits, the step has made the copy.
    """
    for group in optimizer.param_groups:
        if not group["consume_grads"]:
            continue
        copies = copied or not takes_gradients(group)
        for p in group["params"]:
            g, own = p.grad, optimizer.state.get(p, {})
            if g is None:
                continue
            if "last_grad" in own and not copies:
                # Part of a larger buffer (DDP's buckets): its owner will write there again.
                if not _owns_its_memory(g, own["last_grad"]):
                    own["last_grad"].copy_(g)
                else:
                    own["last_grad"] = g.detach()
            p.grad = None


def _owns_its_memory(g: Tensor, h: Tensor) -> bool:
    """Whether g can take h's place: memory of its own, laid out alike."""
    g, h = here(g), here(h)
    return (
        g.dtype == h.dtype
        and g.stride() == h.stride()
        and not (g._is_view() or g.is_neg() or g.is_conj())
        and g.untyped_storage().nbytes() == g.numel() * g.element_size()
    )
