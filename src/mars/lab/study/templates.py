"""Studies that are asked of several models: what varies, what is predicted, what is compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from mars.lab.config import Run
from mars.lab.study.definition import Arm, Changes, Claim, Comparison, Study
from mars.rule.estimator import noise_ratio

Base = Callable[[str], Run]

PUBLISHED = (0.95, 0.99)  # betas
ORIGINAL = "Muon, original scale"


def lower(arm: str, than: str, by: float = 0.0) -> Comparison:
    return Comparison(arm=arm, baseline=than, claim=Claim(kind="lower", by=by))


def within(arm: str, of: str, by: float) -> Comparison:
    return Comparison(arm=arm, baseline=of, claim=Claim(kind="within", by=by))


def rate(arm: str, of: str, times: float) -> Comparison:
    return Comparison(arm=arm, baseline=of, claim=Claim(kind="rate", by=times))


def mars_adamw(label: str, lr: float, changes: Changes | None = None, **options: object) -> Arm:
    own = {"optimizer": options} if options else {}
    return Arm(label=label, optimizer="mars-adamw", lr=lr, changes={**own, **(changes or {})})


def muon(lr: float) -> Arm:
    """The laboratory's Muon, scaled to the size of AdamW's steps, which is not torch's default."""
    return Arm(label="Muon", shown="Muon, Moonlight's scale", optimizer="muon", lr=lr)


def muon_original(lr: float, lr_1d: float | None = None) -> Arm:
    """Muon scaled by √max(1, rows/cols) as MARS-Shampoo is, by torch's default.

    ``lr_1d``: the rate of what is left to AdamW, in lr; by default the recipe's half.
    """
    own: dict[str, object] = {"options": {"adjust_lr_fn": "original"}}
    more = ""
    if lr_1d is not None:
        own |= {"lr": 1.0, "lr_1d": lr_1d}
        more = ", lr_1d = lr" if lr_1d == 1 else f", lr_1d = {lr_1d:g} lr"
    return Arm(
        label=ORIGINAL + more,
        shown="Muon, torch's default scale" + more,
        optimizer="muon",
        lr=lr,
        changes={"optimizer": own},
    )


def varied(arm: Arm, change: str, **own: object) -> Arm:
    label, shown = (f"{name}, {change}" for name in (arm.label, arm.name))
    return dataclasses.replace(arm, label=label, shown=shown, changes={"optimizer": own})


def _tables(gamma: float) -> dict[str, str]:
    """By which MARS-AdamW trains the tables that a matrix type leaves to AdamW."""
    own = {"mars_type": "mars-adamw", "betas": (0.9, 0.95), "gamma": gamma}
    return {"embeddings": str(own)}


def sized(batch_size: int, steps: int) -> Changes:
    """A tenth of the steps is warm-up; ten validations."""
    return {
        "loop": {"batch_size": batch_size, "steps": steps},
        "schedule": {"warmup_steps": steps // 10},
    }


def correction(name: str, base: Base, lr: float, what: str, gammas: tuple[float, ...]) -> Study:
    """γ × approximate or exact, at the published betas, where κ is largest."""
    plain = "γ = 0"
    arms = [mars_adamw(plain, lr, betas=PUBLISHED, gamma=0.0)]
    claims = []
    for gamma in gammas:
        longer = math.sqrt(noise_ratio(gamma, PUBLISHED[0]))
        approximate, exact = f"γ = {gamma:g}", f"γ = {gamma:g}, exact"
        arms.append(mars_adamw(approximate, lr, betas=PUBLISHED, gamma=gamma))
        arms.append(mars_adamw(exact, lr, betas=PUBLISHED, gamma=gamma, exact=True))
        claims += [
            lower(approximate, plain), rate(approximate, plain, longer),
            lower(exact, plain), rate(exact, plain, 1.0),
            within(exact, approximate, 0.01),
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


def clip(name: str, base: Base, lr: float, what: str, by: float) -> Study:
    """Clips and second moments."""
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
        arms=(
            mars_adamw(usual, lr),
            *(mars_adamw(label, lr, options=o) for label, o in options.items()),
        ),
        comparisons=tuple(within(label, usual, by) for label in options),
    )


def batch(
    name: str,
    base: Base,
    lr: float,
    what: str,
    small: Changes,
    large: Changes,
    names: tuple[str, str],
    by: float,
) -> Study:
    """A small and a large batch, of which ``names`` tell the tokens."""
    arms = []
    for tokens, changes in zip(names, (small, large), strict=True):
        # Eight times the batch, √8 times the rate: where the ladder begins, no more.
        first = lr * (1 if changes is small else 2)
        arms.append(Arm(label=f"AdamW, {tokens}", optimizer="adamw", lr=first, changes=changes))
        arms.append(mars_adamw(f"MARS-AdamW, {tokens}", first, changes))
    few, many = names
    return Study(
        name=name,
        question=f"{what}, batches of {few} and {many} tokens: is MARS a large-batch method?",
        prediction=f"MARS-AdamW gains {by:g} more over AdamW with the large batch.",
        base=base,
        arms=tuple(arms),
        comparisons=(
            lower(f"MARS-AdamW, {few}", f"AdamW, {few}"),
            lower(f"MARS-AdamW, {many}", f"AdamW, {many}"),
            Comparison(
                arm=f"MARS-AdamW, {many}",
                baseline=f"AdamW, {many}",
                claim=Claim(kind="lower", by=by),
                than=(f"MARS-AdamW, {few}", f"AdamW, {few}"),
            ),
        ),
    )


def search(
    name: str, base: Base, lr: float, theirs: Arm, matrix: Arm, what: str, *more: Arm
) -> Study:
    """Which setting of the family beats the best baseline of either kind?

    The matrix types leave the token table, half of a small model, to AdamW as Muon does; MARS-AdamW
    gains where AdamW trains. So let both gain.
    """
    adamw, raw = "AdamW", {"second_moment": "raw"}
    arms = (
        Arm(label=adamw, optimizer="adamw", lr=lr),
        theirs,
        matrix,
        varied(matrix, "tables by MARS-AdamW", options=_tables(0.025)),
        varied(matrix, "tables by MARS-AdamW, γ = 0.1", options=_tables(0.1)),
        varied(matrix, "γ = 0", gamma=0.0),
        varied(matrix, "γ = 0.1", gamma=0.1),
        mars_adamw("MARS-AdamW", lr),
        mars_adamw("MARS-AdamW, γ = 0.1", lr, gamma=0.1),
        mars_adamw("MARS-AdamW, γ = 0.1, exact", lr, gamma=0.1, exact=True),
        mars_adamw("MARS-AdamW, raw second moment", lr, options=raw),
        mars_adamw("MARS-AdamW, raw second moment, γ = 0.1", lr, gamma=0.1, options=raw),
        mars_adamw("MARS-AdamW (.95, .99), γ = 0.1", lr, gamma=0.1, betas=PUBLISHED),
        *more,
    )
    return Study(
        name=name,
        question=f"{what}: which setting of the family is worth a switch?",
        prediction=f"MARS-AdamW ends 0.03 below AdamW at its betas. {matrix.label} equals Muon "
        "whatever γ is; with its tables trained by MARS-AdamW it ends 0.01 below Muon.",
        base=base,
        arms=arms,
        comparisons=(
            *(lower(a.label, adamw, 0.03) for a in arms if a.optimizer == "mars-adamw"),
            *(lower(a.label, theirs.label, 0.01) for a in arms if a.optimizer == matrix.optimizer),
        ),
    )


def scale(name: str, base: Base, lr: float, original: float, what: str, by: float) -> Study:
    """What is between the matrix types: the scale, other rates beside it, or the correction?

    Moonlight's scale gives a hidden step an RMS of lr/5, torch's default of lr/√cols or less. Both
    leave AdamW half of lr for tables and vectors: beside the same hidden step the latter's move
    faster, at these widths two to five times.
    """
    theirs = muon(lr)
    mars_m = Arm(label="MARS-M", optimizer="mars-m", lr=lr)
    shampoo = Arm(label="MARS-Shampoo", optimizer="mars-shampoo", lr=original)
    muon_faster, mars_m_faster = (
        varied(arm, "lr_1d = 2 lr", lr=1.0, lr_1d=2.0) for arm in (theirs, mars_m)
    )
    original_faster = muon_original(original, lr_1d=1.0)
    shampoo_faster = varied(shampoo, "lr_1d = lr", lr=1.0, lr_1d=1.0)
    # MARS-AdamW trains tables at lr, and with γ = 0 it is AdamW: vectors keep their half of lr.
    tables = varied(shampoo, "tables at lr", options=_tables(0.0))
    corrected = varied(shampoo, "tables by MARS-AdamW", options=_tables(0.025))
    return Study(
        name=name,
        question=f"{what}: is it the scale, the rate of tables or the correction that makes "
        "MARS-Shampoo, MARS-M and Muon differ?",
        prediction="The rate of tables: faster ones lower the loss of Muon and MARS-M to that of "
        "torch's default scale. The correction adds nothing to a matrix type, and lowers "
        "the loss where it trains the tables: below a Muon whose tables have their best rate.",
        base=base,
        arms=(
            theirs,
            muon_faster,
            muon_original(original),
            original_faster,
            mars_m,
            mars_m_faster,
            shampoo,
            shampoo_faster,
            tables,
            corrected,
        ),
        comparisons=(
            lower(muon_faster.label, theirs.label),
            within(muon_faster.label, ORIGINAL, by),
            within(mars_m.label, theirs.label, by),
            within(mars_m_faster.label, muon_faster.label, by),
            within(shampoo.label, ORIGINAL, by),
            within(original_faster.label, ORIGINAL, by),
            within(shampoo_faster.label, shampoo.label, by),
            lower(tables.label, shampoo.label),
            lower(corrected.label, tables.label),
            lower(corrected.label, muon_faster.label, 0.01),
            lower(corrected.label, ORIGINAL, 0.01),
        ),
    )


def momentum(
    name: str, base: Base, what: str, prediction: str, lion: float, by: float,
    lengths: tuple[tuple[str, float, Changes], ...] = (("", 2e-3, {}),),
) -> Study:  # fmt: skip
    """Is a gain of the correction that of a smaller β₁, which weighs the last gradient more, too?

    Without the clip MARS-Lion *is* Lion with other betas (docs/math.md, fact 1). ``lengths``: a
    suffix of labels, the first rate and what the arms change.
    """
    arms: list[Arm] = []
    claims: list[Comparison] = []
    for suffix, lr, changes in lengths:
        adamw = Arm(label=f"AdamW{suffix}", optimizer="adamw", lr=lr, changes=changes)
        ours = mars_adamw(f"MARS-AdamW{suffix}", lr, changes)
        own = {"optimizer": {"betas": (0.8, 0.95)}}
        low_adamw, low_ours = (
            dataclasses.replace(arm, label=f"{arm.label}, β₁ = 0.8", changes={**changes, **own})
            for arm in (adamw, ours)
        )
        lions = (
            Arm(label=f"Lion{suffix}", optimizer="lion", lr=lion, changes=changes),
            Arm(
                label=f"Lion, betas (.926, .95){suffix}",
                optimizer="lion",
                lr=lion,
                changes={**changes, "optimizer": {"betas": (0.92625, 0.95)}},
            ),
            Arm(label=f"MARS-Lion{suffix}", optimizer="mars-lion", lr=lion, changes=changes),
        )
        theirs, equal, ours_lion = (arm.label for arm in lions)
        arms += [adamw, low_adamw, ours, low_ours, *lions]
        claims += [
            lower(low_adamw.label, adamw.label), lower(ours.label, adamw.label),
            lower(ours.label, low_adamw.label), lower(low_ours.label, low_adamw.label),
            lower(equal, theirs), within(ours_lion, equal, by),
        ]  # fmt: skip
    return Study(
        name=name,
        question=f"{what}: is the gain of MARS-AdamW and of MARS-Lion that of other betas?",
        prediction=prediction,
        base=base,
        arms=tuple(arms),
        comparisons=tuple(claims),
    )


def baseline(
    name: str, base: Base, lr: float, matrix: Arm, what: str, prediction: str, *, by: float,
    faster: float, changes: Changes | None = None,
) -> Study:  # fmt: skip
    """Is AdamW held back by a setting of its own? Elsewhere it has one of each, as everybody has.

    ``faster``: times that the rate of tables and norms is the matrices', as it may be beside a
    matrix type. MARS-AdamW without correction and clip is AdamW, with a rate for each of the two.
    """
    shared = changes or {}
    steps = base("adamw").replace(**{p: dict(f) for p, f in shared.items()}).loop.steps
    longest = "warm-up 30 %"  # given to MARS, too: it changes what all are compared by

    def vary(arm: Arm, change: str, warmup: int | None = None, **own: object) -> Arm:
        schedule = {} if warmup is None else {"schedule": {"warmup_steps": warmup}}
        optimizer = {"optimizer": own} if own else {}
        return dataclasses.replace(
            arm, label=f"{arm.label}, {change}", changes={**arm.changes, **schedule, **optimizer}
        )

    adamw = Arm(label="AdamW", optimizer="adamw", lr=lr, changes=shared)
    ours = mars_adamw("MARS-AdamW", lr, shared)
    matrix = dataclasses.replace(matrix, changes=shared)
    plain = {"clip": "None", "second_moment": "raw", "embeddings": "adamw"}
    two_rates = dataclasses.replace(adamw, optimizer="mars-adamw")
    variants = (
        vary(two_rates, f"tables and norms at {faster:g} lr", gamma=0.0, lr=1.0, lr_1d=faster,
             options=plain),
        vary(adamw, "betas (.9, .99)", betas=(0.9, 0.99)),
        vary(adamw, "betas (.95, .95)", betas=(0.95, 0.95)),
        vary(adamw, "warm-up 2 %", warmup=steps // 50),
        vary(adamw, longest, warmup=3 * steps // 10),
        vary(adamw, "decay 0", weight_decay=0.0),
        vary(adamw, "decay 0.5", weight_decay=0.5),
    )  # fmt: skip
    others = [vary(arm, longest, warmup=3 * steps // 10) for arm in (ours, matrix)]
    return Study(
        name=name,
        question=f"{what}: is AdamW held back by its betas, its warm-up, its decay, or one rate "
        "for all tensors?",
        prediction=prediction,
        base=base,
        arms=(adamw, ours, matrix, *variants, *others),
        comparisons=(
            *(lower(variant.label, adamw.label, 0.02) for variant in variants),
            *(lower(matrix.label, arm.label, by) for arm in (adamw, *variants)),
            lower(ours.label, adamw.label),
            *(
                lower(arm.label, f"{adamw.label}, {longest}", least)
                for arm, least in zip(others, (0.0, by), strict=True)
            ),
        ),
    )
