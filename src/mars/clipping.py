"""Norms that one engine cannot know alone: over all tensors, or of tensors in shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mars.engines import Batch, cpu, foreach, reference
from mars.sharding import Ranks, whole_norms

Group = dict[str, Any]

NORMS = {"reference": reference.norms, "foreach": foreach.norms, "cpu": cpu.norms}


def _whole(norms: Sequence[Tensor], batches: Sequence[Batch]) -> list[Tensor]:
    """The norms of whole tensors, batch by batch, from those of the parts that are here."""
    if not any(b.layouts for b in batches):
        return list(norms)
    layouts = [b.layouts or [None] * len(b.x) for b in batches]
    places = [[(b.group, b.kind, str(b.x[0].dtype), i) for i in b.places] for b in batches]
    return whole_norms(norms, layouts, places)


def _total(norms: Sequence[Tensor], ranks: Ranks, home: torch.device) -> Tensor:
    """√Σ of squares of norms."""
    if norms:
        home = norms[0].device
        parts: dict[torch.device, list[Tensor]] = {}
        for n in norms:
            parts.setdefault(n.device, []).append(n.double())
        stacks = [torch.cat(own).to(home) for own in parts.values()]
        own = torch.linalg.vector_norm(torch.cat(stacks))
    else:
        own = torch.zeros((), dtype=torch.float64, device=home)
    return ranks.norm(own)


def _norms(batch: Batch, engine: str) -> Tensor:
    """Of c, one a tensor."""
    if batch.launch is not None:
        return batch.launch.norms(batch, corrected=True)
    if not batch.lean():
        return torch.stack(NORMS[engine](batch))
    parts = (batch.part(rows).widened() for rows in batch.portions())
    return torch.stack([norm for part in parts for norm in NORMS[engine](part)])


def _gradient_norms(batch: Batch) -> Tensor:
    if batch.launch is not None:
        return batch.launch.norms(batch, corrected=False)
    return torch.stack(torch._foreach_norm([g.to(batch.wide) for g in batch.g]))


def clip_lengths(
    batches: Sequence[tuple[Batch, str]], groups: Sequence[Group], ranks: Ranks
) -> list[Tensor | None]:
    """What each batch is clipped by, where its engine cannot know: the rest is None.

    With clip="global" one norm over all corrected tensors; of sharded tensors their own norms.
    """
    asked = [i for i, (b, _) in enumerate(batches) if _asks(b)]
    own = [batches[i] for i in asked]
    norms = _whole([_norms(*pair) for pair in own], [b for b, _ in own])
    of = dict(zip(asked, norms, strict=True))
    shared = [of[i] for i in asked if batches[i][0].k.clip == "global"]
    total = None
    if shared or (ranks.partition and any(g["clip"] == "global" for g in groups)):
        total = _total(shared, ranks, _home(groups))
    lengths: list[Tensor | None] = []
    for i, (b, _) in enumerate(batches):
        if i not in of:
            lengths.append(None)
        elif b.k.clip == "global":
            assert total is not None
            lengths.append(total.to(b.x[0].device, b.wide))
        else:
            lengths.append(of[i].to(b.wide))
    return lengths


def _asks(b: Batch) -> bool:
    """Whether this batch is clipped by norms that its engine does not compute."""
    apart = len(b.layouts) > 0 or b.launch is not None
    return len(b.h) > 0 and (b.k.clip == "global" or (b.k.clip == "tensor" and apart))


def _home(groups: Sequence[Group]) -> torch.device:
    for g in groups:
        for p in g["params"]:
            return p.device  # type: ignore[no-any-return]
    return torch.device("cpu")


def clip_gradients(
    batches: Iterable[tuple[Batch, str]], groups: Sequence[Group], ranks: Ranks
) -> Tensor | None:
    """For groups with max_grad_norm: gradients shrunk by one norm over all of them; that norm.

    As torch.nn.utils.clip_grad_norm_, but p.grad stays what it is (unless the step consumes it).
    """
    pairs = [pair for pair in batches if pair[0].max_grad_norm is not None]
    clipped = [batch for batch, _ in pairs]
    asked = any(g["max_grad_norm"] is not None for g in groups)
    if not clipped and not (ranks.partition and asked):
        return None
    norms = [_gradient_norms(b) for b in clipped]
    total = _total(_whole(norms, clipped), ranks, _home(groups))
    consumed: list[tuple[Tensor, Tensor]] = []
    for batch, engine in pairs:
        assert batch.max_grad_norm is not None
        length = total.to(batch.x[0].device)
        factor = (batch.max_grad_norm / (length + 1e-6)).clamp(max=1.0).to(batch.wide)
        if batch.launch is not None:
            batch.launch.shrink(batch, factor)
            continue
        if engine == "cpu" and factor == 1.0:
            continue  # a CPU may ask, and saves a copy of all gradients
        taken = list(batch.g)
        batch.g[:] = [g.to(batch.wide) * factor for g in taken]
        if batch.consume:
            consumed += zip(taken, batch.g, strict=True)
    for g, small in consumed:  # they will be the last gradients; no sooner: two may be one tensor
        g.copy_(small)
    return total
