"""The runs that studies vary: models, tokens and schedules, with the settings of an optimizer."""

from __future__ import annotations

from mars.lab import recipes
from mars.lab.config import Run


def gpt_50m(optimizer: str) -> Run:
    """900 steps of 64k tokens, as the recipe has it."""
    return recipes.make("gpt-50m", optimizer)


def gpt_50m_short(optimizer: str) -> Run:
    """300 steps: where there are many arms, and rates are claimed, which takes 9 runs an arm."""
    return gpt_50m(optimizer).replace(
        schedule={"warmup_steps": 30}, loop={"steps": 300, "eval_every": 50}
    )


def gpt2_small(optimizer: str) -> Run:
    """GPT-2 small, 1536 steps of 128k tokens; one schedule for all, settings of gpt-50m."""
    run = recipes.make("gpt2-small", "adamw").replace(
        data={"source": "data/text"},
        schedule={"shape": "cosine", "warmup_steps": 154, "min_lr": 0.1},
        loop={"steps": 1536, "batch_size": 128, "eval_every": 128, "eval_sequences": 512},
        keep={"save_every": 400},
    )
    own = recipes.make("gpt-50m", optimizer).optimizer
    return run.replace(optimizer={f: getattr(own, f) for f in own.__dataclass_fields__})


def gpt2_small_short(optimizer: str) -> Run:
    """A quarter of those steps, each as there: where rates can be searched."""
    return gpt2_small(optimizer).replace(
        schedule={"warmup_steps": 38}, loop={"steps": 384, "eval_every": 64}
    )


def gpt_tiny(optimizer: str) -> Run:
    """150 steps of a thousand bytes."""
    return recipes.make("gpt-tiny", optimizer).replace(
        loop={"steps": 150, "eval_every": 25}, schedule={"warmup_steps": 15}
    )


def gpt_tiny_narrow(optimizer: str) -> Run:
    """One byte per parameter of a model so small that twenty are three epochs and a minute."""
    return recipes.make("gpt-tiny", optimizer).replace(
        model={"n_embd": 64},
        loop={"steps": 160, "eval_every": 16},
        schedule={"warmup_steps": 16},
    )
