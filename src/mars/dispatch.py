"""From a parameter group to the batches that engines step: which engine, which numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from mars.engines import Batch, interpreted, no_triton
from mars.options import LEAN_BUFFERS, ratio_1d, state_format
from mars.rule import KINDS, Hyper
from mars.rule.estimator import Scalar
from mars.rule.newton_schulz import NewtonSchulz
from mars.sharding import ALONE, Ranks, here, is_cut, laid_out_alike
from mars.state import beside, kind_of, needs_last_grad, takes_gradients

Group = dict[str, Any]
logger = logging.getLogger("mars")

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOT_CONTIGUOUS, STACK = "not contiguous", "a stack of matrices"
LEFT_OUT = (NOT_CONTIGUOUS, STACK)  # foreach steps these beside what is fused


def engine_for(group: Group, params: list[Tensor]) -> str:
    """The engine for tensors that fused does not take: what is asked for, or as in torch.optim."""
    chosen = group["foreach"]
    if chosen is None:
        _, chosen = _default_to_fused_or_foreach(params, group["differentiable"], use_fused=False)
        if not chosen and _on_cpu(group, params):
            return "cpu"
    return "foreach" if chosen else "reference"


def _on_cpu(group: Group, params: list[Tensor]) -> bool:
    """Whether these are plain tensors of a CPU, and the step is no graph of any kind."""
    if group["fused"] is False or group["differentiable"] or torch.compiler.is_compiling():
        return False
    return all(p.device.type == "cpu" and type(p.data) is Tensor for p in params)


@cache
def _no_triton() -> str | None:
    """What is wrong with the Triton here; None if nothing is."""
    if (reason := no_triton()) is not None:
        return reason
    if torch.cuda.is_available():
        try:  # it builds its launcher here, for which it needs a C compiler
            import_module("triton.runtime").driver.active.get_current_device()
        except Exception as error:
            logger.warning("no fused engine: Triton does not start here (%s)", error)
            return f"Triton does not start here: {error}"
    return None


@cache
def _no_device(device: torch.device) -> str | None:
    """What is wrong with this device; None if nothing is."""
    if device.type != "cuda":
        return f"on {device.type}: it needs a CUDA device"
    if torch.version.cuda is None:
        return "it is tested on NVIDIA GPUs only"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (7, 0) else f"compute capability {capability}: it needs 7.0"


def why_not_fused(group: Group, p: Tensor, ranks: Ranks = ALONE) -> str | None:
    """Why this tensor of this group is not stepped by the fused engine; None if it is."""
    if group["fused"] is False or (group["fused"] is None and group["foreach"] is not None):
        return "fused=False" if group["fused"] is False else f"foreach={group['foreach']}"
    if group["differentiable"]:
        return "differentiable=True"
    in_interpreter = group["fused"] and interpreted() and p.device.type == "cpu"
    reason = (None if in_interpreter else _no_device(p.device)) or _no_triton()
    if reason is not None:
        return reason
    held = here(p.data)
    if type(held) is not Tensor:
        return f"a {type(held).__name__}"
    if KINDS[kind_of(p, group)].matrix:
        if ranks.replicate or is_cut(p):
            return "ranks share Newton–Schulz"
        if p.ndim > 2 and group["matrix_rule"] == "stack":
            return STACK
    if p.dtype not in FUSED_DTYPES:
        return f"{p.dtype}: it takes float32, bfloat16 and float16"
    if not held.is_contiguous():
        return NOT_CONTIGUOUS
    return None


def steps_now(group: Group, p: Tensor, ranks: Ranks) -> bool:
    """Whether the fused engine steps this tensor now: with a gradient that is dense and alike."""
    if p.grad is None or not laid_out_alike(p, p.grad):
        return False
    g = here(p.grad)
    dense = g.dtype == p.dtype and g.is_contiguous() and not g.is_neg()
    return dense and why_not_fused(group, p, ranks) is None


def shares_norm(group: Group, p: Tensor) -> bool:
    """Whether the step of this tensor needs a norm over many tensors."""
    clipped = group["clip"] == "global" and needs_last_grad(kind_of(p, group), group)
    return clipped or group["max_grad_norm"] is not None


def one_launch(pairs: Iterable[tuple[Group, Tensor]]) -> bool:
    """Whether fused can step these (group, parameter) pairs in one launch."""
    return len({
        (p.device, p.dtype, *(state_format(g, name) for name in LEAN_BUFFERS)) for g, p in pairs
    }) <= 1  # fmt: skip


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _on_device(value: Scalar, x: Tensor) -> Scalar:
    """A tensor option as a 0-d tensor beside x (a copy to a GPU does not wait); a float as is."""
    if not isinstance(value, Tensor):
        return value
    return value.reshape(()).to(x.device, non_blocking=x.device.type != "cpu")


def _for_kernel(value: Scalar, x: Tensor) -> Scalar:
    """A tensor on the CPU is read here; one on a GPU by the kernel, as float32 beside x."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_cuda:
        return float(value)
    return value.to(x.device, torch.float32, non_blocking=True)


def set_numbers(batch: Batch, group: Group, x: Tensor, fused: bool) -> None:
    """Give the batch the group's numbers as they are now."""
    batch.k, batch.ratio = _numbers(batch.kind, group, x, fused)
    batch.max_grad_norm = group["max_grad_norm"]


def _numbers(kind: str, group: Group, x: Tensor, fused: bool) -> tuple[Hyper, float]:
    """What a step of this kind of tensor computes with; its rate over the group's."""
    one_d = beside(kind, group)
    beta1, beta2 = group["betas_1d"] if one_d else group["betas"]
    decay = group["weight_decay_1d"] if one_d else group["weight_decay"]
    lr, gamma = group["lr"], group["gamma"]
    ratio = 1.0 if KINDS[kind].corrected else ratio_1d(group)
    if fused:
        rate, gamma = _for_kernel(lr, x), _for_kernel(gamma, x)
    else:
        rate = _on_device(lr if ratio == 1.0 else lr * ratio, x)
        beta1, beta2, decay, gamma = (_on_device(v, x) for v in (beta1, beta2, decay, gamma))
    k = Hyper(
        lr=rate,
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        decay=decay,
        gamma=gamma,
        clip=group["clip"],
        maximize=group["maximize"],
        raw=group["second_moment"] == "raw",
        stacked=group["matrix_rule"] == "stack",
        ns=NewtonSchulz(group["ns_steps"], group["ns_coefficients"], group["ns_dtype"]),
    )
    return k, ratio


def new_batch(kind: str, group: Group, index: int, x: Tensor, t: Tensor, fused: bool) -> Batch:
    consume = takes_gradients(group)
    k, ratio = _numbers(kind, group, x, fused)
    return Batch(
        kind, k, index,
        # As dynamo reads it: `not` of an option breaks the graph of a compiled step (torch 2.15).
        host_t=False if group["capturable"] else t.device.type == "cpu",
        keep_g=group["is_approx"] and not consume,
        consume=consume,
        max_grad_norm=group["max_grad_norm"],
        ratio=ratio,
    )  # fmt: skip
