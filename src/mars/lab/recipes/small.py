"""Small models, at the best rates that were measured (settings.json)."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from mars.lab.config import Data, Keep, Loop, Model, Optimizer, Run, Schedule
from mars.lab.optimizers import find
from mars.lab.recipes import settings

# Settings that are not searched. Lion takes small rates and decays accordingly more; MARS-AdamW has
# AdamW's betas, with which it does better than with the published ones (docs/results).
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95)},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 1.0},
    "muon": {"lr_1d": 0.5},
    "soap": {"betas": (0.95, 0.95)},
    "mars-adamw": {"betas": (0.9, 0.95), "gamma": 0.025},
    "mars-adamw-2d": {"betas": (0.9, 0.95), "gamma": 0.025},
    "mars-lion": {"betas": (0.95, 0.99), "gamma": 0.025, "weight_decay": 1.0},
    "mars-shampoo": {"betas": (0.95, 0.99), "gamma": 0.025, "lr_1d": 0.5},
    "mars-m": {"betas": (0.95, 0.99), "gamma": 0.025, "lr_1d": 0.5},
}
DECAY = 0.1

# Rates where nothing has been measured: where a grid should begin. AdamW's are for all others.
GUESSES: dict[str, dict[str, float]] = {
    "gpt-tiny": {"adamw": 1e-2},
    "gpt-50m": {
        "adamw": 2e-3, "lion": 3e-4, "muon": 4e-3, "soap": 2e-3, "mars-lion": 3e-4,
        "mars-shampoo": 2e-2, "mars-m": 4e-3,
    },
    "digits-cnn": {"adamw": 1e-2},
}  # fmt: skip


@cache
def rates(recipe: str) -> dict[str, Any]:
    """The learning-rate grid of a recipe and its outcome, as a race over rates writes it."""
    path = resources.files("mars.lab.recipes") / "rates" / f"{recipe}.json"
    if not path.is_file():
        return {"optimizers": {}}
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return {**found, "origin": "package"}


def untuned(recipe: str, name: str, **more: Any) -> Optimizer:
    """An optimizer with its settings, at a guessed rate; ``lr_1d`` is a multiple of that here."""
    lr = GUESSES[recipe].get(name) or find(name).lr or GUESSES[recipe]["adamw"]
    fields = {"weight_decay": DECAY, **SETTINGS.get(name, {}), **more}
    if "lr_1d" in fields:
        fields["lr_1d"] = lr * fields["lr_1d"]
    return Optimizer(name=name, lr=lr, **fields)


def tuned(run: Run) -> Run:
    """The run at the best rate that was measured on its recipe; as it is, if none was."""
    found = settings.of_recipe(run)
    if found is None:
        return run
    return run.replace(optimizer=settings.at_rate(run.optimizer, found.lr))


def gpt_tiny(optimizer: str) -> Run:
    """Half a minute on one core: for races on any machine."""
    return tuned(Run(
        recipe="gpt-tiny",
        model=Model(n_layer=3, n_head=4, n_embd=96, block_size=64, vocab_size=256),
        data=Data(source="tinyshakespeare", tokenizer="bytes"),
        optimizer=untuned("gpt-tiny", optimizer),
        schedule=Schedule(shape="cosine", warmup_steps=50, min_lr=0.1),
        loop=Loop(steps=500, batch_size=16, eval_every=50, eval_sequences=128, log_every=10),
        keep=Keep(save_every=200),
    ))  # fmt: skip


def gpt_50m(optimizer: str) -> Run:
    """51M parameters, 900 steps of 64k tokens: a first real comparison on one GPU."""
    return tuned(Run(
        recipe="gpt-50m",
        model=Model(n_layer=8, n_head=8, n_embd=512, block_size=1024, vocab_size=50304),
        data=Data(source="data/text", tokenizer="gpt2"),
        optimizer=untuned("gpt-50m", optimizer),
        schedule=Schedule(shape="cosine", warmup_steps=90, min_lr=0.1),
        loop=Loop(steps=900, batch_size=64, eval_every=100, eval_sequences=512, log_every=10),
        keep=Keep(save_every=300),
    ))  # fmt: skip
