"""The options of a parameter group: what is allowed, said once."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from mars.rule import KINDS
from mars.rule.newton_schulz import COEFFICIENTS

logger = logging.getLogger("mars")

# A rate below this is a frozen group, not a unit to measure lr_1d in.
SMALLEST_BASE_LR = 1e-12

# Keys that torch, schedulers and users keep in a group beside the options.
METADATA = frozenset({
    "params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr", "lr_scale",
    "max_momentum", "base_momentum",
})  # fmt: skip


def as_float(value: Any) -> float:
    """The value of a number or of a one-element tensor."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def _is(kind: type, value: Any) -> bool:
    """Whether it is a number of this kind, Python's or NumPy's; True and False are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _number(value: Any, low: float = 0.0, high: float = math.inf) -> bool:
    """A finite number in [low, high), or a one-element tensor of that value."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and low <= as_float(value) < high
    return _is(Real, value) and low <= float(value) < high


def _one_of(*allowed: Any) -> Callable[[Any], str | None]:
    names = ", ".join(repr(a) for a in allowed)

    def check(value: Any) -> str | None:
        fits = any(value is a or (isinstance(a, str) and value == a) for a in allowed)
        return None if fits else f"must be one of {names}"

    return check


def _at_least_zero(value: Any) -> str | None:
    return None if _number(value) else "must be one finite number, at least 0"


def _float_at_least_zero(value: Any) -> str | None:
    return "must be a number, not a tensor" if isinstance(value, Tensor) else _at_least_zero(value)


def _rate(value: Any) -> str | None:
    if isinstance(value, Tensor) and value.numel() != 1:
        return "Tensor lr must be 1-element"
    return _at_least_zero(value)


def _betas(value: Any) -> str | None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return "must be a pair of numbers"
    return None


def _steps(value: Any) -> str | None:
    fits = _is(Integral, value) and value >= 1
    return None if fits else "must be an integer, at least 1"


def _max_norm(value: Any) -> str | None:
    """An infinite one clips nothing, and tells the norm."""
    fits = value is None or (_is(Real, value) and value > 0)
    return None if fits else "must be None or a positive number"


# The buffers that can be kept in fewer bits, and in which formats.
LEAN_BUFFERS = ("exp_avg", "exp_avg_sq", "last_grad")
STATE_DTYPES = ("float32", "bfloat16", "8bit")


def _state_dtype(value: Any) -> str | None:
    named = value if isinstance(value, dict) else {"exp_avg": value}
    if value is None or (
        set(named) <= set(LEAN_BUFFERS) and all(form in STATE_DTYPES for form in named.values())
    ):
        return None
    return (
        f"must be None, one of {', '.join(map(repr, STATE_DTYPES))}, or a dict of these by buffer "
        f"({', '.join(LEAN_BUFFERS)})"
    )


_FLAG = _one_of(True, False)
_CHOICE = _one_of(None, True, False)

# name -> (the words torch.optim uses before the value, check)
CHECKS: dict[str, tuple[str, Callable[[Any], str | None]]] = {
    "lr": ("Invalid learning rate", _rate),
    "betas": ("Invalid betas", _betas),
    "eps": ("Invalid epsilon value", _float_at_least_zero),
    "weight_decay": ("Invalid weight_decay value", _at_least_zero),
    "amsgrad": ("Invalid amsgrad", _FLAG),
    "gamma": ("Invalid gamma", _at_least_zero),
    "is_approx": ("Invalid is_approx", _FLAG),
    "mars_type": ("Invalid mars_type", _one_of(*KINDS)),
    "optimize_1d": ("Invalid optimize_1d", _FLAG),
    "lr_1d": ("Invalid lr_1d", _float_at_least_zero),
    "betas_1d": ("Invalid betas_1d", _betas),
    "weight_decay_1d": ("Invalid weight_decay_1d", _at_least_zero),
    "base_lr": ("Invalid base_lr", _float_at_least_zero),
    "maximize": ("Invalid maximize", _FLAG),
    "foreach": ("Invalid foreach", _CHOICE),
    "fused": ("Invalid fused", _CHOICE),
    "capturable": ("Invalid capturable", _FLAG),
    "differentiable": ("Invalid differentiable", _FLAG),
    "clip": ("Invalid clip (the norm is always 1)", _one_of("tensor", "global", None)),
    "second_moment": ("Invalid second_moment", _one_of("corrected", "raw")),
    "matrix_rule": ("Invalid matrix_rule", _one_of("2d", "flatten", "stack")),
    "ns_steps": ("Invalid ns_steps", _steps),
    "ns_coefficients": ("Invalid ns_coefficients", _one_of(*COEFFICIENTS)),
    "ns_dtype": ("Invalid ns_dtype", _one_of("bfloat16", "float16", "float32", "float64")),
    "consume_grads": ("Invalid consume_grads", _FLAG),
    "max_grad_norm": ("Invalid max_grad_norm", _max_norm),
    "state_dtype": ("Invalid state_dtype", _state_dtype),
}


PAIRS = ("betas", "betas_1d")


def check_known(names: Mapping[str, Any], where: str) -> None:
    """Refuse an option that does not exist, and say which one was probably meant."""
    for name in names:
        if name in CHECKS or name in METADATA:
            continue
        if name == "decoupled_weight_decay":
            raise TypeError(
                f"{where} is one of torch.optim's Adam or AdamW: MARS.from_adamw(optimizer) takes "
                "over those of an AdamW"
            )
        close = difflib.get_close_matches(str(name), CHECKS, n=1, cutoff=0.7)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise TypeError(
            f"{where}: unknown option {name!r}.{hint} Options: {', '.join(CHECKS)}. Notes of your "
            f"own go into the groups of a finished optimizer: param_groups[i][{name!r}] = …"
        )


def check_values(options: Mapping[str, Any], moved: bool = False) -> None:
    """Refuse a wrong value by naming the option, the value and what is allowed.

    ``moved``: schedulers may have been at it, which round.
    """
    for name in CHECKS:
        if name in options:
            value = options[name]
            if moved and name in MOVED and _number(value, MOVED[name]):
                value = abs(value)
            _check_value(name, value)
    for name in PAIRS:
        if name in options:
            _check_betas(name, options[name])
    _check_together(options)


# What schedulers move, and how low: a rate that ends at −1e-19 by rounding must not end a training.
# γ below 0 is a mistake as an option; a schedule may mean it, and all engines step with it.
ROUNDED = -1e-12
MOVED = {
    "lr": ROUNDED, "lr_1d": ROUNDED, "base_lr": ROUNDED, "weight_decay": ROUNDED,
    "weight_decay_1d": ROUNDED, "gamma": -math.inf,
}  # fmt: skip
SETTLED = tuple(name for name in CHECKS if name not in MOVED)


def check_changed(groups: Sequence[dict[str, Any]], checked: dict[int, dict[str, Any]]) -> None:
    """Refuse a wrong value in groups that were changed since ``checked`` was noted here.

    Tensors are not read, which would wait for the device.
    """
    unknown = object()
    while len(checked) > len(groups):
        checked.popitem()  # a group that was taken out
    for i, group in enumerate(groups):
        before = checked.setdefault(i, {})
        if before.get("of") is not group:  # groups were added, or taken out
            checked[i] = before = {"of": group}
        changed = {
            n: v for n in SETTLED
            if (v := group[n]) is not (known := before.get(n, unknown))
            and not (type(v) is dict and v == known)
        }  # fmt: skip
        if changed:
            changed |= (renamed := _named(changed))
            check_values({n: v for n, v in changed.items() if not _has_tensors(v)})
            group.update(renamed)
        for name in MOVED:
            if not _fits(name, group[name]):
                _check_value(name, group[name])
        _check_together(group)
        _tell_about_rates(group, before)
        became = changed.get("mars_type")
        if became == "plain-adamw" and before.get("mars_type", became) != became:
            raise ValueError(
                "mars_type cannot become 'plain-adamw' in mid-run, whose rate is lr_1d: gamma=0 "
                "and clip=None make MARS-AdamW AdamW"
            )
        before.update({n: dict(v) if type(v) is dict else v for n, v in changed.items()})


def _tell_about_rates(group: Mapping[str, Any], before: dict[str, Any]) -> None:
    """A schedule by hand that moves lr and lr_1d alike moves the rate of vectors twice."""
    rate, lr, base = group["lr_1d"], group["lr"], group["base_lr"]
    if before.setdefault("lr_1d", rate) == rate or "told" in before:
        return  # as in almost every step
    alone = type(lr) is float and lr != base and base > SMALLEST_BASE_LR
    if alone and any(p.ndim != 2 for p in group["params"]):
        before["told"] = True
        logger.warning(
            "lr_1d became %g beside lr=%g: it is the rate of vectors at lr = base_lr = %g, and "
            "moves with lr, so that it now is %g. Move lr alone, or base_lr as well",
            rate, lr, base, ratio_1d(group) * lr,
        )  # fmt: skip


def _fits(name: str, value: Any) -> bool:
    """Whether a schedule may have made this of an option. Nobody waits to read a tensor."""
    least = MOVED[name]
    if type(value) is float:
        return least <= value < math.inf
    return isinstance(value, Tensor) or _number(value, least)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(part, Tensor) for part in value)


def _check_value(name: str, value: Any) -> None:
    words, check = CHECKS[name]
    problem = check(value)
    if problem is not None:
        raise ValueError(f"{words}: {value!r} ({name}: {problem})")


def with_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with dtypes by their names, torch.bfloat16 is "bfloat16", and pairs as tuples:
    configuration libraries have lists of their own, NumPy arrays.
    """
    return {**options, **_named(options)}


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are written otherwise in a group."""

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {buffer: named(form) for buffer, form in value.items()}
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

    own = {name: named(options[name]) for name in ("state_dtype", "ns_dtype") if name in options}
    for name in PAIRS:
        value: Any = options.get(name)
        sequence = isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple, list))
        if sequence or (getattr(value, "ndim", 0) == 1 and not isinstance(value, Tensor)):
            own[name] = tuple(value)
    return {name: value for name, value in own.items() if value is not options[name]}


def _check_betas(name: str, betas: Any) -> None:
    if len({isinstance(beta, Tensor) for beta in betas}) == 2:
        raise ValueError(f"{name} must be either both floats or both Tensors, not {betas!r}")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor {name}[{i}] must be 1-element, not of shape {beta.shape}")
        if not _number(beta, 0.0, 1.0):
            raise ValueError(
                f"Invalid beta parameter at index {i}: {beta!r} ({name}={betas!r}: both must be "
                "numbers in [0, 1))"
            )


def _check_together(options: Mapping[str, Any]) -> None:
    """Options that exclude each other, in torch.optim's words."""
    foreach, fused = options.get("foreach"), options.get("fused")
    if foreach and not options.get("capturable"):
        scalars = {"lr": options.get("lr")}
        scalars |= {f"betas[{i}]": beta for i, beta in enumerate(options.get("betas", ()))}
        for name, value in scalars.items():
            if isinstance(value, Tensor):
                raise ValueError(
                    f"{name} as a Tensor is not supported for capturable=False and foreach=True; "
                    "leave foreach=None, or set capturable=True"
                )
    if options.get("differentiable"):
        if options.get("is_approx") is False:
            raise ValueError(
                "differentiable=True needs is_approx=True: gradients at the previous parameters "
                "are not part of the graph"
            )
        for name in ("foreach", "fused", "consume_grads", "max_grad_norm", "state_dtype"):
            if options.get(name):
                raise RuntimeError(f"`{name}` does not support `differentiable`")
    if fused and foreach:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    for name in ("weight_decay", "weight_decay_1d"):
        if isinstance(options.get(name), Tensor) and not options.get("differentiable"):
            raise ValueError(f"{name} as a Tensor needs differentiable=True; pass a float")
    if options.get("max_grad_norm") and options.get("is_approx") is False:
        raise ValueError(
            "max_grad_norm needs is_approx=True: in exact mode both gradients of a step must be "
            "clipped alike; clip them in the closure"
        )
    if options.get("consume_grads") and options.get("is_approx") is False:
        raise ValueError(
            "consume_grads=True needs is_approx=True: in exact mode the last gradient is not "
            "the gradient of this step"
        )


def check_captured(options: Mapping[str, Any]) -> None:
    """A graph would replay on the gradients that its capture took away. Not refused where dynamo
    has set ``capturable``, which captures nothing: the step then copies what it consumes.
    """
    if options.get("consume_grads") and options.get("capturable"):
        raise ValueError(
            "consume_grads=True needs capturable=False: a captured graph replays on fixed "
            "buffers, and would never see the new last gradient"
        )


def check_differentiable(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Autograd is switched on for whole steps."""
    if group.get("differentiable") and not defaults["differentiable"]:
        raise ValueError("a group can be differentiable only if the whole optimizer is")


def plain_numbers(options: dict[str, Any], differentiable: bool) -> dict[str, Any]:
    """Write checked numbers as Python's own, which weights_only loading takes; return the dict.

    Tensor betas are read here, once, unless a gradient shall reach them; other tensors stay.
    """
    for name, value in options.items():
        if name in PAIRS:
            if not (differentiable and isinstance(value[0], Tensor)):
                options[name] = (as_float(value[0]), as_float(value[1]))
        elif name == "state_dtype" and isinstance(value, dict):
            options[name] = dict(value)
        elif name in CHECKS and _is(Real, value):
            options[name] = int(value) if _is(Integral, value) else float(value)
    return options


def ratio_1d(group: Mapping[str, Any]) -> float:
    """AdamW's rate over lr: lr_1d / lr at construction, so that whatever moves lr moves it too."""
    base = float(group["base_lr"])
    return float(group["lr_1d"]) / base if base > SMALLEST_BASE_LR else 1.0


def state_format(group: Mapping[str, Any], buffer: str) -> str:
    """The format of a buffer: "float32" (as wide as the arithmetic), "bfloat16" or "8bit".

    In exact mode last gradients come from outside the step, and stay what they are.
    """
    asked = group["state_dtype"]
    if buffer not in LEAN_BUFFERS or (buffer == "last_grad" and not group["is_approx"]):
        return "float32"
    form = asked.get(buffer) if isinstance(asked, dict) else asked
    return form or "float32"
