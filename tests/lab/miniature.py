"""Runs small enough for tests: a GPT of a few thousand parameters on bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mars.lab.config import Data, Keep, Loop, Model, Optimizer, Run, Schedule

# Every kind of optimizer, and exact mode, at rates that move the miniature.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-2},
    "lion": {"name": "lion", "lr": 1e-3},
    "muon": {"name": "muon", "lr": 1e-2},
    "soap": {"name": "soap", "lr": 1e-2},
    "adopt": {"name": "adopt", "lr": 1e-2},
    "mars-adamw": {"name": "mars-adamw", "lr": 1e-2},
    "mars-lion": {"name": "mars-lion", "lr": 1e-3},
    "mars-shampoo": {"name": "mars-shampoo", "lr": 1e-2},
    "mars-m": {"name": "mars-m", "lr": 1e-2},
    "mars-adamw-2d": {"name": "mars-adamw-2d", "lr": 1e-2},
    "exact": {"name": "mars-adamw", "lr": 1e-2, "exact": True},
    "lean": {"name": "mars-adamw", "lr": 1e-2, "options": {"state_dtype": "bfloat16"}},
}


def run(out: Path, optimizer: str = "mars-adamw", **loop: Any) -> Run:
    """A run of 12 steps in a directory."""
    settings = {
        "steps": 12, "batch_size": 4, "eval_every": 4, "eval_sequences": 4, "log_every": 2,
        "diagnose_every": 8, "threads": 1, "device": "cpu", **loop,
    }  # fmt: skip
    return Run(
        recipe="miniature",
        model=Model(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=256, dropout=0.1),
        data=Data(source="tinyshakespeare", tokenizer="bytes"),
        optimizer=Optimizer(**OPTIMIZERS[optimizer]),
        schedule=Schedule(warmup_steps=min(2, int(settings["steps"]))),
        loop=Loop(**settings),
        keep=Keep(out=str(out), save_every=3),
    )
