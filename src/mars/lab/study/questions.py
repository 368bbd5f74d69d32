"""The studies that are asked here, as data; each name is a command: `mars study NAME`.

Those on gpt-50m and GPT-2 small read tokens from data/text: 56M training tokens, so that 20M are
a third of an epoch, 59M are 1.05 epochs and 201M are 3.6. The ``tiny-`` ones need no
GPU, and but for tiny-code no data; they stand in tiny.py.
"""

from __future__ import annotations

from collections.abc import Callable

from mars.lab.errors import LabError, meant
from mars.lab.own import imported, in_a_line
from mars.lab.study import tiny
from mars.lab.study.bases import (
    gpt2_small,
    gpt2_small_short,
    gpt_50m,
    gpt_50m_short,
)
from mars.lab.study.definition import Arm, Study
from mars.lab.study.templates import (
    ORIGINAL,
    PUBLISHED,
    baseline,
    batch,
    clip,
    correction,
    lower,
    mars_adamw,
    momentum,
    muon,
    muon_original,
    scale,
    search,
    sized,
    within,
)

GAMMAS = (0.0125, 0.025, 0.05, 0.1)
LEAN = {"clip": "None", "second_moment": "raw"}  # the cheapest step of MARS-AdamW


def optimizers_50m() -> Study:
    """Question 1."""
    return Study(
        name="optimizers-50m",
        question="A GPT with 51M parameters, 59M tokens: which differences between optimizers are "
        "real?",
        prediction="Methods that use a matrix as one (Muon, SOAP, MARS-M, MARS-Shampoo) end below "
        "AdamW by 0.1 or more. At AdamW's betas MARS-AdamW ends below a tuned AdamW, at the "
        "published ones it does not. The correction adds nothing to Muon. (Added after 46 runs, in "
        "which MARS-Shampoo was 0.06 below Muon: that is its scale and the higher rate of tables "
        "beside it, and Muon with both of them ends within 0.01 of it.)",
        base=gpt_50m,
        arms=(
            Arm(label="AdamW", optimizer="adamw", lr=2e-3),
            muon(4e-3),
            mars_adamw("MARS-AdamW (.9, .95)", 2e-3),
            mars_adamw("MARS-AdamW (.95, .99)", 2e-3, betas=PUBLISHED),
            Arm(label="MARS-M", optimizer="mars-m", lr=4e-3),
            Arm(label="MARS-Shampoo", optimizer="mars-shampoo", lr=1.6e-2),
            muon_original(3.2e-2),
            Arm(label="SOAP", optimizer="soap", lr=2e-3),
            Arm(label="Lion", optimizer="lion", lr=3e-4),
            Arm(label="MARS-Lion", optimizer="mars-lion", lr=3e-4),
        ),
        comparisons=(
            lower("MARS-AdamW (.9, .95)", "AdamW"),
            lower("MARS-AdamW (.95, .99)", "AdamW"),
            lower("Muon", "AdamW", 0.1),
            lower("MARS-M", "AdamW", 0.1),
            within("MARS-M", "Muon", 0.01),
            lower("MARS-Shampoo", "AdamW", 0.1),
            lower("MARS-Shampoo", "Muon", 0.01),
            within("MARS-Shampoo", ORIGINAL, 0.01),
            lower("SOAP", "AdamW", 0.1),
            lower("MARS-Lion", "Lion"),
        ),
    )


def correction_50m() -> Study:
    """Question 2, on losses; `mars study variance` is its second half."""
    what = "MARS-AdamW on a GPT with 51M parameters, 20M tokens"
    return correction("correction-50m", gpt_50m_short, 2e-3, what, GAMMAS)


def clip_50m() -> Study:
    """Question 3."""
    return clip("clip-50m", gpt_50m, 2e-3, "MARS-AdamW on a GPT with 51M parameters", 0.01)


def batch_50m() -> Study:
    """Question 4: the arms of 64k tokens are those of optimizers-50m: --take them from there."""
    sizes = (sized(64, 900), sized(512, 113))
    what = "A GPT with 51M parameters, 59M tokens"
    return batch("batch-50m", gpt_50m, 2e-3, what, *sizes, ("64k", "512k"), 0.01)


def gpt2_small_201m() -> Study:
    """Question 5. Rates begin where gpt2-small-rates ends, as far as that has come."""
    return Study(
        name="gpt2-small",
        question="GPT-2 small, 201M tokens: what are the tuned optimizers worth?",
        prediction="MARS-AdamW ends 0.03 below a tuned AdamW, MARS-M 0.01 below a tuned Muon.",
        base=gpt2_small,
        arms=(
            Arm(label="AdamW", optimizer="adamw", lr=1e-3),
            muon(8e-3),
            mars_adamw("MARS-AdamW", 1e-3),
            Arm(label="MARS-M", optimizer="mars-m", lr=8e-3),
            mars_adamw("MARS-AdamW, no clip, raw", 1e-3, options=LEAN),
        ),
        comparisons=(
            lower("MARS-AdamW", "AdamW", 0.03),
            lower("MARS-AdamW, no clip, raw", "AdamW", 0.03),
            lower("MARS-M", "Muon", 0.01),
            lower("MARS-M", "AdamW", 0.03),
        ),
        keep_checkpoints=True,
    )


def gpt2_small_rates() -> Study:
    """The rates of question 5: a ladder each takes minutes here, and hours with all tokens."""
    return Study(
        name="gpt2-small-rates",
        question="GPT-2 small, 50M tokens: at which rate is each optimizer best, and what is it "
        "worth there?",
        prediction="Best rates are those with 51M parameters, or a rung below. Muon and the matrix "
        "types end 0.1 below AdamW, MARS-Shampoo 0.01 below Muon, MARS-AdamW below AdamW, MARS-M "
        "where Muon does.",
        base=gpt2_small_short,
        arms=(
            Arm(label="AdamW", optimizer="adamw", lr=1e-3),
            muon(2e-3),
            mars_adamw("MARS-AdamW", 1e-3),
            Arm(label="MARS-M", optimizer="mars-m", lr=4e-3),
            Arm(label="MARS-Shampoo", optimizer="mars-shampoo", lr=1.6e-2),
            mars_adamw("MARS-AdamW, no clip, raw", 1e-3, options=LEAN),
        ),
        comparisons=(
            lower("Muon", "AdamW", 0.1),
            lower("MARS-AdamW", "AdamW"),
            lower("MARS-AdamW, no clip, raw", "AdamW"),
            lower("MARS-M", "AdamW", 0.1),
            within("MARS-M", "Muon", 0.01),
            lower("MARS-Shampoo", "AdamW", 0.1),
            lower("MARS-Shampoo", "Muon", 0.01),
        ),
    )


def search_50m() -> Study:
    """With the matrix type, and the scale of Muon, that did best in optimizers-50m, and with the
    clip and second moment that did in clip-50m: --take what is known from either."""
    what = "A GPT with 51M parameters, 59M tokens"
    shampoo = Arm(label="MARS-Shampoo", optimizer="mars-shampoo", lr=1.6e-2)
    more = (
        mars_adamw("MARS-AdamW, no clip, raw", 2e-3, options=LEAN),
        mars_adamw("MARS-AdamW, no clip, raw, γ = 0.1", 2e-3, gamma=0.1, options=LEAN),
    )
    return search("search-50m", gpt_50m, 2e-3, muon_original(3.2e-2), shampoo, what, *more)


def scale_50m() -> Study:
    """Four of its arms are those of optimizers-50m: --take them from there."""
    what = "A GPT with 51M parameters, 59M tokens"
    return scale("scale-50m", gpt_50m, 4e-3, 3.2e-2, what, 0.01)


def baseline_50m() -> Study:
    """Whether the lead of the matrix types is AdamW's fault. Three of its arms are those of
    optimizers-50m: --take them from there.
    """
    what = "A GPT with 51M parameters, 59M tokens"
    shampoo = Arm(label="MARS-Shampoo", optimizer="mars-shampoo", lr=1.6e-2)
    prediction = (
        "In part: in 900 steps AdamW gains up to 0.1 where tables and norms have the rate that "
        "MARS-Shampoo leaves them, eight times AdamW's, and up to 0.05 by a longer warm-up; betas "
        "and decay change less than 0.02. MARS-Shampoo stays 0.1 below each. (Added after five "
        "runs, in which AdamW gained 0.066 by the longer warm-up: MARS-AdamW gains less by it, so "
        "that its lead goes; MARS-Shampoo keeps most of its own.)"
    )
    return baseline("baseline-50m", gpt_50m, 2e-3, shampoo, what, prediction, by=0.1, faster=8.0)


def momentum_50m() -> Study:
    """Four of its arms are those of optimizers-50m: --take them from there."""
    what = "A GPT with 51M parameters, 59M tokens"
    prediction = (
        "In part: AdamW gains 0.01 to 0.03 by β₁ = 0.8, MARS-AdamW at 0.9 stays level with that or "
        "below, and at 0.8 leads AdamW by less than 0.03. MARS-Lion ends within 0.05 of the Lion "
        "whose betas it has."
    )
    return momentum("momentum-50m", gpt_50m, what, prediction, lion=3e-4, by=0.05)


STUDIES: dict[str, Callable[[], Study]] = {
    "optimizers-50m": optimizers_50m,
    "correction-50m": correction_50m,
    "clip-50m": clip_50m,
    "batch-50m": batch_50m,
    "search-50m": search_50m,
    "scale-50m": scale_50m,
    "baseline-50m": baseline_50m,
    "momentum-50m": momentum_50m,
    "gpt2-small": gpt2_small_201m,
    "gpt2-small-rates": gpt2_small_rates,
    "tiny-optimizers": tiny.optimizers,
    "tiny-correction": tiny.correction,
    "tiny-clip": tiny.clip,
    "tiny-batch": tiny.batch,
    "tiny-search": tiny.search,
    "tiny-length": tiny.length,
    "tiny-decay": tiny.decay,
    "tiny-baseline": tiny.baseline,
    "tiny-momentum": tiny.momentum,
    "tiny-scale": tiny.scale,
    "tiny-tokens": tiny.tokens,
    "tiny-code": tiny.code,
}


def find(name: str) -> Study:
    """The study of a name; a function of yours that returns one is package.module:function."""
    if name in STUDIES:
        return STUDIES[name]()
    if ":" not in name:
        known = [*STUDIES, "variance"]
        hint = meant(name, known) or f"known: {', '.join(known)}; your own: package.module:function"
        raise LabError(f"unknown study {name!r}: {hint}")
    what = "cannot be made"
    try:
        made = imported(name)()
        if not isinstance(made, Study):
            raise LabError(f"study {name!r} returned no mars.lab.study.Study")
        for arm in made.arms:
            what = f"has an arm {arm.label!r} of which no run can be made"
            made.run(arm)
    except LabError:
        raise
    except Exception as error:  # whatever a module of somebody's does
        raise LabError(f"study {name!r} {what}: {in_a_line(error)}") from error
    return made
