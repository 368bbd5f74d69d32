"""Recipes: functions that return a configuration, for an optimizer with its best known settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from mars.lab.config import Model, Run
from mars.lab.errors import LabError, meant
from mars.lab.recipes import gpt2, small, vision, yours
from mars.lab.recipes.small import rates

__all__ = ["RECIPES", "Recipe", "elsewhere", "find", "make", "rates"]


@dataclass(frozen=True)
class Recipe:
    """A named configuration: for which optimizer it is, unless another is asked for."""

    about: str
    make: Callable[[str], Run]
    optimizer: str = "mars-adamw"


RECIPES: dict[str, Recipe] = {
    "gpt-tiny": Recipe(
        "a 0.4M-parameter GPT on the bytes of Shakespeare, embedded: half a minute on a CPU",
        small.gpt_tiny,
    ),
    "gpt-50m": Recipe(
        "a 51M-parameter GPT for 59M tokens of your text (GPT-2's vocabulary): minutes on a GPU",
        small.gpt_50m,
    ),
    **{
        f"gpt2-{size}{suffix}": Recipe(
            f"GPT-2 {size} ({count}) on {data}, 49B tokens, with the published settings",
            gpt2.maker(size, data),
        )
        for size, count in (
            ("small", "124M"),
            ("medium", "354M"),
            ("large", "773M"),
            ("xl", "1.6B"),
        )
        for suffix, data in (("", "openwebtext"), ("-fineweb", "fineweb-edu"))
    },
    "digits-cnn": Recipe(
        "a CNN of 38 thousand parameters on handwritten digits, embedded: seconds on a CPU",
        vision.digits_cnn,
    ),
    **{
        f"{data}-{arch}{suffix}": Recipe(f"{about}, {how}", vision.maker(data, arch, short=short))
        for suffix, short, how in (
            ("", False, f"{vision.EPOCHS} epochs, rate divided by 10 twice"),
            ("-short", True, f"{vision.SHORT_EPOCHS} epochs, one cycle"),
        )
        for data, arch, about in vision.NETWORKS
    },
}


def find(name: str) -> Recipe:
    """The recipe of a name."""
    if name in RECIPES:
        return RECIPES[name]
    hint = meant(name, RECIPES) or f"known: {', '.join(RECIPES)}"
    if not hint.startswith("did"):
        hint += "; your own: package.module:function, or a JSON file"
    if "/" in name:
        hint = f"and there is no such directory; {hint}"
    raise LabError(f"unknown recipe {name!r}: {hint}")


def make(name: str, optimizer: str | None = None) -> Run:
    """The configuration of a recipe, for an optimizer; package.module:function is one of yours."""
    if ":" in name:
        return yours.make(name, optimizer, (*RECIPES, Run.recipe))
    recipe = find(name)
    return recipe.make(optimizer or recipe.optimizer)


def elsewhere(run: Run, name: str) -> Run:
    """A run on a recipe of somebody's with another optimizer, which has its usual settings.

    What is no matter of an optimizer stays: all are clipped alike.
    """
    usual = make("gpt-50m" if isinstance(run.model, Model) else "digits-cnn", name).optimizer
    clip = run.optimizer.max_grad_norm
    return dataclasses.replace(run, optimizer=dataclasses.replace(usual, max_grad_norm=clip))
