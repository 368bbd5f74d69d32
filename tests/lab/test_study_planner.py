"""The planner of studies, by properties: whatever the losses are, it ends, and in the right way."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_study import result, results_of, simulate, study

from mars.lab.study import Arm, Claim, Comparison
from mars.lab.study.choice import ladders
from mars.lab.study.definition import SPAN
from mars.lab.study.estimates import estimate
from mars.lab.study.judge import judge
from mars.lab.study.packing import Packing
from mars.lab.study.planner import Stage, Wanted, pick, wanted
from mars.lab.study.stretch import packed


def valley(best: dict[str, float], diverges: float = math.inf, noise: float = 0.0):
    """Loss over log(lr): a parabola, infinite from some rate on."""

    def loss(label: str, lr: float, seed: int) -> float:
        if lr >= diverges:
            return math.inf
        shake = noise * math.sin(1e4 * lr + 7 * seed + len(label))
        return 3.0 + 0.1 * math.log2(lr / best[label]) ** 2 + shake

    return loss


rates = st.floats(1e-3, 0.1)  # well within the ladder


@settings(max_examples=60, deadline=None)
@given(rates, rates, st.floats(2e-3, 10.0), st.floats(0, 0.1), st.integers(1, 5))
def test_it_ends_bracketed_and_never_repeats_a_run(
    adamw: float, mars: float, diverges: float, noise: float, slots: int
) -> None:
    of = study()
    loss = valley({"AdamW": adamw, "MARS": mars}, diverges, noise)
    done = simulate(of, loss, slots=slots)
    assert len({want.key for want in done}) == len(done)
    for ladder in ladders(of, results_of(of, done, loss)).values():
        best = ladder.best
        assert best is not None
        assert ladder.bracketed
        assert len(ladder.losses[best]) == 3
        assert math.isfinite(sum(ladder.losses[best].values()))


@settings(max_examples=60, deadline=None)
@given(rates, st.floats(2e-3, 10.0))
def test_without_noise_the_best_rate_is_no_worse_than_any_rung(best: float, dies: float) -> None:
    """And, unless a cliff is next to it, within noise of the best rate there is."""
    of = study()
    loss = valley({"AdamW": best, "MARS": best}, dies)
    found = ladders(of, results_of(of, simulate(of, loss), loss))
    arm = of.arms[0]
    every = {lr: loss("AdamW", lr, 0) for lr in (arm.rate(k) for k in range(-SPAN, SPAN + 1))}
    chosen = found["AdamW"].best
    assert chosen is not None
    assert loss("AdamW", chosen, 0) <= min(every.values())
    if found["AdamW"].sloped:
        assert loss("AdamW", chosen, 0) - 3.0 <= of.noise


def test_a_ladder_ends_where_no_end_is_in_sight() -> None:
    of = study()
    done = simulate(of, lambda label, lr, seed: -math.log(lr))
    assert max(want.lr for want in done) == of.arms[0].rate(SPAN)
    everything_diverges = simulate(of, lambda label, lr, seed: math.inf)
    assert min(want.lr for want in everything_diverges) == of.arms[0].rate(-SPAN)
    assert {want.stage for want in everything_diverges} <= {Stage.FIRST, Stage.LADDER}


@pytest.mark.parametrize("off", [-0.45, -0.3, 0.13, 0.14, 0.2, 0.4, 0.49])
def test_a_best_rate_between_two_rungs_is_bracketed(off: float) -> None:
    """As `--take` brings it from a study whose ladder began at another rate."""
    of = study()
    taken = float(f"{of.arms[0].lr * 2**off:.3g}")
    loss = valley({"AdamW": taken, "MARS": 1e-2})
    results = [result(of, "AdamW", taken, 0, loss("AdamW", taken, 0))]
    while runs := wanted(of, results):
        want = runs[0]
        results.append(result(of, *want.key, loss(*want.key)))
    found = ladders(of, results)["AdamW"]
    assert (found.best, found.bracketed) == (taken, True)
    assert None not in found.beside(taken)


def test_what_is_known_of_nothing_comes_first_then_rates_then_seeds() -> None:
    of = study()
    done = simulate(of, valley({"AdamW": 1e-2, "MARS": 1e-2}))
    assert [want.arm.label for want in done[:2]] == ["AdamW", "MARS"]
    assert [want.stage for want in done] == sorted(want.stage for want in done)
    assert len(done) == 2 * (3 + 2)  # three rates and two more seeds each: nothing is wasted


def test_a_rate_that_diverges_at_a_later_seed_is_given_up() -> None:
    of = study()
    usual = valley({"AdamW": 1e-2, "MARS": 1e-2})

    def loss(label: str, lr: float, seed: int) -> float:
        return math.inf if (lr, seed) == (1e-2, 2) else usual(label, lr, seed)

    found = ladders(of, results_of(of, simulate(of, loss), loss))
    assert found["AdamW"].best in (5e-3, 2e-2)
    assert len(found["AdamW"].losses[found["AdamW"].best]) == 3


def test_neighbours_within_noise_get_their_seeds_and_may_win() -> None:
    of = study(noise=0.01)

    def loss(label: str, lr: float, seed: int) -> float:
        lucky = -0.004 if (lr, seed) == (1e-2, 0) else 0.002 * (seed - 1)
        return 3.0 + {1e-2: 0.002, 2e-2: 0.0}.get(lr, 1.0) + lucky

    done = simulate(of, loss)
    assert Stage.NEIGHBOURS in {want.stage for want in done}
    assert ladders(of, results_of(of, done, loss))["AdamW"].best == 2e-2


def test_a_bump_within_noise_does_not_hide_the_valley() -> None:
    """As seen of MARS-AdamW in tiny-optimizers: 0.02 is lower than its neighbours, by luck."""
    seen = {0.04: 3.1276, 0.02: 2.8910, 0.01: 2.8953, 0.005: 2.80, 0.0025: 2.52, 0.00125: 2.57,
            0.000625: 2.9}  # fmt: skip
    of = study(noise=0.03)

    def loss(label: str, lr: float, seed: int) -> float:
        return seen.get(lr, 2.6) + 0.001 * seed  # between two rungs nothing is gained

    done = simulate(of, loss)
    assert 0.00177 in {want.lr for want in done}
    assert ladders(of, results_of(of, done, loss))["AdamW"].best == 0.0025


def test_a_better_rate_between_two_rungs_is_tried_and_gets_the_seeds() -> None:
    of = study()
    done = simulate(of, lambda label, lr, seed: 2.0 + math.log2(lr / 1.3e-2) ** 2)
    assert {want.lr for want in done} == {5e-3, 1e-2, 1.41e-2, 2e-2}
    for arm in of.arms:
        assert [want.lr for want in done if want.arm == arm].count(1.41e-2) == of.seeds


def test_a_parabola_promises_nothing_beyond_the_rates_it_goes_through() -> None:
    """At seed 0 the next rate below is lower, within noise: its bottom would be 2.5 rungs away."""
    of = study(noise=0.02)
    losses = {(2.5e-3, 0): 3.2, (5e-3, 0): 2.98, (1e-2, 0): 3.0, (1e-2, 1): 2.9, (2e-2, 0): 3.03,
              (4e-2, 0): 3.2}  # fmt: skip
    found = ladders(of, [result(of, "AdamW", *key, loss) for key, loss in losses.items()])["AdamW"]
    found = replace(found, noise=0.02)
    assert (found.best, found.bracketed) == (1e-2, True)
    assert found.between(0.0) is None


@pytest.mark.parametrize("turned", [False, True])
def test_beside_a_cliff_a_parabola_promises_no_more_than_the_rates_beyond_allow(turned) -> None:
    """As seen on GPT-2 small: Muon gains a little a rung, until a rate at which it learns nothing.
    A parabola through the last three would be 0.23 lower half a rung before the best.
    """
    of = study()
    rates = [2e-2, 1e-2, 5e-3, 2.5e-3] if turned else [1.25e-3, 2.5e-3, 5e-3, 1e-2]
    losses = dict(zip(rates, [3.615, 3.6, 3.587, 5.497], strict=True))
    runs = [result(of, "AdamW", lr, 0, loss) for lr, loss in losses.items()]
    found = replace(ladders(of, runs)["AdamW"], noise=0.005)
    assert (found.best, found.bracketed) == (5e-3, True)
    assert found.between(0.0) is None
    unknown = replace(found, losses={lr: found.losses[lr] for lr in rates[1:]})
    assert unknown.between(0.0) == (7.07e-3 if turned else 3.54e-3, pytest.approx(0.233, rel=0.01))
    steep = replace(found, losses=found.losses | {rates[0]: {0: 3.72}})  # 0.12 a rung, so 0.06
    assert steep.between(0.0) == (unknown.between(0.0)[0], pytest.approx(0.06 - 0.013, rel=0.01))


def test_a_rate_between_two_rungs_is_not_tried_for_less_than_noise() -> None:
    of = study(noise=0.1)
    flat = valley({"AdamW": 1.3e-2, "MARS": 1.3e-2})  # 0.014 between 0.01 and 0.013
    assert all(math.log2(want.lr / 1e-2).is_integer() for want in simulate(of, flat))


def test_a_rate_that_is_far_lower_leads_before_it_has_all_seeds() -> None:
    of = study()
    known = [result(of, "AdamW", 1e-2, seed, 3.0 + 0.01 * seed) for seed in range(3)]
    assert ladders(of, [*known, result(of, "AdamW", 5e-3, 0, 2.99)])["AdamW"].best == 1e-2
    assert ladders(of, [*known, result(of, "AdamW", 5e-3, 0, 2.9)])["AdamW"].best == 5e-3


def test_runs_of_another_size_are_no_measure_of_noise() -> None:
    """As seen in batch-50m: few large steps scatter five times as much as many small ones."""
    large = {"loop": {"batch_size": 64, "micro_batch_size": None}}
    arms = (
        Arm(label="small", optimizer="adamw", lr=1e-2),
        Arm(label="large", optimizer="adamw", lr=1e-2, changes=large),
    )
    of = study(arms=arms, comparisons=())
    known = [result(of, "small", 1e-2, seed, 3.0 + 0.01 * seed) for seed in range(3)]
    known += [result(of, "small", lr, 0, 3.1) for lr in (5e-3, 2e-2)]
    known += [result(of, "large", 1e-2, seed, 4.0 + 0.2 * seed) for seed in range(2)]
    found = ladders(of, known)
    assert found["small"].noise == pytest.approx(0.01)
    assert found["large"].noise == pytest.approx(0.1414, rel=1e-3)
    assert found["small"].bracketed


def test_settled_comparisons_wait_for_open_ones() -> None:
    arms = tuple(Arm(label=n, optimizer="adamw", lr=1e-2) for n in ("A", "B", "C", "D"))
    lower = Claim(kind="lower")
    of = study(
        arms=arms,
        comparisons=(
            Comparison(arm="B", baseline="A", claim=lower),
            Comparison(arm="D", baseline="C", claim=lower),
        ),
    )
    worse = {5e-3: 1.0, 1e-2: 0.0, 2e-2: 0.0015, 4e-2: 1.0}  # 0.02 may be as good
    known = [
        result(of, label, lr, seed, loss + 0.001 * seed + worse[lr])
        for label, loss in (("A", 3.0), ("B", 2.0))
        for lr in worse
        for seed in (range(3) if lr == 1e-2 else [0])
    ]
    assert judge(of, known)[0].state == "holds"
    order = wanted(of, known)
    first_settled = next(i for i, want in enumerate(order) if want.arm.label in "AB")
    assert all(want.arm.label in "AB" for want in order[first_settled:])


def test_more_seeds_are_run_only_where_they_can_decide() -> None:
    of = study()

    def far(label: str, lr: float, seed: int) -> float:
        return valley({"AdamW": 1e-2, "MARS": 1e-2})(label, lr, seed) - (label == "MARS")

    assert len(simulate(of, far, seeds=6)) == len(simulate(of, far))

    def near(label: str, lr: float, seed: int) -> float:
        own = 0.01 * math.sin(5 * seed) if label == "MARS" else 0.0
        return valley({"AdamW": 1e-2, "MARS": 1e-2})(label, lr, seed) + own

    assert max(want.seed for want in simulate(of, near, seeds=6)) == 5


def test_a_claim_about_rates_has_three_rates_at_every_seed() -> None:
    of = study(comparisons=(Comparison(arm="MARS", baseline="AdamW",
                                       claim=Claim(kind="rate", by=1.5)),))  # fmt: skip
    loss = valley({"AdamW": 1e-2, "MARS": 1.5e-2})
    results = results_of(of, simulate(of, loss), loss)
    (judged,) = judge(of, results)
    assert judged.state == "holds"
    assert judged.difference is not None
    assert math.exp(judged.difference.mean) == pytest.approx(1.5, rel=1e-2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1, 500), min_size=1, max_size=6), st.floats(0, 600))
def test_what_is_begun_can_be_finished(took: list[float], left: float) -> None:
    arm = study().arms[0]
    runs = [Wanted(arm, 1e-2, seed, Stage.SEEDS) for seed in range(len(took))]
    got = pick(runs, left, lambda want: (took[want.seed], True), whole=600.0)
    fitting = [want for want in runs if took[want.seed] <= left]
    assert got == (fitting[0] if fitting else None)


def test_a_guess_and_a_run_longer_than_a_stretch_are_begun_if_there_is_time() -> None:
    (run,) = [Wanted(study().arms[0], 1e-2, 0, Stage.FIRST)]
    assert pick([run], 100.0, lambda want: (900.0, False), 540.0, least=90) is run
    assert pick([run], 100.0, lambda want: (900.0, True), 540.0, least=90) is run
    assert pick([run], 80.0, lambda want: (900.0, True), 540.0, least=90) is None
    assert pick([run], 100.0, lambda want: (500.0, True), 540.0, least=90) is None
    assert pick([run], None, lambda want: (1e9, True), None) is run


def test_estimates_come_from_the_same_arm_then_from_others_by_work() -> None:
    of = study(arms=(
        Arm(label="AdamW", optimizer="adamw", lr=1e-2),
        Arm(label="MARS", optimizer="mars-adamw", lr=1e-2),
        Arm(label="exact", optimizer="mars-adamw", lr=1e-2,
            changes={"optimizer": {"exact": True}}),
    ))  # fmt: skip
    cpu = torch.device("cpu")
    assert not estimate(of, [], of.arms[0], 1, cpu)[1]
    known = [result(of, "AdamW", 1e-2, 0, 3.0, wall=20.0)]
    assert estimate(of, known, of.arms[0], 1, cpu) == (pytest.approx(22.0), True)
    assert estimate(of, known, of.arm("exact"), 1, cpu) == (pytest.approx(44.0), True)
    assert estimate(of, known, of.arms[0], 2, cpu) == (pytest.approx(44.0), True)
    both = [replace(known[0], at_once=2)]
    assert estimate(of, both, of.arms[0], 2, cpu) == (pytest.approx(22.0), True)
    assert estimate(of, both, of.arms[0], 1, cpu) == (pytest.approx(16.5), True)
    dead = [result(of, "AdamW", 1e-2, 0, math.inf, wall=1.0)]
    assert not estimate(of, dead, of.arms[0], 1, cpu)[1]


@given(st.lists(st.floats(0.1, 2.0), min_size=3, max_size=3))
def test_packing_keeps_the_number_that_gets_most_done(total: list[float]) -> None:
    packing = Packing()
    for _ in range(4):
        n = packing.slots
        packing.observe([total[n - 1] / n] * n)
    assert packing.settled
    best = packing.slots
    assert all(total[i] >= 1.08 * total[i - 1] for i in range(1, best))
    assert best == 3 or total[best] < 1.08 * total[best - 1]


def test_packing_waits_for_all_readings_and_obeys() -> None:
    packing = Packing()
    assert packing.observe([None]) == 1
    assert packing.observe([1.0]) == 2
    assert packing.observe([1.0]) == 2  # the second has not begun
    assert packing.observe([1.0, None]) == 2
    assert Packing(5).observe([1.0]) == 5


@pytest.mark.parametrize(
    ("at_once", "number"),
    [
        ([], None),
        ([1, 1], None),  # a CPU's, or nothing was tried yet
        ([1, 2, 3, 2, 2, 2], 2),
        ([2, 2, 2, 1], 2),  # the last of a stretch, for which there was time alone only
        ([1, 2, 1, 1], 1),  # two were not worth it
        ([1, 2, 3, 1], None),
    ],
)
def test_the_next_stretch_begins_with_as_many_runs_as_usual(
    at_once: list[int], number: int | None
) -> None:
    of = study()
    runs = [result(of, "AdamW", 1e-2, i, 3.0, at_once=n) for i, n in enumerate(at_once)]
    assert packed(runs) == number


def test_simulated_studies_end_and_are_counted(tmp_path: Path, capsys) -> None:
    """bench/simulate_verdicts.py, whose figures are in docs/studies.md."""
    import simulate_verdicts

    assert simulate_verdicts.main(["--studies", "2", "--out", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [case.text for case in simulate_verdicts.CASES]
    assert all(0 <= row["holds"] + row["does not hold"] <= 1 for row in rows)
    assert capsys.readouterr().out.count("\n") == 1 + len(rows)
    apart = simulate_verdicts.Case("far", Claim(kind="lower"), truth=-1.0)
    assert simulate_verdicts.measure(apart, 3)["holds"] == 1
    assert simulate_verdicts.measure(replace(apart, truth=1.0), 3)["does not hold"] == 1


def test_nothing_is_promised_behind_a_rate_that_diverged() -> None:
    """The loss has not fallen from there: a verdict said that an arm may end inf lower."""
    of = study()
    runs = [result(of, "AdamW", lr, 0, x) for lr, x in ((5e-3, 2.5), (1e-2, 2.4), (2e-2, math.inf))]
    found = ladders(of, runs)["AdamW"]
    assert (found.best, found.bracketed) == (1e-2, True)
    assert found.possible() == (1.41e-2, pytest.approx(0.1 / 8, rel=0.02))
