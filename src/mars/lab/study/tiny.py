"""Studies of tiny GPTs: no GPU and but for one no data, an answer in minutes, which means little
by itself.
"""

from __future__ import annotations

import dataclasses

from mars.lab.study import templates
from mars.lab.study.bases import gpt_tiny, gpt_tiny_narrow
from mars.lab.study.definition import Arm, Changes, Claim, Comparison, Study
from mars.lab.study.templates import (
    ORIGINAL,
    lower,
    mars_adamw,
    muon,
    muon_original,
    sized,
    within,
)

TINY = "A GPT of 0.4M parameters, 150k bytes of Shakespeare"
LONG: Changes = {
    "loop": {"steps": 1200, "eval_every": 100},
    "schedule": {"warmup_steps": 120},
}


def optimizers() -> Study:
    return Study(
        name="tiny-optimizers",
        question=f"{TINY}: which differences are real?",
        prediction="Muon ends 0.1 below AdamW; MARS-AdamW ends below AdamW.",
        base=gpt_tiny,
        arms=(
            Arm(label="AdamW", optimizer="adamw", lr=5e-3),
            muon(3.2e-2),
            mars_adamw("MARS-AdamW", 5e-3),
        ),
        comparisons=(lower("Muon", "AdamW", 0.1), lower("MARS-AdamW", "AdamW")),
        noise=0.03,
    )


def correction() -> Study:
    return templates.correction(
        "tiny-correction", gpt_tiny, 5e-3, "MARS-AdamW on a tiny GPT", (0.025, 0.1)
    )


def clip() -> Study:
    return templates.clip("tiny-clip", gpt_tiny, 5e-3, "MARS-AdamW on a tiny GPT", 0.03)


def batch() -> Study:
    sizes = (sized(16, 160), sized(128, 20))
    return templates.batch("tiny-batch", gpt_tiny, 5e-3, "A tiny GPT", *sizes, ("1k", "8k"), 0.03)


def search() -> Study:
    mars_m = Arm(label="MARS-M", optimizer="mars-m", lr=3.2e-2)
    return templates.search("tiny-search", gpt_tiny, 5e-3, muon(3.2e-2), mars_m, TINY)


def length() -> Study:
    """Why γ = 0.1 leads on a tiny GPT and not with 51M parameters. The short arms are those of
    tiny-search: --take them from there."""
    adamw, default, large = "AdamW", "MARS-AdamW", "MARS-AdamW, γ = 0.1"
    arms = []
    for steps, lr, changes in ((150, 5e-3, {}), (1200, 2.5e-3, LONG)):
        arms.append(Arm(label=f"{adamw}, {steps} steps", optimizer="adamw", lr=lr, changes=changes))
        arms.append(mars_adamw(f"{default}, {steps} steps", lr, changes))
        arms.append(mars_adamw(f"{large}, {steps} steps", lr, changes, gamma=0.1))
    return Study(
        name="tiny-length",
        question="A GPT of 0.4M parameters, 150 and 1,200 steps: does a large γ pay in short runs "
        "alone?",
        prediction="Yes: γ = 0.1 leads the default by 0.02 more in 150 steps than in 1,200, and "
        "ends within 0.03 of AdamW there. The default ends below AdamW whatever the steps.",
        base=gpt_tiny,
        arms=tuple(arms),
        comparisons=(
            lower(f"{default}, 150 steps", f"{adamw}, 150 steps"),
            lower(f"{default}, 1200 steps", f"{adamw}, 1200 steps"),
            within(f"{large}, 1200 steps", f"{adamw}, 1200 steps", 0.03),
            Comparison(
                arm=f"{large}, 150 steps",
                baseline=f"{default}, 150 steps",
                claim=Claim(kind="lower", by=0.02),
                than=(f"{large}, 1200 steps", f"{default}, 1200 steps"),
            ),
        ),
    )


def decay() -> Study:
    """Elsewhere the decay is 0.1 for all, so that what a step takes off the weights grows with the
    best rate. AdamW and MARS-AdamW have runs in tiny-length: --take them from there.
    """
    adamw, ours, matrix = "AdamW", "MARS-AdamW", "MARS-Shampoo"
    first = {adamw: ("adamw", 1e-2), ours: ("mars-adamw", 1e-2), matrix: ("mars-shampoo", 3.2e-2)}
    decays = {"": {}, **{f", decay {d:g}": {"weight_decay": d} for d in (0.0, 0.5, 2.5)}}
    arms = tuple(
        Arm(label=f"{label}{suffix}", optimizer=name, lr=lr, changes={**LONG, "optimizer": own})
        for suffix, own in decays.items()
        for label, (name, lr) in first.items()
    )
    return Study(
        name="tiny-decay",
        question="A GPT of 0.4M parameters, 1.2M bytes of Shakespeare: does the order of the "
        "optimizers stay if the decay is tuned, too?",
        prediction="Yes: MARS-Shampoo at the decay that all had, 0.1, ends 0.05 or more below "
        "AdamW at its best decay, and MARS-AdamW below AdamW at the same decay, whichever it is. "
        "No optimizer gains 0.02 by another decay.",
        base=gpt_tiny,
        arms=arms,
        comparisons=(
            *(lower(matrix, f"{adamw}{suffix}", 0.05) for suffix in decays),
            *(lower(f"{ours}{suffix}", f"{adamw}{suffix}") for suffix in decays),
            *(lower(f"{arm}{suffix}", arm, 0.02) for arm in first for suffix in decays if suffix),
        ),
    )


def baseline() -> Study:
    """Five of its arms have runs in tiny-decay: --take them from there."""
    shampoo = Arm(label="MARS-Shampoo", optimizer="mars-shampoo", lr=3.2e-2)
    what = "A GPT of 0.4M parameters, 1.2M bytes of Shakespeare"
    prediction = (
        "No: none of them gains 0.02, and MARS-Shampoo stays 0.05 below each. (Added before its "
        "first runs had ended: where all have the longer warm-up MARS-AdamW's lead goes, and "
        "MARS-Shampoo's stays.)"
    )
    return templates.baseline(
        "tiny-baseline", gpt_tiny, 1e-2, shampoo, what, prediction,
        by=0.05, faster=4.0, changes=LONG,
    )  # fmt: skip


def momentum() -> Study:
    """Four arms of each length have runs in tiny-search and tiny-length: --take them from there."""
    prediction = (
        "Yes. (After trial runs of some of these arms:) β₁ = 0.8 takes AdamW lower, to where "
        "MARS-AdamW ends at β₁ = 0.9 or below, and MARS-AdamW leads AdamW by less where both have "
        "0.8. MARS-Lion ends within 0.02 of the Lion whose betas it has. (After its runs of 150 "
        "steps, of which a third failed at any rate: 1,200 steps of Lion as well.)"
    )
    what = "A GPT of 0.4M parameters, 150 and 1,200 steps"
    short: Changes = {}
    lengths = ((", 150 steps", 2.5e-3, short), (", 1200 steps", 1e-2, LONG))
    return templates.momentum("tiny-momentum", gpt_tiny, what, prediction, 1e-3, 0.02, lengths)


def tokens() -> Study:
    """Studies of larger models have one byte or token per parameter, which is a short run."""
    longer: Changes = {
        "loop": {"steps": 3200, "eval_every": 160},
        "schedule": {"warmup_steps": 320},
    }
    adamw, ours, matrix = "AdamW", "MARS-AdamW", "MARS-Shampoo"
    one, twenty = ", 1 a parameter", ", 20 a parameter"
    arms = []
    for suffix, changes in ((one, {}), (twenty, longer)):
        arms.append(Arm(label=adamw + suffix, optimizer="adamw", lr=1e-2, changes=changes))
        arms.append(mars_adamw(ours + suffix, 1e-2, changes))
        arms.append(Arm(
            label=matrix + suffix, optimizer="mars-shampoo", lr=3.2e-2, changes=changes
        ))  # fmt: skip
        theirs = muon_original(3.2e-2)
        arms.append(dataclasses.replace(
            theirs, label=theirs.label + suffix, shown=theirs.shown + suffix,
            changes={**theirs.changes, **changes},
        ))  # fmt: skip
    return Study(
        name="tiny-tokens",
        question="A GPT of 0.17M parameters, 1 and 20 bytes of Shakespeare per parameter: do the "
        "leads stay in longer runs?",
        prediction="Those of the optimizers of matrices stay above 0.05 and shrink by 0.05 or "
        "more. MARS-AdamW ends below AdamW in both, and MARS-Shampoo where Muon of the same scale "
        "does in the longer one.",
        base=gpt_tiny_narrow,
        arms=tuple(arms),
        comparisons=(
            *(lower(arm + s, adamw + s, 0.05) for s in (one, twenty) for arm in (matrix, ORIGINAL)),
            *(lower(ours + s, adamw + s) for s in (one, twenty)),
            within(matrix + twenty, ORIGINAL + twenty, 0.02),
            *(
                Comparison(
                    arm=arm + one,
                    baseline=adamw + one,
                    claim=Claim(kind="lower", by=0.05),
                    than=(arm + twenty, adamw + twenty),
                )
                for arm in (matrix, ORIGINAL)
            ),
        ),
    )


def code() -> Study:
    """Everything else here learns English. What it reads is made by a command of docs/studies.md,
    from the history of this repository.
    """
    adamw, ours, low = "AdamW", "MARS-AdamW", {"optimizer": {"betas": (0.8, 0.95)}}
    plain = Arm(label=adamw, optimizer="adamw", lr=1e-2, changes=LONG)
    corrected = mars_adamw(ours, 1e-2, LONG)
    lower_beta = tuple(
        dataclasses.replace(arm, label=f"{arm.label}, β₁ = 0.8", changes={**LONG, **low})
        for arm in (plain, corrected)
    )
    theirs = muon_original(3.2e-2)
    return Study(
        name="tiny-code",
        question="A GPT of 0.4M parameters, 1.2M bytes of Python: does the order of the optimizers "
        "stay on text that is not English?",
        prediction="Yes: MARS-Shampoo and Muon of its scale end 0.05 or more below AdamW, and "
        "within 0.03 of each other. MARS-AdamW ends below AdamW, and so does AdamW with β₁ = 0.8; "
        "where both have that, MARS-AdamW leads by less than 0.02.",
        base=lambda optimizer: gpt_tiny(optimizer).replace(data={"source": "data/code.txt"}),
        arms=(
            plain,
            corrected,
            *lower_beta,
            Arm(label="MARS-Shampoo", optimizer="mars-shampoo", lr=3.2e-2, changes=LONG),
            dataclasses.replace(theirs, changes={**theirs.changes, **LONG}),
        ),
        comparisons=(
            lower("MARS-Shampoo", adamw, 0.05),
            lower(theirs.label, adamw, 0.05),
            within("MARS-Shampoo", theirs.label, 0.03),
            lower(ours, adamw),
            lower(lower_beta[0].label, adamw),
            within(lower_beta[1].label, lower_beta[0].label, 0.02),
        ),
    )


def scale() -> Study:
    return templates.scale("tiny-scale", gpt_tiny, 3.2e-2, 6.4e-2, TINY, 0.03)
