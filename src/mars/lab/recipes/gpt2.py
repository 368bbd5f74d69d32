"""GPT-2 as the authors train it: their models, batch, schedule and rates.

Sources: the configuration files and the tables in the READMEs of the authors' repository
(AGI-Arena/MARS at ba69385: config/train_gpt2_*.py, README.md, MARS_M/README.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mars.lab.config import Data, Keep, Loop, Model, Optimizer, Run, Schedule
from mars.lab.errors import LabError
from mars.lab.recipes.settings import at_rate
from mars.lab.recipes.small import gpt_50m

# Layers, heads, width, and whether attention is scaled by the layer's number (a default of their
# training scripts, which the configuration of small leaves as it is).
SIZES = {
    "small": (12, 12, 768, True),
    "medium": (24, 16, 1024, True),
    "large": (36, 20, 1280, True),
    "xl": (48, 25, 1600, True),
}

# Where the learning rate ends, in absolute terms. (For MARS-M none is published.)
MIN_LR = {"small": 3e-5, "medium": 6e-5, "large": 1e-5, "xl": 1e-5}

RATES: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {
        "small": {"lr": 6e-4},
        "medium": {"lr": 3e-4},
        "large": {"lr": 2e-4},
        "xl": {"lr": 2e-4},
    },
    "muon": {
        "small": {"lr": 2e-2, "lr_1d": 3e-3},
        "medium": {"lr": 1e-2, "lr_1d": 1.5e-3},
        "large": {"lr": 6.67e-3, "lr_1d": 1e-3},
    },
    "mars-adamw": {
        "small": {"lr": 6e-3, "lr_1d": 3e-3},
        "medium": {"lr": 3e-3, "lr_1d": 1.5e-3},
        "large": {"lr": 2e-3, "lr_1d": 1e-3},
        "xl": {"lr": 2e-3, "lr_1d": 1e-3},
    },
    "mars-m": {
        "small": {"lr": 6e-3},
        "medium": {"lr": 5e-3},
        "large": {"lr": 5e-3},
    },
}
# MARS-M has other rates on FineWeb-Edu, and XL there alone.
FINEWEB: dict[str, dict[str, dict[str, Any]]] = {
    "mars-m": {"small": {"lr": 1e-2}, "xl": {"lr": 3e-3}}
}
# Their Muon script has a schedule of its own: constant, then to zero over the last 2000 steps.
MUON_SCHEDULE = Schedule(shape="wsd", warmup_steps=2000, decay_share=0.02)

# The rest of the published settings. Embeddings are trained by AdamW for Muon and MARS-M (the
# authors ran the Muon baseline on them too, which costs it: we do not). MARS-M is without clip.
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1, "betas": (0.9, 0.95)},
    "muon": {
        "weight_decay": 0.0,
        "weight_decay_1d": 0.1,
        "betas_1d": (0.9, 0.95),
        "options": {"adjust_lr_fn": "original"},
    },
    "mars-adamw": {"weight_decay": 0.01, "betas": (0.95, 0.99), "gamma": 0.025},
    "mars-m": {
        "weight_decay": 0.1,
        "betas": (0.95, 0.99),
        "betas_1d": (0.9, 0.95),
        "gamma": 0.025,
        "options": {"clip": "None"},
    },
}


def maker(size: str, data: str) -> Callable[[str], Run]:
    """The recipe of a size and a data set."""

    def make(optimizer: str) -> Run:
        layers, heads, width, scaled = SIZES[size]
        chosen, schedule = _optimizer(optimizer, size, data)
        suffix = "-fineweb" if data == "fineweb-edu" else ""
        return Run(
            recipe=f"gpt2-{size}{suffix}",
            model=Model(
                n_layer=layers, n_head=heads, n_embd=width, scale_attn_by_inverse_layer_idx=scaled
            ),
            data=Data(source=f"data/{data}", tokenizer="gpt2"),
            optimizer=chosen,
            schedule=schedule,
            loop=Loop(steps=100_000, batch_size=480, eval_every=1000, eval_sequences=3000),
            keep=Keep(save_every=1000),
        )

    return make


def _optimizer(name: str, size: str, data: str) -> tuple[Optimizer, Schedule]:
    """The published settings, and the schedule."""
    if name not in RATES:
        # Nothing is published: as many times AdamW's rate as its best was with 51M parameters.
        own, adamw = (gpt_50m(each).optimizer for each in (name, "adamw"))
        rate = RATES["adamw"][size]["lr"] * own.lr / adamw.lr
        return replace(own, **at_rate(own, float(f"{rate:.3g}"))), Schedule(min_lr=0.1)
    rates = FINEWEB.get(name, {}).get(size) if data == "fineweb-edu" else None
    rates = rates or RATES[name].get(size)
    if rates is None:
        raise LabError(f"no settings of {name} are published for gpt2-{size} on {data}")
    least = MIN_LR[size] / rates["lr"]
    schedule = MUON_SCHEDULE if name == "muon" else Schedule(min_lr=least)
    return Optimizer(name=name, **rates, **SETTINGS[name]), schedule
