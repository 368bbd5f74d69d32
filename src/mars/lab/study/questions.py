"""The studies that are asked here, as data; each name is a command: `mars study NAME`.

Those on gpt-50m and GPT-2 small read tokens from data/text: 56M training tokens, so that 20M are
a third of an epoch, 59M are 1.05 epochs, 118M are 2.1 and 210M are 3.7. The ``tiny-`` ones need no
data and no GPU: the same questions where an answer takes minutes and means little.
"""

from __future__ import annotations

import difflib
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path

from mars.lab import recipes
from mars.lab.config import Run
from mars.lab.errors import LabError
from mars.lab.study.definition import Arm, Changes, Claim, Comparison, Study

GAMMAS = (0.0125, 0.025, 0.05, 0.1)
PUBLISHED = (0.95, 0.99)  # betas


def gpt_50m(optimizer: str) -> Run:
    """900 steps of 64k tokens, as the recipe has it."""
    return recipes.make("gpt-50m", optimizer)


def gpt_50m_short(optimizer: str) -> Run:
    """300 steps: where there are many arms, and rates are claimed, which takes 9 runs an arm."""
    return gpt_50m(optimizer).replace(
        schedule={"warmup_steps": 30}, loop={"steps": 300, "eval_every": 50}
    )


def gpt2_small(optimizer: str) -> Run:
    """GPT-2 small, 1600 steps of 128k tokens; one schedule for all, settings of gpt-50m."""
    run = recipes.make("gpt2-small", "adamw").replace(
        data={"source": "data/text"},
        schedule={"shape": "cosine", "warmup_steps": 160, "min_lr": 0.1},
        loop={"steps": 1600, "batch_size": 128, "eval_every": 200, "eval_sequences": 512},
        keep={"save_every": 400},
    )
    own = recipes.make("gpt-50m", optimizer).optimizer
    return run.replace(optimizer={f: getattr(own, f) for f in own.__dataclass_fields__})


def gpt_tiny(optimizer: str) -> Run:
    """150 steps of a thousand bytes."""
    return recipes.make("gpt-tiny", optimizer).replace(
        loop={"steps": 150, "eval_every": 25}, schedule={"warmup_steps": 15}
    )


def _lower(arm: str, than: str, by: float = 0.0) -> Comparison:
    return Comparison(arm=arm, baseline=than, claim=Claim(kind="lower", by=by))


def _within(arm: str, of: str, by: float) -> Comparison:
    return Comparison(arm=arm, baseline=of, claim=Claim(kind="within", by=by))


def _rate(arm: str, of: str, times: float) -> Comparison:
    return Comparison(arm=arm, baseline=of, claim=Claim(kind="rate", by=times))


def _mars(label: str, lr: float, changes: Changes | None = None, **options: object) -> Arm:
    own = {"optimizer": options} if options else {}
    return Arm(label=label, optimizer="mars-adamw", lr=lr, changes={**own, **(changes or {})})


def optimizers_50m() -> Study:
    """Question 1."""
    return Study(
        name="optimizers-50m",
        question="A 50M-parameter GPT, 59M tokens: which differences between optimizers are real?",
        prediction="Methods that use a matrix as one (Muon, SOAP, MARS-M, MARS-Shampoo) end below "
        "AdamW by 0.1 or more. At AdamW's betas MARS-AdamW ends below a tuned AdamW, at the "
        "published ones it does not. The correction adds nothing to Muon.",
        base=gpt_50m,
        arms=(
            Arm(label="AdamW", optimizer="adamw", lr=2e-3),
            Arm(label="Muon", optimizer="muon", lr=4e-3),
            _mars("MARS-AdamW (.9, .95)", 2e-3),
            _mars("MARS-AdamW (.95, .99)", 2e-3, betas=PUBLISHED),
            Arm(label="MARS-M", optimizer="mars-m", lr=4e-3),
            Arm(label="MARS-Shampoo", optimizer="mars-shampoo", lr=1.6e-2),
            Arm(label="SOAP", optimizer="soap", lr=2e-3),
            Arm(label="Lion", optimizer="lion", lr=3e-4),
            Arm(label="MARS-Lion", optimizer="mars-lion", lr=3e-4),
        ),
        comparisons=(
            _lower("MARS-AdamW (.9, .95)", "AdamW"),
            _lower("MARS-AdamW (.95, .99)", "AdamW"),
            _lower("Muon", "AdamW", 0.1),
            _lower("MARS-M", "AdamW", 0.1),
            _within("MARS-M", "Muon", 0.01),
            _lower("MARS-Shampoo", "AdamW", 0.1),
            _lower("SOAP", "AdamW", 0.1),
            _lower("MARS-Lion", "Lion"),
        ),
    )


def _correction(name: str, base: Callable[[str], Run], lr: float, what: str,
                gammas: tuple[float, ...]) -> Study:  # fmt: skip
    """γ × approximate or exact, at the published betas, where κ is largest."""
    plain = "γ = 0"
    arms = [_mars(plain, lr, betas=PUBLISHED, gamma=0.0)]
    claims = []
    for gamma in gammas:
        kappa = gamma * PUBLISHED[0] / (1 - PUBLISHED[0])
        longer = math.sqrt((1 + kappa) ** 2 + kappa**2)
        approximate, exact = f"γ = {gamma:g}", f"γ = {gamma:g}, exact"
        arms.append(_mars(approximate, lr, betas=PUBLISHED, gamma=gamma))
        arms.append(_mars(exact, lr, betas=PUBLISHED, gamma=gamma, exact=True))
        claims += [
            _lower(approximate, plain), _rate(approximate, plain, longer),
            _lower(exact, plain), _rate(exact, plain, 1.0),
            _within(exact, approximate, 0.01),
        ]  # fmt: skip
    return Study(
        name=name,
        question=f"{what}: what does the correction do, approximate and exact, for every γ?",
        prediction="Approximate: Var(c)/Var(g) is (1+κ)² + κ² and the best rate grows by its "
        "root; exact: both stay at 1. Losses fall a little with γ and hardly differ between the "
        "two at the default γ.",
        base=base,
        arms=tuple(arms),
        comparisons=tuple(claims),
    )


def correction_50m() -> Study:
    """Question 2, on losses; `mars study variance` is its second half."""
    what = "MARS-AdamW on a 50M-parameter GPT, 20M tokens"
    return _correction("correction-50m", gpt_50m_short, 2e-3, what, GAMMAS)


def _clip(name: str, base: Callable[[str], Run], lr: float, what: str, by: float) -> Study:
    usual = "tensor, corrected"
    options = {
        "global, corrected": {"clip": "global"},
        "none, corrected": {"clip": "None"},
        "tensor, raw": {"second_moment": "raw"},
        "none, raw": {"clip": "None", "second_moment": "raw"},
    }
    return Study(
        name=name,
        question=f"{what}: does the clip (per tensor, global, none) or the second moment "
        "(corrected, raw) matter?",
        prediction=f"Neither does, by more than {by:g}; with a raw second moment the best rate is "
        "lower, because v no longer grows with the correction's noise.",
        base=base,
        arms=(_mars(usual, lr), *(_mars(label, lr, options=o) for label, o in options.items())),
        comparisons=tuple(_within(label, usual, by) for label in options),
    )


def clip_50m() -> Study:
    """Question 3."""
    return _clip("clip-50m", gpt_50m, 2e-3, "MARS-AdamW on a 50M-parameter GPT", 0.01)


def _batch(name: str, base: Callable[[str], Run], lr: float, what: str, small: Changes,
           large: Changes, names: tuple[str, str], by: float) -> Study:  # fmt: skip
    arms = []
    for batch, changes in zip(names, (small, large), strict=True):
        # Eight times the batch, √8 times the rate: where the ladder begins, no more.
        first = lr * (1 if changes is small else 2)
        arms.append(Arm(label=f"AdamW, {batch}", optimizer="adamw", lr=first, changes=changes))
        arms.append(_mars(f"MARS-AdamW, {batch}", first, changes))
    few, many = names
    return Study(
        name=name,
        question=f"{what}, batches of {few} and {many} tokens: is MARS a large-batch method?",
        prediction=f"MARS-AdamW gains {by:g} more over AdamW with the large batch.",
        base=base,
        arms=tuple(arms),
        comparisons=(
            _lower(f"MARS-AdamW, {few}", f"AdamW, {few}"),
            _lower(f"MARS-AdamW, {many}", f"AdamW, {many}"),
            Comparison(
                arm=f"MARS-AdamW, {many}",
                baseline=f"AdamW, {many}",
                claim=Claim(kind="lower", by=by),
                than=(f"MARS-AdamW, {few}", f"AdamW, {few}"),
            ),
        ),
    )


def _sized(batch_size: int, steps: int) -> Changes:
    """A tenth of the steps is warm-up; ten validations."""
    return {
        "loop": {"batch_size": batch_size, "steps": steps},
        "schedule": {"warmup_steps": steps // 10},
    }


def batch_50m() -> Study:
    """Question 4: 118M tokens either way, 2.1 epochs."""
    sizes = (_sized(64, 1800), _sized(512, 225))
    what = "A 50M-parameter GPT, 118M tokens"
    return _batch("batch-50m", gpt_50m, 2e-3, what, *sizes, ("64k", "512k"), 0.01)


def gpt2_small_210m() -> Study:
    """Question 5."""
    return Study(
        name="gpt2-small",
        question="GPT-2 small, 210M tokens: what are the tuned optimizers worth?",
        prediction="MARS-AdamW ends 0.03 below a tuned AdamW, MARS-M 0.01 below a tuned Muon.",
        base=gpt2_small,
        arms=(
            Arm(label="AdamW", optimizer="adamw", lr=2e-3),
            Arm(label="Muon", optimizer="muon", lr=4e-3),
            _mars("MARS-AdamW", 2e-3),
            Arm(label="MARS-M", optimizer="mars-m", lr=4e-3),
        ),
        comparisons=(
            _lower("MARS-AdamW", "AdamW", 0.03),
            _lower("MARS-M", "Muon", 0.01),
            _lower("MARS-M", "AdamW", 0.03),
        ),
        keep_checkpoints=True,
    )


def _search(name: str, base: Callable[[str], Run], lr: float, muon_lr: float, what: str) -> Study:
    """Which setting of the family beats the best baseline of either kind?

    MARS-M leaves the token table, half of a small model, to AdamW as Muon does; MARS-AdamW gains
    where AdamW trains. So let both gain.
    """

    def mars_m(label: str, **own: object) -> Arm:
        return Arm(label=label, optimizer="mars-m", lr=muon_lr, changes={"optimizer": own})

    def tables(gamma: float) -> dict[str, str]:
        own = {"mars_type": "mars-adamw", "betas": (0.9, 0.95), "gamma": gamma}
        return {"embeddings": str(own)}

    adamw, muon, raw = "AdamW", "Muon", {"second_moment": "raw"}
    arms = (
        Arm(label=adamw, optimizer="adamw", lr=lr),
        Arm(label=muon, optimizer="muon", lr=muon_lr),
        mars_m("MARS-M"),
        mars_m("MARS-M, tables by MARS-AdamW", options=tables(0.025)),
        mars_m("MARS-M, tables by MARS-AdamW, γ = 0.1", options=tables(0.1)),
        mars_m("MARS-M, γ = 0", gamma=0.0),
        mars_m("MARS-M, γ = 0.1", gamma=0.1),
        _mars("MARS-AdamW", lr),
        _mars("MARS-AdamW, γ = 0.1", lr, gamma=0.1),
        _mars("MARS-AdamW, γ = 0.1, exact", lr, gamma=0.1, exact=True),
        _mars("MARS-AdamW, raw second moment", lr, options=raw),
        _mars("MARS-AdamW, raw second moment, γ = 0.1", lr, gamma=0.1, options=raw),
        _mars("MARS-AdamW (.95, .99), γ = 0.1", lr, gamma=0.1, betas=PUBLISHED),
    )
    return Study(
        name=name,
        question=f"{what}: which setting of the family is worth a switch?",
        prediction="MARS-AdamW ends 0.03 below AdamW at its betas. MARS-M equals Muon whatever γ "
        "is; with its tables trained by MARS-AdamW it ends 0.01 below Muon.",
        base=base,
        arms=arms,
        comparisons=(
            *(_lower(a.label, adamw, 0.03) for a in arms if a.optimizer == "mars-adamw"),
            *(_lower(a.label, muon, 0.01) for a in arms if a.optimizer == "mars-m"),
        ),
    )


def search_50m() -> Study:
    what = "A 50M-parameter GPT, 59M tokens"
    return _search("search-50m", gpt_50m, 2e-3, 4e-3, what)


def tiny_optimizers() -> Study:
    return Study(
        name="tiny-optimizers",
        question="A GPT of 0.4M parameters, 150k bytes of Shakespeare: which differences are real?",
        prediction="Muon ends 0.1 below AdamW; MARS-AdamW ends below AdamW.",
        base=gpt_tiny,
        arms=(
            Arm(label="AdamW", optimizer="adamw", lr=5e-3),
            Arm(label="Muon", optimizer="muon", lr=3.2e-2),
            _mars("MARS-AdamW", 5e-3),
        ),
        comparisons=(_lower("Muon", "AdamW", 0.1), _lower("MARS-AdamW", "AdamW")),
        noise=0.03,
    )


def tiny_correction() -> Study:
    return _correction("tiny-correction", gpt_tiny, 5e-3, "MARS-AdamW on a tiny GPT", (0.025, 0.1))


def tiny_clip() -> Study:
    return _clip("tiny-clip", gpt_tiny, 5e-3, "MARS-AdamW on a tiny GPT", 0.03)


def tiny_batch() -> Study:
    sizes = (_sized(16, 160), _sized(128, 20))
    return _batch("tiny-batch", gpt_tiny, 5e-3, "A tiny GPT", *sizes, ("1k", "8k"), 0.03)


def tiny_search() -> Study:
    what = "A GPT of 0.4M parameters, 150k bytes of Shakespeare"
    return _search("tiny-search", gpt_tiny, 5e-3, 3.2e-2, what)


STUDIES: dict[str, Callable[[], Study]] = {
    "optimizers-50m": optimizers_50m,
    "correction-50m": correction_50m,
    "clip-50m": clip_50m,
    "batch-50m": batch_50m,
    "search-50m": search_50m,
    "gpt2-small": gpt2_small_210m,
    "tiny-optimizers": tiny_optimizers,
    "tiny-correction": tiny_correction,
    "tiny-clip": tiny_clip,
    "tiny-batch": tiny_batch,
    "tiny-search": tiny_search,
}


def find(name: str) -> Study:
    """The study of a name; a function of yours that returns one is package.module:function."""
    if name in STUDIES:
        return STUDIES[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        known = [*STUDIES, "variance"]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise LabError(f"unknown study {name!r}: {hint}")
    if (here := str(Path.cwd())) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, here)
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except LabError:
        raise
    except Exception as error:  # whatever a module of somebody's does when it is imported
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise LabError(f"study {name!r} cannot be made: {text}") from error
    if not isinstance(made, Study):
        raise LabError(f"study {name!r} returned no mars.lab.study.Study")
    return made
