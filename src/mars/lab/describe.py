"""`mars train --dry-run`: what a run would be, without taking a step."""

from __future__ import annotations

import dataclasses
import json

import torch
from torch import nn

from mars.lab import hardware, parallel
from mars.lab.config import Model, Run, check, to_json
from mars.lab.data import Batches, validation
from mars.lab.errors import LabError
from mars.lab.models import GPT
from mars.lab.optimizers import build, label
from mars.lab.parallel import World
from mars.lab.report import units
from mars.lab.train import open_data


def describe(run: Run) -> str:
    """The resolved configuration, size, routing, memory and token budget."""
    check(run)
    device = hardware.planned_device(run.loop.device)
    world = parallel.shape(run)
    model = GPT(run.model, seed=None)  # untouched memory: XL is described as fast as tiny
    optimizer = build(model, run.optimizer)
    parts = [
        ("configuration", json.dumps(to_json(run), indent=2)),
        ("parameters", _parameters(model)),
        (f"routing of {label(run.optimizer.name)}", routing(model, optimizer)),
        ("memory", _memory(run, model, optimizer, device, world)),
        ("budget", _budget(run, device, world)),
    ]
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{text}" for title, text in parts)


def _parameters(model: nn.Module) -> str:
    total = sum(p.numel() for p in model.parameters())
    hidden = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and ".h." in n)
    return f"{total:,} in all, {hidden:,} in hidden matrices"


def routing(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Which rule trains which tensors, at which rate."""
    names = {p: name for name, p in model.named_parameters()}
    lines = []
    for group in optimizer.param_groups:
        members = [names[p] for p in group["params"]]
        size = sum(p.numel() for p in group["params"])
        more = f", … {len(members)} tensors" if len(members) > 2 else ""
        # MARS keeps the rate and decay of what is no matrix under names of their own.
        plain = group.get("mars_type") == "plain-adamw"
        rate = group["lr_1d"] if plain else group["lr"]
        decay = group["weight_decay_1d"] if plain else group.get("weight_decay", 0.0)
        rule = group.get("mars_type") or _rule_of(optimizer, group)
        lines.append(
            f"{rule:12} lr {rate:<8g} decay {decay:<5g} {units.tokens(size):>6} parameters: "
            f"{', '.join(members[:2])}{more}"
        )
    return "\n".join(lines)


def _rule_of(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> str:
    for part in getattr(optimizer, "optimizers", [optimizer]):
        if any(group is own for own in part.param_groups):
            return type(part).__name__
    return type(optimizer).__name__


def miniature(model: Model) -> Model:
    """A model with the same kinds of tensors, of no size to speak of."""
    return dataclasses.replace(
        model, n_layer=1, n_embd=8 * model.n_head, block_size=8, vocab_size=64
    )


def state_bytes(run: Run, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state: a parameter's, measured on a miniature, times the real number of them."""
    model = GPT(miniature(run.model))
    small = build(model, run.optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    small.step(lambda: 0.0) if run.optimizer.exact else small.step()
    states = {}
    for part in getattr(small, "optimizers", [small]):
        states.update(part.state)
    total = 0.0
    for own, real in zip(small.param_groups, optimizer.param_groups, strict=True):
        held = sum(
            v.numel() * v.element_size()
            for p in own["params"]
            for v in states.get(p, {}).values()
            if isinstance(v, torch.Tensor) and v.ndim
        )
        small_count = sum(p.numel() for p in own["params"])
        total += held / max(1, small_count) * sum(p.numel() for p in real["params"])
    return total


def _memory(
    run: Run, model: GPT, optimizer: torch.optim.Optimizer, device: torch.device, world: World
) -> str:
    """Of one process; under FSDP2 it has a share of everything but activations."""
    count = sum(p.numel() for p in model.parameters()) / world.shards
    dtype = hardware.choose_precision(run.loop.precision, device)
    micro = hardware.choose_micro_batch(run, device, world.size)
    kept = micro * run.model.block_size * hardware.activation_bytes(run, dtype)
    rows = {
        "parameters": 4.0 * count,
        "gradients": 4.0 * count,
        "optimizer state": state_bytes(run, optimizer) / world.shards,
        f"activations (estimated; micro-batch {micro}, {str(dtype)[6:]})": kept,
    }
    if run.optimizer.exact:
        rows["previous parameters (exact mode)"] = 4.0 * count
    if world.shards > 1:  # the embeddings and two blocks, of which one is on its way
        blocks = sum(p.numel() for p in model.transformer.h.parameters())
        gathered = count * world.shards - blocks + 2 * blocks / run.model.n_layer
        rows["gathered parameters"] = gathered * torch.empty((), dtype=dtype).element_size()
    rows["together"] = sum(rows.values())
    return "\n".join(f"{units.size(value):>10}  {name}" for name, value in rows.items())


def _budget(run: Run, device: torch.device, world: World) -> str:
    tokens, loop = run.tokens_per_step * run.loop.steps, run.loop
    try:
        train, valid = open_data(run)
        Batches(train, run.model.block_size, loop.batch_size, loop.seed)  # long enough?
        validation(valid, run.model.block_size, loop.eval_sequences)
        data = (
            f"{train.source}: {len(train):,} tokens to train on "
            f"({tokens / len(train):.2f} epochs), {len(valid):,} to validate on"
        )
    except LabError as error:
        data = f"data: {error}"
    micro = hardware.choose_micro_batch(run, device, world.size)
    batch = f"{loop.batch_size} × {run.model.block_size}"
    processes = f", {world.size} processes by {world.mode}" if world.mode else ""
    return "\n".join([
        f"{units.tokens(tokens)} tokens: {loop.steps:,} steps of {run.tokens_per_step:,} tokens "
        f"({batch}, {loop.batch_size // (micro * world.size)} micro-batches a step)",
        data,
        f"runs on {device}{processes}; written to {run.directory}",
    ])  # fmt: skip
