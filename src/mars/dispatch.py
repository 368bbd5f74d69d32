"""From a parameter group to the batches that engines step: which engine, which numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from mars.engines import ENGINES, Batch
from mars.options import rate_1d
from mars.rule import KINDS, Hyper
from mars.rule.estimator import Scalar
from mars.rule.newton_schulz import NewtonSchulz

Group = dict[str, Any]


def engine_for(group: Group, params: list[Tensor]) -> str:
    """The engine for a group: what it asks for, else what torch.optim would choose."""
    foreach = group["foreach"]
    if foreach is None:
        _, foreach = _default_to_fused_or_foreach(params, group["differentiable"], use_fused=False)
    return "foreach" if foreach else "reference"


def _on_device(value: Scalar, x: Tensor) -> Scalar:
    """A tensor option as a 0-d tensor beside x (a copy to a GPU does not wait); a float as is."""
    if not isinstance(value, Tensor):
        return value
    return value.reshape(()).to(x.device, non_blocking=True)


def new_batch(kind: str, group: Group, index: int, x: Tensor, t: Tensor) -> Batch:
    one_d = not KINDS[kind].corrected and group["mars_type"] != kind
    beta1, beta2 = group["betas_1d"] if one_d else group["betas"]
    lr = group["lr"] if KINDS[kind].corrected else rate_1d(group)
    hyper = Hyper(
        lr=_on_device(lr, x),
        beta1=_on_device(beta1, x),
        beta2=_on_device(beta2, x),
        eps=group["eps"],
        decay=_on_device(group["weight_decay_1d"] if one_d else group["weight_decay"], x),
        gamma=_on_device(group["gamma"], x),
        clip=group["clip"],
        maximize=group["maximize"],
        raw=group["second_moment"] == "raw",
        ns=NewtonSchulz(group["ns_steps"], group["ns_coefficients"], group["ns_dtype"]),
    )
    return Batch(
        kind, hyper, index,
        host_t=not group["capturable"] and t.device.type == "cpu",
        keep_g=group["is_approx"] and not group["consume_grads"],
    )  # fmt: skip


def global_length(batches: Iterable[tuple[Batch, str]]) -> dict[torch.device, Tensor]:
    """One norm over all corrected tensors of the groups with clip="global", on each device."""
    lengths: dict[torch.device, list[Tensor]] = {}
    for batch, engine in batches:
        if batch.k.clip == "global" and batch.h:
            norms = [n.double() for n in ENGINES[engine].norms(batch)]
            lengths.setdefault(batch.x[0].device, []).append(torch.stack(norms))
    if not lengths:
        return {}
    home = next(iter(lengths))
    parts = [torch.cat(norms).to(home) for norms in lengths.values()]
    total = torch.linalg.vector_norm(torch.cat(parts))
    return {device: total.to(device) for device in lengths}
