"""`mars train --dry-run`: what a run would be, without taking a step."""

from __future__ import annotations

import contextlib
import json

import torch
from torch import nn

import mars
from mars.explain import trained
from mars.lab import hardware, parallel, tasks
from mars.lab.config import Run, check, to_json
from mars.lab.errors import LabError
from mars.lab.models import GPT
from mars.lab.optimizer_state import parts
from mars.lab.optimizers import build, label
from mars.lab.parallel import World
from mars.lab.recipes import settings
from mars.lab.report import units
from mars.lab.tasks import Task


def describe(run: Run) -> str:
    """The resolved configuration, size, routing, memory and token budget."""
    with contextlib.suppress(LabError):  # data that are not there are told with the budget
        run = tasks.with_steps(check(run))
    device = hardware.planned_device(check(run).loop.device)
    world = parallel.shape(run)
    task = tasks.of(run)
    if run.loop.fp8_head:
        dtype = hardware.choose_precision(run.loop.precision, device)
        hardware.check_fp8(device, dtype, task.micro_batch(device, world.size) * task.per_row)
    try:
        model = task.model(None)  # untouched memory: XL is described as fast as tiny
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        count = units.tokens(task.parameters)
        text = f"{count} parameters are too many for this machine even to lay them out"
        raise LabError(f"{text}: `mars plan` takes models of any size") from error
    optimizer = build(model, run.optimizer)
    parts = [
        ("configuration", json.dumps(to_json(run), indent=2)),
        ("parameters", _parameters(model)),
        ("learning rate", rate(run, model)),
        (f"routing of {label(run.optimizer.name)}", routing(model, optimizer)),
        ("memory", _memory(task, model, optimizer, device, world)),
        ("budget", _budget(task, device, world)),
    ]
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{text}" for title, text in parts)


def _parameters(model: nn.Module) -> str:
    total = sum(p.numel() for p in model.parameters())
    groups = mars.param_groups(model, mars_type="mars-m", matrix_rule="flatten")
    hidden = sum(p.numel() for g in groups if g["name"] == "matrices" for _, p in g["params"])
    flat = any(p.ndim > 2 for p in model.parameters())
    what = "hidden matrices and convolutions" if flat else "hidden matrices"
    return f"{total:,} in all, {hidden:,} in {what}"


def rate(run: Run, model: nn.Module) -> str:
    """Which runs the learning rate comes from, and the best setting that was measured nearby."""
    about = sum(p.numel() for p in model.parameters()), *settings.seen(run)
    own = settings.recommended(run.optimizer, *about, free=())
    best = settings.recommended(run.optimizer, *about)
    if best is None:
        return f"lr {run.optimizer.lr:g}: no grid here had this optimizer with these options"
    if own is not None and own.setting.lr == run.optimizer.lr:
        better = "" if best.setting is own.setting else f"\nwith other settings: {best}"
        return f"{own}{better}"
    return f"lr {run.optimizer.lr:g}: not the best of a grid here\nnearest that is: {best}"


def routing(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Which rule trains which tensors, at which rate."""
    names = {p: name for name, p in model.named_parameters()}
    lines: dict[tuple[int, str, float, float], list[nn.Parameter]] = {}
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if "mars_type" in group:
                rule, rate, decay = trained(p, group)
            else:
                rule, rate = _rule_of(optimizer, group), group["lr"]
                decay = group.get("weight_decay", 0.0)
            lines.setdefault((i, rule, rate, decay), []).append(p)
    return "\n".join(
        f"{rule:12} lr {rate:<8g} decay {decay:<5g} "
        f"{units.tokens(sum(p.numel() for p in members)):>6} parameters: "
        f"{', '.join(names[p] for p in members[:2])}"
        + (f", … {len(members)} tensors" if len(members) > 2 else "")
        for (_, rule, rate, decay), members in lines.items()
    )


def _rule_of(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> str:
    for part in parts(optimizer):
        if any(group is own for own in part.param_groups):
            return type(part).__name__
    return type(optimizer).__name__


def estimated_state_bytes(task: Task, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state: a parameter's, measured on a miniature, times the real number of them."""
    run, model = task.run, task.miniature()
    small = build(model, run.optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    small.step(lambda: 0.0) if run.optimizer.exact else small.step()
    states = {}
    for part in parts(small):
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
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device,
    world: World,
) -> str:  # fmt: skip
    """Of one process; under FSDP2 it has a share of everything but activations."""
    run = task.run
    count = sum(p.numel() for p in model.parameters()) / world.shards
    dtype = hardware.choose_precision(run.loop.precision, device)
    micro = task.micro_batch(device, world.size)
    kept = micro * task.kept_bytes(dtype)
    rows = {
        "parameters": 4.0 * count,
        "gradients": 4.0 * count,
        "optimizer state": estimated_state_bytes(task, optimizer) / world.shards,
        f"activations (estimated; micro-batch {micro}, {str(dtype)[6:]})": kept,
    }
    if run.optimizer.exact:
        rows["previous parameters (exact mode)"] = 4.0 * count
    if world.shards > 1 and isinstance(model, GPT):
        # The embeddings and two blocks, of which one is on its way.
        blocks = sum(p.numel() for p in model.transformer.h.parameters())
        gathered = count * world.shards - blocks + 2 * blocks / run.gpt.n_layer
        rows["gathered parameters"] = gathered * torch.empty((), dtype=dtype).element_size()
    rows["together"] = sum(rows.values())
    return "\n".join(f"{units.size(value):>10}  {name}" for name, value in rows.items())


def _budget(task: Task, device: torch.device, world: World) -> str:
    run, loop, unit = task.run, task.run.loop, task.unit
    count = task.per_step * loop.steps
    try:
        task.open()
        data = (
            f"{task.train.source}: {task.train.count:,} {unit} to train on "
            f"({count / task.train.count:.2f} epochs), {task.valid.count:,} to validate on"
        )
    except LabError as error:
        data = f"data: {error}"
    micro = task.micro_batch(device, world.size)
    parts = loop.batch_size // (micro * world.size)
    cut = "1 micro-batch" if parts == 1 else f"{parts} micro-batches"
    processes = f", {world.size} processes by {world.mode}" if world.mode else ""
    return "\n".join([
        f"{units.tokens(count)} {unit}: {loop.steps:,} steps of {task.per_step:,} {unit} "
        f"({task.batch_text}, {cut} a step)",
        data,
        f"runs on {device}{processes}; written to {run.directory}",
    ])  # fmt: skip
