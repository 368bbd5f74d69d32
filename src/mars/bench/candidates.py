"""Who is timed: torch's optimizers, every engine and type of MARS, and other people's MARS."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from mars import MARS
from mars.rule import KINDS

Params = list[nn.Parameter]

COMMON: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
ENGINES: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "cpu": {},
    "foreach": {"foreach": True, "fused": False},
    "reference": {"foreach": False, "fused": False},
}
VARIANTS: dict[str, dict[str, Any]] = {  # of mars-adamw, in the first engine
    "consume_grads": {"consume_grads": True},
    "max_grad_norm": {"max_grad_norm": 1.0},
    "no clip": {"clip": None},
    "no clip, raw": {"clip": None, "second_moment": "raw"},  # needs no last gradient
    "bfloat16 state": {"state_dtype": "bfloat16"},
    "8-bit state": {"state_dtype": "8bit"},
}


class Candidate(NamedTuple):
    """An optimizer to time. What ``make`` or the step raises becomes the reason to skip it."""

    name: str
    make: Callable[[Params], Optimizer]
    hidden: bool = False  # timed on the hidden matrices only
    before: Callable[[Params], object] | None = None  # runs before the step and is timed with it
    norm_of_all: bool = False  # needs every gradient before the first update: reads them twice


def _adamw(params: Params, **options: Any) -> Optimizer:
    return torch.optim.AdamW(params, **COMMON, **options)


def baseline(on_gpu: bool, hidden: bool = False) -> Candidate:
    """What ratios are to: the fused AdamW on a GPU; on a CPU what torch chooses, which is a loop.

    Once on all parameters, once on the hidden matrices: a ratio compares like with like.
    """
    name = ("torch AdamW fused" if on_gpu else "torch AdamW") + (", hidden" if hidden else "")
    return Candidate(name, partial(_adamw, fused=True) if on_gpu else _adamw, hidden)


def candidates(on_gpu: bool) -> list[Candidate]:
    """Everything there is to time, in the order in which it is: all parameters, then hidden."""
    fused = partial(_adamw, fused=True)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=1.0)
    made = [baseline(on_gpu)]
    if not on_gpu:
        made.append(Candidate("torch AdamW fused", fused))
    made.append(Candidate("torch AdamW foreach", partial(_adamw, foreach=True)))
    clipped = Candidate("torch AdamW fused + clip_grad_norm_", fused)
    made.append(clipped._replace(before=clip, norm_of_all=True))
    engines = [name for name in ENGINES if name != ("cpu" if on_gpu else "fused")]
    made += [_mars(kind, engine) for kind in KINDS for engine in engines if not KINDS[kind].matrix]
    made += [_mars("mars-adamw", engines[0], variant) for variant in VARIANTS]
    made.append(_mars("mars-lion", engines[0], "no clip"))  # needs no last gradient either
    made.append(Candidate("pytorch_optimizer MARS", _pytorch_optimizer))
    made.append(Candidate("heavyball MARS", _heavyball))
    made.append(Candidate("timm Mars", _timm))
    made += [baseline(on_gpu, hidden=True), Candidate("torch Muon", _muon, hidden=True)]
    made += [_mars(kind, engine) for kind in KINDS for engine in engines if KINDS[kind].matrix]
    return made


def _mars(kind: str, engine: str, variant: str | None = None) -> Candidate:
    options = {**COMMON, **ENGINES[engine], **(VARIANTS[variant] if variant else {})}
    return Candidate(
        f"{kind} {engine}" + (f", {variant}" if variant else ""),
        partial(MARS, mars_type=kind, lr_1d=COMMON["lr"], **options),
        hidden=KINDS[kind].matrix,
        norm_of_all=variant == "max_grad_norm",
    )


def _muon(params: Params) -> Any:
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(f"torch {torch.__version__} has no Muon (2.9 has)")
    return torch.optim.Muon(params, **COMMON)


def _peer(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # it is there, but lacks something itself
        raise RuntimeError(f"{name} is not installed") from None


def _pytorch_optimizer(params: Params) -> Any:
    return _peer("pytorch_optimizer").MARS(params, **COMMON)


def _heavyball(params: Params) -> Any:
    """Its MARS has been a class of its own, and an option of AdamW: what this version has."""
    package = _peer("heavyball")
    if hasattr(package, "MARSAdamW"):
        return package.MARSAdamW(params, **COMMON)
    for name in ("AdamW", "ForeachAdamW"):
        cls = getattr(package, name, None)
        if cls is not None and "mars" in inspect.signature(cls).parameters:
            return cls(params, mars=True, **COMMON)
    raise RuntimeError("this heavyball has no MARS")


def _timm(params: Params) -> Any:
    _peer("timm")
    return _peer("timm.optim").Mars(params, **COMMON)
