"""From a configured AdamW to the MARS that replaces it."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import AdamW

from mars.advice import BEGIN
from mars.options import CHECKS, METADATA, as_float
from mars.rule.estimator import noise_ratio
from mars.table import format_table

if TYPE_CHECKING:
    from mars.optimizer import MARS

logger = logging.getLogger("mars")

Group = dict[str, Any]  # of an optimizer

KEPT = ("eps", "amsgrad", "maximize", "foreach", "capturable", "differentiable")


def noise_factor(gamma: float, beta1: float) -> float:
    """√((1+κ)² + κ²): how much larger c is than g where noise dominates, in approximate mode.

    1.55 at the defaults. The second moment grows by its square, so a MARS-AdamW step is that
    much shorter than an AdamW step of the same rate.

    >>> round(noise_factor(0.025, 0.95), 3)
    1.55
    """
    return math.sqrt(noise_ratio(gamma, beta1))


def from_adamw(
    optimizer: AdamW,
    cls: type[MARS] | None = None,
    *,
    rule: str = "step-size",
    verbose: bool = True,
    **options: Any,
) -> MARS:
    """Return the MARS that replaces a configured ``torch.optim.AdamW``, groups kept.

    ``rule="step-size"`` keeps AdamW's betas and the size of its step: lr grows by √((1+κ)² + κ²)
    (see `noise_factor`) and weight decay shrinks by it, so that lr·λ is unchanged. For
    ``mars_type="mars-m"``, whose scale is made to match AdamW's, the factor is 1. So it is with
    ``second_moment="raw"``, which sees no noise of the correction. In exact mode the best rate was
    found to move nearly as far (docs/results.md), so the factor is the same.
    ``rule="published"`` does what the authors did for GPT-2: lr × 10, λ ÷ 10, betas (0.95, 0.99),
    and AdamW's rate for the tensors that are not matrices × 5.

    Under ``"step-size"``, tensors that are not matrices go on with AdamW exactly as configured,
    unless ``optimize_1d=True`` has MARS train them as well.
    Moments are not carried over: call this before training.

    Args:
        optimizer: the AdamW to replace; it is left as it is.
        rule: ``"step-size"`` or ``"published"``.
        verbose: say what was chosen, on stdout.
        options: options of MARS (``mars_type``, ``gamma``, ``betas``, …).
    """
    from mars.optimizer import MARS

    make = MARS if cls is None else cls
    if not isinstance(optimizer, AdamW):
        raise TypeError(f"from_adamw takes a torch.optim.AdamW, not {type(optimizer).__name__}")
    for name in ("lr", "weight_decay", "lr_1d", "weight_decay_1d", "betas_1d"):
        if name in options:
            raise TypeError(
                f"from_adamw chooses {name!r}; change it afterwards in optimizer.param_groups (an "
                "lr moves all rates in proportion; lr_1d is the rate of vectors at lr = base_lr)"
            )
    if any(group["differentiable"] for group in optimizer.param_groups):
        options.setdefault("differentiable", True)
    # A throw-away MARS validates the options and fills in the defaults.
    settings = make([{"params": []}], **options).defaults
    if optimizer.state:
        logger.warning("from_adamw: the moments of AdamW are not carried over")
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        logger.warning(
            "from_adamw: a scheduler moves the rates of this AdamW, and will not move those of the "
            "MARS made from it. Make the scheduler afterwards, on the MARS"
        )
    rows: list[tuple[str, ...]] = [
        ("group", "parameters", "lr", "weight_decay", "lr of vectors", "betas")
    ]
    keep = "betas" not in options and rule != "published"

    def convert(group: Group) -> tuple[Group, tuple[float, float]]:
        betas = group["betas"] if keep else settings["betas"]
        factors = _factors(rule, settings, float(betas[0]))
        return {**_converted(group, betas, *factors), **_only(KEPT, options)}, factors

    groups = []
    for i, group in enumerate(optimizer.param_groups):
        new, factors = convert(group)
        groups.append(new)
        rows.append(
            (str(i), *_row(group, new["betas"], factors[0], _of_vectors(settings, *factors)))
        )
    mars = make(groups, **options)
    # Of groups that are added later, as when layers are unfrozen; their decay was said, too.
    mars.defaults.update(convert(optimizer.defaults)[0])
    mars._unsaid_decay = False
    for group, own in zip(mars.param_groups, optimizer.param_groups, strict=True):
        for name in own.keys() - optimizer.defaults.keys() - CHECKS.keys() - METADATA:
            group[name] = own[name]  # a note of the user's
    if verbose:
        sys.stdout.write(
            f"{settings['mars_type']} in place of AdamW, rule {rule!r}\n{format_table(rows)}\n"
        )
    return mars


def _only(names: Iterable[str], values: Group) -> Group:
    return {name: values[name] for name in names if name in values}


def _shown_lr(group: Group) -> float:
    """The rate without its schedule: a scheduler that warms up has set lr to 0 already."""
    return as_float(group.get("initial_lr", group["lr"]))


def _converted(group: Group, betas: Any, factor: float, factor_1d: float) -> Group:
    """A group of AdamW as one of MARS, its rates multiplied: for matrices, for the rest."""
    new = _only(("params", *KEPT), group) | _only(METADATA - {"params"}, group)
    for name in ("initial_lr", "max_lr", "min_lr", "swa_lr"):
        if name in group:
            new[name] = group[name] * factor
    lr, decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor) and group["foreach"] and not group["capturable"]:
        new["foreach"] = None
    peak = _shown_lr(group) or 1.0  # vectors follow the peak rate
    new |= {
        "lr": lr * factor,
        "betas": betas,
        "weight_decay": decay / factor,
        "lr_1d": peak * factor_1d,
        "base_lr": peak * factor,
        "betas_1d": group["betas"],
        "weight_decay_1d": decay,
    }
    if "param_names" in new:
        new["params"] = list(zip(new.pop("param_names"), new["params"], strict=True))
    return new


def _row(group: Group, betas: Any, factor: float, factor_1d: float) -> tuple[str, ...]:
    """What is said of a group."""
    lr, decay = _shown_lr(group), as_float(group["weight_decay"])
    lazy = any(is_lazy(p) for p in group["params"])
    return (
        "not known yet" if lazy else f"{sum(p.numel() for p in group['params']):,}",
        f"{lr:.3g} -> {lr * factor:.3g}",
        f"{decay:.3g} -> {decay / factor:.3g}",
        f"{lr * factor_1d:.3g}",
        f"{betas}",
    )


def _of_vectors(settings: Group, factor: float, factor_1d: float) -> float:
    """What the rate of vectors is multiplied by: MARS may train them, too."""
    mars = settings["optimize_1d"] and settings["mars_type"] != "plain-adamw"
    return factor if mars else factor_1d


def _factors(rule: str, settings: dict[str, Any], beta1: float) -> tuple[float, float]:
    """What lr is multiplied by, for matrices and for the rest."""
    if rule not in ("step-size", "published"):
        raise ValueError(f"Invalid rule: {rule!r} (it must be 'step-size' or 'published')")
    mars_type = settings["mars_type"]
    if rule == "published":
        if mars_type != "mars-adamw":
            raise ValueError(f"rule='published' is for 'mars-adamw', not {mars_type!r}")
        return 10.0, 5.0
    if mars_type == "mars-adamw":
        noisy = settings["second_moment"] == "corrected"
        return (noise_factor(as_float(settings["gamma"]), beta1) if noisy else 1.0), 1.0
    if mars_type in ("mars-m", "plain-adamw"):
        return 1.0, 1.0
    raise ValueError(
        f"no rule keeps the size of AdamW's step for {mars_type!r}: its steps are of another "
        f"kind. Construct MARS directly, begin with {BEGIN[mars_type]}, and tune lr"
    )
