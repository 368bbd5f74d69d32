"""`explain`: which rule and which engine step which parameters, at which rate, and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from mars.dispatch import engine_for, why_not_fused
from mars.exchange import plan_text
from mars.optimizer import MARS
from mars.options import as_float, ratio_1d
from mars.rule import KINDS
from mars.sharding import here, layout_of
from mars.state import beside, kind_of
from mars.table import format_table


def explain(optimizer: MARS) -> str:
    """A table of what will be done: a line for each group, rule, engine and reason.

    The rates and decays are those that count now, also where AdamW trains at ``lr_1d``. Where ranks
    share Newton–Schulz, a second table says who orthogonalises what. An optimizer that Accelerate
    or Lightning has wrapped is taken, too.

    Examples:
        >>> import torch, mars
        >>> print(mars.explain(mars.MARS(torch.nn.Linear(4, 2).parameters())))
        group  rule         tensors  lr now  weight_decay  engine  why not fused
        0      mars-adamw         1  0.003   0             cpu     on cpu: it needs a CUDA device
        0      plain-adamw        1  0.003   0.1           cpu     on cpu: it needs a CUDA device
    """
    optimizer = unwrapped(optimizer)
    table = format_table(engine_rows(optimizer), right=(2,))
    plan = plan_text(optimizer.param_groups, optimizer._ranks)
    return f"{table}\n\n{plan}" if plan else table


def unwrapped(optimizer: Any) -> Any:
    """The MARS in what a trainer has made of it: Accelerate and Lightning call it ``optimizer``."""
    while not isinstance(optimizer, MARS) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def engine_rows(optimizer: MARS) -> list[tuple[str, ...]]:
    """The rows of the table, the first being its head."""
    if not hasattr(optimizer, "_ranks"):
        raise TypeError(f"explain takes a MARS, not {type(optimizer).__name__}")
    pairs = [(i, g, p) for i, g in enumerate(optimizer.param_groups) for p in g["params"]]
    reasons = [why_not_fused(group, p, optimizer._ranks) for _, group, p in pairs]
    if optimizer._observer is not None:
        reasons = ["mars.diagnose is watching"] * len(pairs)
    lines: Counter[tuple[str, ...]] = Counter()
    for (i, group, p), reason in zip(pairs, reasons, strict=True):
        engine = "fused"
        if reason is not None:
            shares = optimizer._ranks.replicate and KINDS[kind_of(p, group)].matrix
            alone = layout_of(p, group) is None and not shares
            engine = engine_for(group, [here(p) for p in group["params"]]) if alone else "foreach"
        kind, rate, decay = trained(p, group)
        name, numbers = str(group.get("name", i)), (f"{rate:.4g}", f"{decay:.4g}")
        lines[(name, kind, *numbers, engine, reason or "")] += 1
    head = ("group", "rule", "tensors", "lr now", "weight_decay", "engine", "why not fused")
    return [head, *((name, kind, str(n), *rest) for (name, kind, *rest), n in lines.items())]


def trained(p: Tensor, group: dict[str, Any]) -> tuple[str, float, float]:
    """The rule that trains a tensor of a group of MARS, its rate and its decay, as they are now."""
    kind = kind_of(p, group)
    rate = as_float(group["lr"]) * (1.0 if KINDS[kind].corrected else ratio_1d(group))
    decay = group["weight_decay_1d" if beside(kind, group) else "weight_decay"]
    return kind, rate, as_float(decay)
