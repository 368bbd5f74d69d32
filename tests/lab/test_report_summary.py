"""The summary's numbers, worked out by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import synthetic_logs as logs

from mars.lab.errors import LabError
from mars.lab.report import headline, load, read_rates, summarise, table
from mars.lab.report.markup import escape
from mars.lab.report.page import render
from mars.lab.report.statistics import t_quantile
from mars.lab.report.summary import Entry, Summary


def run(
    folder: Path, optimizer: str, seed: int, curve: dict[int, float], lr: float = 1e-3, **head: Any
) -> None:
    """A finished run with exactly this validation curve (loss by step)."""
    header = logs.header(optimizer, lr, seed, **head)
    body: list[dict] = [
        {"kind": "valid", **logs.at(step, second=head.pop("second", 0.1)), "loss": loss}
        for step, loss in curve.items()
    ]
    logs.write(folder / f"{optimizer}-{lr:g}-{seed}", [header, *body, logs.end(body)])


@pytest.fixture
def three_seeds(tmp_path: Path) -> Path:
    """AdamW ends at 3.0, 3.2, 3.1; MARS-M at 2.9, 3.0, 2.95, faster."""
    for seed, end in enumerate((3.0, 3.2, 3.1)):
        run(tmp_path, "adamw", seed, {0: 5.0, 200: 4.0, 400: end})
    for seed, end in enumerate((2.9, 3.0, 2.95)):
        run(tmp_path, "mars-m", seed, {0: 5.0, 200: 3.3, 400: end})
    return tmp_path


def by_label(summary: Summary, label: str) -> Entry:
    (found,) = [entry for entry in summary.entries if entry.label == label]
    return found


def test_means_spread_and_interval_by_hand(three_seeds: Path) -> None:
    summary = summarise(load([three_seeds]))
    base, ours = by_label(summary, "AdamW"), by_label(summary, "MARS-M")
    assert summary.entries == (ours, base)
    assert summary.baseline is base
    assert base.loss is not None
    assert base.loss.mean == pytest.approx(3.1)
    assert base.loss.sd == pytest.approx(0.1)
    assert (base.loss.n, base.loss.low, base.loss.high) == (3, 3.0, 3.2)
    # Differences −0.1, −0.2, −0.15: mean −0.15, sd 0.05; t(2) = 4.3027, so ± 4.3027·0.05/√3.
    d = ours.difference
    assert d is not None
    assert (d.n, d.resolved) == (3, True)
    assert d.mean == pytest.approx(-0.15)
    assert d.low == pytest.approx(-0.15 - 4.302653 * 0.05 / math.sqrt(3), abs=1e-6)
    assert d.high == pytest.approx(-0.15 + 4.302653 * 0.05 / math.sqrt(3), abs=1e-6)
    assert base.difference is None


def test_tokens_to_the_baselines_loss_by_hand(three_seeds: Path) -> None:
    ours = by_label(summarise(load([three_seeds])), "MARS-M")
    # The mean curve falls from 3.3 at step 200 to 2.95 at 400 and meets 3.1 after 4/7 of that.
    steps = 200 + 200 * (3.3 - 3.1) / (3.3 - 2.95)
    assert ours.progress_to_baseline == pytest.approx(steps * logs.PER_STEP)
    assert ours.progress_ratio == pytest.approx(steps / 400)
    assert ours.seconds_to_baseline == pytest.approx(steps * 0.1)


def test_an_optimizer_that_never_gets_there_says_so(tmp_path: Path) -> None:
    run(tmp_path, "adamw", 0, {0: 5.0, 400: 3.0})
    run(tmp_path, "lion", 0, {0: 5.0, 400: 3.2})
    summary = summarise(load([tmp_path]))
    lion = by_label(summary, "Lion")
    assert (lion.progress_to_baseline, lion.progress_ratio) == (None, None)
    assert by_label(summary, "AdamW").progress_ratio == 1


def test_the_same_curve_needs_the_same_tokens_even_if_it_rises_again(tmp_path: Path) -> None:
    for name in ("adamw", "muon"):
        run(tmp_path, name, 0, {0: 5.0, 200: 2.8, 400: 3.0})
    muon = by_label(summarise(load([tmp_path])), "Muon")
    assert muon.progress_ratio == 1
    assert muon.progress_to_baseline is not None
    assert muon.progress_to_baseline < 200 * logs.PER_STEP


def test_seeds_are_paired_not_just_averaged(tmp_path: Path) -> None:
    """Only seeds that both have count: here seed 1, where the other is worse."""
    run(tmp_path, "adamw", 0, {0: 5.0, 400: 9.0})
    run(tmp_path, "adamw", 1, {0: 5.0, 400: 3.0})
    run(tmp_path, "muon", 1, {0: 5.0, 400: 3.1})
    d = by_label(summarise(load([tmp_path])), "Muon").difference
    assert d is not None
    assert (d.n, d.low, d.resolved) == (1, None, None)
    assert d.mean == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("df", "t"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (7, 2.36462),
                  (10, 2.22814), (29, 2.04523), (30, 2.04227), (120, 1.97993)],
)  # fmt: skip
def test_t_agrees_with_printed_tables(df: int, t: float) -> None:
    assert t_quantile(df) == pytest.approx(t, abs=6e-6 * t)


def test_the_best_rate_stands_in_the_table_and_is_bracketed(tmp_path: Path) -> None:
    for lr, loss in ((1e-3, 3.3), (2e-3, 3.0), (4e-3, 3.2)):
        for seed in (0, 1):
            run(tmp_path, "adamw", seed, {0: 5.0, 400: loss + 0.01 * seed}, lr=lr)
    summary = summarise(load([tmp_path]))
    (entry,) = summary.entries
    assert (entry.lr, entry.sensitivity.bracketed, len(entry.runs), len(entry.others)) == (
        2e-3, True, 2, 4,
    )  # fmt: skip
    assert [point.losses for point in entry.sensitivity.points][1] == {0: 3.0, 1: 3.01}
    assert summary.sensitivity == (entry.sensitivity,)
    assert not summary.warnings


def test_rates_tried_once_do_not_decide_between_those_tried_often(tmp_path: Path) -> None:
    # As a study leaves them: ladders at seed 0, further seeds of the rates that are close.
    for lr, losses in ((1e-3, [3.2]), (2e-3, [3.1, 3.0, 3.0]), (4e-3, [3.0, 3.4, 3.3]),
                       (8e-3, [3.3])):  # fmt: skip
        for seed, loss in enumerate(losses):
            run(tmp_path, "adamw", seed, {0: 5.0, 400: loss}, lr=lr)
    assert [entry.lr for entry in summarise(load([tmp_path])).entries] == [2e-3]
    run(tmp_path, "adamw", 0, {0: 5.0, 400: 2.5}, lr=3e-3)  # one seed may be all that the best has
    assert [entry.lr for entry in summarise(load([tmp_path])).entries] == [3e-3]


def test_a_best_rate_at_the_edge_is_warned_of(tmp_path: Path) -> None:
    for lr, loss in ((1e-3, 3.3), (2e-3, 3.0)):
        run(tmp_path, "adamw", 0, {0: 5.0, 400: loss}, lr=lr)
    summary = summarise(load([tmp_path]))
    assert summary.entries[0].sensitivity.bracketed is False
    assert any("a better one may lie beyond" in warning for warning in summary.warnings)
    assert "!0.002" in table(summary)


def test_a_rate_that_has_not_ended_is_no_edge(tmp_path: Path) -> None:
    logs.run(tmp_path / "under-way", "adamw", 1e-3, status=None)
    for lr, loss in ((2e-3, 3.0), (4e-3, 3.3)):
        run(tmp_path, "adamw", 0, {0: 5.0, 400: loss}, lr=lr)
    said = summarise(load([tmp_path])).warnings
    assert any("the best rate, 0.002, is the lowest that ended" in warning for warning in said)


def test_a_rate_that_diverges_brackets_and_never_wins(tmp_path: Path) -> None:
    for lr, loss in ((1e-3, 3.3), (2e-3, 3.0)):
        for seed in (0, 1):
            run(tmp_path, "adamw", seed, {0: 5.0, 400: loss}, lr=lr)
    run(tmp_path, "adamw", 0, {0: 5.0, 400: 2.0}, lr=4e-3)  # lucky
    dead = {"diverge": 50, "status": "failed", "text": "the loss is not finite"}
    logs.run(tmp_path / "dead", "adamw", 4e-3, seed=1, **dead)
    summary = summarise(load([tmp_path]))
    (entry,) = summary.entries
    assert (entry.lr, entry.sensitivity.bracketed) == (2e-3, True)
    assert [(p.dead, len(p.losses)) for p in entry.sensitivity.points] == [(0, 2), (0, 2), (1, 1)]
    assert any("diverged at step 50" in warning for warning in summary.warnings)


def test_rates_are_compared_on_the_seeds_they_share(tmp_path: Path) -> None:
    """A rate with an extra, bad seed must not lose because of it."""
    for seed, loss in enumerate((3.0, 3.0, 4.0)):
        run(tmp_path, "adamw", seed, {0: 5.0, 400: loss}, lr=1e-3)
    run(tmp_path, "adamw", 0, {0: 5.0, 400: 3.1}, lr=2e-3)
    assert summarise(load([tmp_path])).entries[0].lr == 1e-3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 800}, "steps 800 (not 400)"),
        ({"tokens_per_step": 4096}, "tokens per step 4096 (not 8192)"),
        ({"data": {"train": {"sha256": "ff" * 32}, "valid": {"sha256": "b2" * 32}}},
         "training data ffffffffffff (not a1a1a1a1a1a1)"),
        ({"config": {"model": {"n_layer": 7}}}, "model.n_layer 7 (not 6)"),
    ],
)  # fmt: skip
def test_runs_that_are_not_comparable_are_never_mixed(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    run(tmp_path, "adamw", 0, {0: 5.0, 400: 3.0})
    run(tmp_path, "adamw", 1, {0: 5.0, 400: 3.0})
    run(tmp_path, "muon", 0, {0: 5.0, 400: 1.0}, **change)
    run(tmp_path / "more", "adamw", 0, {0: 5.0, 400: 1.0}, **change)
    summary = summarise(load([tmp_path]))
    (warning, _) = [w for w in summary.warnings if w.startswith("not comparable: ")]
    assert said in warning
    assert len(summary.ranked) == 1
    assert summary.baseline is summary.entries[0]
    assert summary.entries[0].loss is not None
    assert summary.entries[0].loss.mean == 3.0  # the other AdamW, at 1.0, is a row of its own
    for entry in summary.entries[1:]:
        assert (entry.difference, entry.progress_ratio) == (None, None)
        assert entry.incomparable is not None
    assert "not comparable" in table(summary)
    assert "Muon is lowest" not in headline(summary)


def test_one_label_with_two_configurations_becomes_two(tmp_path: Path) -> None:
    for gamma in (0.025, 0.05):
        config = logs.header("mars-m")["config"]
        config["optimizer"]["gamma"] = gamma
        run(tmp_path / str(gamma), "mars-m", 0, {0: 5.0, 400: 3 + gamma}, config=config)
    labels = [entry.label for entry in summarise(load([tmp_path])).entries]
    assert labels == ["MARS-M gamma=0.025", "MARS-M gamma=0.05"]


@pytest.mark.parametrize(("name", "value"), [("fp8_head", True), ("precision", "fp32")])
@pytest.mark.parametrize("by", ["lr", "seed"])
def test_runs_that_are_rounded_otherwise_are_no_grid(
    name: str, value: object, by: str, tmp_path: Path
) -> None:
    for i in range(2):
        config = logs.header("adamw")["config"]
        if i:
            config["loop"][name] = value
            config["optimizer"]["lr"] *= 2 if by == "lr" else 1
        run(
            tmp_path / str(i),
            "adamw",
            i if by == "seed" else 0,
            {0: 5.0, 400: 3 + i},
            config=config,
        )
    first, second = (entry.label for entry in summarise(load([tmp_path])).entries)
    assert first != second
    assert second == f"AdamW {name}={value}"


def test_an_option_that_is_none_is_not_one_that_is_not_given(tmp_path: Path) -> None:
    given = ({}, {"second_moment": "raw"}, {"second_moment": "raw", "clip": None})
    for i, options in enumerate(given):
        config = logs.header("mars-adamw")["config"]
        config["optimizer"]["options"] = options
        run(tmp_path / str(i), "mars-adamw", 0, {0: 5.0, 400: 3 + i}, config=config)
    summary = summarise(load([tmp_path]))
    both = "MARS-AdamW second_moment=raw"
    assert [e.label for e in summary.entries] == ["MARS-AdamW", both, f"{both}, clip=None"]


def test_labels_are_cut_only_where_they_can_still_be_told_apart(tmp_path: Path) -> None:
    for i in range(3):
        config = logs.header("mars-adamw")["config"]
        config["optimizer"]["options"] = {"clip": None, "second_moment": "raw", f"o{i}": "w" * 30}
        run(tmp_path / str(i), "mars-adamw", 0, {0: 5.0, 400: 3 + i}, config=config)
    summary = summarise(load([tmp_path]))
    for room in (None, 80):
        shown = table(summary, room)
        assert all(entry.label in shown for entry in summary.entries), room
        assert (shown.count("\noptimizer") == 1) == (
            room is None
        )  # in a pipe the table stays whole


def test_rates_make_a_grid_only_where_all_else_is_equal(tmp_path: Path) -> None:
    for lr, decay, rate_1d in ((1e-3, 0.1, 1e-3), (2e-3, 0.1, 2e-3), (4e-3, 0.3, 4e-3)):
        config = logs.header("adamw")["config"]
        config["optimizer"] |= {"weight_decay": decay, "lr_1d": rate_1d}
        config["loop"]["threads"] = 1 if lr > 1e-3 else 2  # changes nothing
        run(tmp_path / str(lr), "adamw", 0, {0: 5.0, 400: 3 - lr}, lr=lr, config=config)
    summary = summarise(load([tmp_path]))
    rates = {e.label: [p.lr for p in e.sensitivity.points] for e in summary.entries}
    assert rates == {"AdamW weight_decay=0.1": [1e-3, 2e-3], "AdamW weight_decay=0.3": [4e-3]}


def test_what_changes_no_loss_makes_no_other_optimizer(tmp_path: Path) -> None:
    for threads in (1, 2):
        config = logs.header("adamw")["config"]
        config["loop"]["threads"] = threads
        machine = {"device": "cpu", "name": "a", "threads": threads}
        run(tmp_path / str(threads), "adamw", threads - 1, {0: 5.0, 400: 3.0}, config=config,
            hardware=machine)  # fmt: skip
        run(tmp_path / f"again {threads}", "adamw", 5, {0: 5.0, 400: 3.0}, config=config,
            hardware=machine, time=f"2026-01-0{threads}")  # fmt: skip
    summary = summarise(load([tmp_path]))
    assert [entry.label for entry in summary.entries] == ["AdamW"]
    assert any("different numbers of threads" in text for text in summary.warnings)
    assert not any("hardware" in text for text in summary.warnings)


def test_what_should_be_equal_and_is_not_is_told(tmp_path: Path) -> None:
    for name, shape, clip in (("adamw", "cosine", 1.0), ("muon", "constant", None)):
        config = logs.header(name)["config"]
        config["schedule"]["shape"] = shape
        config["optimizer"]["max_grad_norm"] = clip
        precision = "float32" if clip else "bfloat16"
        run(tmp_path / name, name, 0, {0: 5.0, 400: 3.0}, config=config, precision=precision)
    told = " | ".join(summarise(load([tmp_path])).warnings)
    for text in (
        "precision (bfloat16; float32)",
        "schedule (",
        "clip of the gradients (1.0; None)",
    ):
        assert f"the runs differ in {text}" in told


def test_of_equal_runs_the_newest_counts(tmp_path: Path) -> None:
    run(tmp_path / "a", "adamw", 0, {0: 5.0, 400: 3.0}, time="2026-01-02")
    run(tmp_path / "b", "adamw", 0, {0: 5.0, 400: 2.0}, time="2026-01-01")
    summary = summarise(load([tmp_path]))
    assert summary.entries[0].scores == {0: 3.0}
    assert any("the newest that ended counts" in warning for warning in summary.warnings)


def test_a_difference_over_some_of_the_seeds_is_told(tmp_path: Path) -> None:
    run(tmp_path / "a", "adamw", 1, {0: 5.0, 400: 3.0})
    for seed, loss in ((0, 2.0), (1, 3.1)):
        run(tmp_path / f"m{seed}", "muon", seed, {0: 5.0, 400: loss})
    found = summarise(load([tmp_path]))
    assert "Muon: its difference to AdamW is over 1 of 2 seeds, which both have" in found.warnings


def test_a_run_that_was_stopped_does_not_replace_one_that_ended(tmp_path: Path) -> None:
    run(tmp_path / "a", "adamw", 0, {0: 5.0, 400: 3.0}, time="2026-01-01")
    logs.run(tmp_path / "b", "adamw", upto=200, status="stopped")
    (entry,) = summarise(load([tmp_path])).entries
    assert entry.scores == {0: 3.0}


def test_runs_under_way_are_shown_but_not_ranked(tmp_path: Path) -> None:
    logs.run(tmp_path / "a", "adamw")
    logs.run(tmp_path / "b", "muon", upto=200, status=None)
    summary = summarise(load([tmp_path]))
    assert [entry.label for entry in summary.ranked] == ["AdamW"]
    assert any("unfinished at step 200 of 400" in w for w in summary.warnings)
    assert headline(summary).endswith("Not ranked: Muon (unfinished).")
    alone = summarise(load([tmp_path / "b"]))
    assert headline(alone) == "No comparable run has finished yet (1 unfinished)."
    assert "0/1" in table(alone)


def test_a_run_that_failed_is_called_so_with_its_error(tmp_path: Path) -> None:
    path = logs.run(tmp_path / "b", "muon", upto=200, status=None)
    (path / "error.txt").write_text("Traceback (most recent call last):\n  …\nValueError: boom\n")
    runs = load([path])
    summary = summarise(runs)
    assert headline(summary) == "No comparable run has finished yet (1 failed)."
    text = "Muon, lr 0.02, seed 0: failed at step 200 of 400: ValueError: boom"
    assert f"! {text}" in table(summary)
    page = render(runs, summary)
    assert '<span class="status failed">failed</span>' in page
    assert page.count("ValueError: boom") == 2  # a warning, and in the table of runs


def test_a_baseline_that_was_not_run_is_called_by_its_usual_name(tmp_path: Path) -> None:
    logs.run(tmp_path / "m", "muon")
    logs.run(tmp_path / "l", "lion")
    summary = summarise(load([tmp_path]))
    assert "  to AdamW  " in table(summary)
    assert "no run of the baseline, AdamW: differences are not shown" in summary.warnings


def test_no_validation_records_is_no_crash(tmp_path: Path) -> None:
    logs.run(tmp_path / "a", "adamw", valid=False)
    summary = summarise(load([tmp_path]))
    assert summary.entries[0].loss is None
    assert headline(summary).startswith("The runs finished without a validation loss")


def test_cost_of_a_step(tmp_path: Path) -> None:
    logs.run(tmp_path / "a", "muon")
    (entry,) = summarise(load([tmp_path])).entries
    assert entry.step_seconds == pytest.approx(0.121)
    assert entry.optimizer_share == pytest.approx(0.021 / 0.121)
    assert entry.memory == 1.5e9


def test_a_busy_machine_is_noticed(tmp_path: Path) -> None:
    body = [
        {"kind": "train", **logs.at(10 * i), "loss": 3.0, "step_seconds": 0.1 * (1 + i % 2)}
        for i in range(1, 12)
    ]
    logs.write(tmp_path / "a", [logs.header("adamw"), *body, logs.end(body)])
    (warning,) = [w for w in summarise(load([tmp_path])).warnings if "busy" in w]
    assert warning.startswith("the time of a step varies by ")
    logs.run(tmp_path / "b", "adamw")
    assert not [w for w in summarise(load([tmp_path / "b"])).warnings if "busy" in w]


def test_times_that_do_not_compare_are_not_shown_as_if_they_did(tmp_path: Path) -> None:
    for name in ("adamw", "muon"):
        for seed in (0, 1):
            logs.run(tmp_path / f"{name}-{seed}", name, seed=seed)
    runs = load([tmp_path])
    steady = render(runs, summarise(runs)).partition("<script")[0]
    assert "muted" not in steady.partition("</style>")[2]
    runs[0].train["step_seconds"][::2] *= 2
    summary = summarise(runs)
    page = render(runs, summary).partition("<script")[0]
    assert "the machine was busy" in summary.times
    cells = re.findall(r'<td class="number muted" title="([^"]*)">(.*?)</td>', page)
    assert {why for why, _ in cells} == {summary.times}
    assert len(cells) == 2 * 3  # time to the baseline's loss, of a step, tokens in a second
    shown = [text for _, text in cells if text != "100%"]
    assert all(text.startswith("~") for text in shown), shown
    assert page.count('class="cost muted"') == 2
    assert re.search(r"<b>~[\d.]+%</b> · ~[\d.]+ ms of ~[\d.]+ ms", page)


def test_the_table_fits_a_hundred_columns(tmp_path: Path) -> None:
    race = logs.race(tmp_path / "race")
    logs.run(race / "x", "adamw", head={"label": "An optimizer with a very long name " * 3})
    for line in table(summarise(load([race]))).splitlines():
        assert len(line) <= 100, line


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({0: 2.9, 1: 2.91}, "0.1000 below AdamW (95% interval 0.1000 to 0.1000, 2 seeds)."),
        ({0: 2.9, 1: 3.1}, "0.0050 below AdamW, which may be noise (95% interval −1.2"),
        ({0: 2.9}, "0.1000 below AdamW, on one seed, which does not tell it from noise."),
        ({0: 3.1, 1: 3.2}, "no other optimizer beats the baseline"),
        ({7: 2.9}, "no seed in common"),
    ],
)
def test_the_headline_is_honest(tmp_path: Path, ours: dict[int, float], said: str) -> None:
    for seed, loss in ((0, 3.0), (1, 3.01)):
        run(tmp_path, "adamw", seed, {0: 5.0, 400: loss})
    for seed, loss in ours.items():
        run(tmp_path, "muon", seed, {0: 5.0, 400: loss})
    assert said in headline(summarise(load([tmp_path])))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mars race gpt-tiny --seeds 2 --out 'a b'",
         "`mars race 'a b' --seeds 5` goes on with this race."),
        ("mars race runs/a --keep.out=runs/b",
         "`mars race runs/b --seeds 5` goes on with this race."),
        ("mars race --seeds 2 gpt-tiny",
         "`mars race runs/race-gpt-tiny --seeds 5` goes on with this race."),
        ("mars study tiny-optimizers",
         "`mars study tiny-optimizers --seeds 5` goes on with this study."),
        ("mars train gpt-tiny", "run more."),
    ],
)  # fmt: skip
def test_a_lead_by_two_seeds_says_how_to_run_more(tmp_path: Path, command: str, said: str) -> None:
    for seed, loss in ((0, 3.0), (1, 3.01)):
        run(tmp_path, "adamw", seed, {0: 5.0, 400: loss})
        run(tmp_path, "muon", seed, {0: 5.0, 400: loss - 0.2}, command=command)
        run(tmp_path, "mars-m", seed, {0: 5.0, 400: loss - 0.1 + 0.001 * seed})
    (tmp_path / "race.json").write_text(json.dumps({"command": command, "recipe": "gpt-tiny"}))
    runs = load([tmp_path])
    words = headline(summarise(runs))
    lead = "Its lead over MARS-M, 0.1005 (95% interval 0.0941 to 0.1069), rests on 2 seeds only: "
    assert words.endswith(lead + said)
    shown = escape(said).replace("`mars", "<code>mars")
    assert shown.replace("`", "</code>") in render(runs, summarise(runs))


def test_a_committed_grid_fills_in_for_rates_that_were_not_run(tmp_path: Path) -> None:
    race = logs.race(tmp_path / "race", names=("adamw", "muon"))
    losses = {"0.001": [3.1, 3.2], "0.01": [3.5, None], "0.0005": [3.4]}
    tuned = {"adamw": {"label": "AdamW", "best": 1e-3, "losses": losses}}
    grid = {"recipe": "gpt-tiny", "command": "mars tune gpt-tiny", "optimizers": tuned}
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(grid))
    (curve,) = summarise(load([race]), rates=read_rates(path)).sensitivity
    assert [(p.lr, p.dead, p.mean) for p in curve.points] == [
        (5e-4, 0, 3.4), (1e-3, 0, pytest.approx(3.15)), (1e-2, 1, 3.5),
    ]  # fmt: skip
    assert (curve.best, curve.bracketed, curve.source) == (1e-3, True, "mars tune gpt-tiny")


def test_a_grid_of_other_runs_is_not_drawn(tmp_path: Path) -> None:
    race = logs.race(tmp_path / "race", names=("adamw", "muon"))
    own = 400 * logs.PER_STEP
    losses = {"0.001": [3.1], "0.01": [3.5]}
    tuned = {name: {"label": name, "losses": losses} for name in ("adamw", "soap")}
    for tokens, drawn in ((own, ["adamw"]), (25 * own, [])):
        summary = summarise(load([race]), rates={"tokens": tokens, "optimizers": tuned})
        assert [curve.optimizer for curve in summary.sensitivity] == drawn
        assert any("grid of rates is not drawn" in text for text in summary.warnings) != bool(drawn)


def test_runs_that_only_look_like_a_grid_are_told(tmp_path: Path) -> None:
    for lr, lr_1d in ((1e-3, 5e-4), (2e-3, 1e-3), (4e-3, 8e-3)):
        own = {**logs.header("mars-m", lr)["config"], "optimizer": {"lr": lr, "lr_1d": lr_1d}}
        run(tmp_path, "mars-m", 0, {0: 5.0, 400: 3.0 + lr}, lr, config=own)
    (warning,) = (w for w in summarise(load([tmp_path])).warnings if "lr_1d" in w)
    assert "different lr_1d / lr (0.5 to 2)" in warning


def test_an_extended_run_is_told(tmp_path: Path) -> None:
    run(tmp_path, "adamw", 0, {0: 5.0, 400: 3.0})
    path = next(tmp_path.glob("*/log.jsonl"))
    first, *rest = path.read_text().splitlines()
    event = {"kind": "event", **logs.at(200), "what": "extended", "text": "from 200"}
    path.write_text("\n".join([first, json.dumps(event), *rest]) + "\n")
    assert any("a run was extended" in text for text in summarise(load([tmp_path])).warnings)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"optimizers": {"adamw": {}}}',
             '{"optimizers": {"adamw": {"losses": {"x": [1]}}}}',
             '{"optimizers": {"adamw": {"losses": {"1": ["low"]}}}}'],
)  # fmt: skip
def test_a_bad_file_of_rates_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(LabError, match=r"rates\.json"):
        read_rates(path)


def test_nothing_is_an_error() -> None:
    with pytest.raises(LabError, match="no run"):
        summarise([])


def test_images_are_judged_by_accuracy_and_tokens_are_never_mentioned(tmp_path: Path) -> None:
    runs = load([logs.vision(tmp_path)])
    summary = summarise(runs)
    # Every next optimizer is a point worse, whatever its loss.
    assert [e.optimizer for e in summary.entries] == list(logs.OPTIMIZERS)
    first, second = summary.entries[:2]
    assert first is summary.baseline
    assert first.accuracy is not None
    assert first.accuracy.mean == pytest.approx(0.9 - 0.8 * math.exp(-4) - 0.002, abs=1e-4)
    assert second.difference is not None
    assert second.difference.mean == pytest.approx(0.01)
    assert second.difference.resolved
    assert second.progress_ratio is None  # never as good
    text = table(summary)
    assert "AdamW is highest, at an accuracy of 88.33%" in text
    assert "-1.00 [" in text.replace("−", "-")
    assert "images/s" in text
    assert "token" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_other_crops_are_not_comparable(tmp_path: Path) -> None:
    logs.vision(tmp_path / "a", seeds=1, names=["adamw"])
    logs.vision(tmp_path / "b", seeds=1, names=["muon"])
    log = tmp_path / "b" / "muon-s0" / "log.jsonl"
    original = log.read_text()
    for change, words in {
        '"pad": 2': "2 pixels, yes",
        '"pad": 4, "cutout": 8': "4 pixels, yes, cutout of 8",
    }.items():
        log.write_text(original.replace('"pad": 4', change))
        summary = summarise(load([tmp_path]))
        (odd,) = [e for e in summary.entries if e.incomparable]
        assert odd.incomparable == f"crops and flips {words} (not 4 pixels, yes)"


def test_a_run_of_another_kind_is_told_in_few_words(tmp_path: Path) -> None:
    logs.vision(tmp_path / "a", seeds=2, names=["adamw", "muon"])
    logs.race(tmp_path / "b", seeds=1, names=["lion"])
    (odd,) = [e for e in summarise(load([tmp_path])).entries if e.incomparable]
    assert "a model of another kind" in str(odd.incomparable)
    assert "model." not in str(odd.incomparable)
