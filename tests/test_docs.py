"""The snippets of the README run, links lead somewhere, and figures are those of the results."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from mars import MARS
from mars.lab.report.statistics import paired
from mars.rule import KINDS

if TYPE_CHECKING:
    from mars.lab.study.choice import Ladder
    from mars.lab.study.judge import Judged
    from mars.lab.study.results import Result

ROOT = Path(__file__).parents[1]
# Packages that the snippets of a page are about.
NEEDS = {"trainers.md": ("transformers", "accelerate", "lightning")}
WHOLE = ("README.md", "index.md", "quickstart.md")  # read from the top; they say their imports
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)


def surroundings() -> dict:
    """What a reader has before the snippet: a model, data, a loop."""

    class Model(nn.Sequential):
        def forward(self, input: torch.Tensor, labels: torch.Tensor | None = None) -> object:
            logits = super().forward(input)
            if labels is None:
                return logits
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    model = Model(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7))
    batches = list(torch.randint(0, 7, (4, 5)))
    names: dict = {"model": model, "loader": batches, "pairwise": pairwise}
    names["directory"] = tempfile.mkdtemp()
    names["dataset"] = [{"input": row, "labels": row} for row in torch.randint(0, 7, (8,))]

    def loss_of(model, batch):
        return nn.functional.cross_entropy(model(batch), batch)

    def closure():
        names["optimizer"].zero_grad()
        loss = loss_of(model, batches[0])
        loss.backward()
        return loss

    def train_step():
        names["optimizer"].step(closure)

    names |= {"loss_of": loss_of, "closure": closure, "train_step": train_step}
    names["adamw"] = torch.optim.AdamW(model.parameters())
    names["loss"] = loss_of(model, batches[0])
    return names


def flat(page: str | Path) -> str:
    """The text of a page, wherever its lines break."""
    return " ".join((ROOT / page).read_text().split())


def runs_of(study: str) -> list[Result]:
    """The runs of a study that are kept here."""
    from mars.lab.study.results import Results

    return Results(ROOT / "docs/results" / study).read()


def ladders(study: str) -> dict[str, Ladder]:
    from mars.lab.study import choice
    from mars.lab.study.questions import find

    return choice.ladders(find(study), runs_of(study))


def verdicts(study: str) -> list[Judged]:
    from mars.lab.study.judge import judge
    from mars.lab.study.questions import find

    return judge(find(study), runs_of(study))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    names = surroundings()
    for block in blocks(page):
        if page.name not in WHOLE:
            names = surroundings()
            exec("import mars\nfrom mars import MARS\noptimizer = MARS(model.parameters())", names)
        exec(block, names)
        assert names["optimizer"].param_groups
        if "trainer" in names:
            names["trainer"].args.max_steps = 2
            names["trainer"].args.dataloader_pin_memory = False  # of a GPU, which warns without
            assert names["trainer"].train().global_step == 2


def test_committed_verdicts_are_what_the_results_say() -> None:
    from mars.lab.study import times
    from mars.lab.study.questions import STUDIES, find
    from mars.lab.study.verdict import markdown, verdict

    kept = [path.parent for path in sorted((ROOT / "docs/results").glob("*/results.jsonl"))]
    assert kept
    for folder in kept:
        assert folder.name in STUDIES
        study, results = find(folder.name), runs_of(folder.name)
        found = verdict(study, results, times.read(study, folder, results))
        assert (folder / "verdict.md").read_text() == markdown(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    """Every `mars` command of a page: its recipe exists, its options are options."""
    from mars.lab import arguments
    from mars.lab.evaluation.command import EvalArgs
    from mars.lab.huggingface.command import ExportArgs
    from mars.lab.race import RaceArgs
    from mars.lab.sample import SampleArgs
    from mars.lab.train_command import TrainArgs

    kinds = {"train": TrainArgs, "race": RaceArgs}
    simple = {"eval": EvalArgs, "export": ExportArgs, "sample": SampleArgs}
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S):
        for line in block.splitlines():
            for part in line.split("#")[0].split("&&"):
                words = shlex.split(part)
                if len(words) > 1 and words[0] == "mars" and words[1] in simple:
                    assert arguments.parse(simple[words[1]], words[2:], "mars", "")
                if len(words) < 2 or words[0] != "mars" or words[1] not in kinds:
                    continue
                recipe, rest = arguments.recipe_of(words[2:], "gpt-tiny", "mars")
                name = recipe if not recipe.startswith("runs/") else "gpt-tiny"
                # Initial weights are read for their sizes; those of a page are not here.
                found = arguments.base_run(name, [] if "--model.init" in rest else rest)
                assert arguments.parse(kinds[words[1]], rest, "mars", "", found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_tables_are_those_of_the_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import readme_tables

    monkeypatch.setattr(sys, "argv", ["readme_tables.py", "--check"])
    code = readme_tables.main()
    assert code == 0, capsys.readouterr().out + "run python bench/readme_tables.py"
    text = (ROOT / "README.md").read_text()
    assert text.count("by bench/readme_tables.py -->") == text.count("<!-- end -->") == 3


@pytest.mark.parametrize("study", ["optimizers-50m", "gpt2-small", "batch-50m"])
def test_pictures_of_studies_can_be_drawn_again(study: str, tmp_path: Path) -> None:
    import study_figure
    from matplotlib import pyplot as plt

    (tmp_path / study).mkdir()
    shutil.copy(ROOT / "docs/results" / study / "results.jsonl", tmp_path / study)
    for draw, name in ((study_figure.draw, "figure.png"), (study_figure.summarise, "summary.png")):
        assert draw(tmp_path / study) == tmp_path / study / name
        assert (tmp_path / study / name).read_bytes().startswith(b"\x89PNG")
    plt.close("all")


def test_pictures_of_studies_compare_equal_seeds() -> None:
    import study_figure as figure

    found = [own for own in ladders("gpt2-small").values() if own.best is not None]
    assert {len(own.losses[own.best]) for own in found} == {1, 2, 3}
    assert figure.over(figure.seeds_of(found), found) == "seed 0, which all have"
    assert figure.most_seeds(found) == 3
    equal = [own for own in found if len(own.losses[own.best]) == 3]
    assert figure.over(figure.seeds_of(equal), equal) == "mean of 3 seeds"


def test_sentences_on_the_race_are_those_of_its_logs() -> None:
    from mars.lab.report import load, summarise

    summary = summarise(load([ROOT / "docs/results/gpt-50m"]))
    ours, base = summary.entries
    assert (ours.label, base.label, ours.lr) == ("MARS-AdamW", "AdamW", base.lr)
    assert ours.difference is not None
    twice = {e.label: {p.lr: p.mean for p in e.sensitivity.points}[2 * e.lr] for e in (ours, base)}
    figures = (
        f"{-ours.difference.mean:.3f} lower",
        f"(−{-ours.difference.low:.3f} to +{ours.difference.high:.3f}), not resolved",
        f"MARS-AdamW has lost {twice['MARS-AdamW'] - ours.loss.mean:.2f} and "
        f"AdamW {twice['AdamW'] - base.loss.mean:.2f}",
    )
    text = flat("docs/results.md")
    for figure in figures:
        assert figure in text, figure


def test_sentences_on_the_study_are_those_of_its_runs() -> None:
    found = ladders("optimizers-50m")
    best = {label: own.losses[own.best] for label, own in found.items() if own.best}

    def below(arm: str, base: str) -> list[float]:
        return [best[base][s] - loss for s, loss in best[arm].items() if s in best[base]]

    readme, results = map(flat, ("README.md", "docs/results.md"))
    ours = below("MARS-AdamW (.9, .95)", "AdamW")
    told = f"MARS-AdamW gains {fmean(ours):.2f} with 51M parameters. A longer warm-up gave AdamW"
    assert told in readme
    assert f"**MARS-AdamW**: {fmean(ours):.3f}. With 30 %" in readme
    default, adamw = (found[arm].losses for arm in ("MARS-AdamW (.9, .95)", "AdamW"))
    same = [adamw[2e-3][seed] - default[2e-3][seed] for seed in range(3)]
    assert min(*ours, *same) > 0
    assert f"At AdamW's rate it is {fmean(same):.3f} below it" in results
    told = f"ends {fmean(ours):.3f} below AdamW** (0.027 to 0.065), at 1.4 times its rate"
    assert f"MARS-AdamW at AdamW's betas {told}" in results
    assert "{:.3f}, {:.3f} and {:.3f} on the three seeds".format(*ours) in results
    published = below("MARS-AdamW (.95, .99)", "AdamW")
    assert f"three seeds, by {-fmean(published):.3f} on average" in results
    assert max(published) < 0
    assert f"MARS-Lion {fmean(below('MARS-Lion', 'Lion')):.2f} below Lion" in results
    arms = ("Muon", "MARS-M", "MARS-Shampoo", "SOAP")
    told = "{:.2f}, {:.2f}, {:.2f} and {:.2f}".format(*(fmean(below(a, "AdamW")) for a in arms))
    assert f"end {told} below" in results
    ladder = found["MARS-Shampoo"]
    first = {lr: own[0] for lr, own in ladder.losses.items()}
    rungs = (8e-3, 16e-3, 32e-3, 64e-3, 128e-3)  # a quarter to four times
    ahead = [adamw[2e-3][0] - first[lr] for lr in rungs]
    told = f"MARS-Shampoo ends {min(ahead):.2f} to {max(ahead):.2f} below the best AdamW, which"
    twice = adamw[4e-3][0] - adamw[2e-3][0]
    assert f"{told} itself loses {twice:.2f} at twice its own rate (one seed)" in readme
    choosing = flat("docs/choosing.md")
    told = "{:.3f}, {:.3f}, {:.3f}, {:.3f} and {:.3f} below the best AdamW at 0.008".format(*ahead)
    assert told in choosing
    half = adamw[1e-3][0] - adamw[2e-3][0]
    assert f"loses {half:.3f} at half its best rate and {twice:.3f} at twice" in choosing
    d = paired(*(best[arm] for arm in ("MARS-Shampoo", "Muon, original scale")))
    told = f"{-d.mean:.4f} below it ({d.low:.4f} to {d.high:+.4f})".replace("-", "−")
    assert told in results
    told = f"at torch's default scale ({d.low:.3f} to {d.high:+.3f})".replace("-", "−")
    assert told in readme
    assert f"ends {fmean(below('MARS-Shampoo', 'Muon')):.3f} below Muon at Moonlight's" in results
    lost = [losses[4e-3][0] - losses[2e-3][0] for losses in (default, adamw)]
    assert f"it loses {lost[0]:.2f} where AdamW loses {lost[1]:.2f}" in results
    far = default[8e-3][0] - default[2.83e-3][0]
    assert f"at 2.8 times it loses {far:.2f}" in results
    of_m = below("MARS-M", "Muon")
    told = (
        f"{of_m[0]:.3f} and {of_m[1]:.3f} below it on two seeds, {-of_m[2]:.3f} above on the third"
    )
    assert told in results


def test_sentences_on_the_clip_are_those_of_its_runs() -> None:
    found = ladders("search-50m")
    adamw, lean = (found[arm] for arm in ("AdamW", "MARS-AdamW, no clip, raw"))
    assert lean.bracketed
    losses = lean.losses[lean.best]
    below = [f"{adamw.losses[adamw.best][seed] - losses[seed]:.3f}" for seed in range(3)]
    told = f"{below[0]}, {below[1]} and {below[2]} below AdamW"
    assert told in flat("docs/results.md")
    clips = ladders("clip-50m")

    def lost(*labels: str) -> str:
        steep = [
            own.losses[4e-3][0] - own.losses[2e-3][0] for own in (clips[label] for label in labels)
        ]
        return f"{min(steep):.2f} to {max(steep):.2f}"

    raw = lost("tensor, raw", "none, raw")
    corrected = lost("tensor, corrected", "global, corrected", "none, corrected")
    results = flat("docs/results.md")
    assert f"at twice that rate it loses {raw}, the corrected one {corrected}" in results
    default = clips["tensor, corrected"].losses
    lead = fmean(default[2e-3].values()) - fmean(clips["none, raw"].losses[2e-3].values())
    assert f"{lead:.3f} below the default (0.013 to 0.023)" in results
    gain = [default[2e-3][seed] - loss for seed, loss in default[2.83e-3].items()]
    told = "better at 0.00283, between two rungs, by {:.3f}, {:.3f} and {:.3f}"
    assert told.format(*gain) in results
    left = fmean(clips["none, raw"].losses[2e-3][s] - x for s, x in default[2.83e-3].items())
    assert f"the lowest of all: {left:.3f} below this variant (−0.010 to 0.019" in results
    assert f"below the default there by {lead:.3f} at the same rate" in flat("docs/choosing.md")


def test_sentences_on_the_correction_are_those_of_its_runs() -> None:
    found = ladders("correction-50m")

    def final(arm: str, lr: float | None = None) -> float:
        return fmean(found[arm].losses[lr or found[arm].best].values())

    verdict = (ROOT / "docs/results/correction-50m/verdict.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in verdict.splitlines()]
    told = [row for row in rows if len(row) > 8 and row[8].endswith("%")]
    tokens, time = ({row[1]: int(row[i].removesuffix("%")) for row in told} for i in (7, 8))
    plain, approximate = "γ = 0", [f"γ = {gamma:g}" for gamma in (0.0125, 0.025, 0.05, 0.1)]
    exact = [f"{arm}, exact" for arm in approximate]
    page, readme, choosing = map(flat, ("docs/results.md", "README.md", "docs/choosing.md"))
    below = {arm: final(plain) - final(arm) for arm in (*approximate, *exact)}
    default, best = "γ = 0.025", min(approximate, key=final)
    assert f"The lowest of the approximate ones is {best}, {below[best]:.3f} below γ = 0." in page
    said = f"γ = 0.025 ends {below[default]:.3f} below γ = 0 at {found[default].best:g}, between"
    assert said in page
    own = found[default].losses[found[default].best].values()
    assert "differ ({:.3f}, {:.3f} and {:.3f})".format(*own) in page
    assert f"At 0.001 it gains {final(plain) - final(default, 0.001):.3f}, which is" in page
    lost, gained = (final(arm, 0.002) - final(arm, 0.001) for arm in (plain, best))
    assert f"γ = 0 loses {lost:.2f}, the default stays" in page
    assert f"and {best} gains {-gained:.2f}." in page
    more = [final(a) - final(e) for a, e in zip(approximate, exact, strict=True)]
    assert (more[1], more[-1]) == (min(more), max(more))
    assert f"by {more[1]:.3f} (γ = 0.025) to {more[-1]:.3f} (γ = 0.1) below" in page
    assert f"it ended {more[1]:.3f} to {more[-1]:.3f} lower" in choosing

    def span(of: dict[str, int], arms: Sequence[str]) -> str:
        return f"{min(of[arm] for arm in arms)} to {max(of[arm] for arm in arms)} %"

    assert f"{span(tokens, exact)} of the tokens and {span(time, exact)} of the time" in page
    assert span(tokens, approximate) == span(time, approximate)
    assert f"approximate mode needs {span(time, approximate)} of both" in page
    ends = [below[arm] for arm in approximate]
    assert f"{min(ends):.2f} to {max(ends):.2f} after 20M tokens" in readme
    theirs, plainly = found[default].losses[5e-4], found[plain].losses[5e-4]
    half = [plainly[seed] - loss for seed, loss in theirs.items() if seed in plainly]
    assert abs(fmean(half)) < 0.01  # "At half the best rate of γ = 0 it gains nothing"
    lower = [final(default, 0.002) - final(arm) for arm in ("γ = 0.05", "γ = 0.1")]
    said = (
        f"was {lower[0]:.3f} below the default at the same rate and γ = 0.1 {lower[1]:.3f} (three"
    )
    assert said in choosing
    assert f"({final(default):.3f}, where γ = 0.05 has {final('γ = 0.05'):.3f})" in choosing


def test_sentences_on_the_correction_of_a_tiny_model_are_those_of_its_runs() -> None:
    found = ladders("tiny-correction")
    best = {arm: ladder.losses[ladder.best] for arm, ladder in found.items()}
    default, large = "γ = 0.025", "γ = 0.1"
    page, choosing = map(flat, ("docs/results-small.md", "docs/choosing.md"))
    d = paired(best[large], best[default])
    assert f"({-d.mean:.3f} lower, {-d.high:.3f} to {-d.low:.3f})" in page
    assert f"At the published betas it was {-d.mean:.3f} below the default" in choosing
    more = {arm: paired(best[f"{arm}, exact"], best[arm]) for arm in (large, default)}
    e = more[default]
    assert f"lowers it by {-more[large].mean:.3f} more at γ = 0.1" in page
    assert (
        f"by {-e.mean:.3f}, not resolved ({-e.high:.3f} to {-e.low:.3f})".replace("-", "−") in page
    )
    assert not e.resolved
    told = f"it ended {-more[large].mean:.3f} lower at γ = 0.1 and {-e.mean:.3f} at γ = 0.025"
    assert told in choosing
    plain = paired(best[default], best["γ = 0"])
    assert f"On a tiny GPT the default ends {-plain.mean:.3f} lower (resolved" in choosing
    moved = {
        j.comparison.arm: j
        for j in verdicts("tiny-correction")
        if j.comparison.claim.kind == "rate"
    }
    ratio = {arm: math.exp(j.difference.mean) for arm, j in moved.items()}
    assert moved[large].state == "holds"
    assert moved[default].state == "not resolved"
    assert f"as predicted at γ = 0.1: {ratio[large]:.2f} times that of γ = 0" in page
    assert f"it moved by {ratio[large]:.2f} for γ = 0.1, as predicted" in choosing
    exact = [ratio[f"{arm}, exact"] for arm in (default, large)]
    assert "moves to {:.1f} and {:.1f} times".format(*exact) in page
    told = "{:.1f} and {:.1f} times, where approximate mode has {:.1f} and {:.1f}"
    assert told.format(*exact, ratio[default], ratio[large]) in choosing


def test_sentences_on_the_search_are_those_of_its_runs() -> None:
    found = ladders("search-50m")
    page, choosing = map(flat, ("docs/results.md", "docs/choosing.md"))

    def first(arm: str, lr: float) -> float:
        return found[arm].losses[lr][0]

    large, lean = "MARS-AdamW, γ = 0.1", "MARS-AdamW, no clip, raw, γ = 0.1"
    at = [first(large, lr) for lr in (2e-3, 4e-3)]
    assert set(found[large].losses) == set(found[lean].losses) == {2e-3, 4e-3}
    adamw, default = first("AdamW", 2e-3), first("MARS-AdamW", 2.83e-3)
    assert f"ends at {at[0]:.3f} at AdamW's rate and {at[1]:.3f} at twice that" in page
    assert f"level with AdamW's {adamw:.3f} and above the default's {default:.3f} at" in page
    raw = [first(lean, lr) for lr in (2e-3, 4e-3)]
    assert "second moment at {:.3f}, and {:.3f} at twice the rate".format(*raw) in page
    assert f"level with AdamW and {at[1] - default:.3f} above the default" in choosing
    between, rung = (fmean(found["AdamW"].losses[lr].values()) for lr in (1.41e-3, 2e-3))
    assert f"ends {between - rung:.3f} *above* its best rung there, in the mean" in page
    own = found["MARS-AdamW"].losses
    half = [own[2e-3][seed] - loss for seed, loss in own[2.83e-3].items()]
    assert "ends {:.3f}, {:.3f} and {:.3f} below its own at 0.00283".format(*half) in page


def test_sentences_on_the_search_on_a_tiny_model_are_those_of_its_verdict() -> None:
    names = ("correction", "clip", "search", "batch", "scale")
    runs = sum(len(runs_of(f"tiny-{name}")) for name in names)
    assert f"{runs} runs in five studies" in flat("docs/results-small.md")
    judged = verdicts("tiny-search")
    by = {j.comparison.arm: j.difference for j in judged}
    default, large = (by[arm] for arm in ("MARS-AdamW", "MARS-AdamW, γ = 0.1"))
    page, choosing = map(flat, ("docs/results-small.md", "docs/choosing.md"))
    span = f"{-large.mean:.3f} below it ({-large.high:.3f} to {-large.low:.3f})"
    assert f"resolved in all three forms: {span}" in page
    published = by["MARS-AdamW (.95, .99), γ = 0.1"]
    span = f"{-published.mean:.3f} below ({-published.high:.3f} to {-published.low:.3f})"
    assert f"At the published betas it does not: {span}" in page
    span = f"{-default.mean:.3f} ({-default.high:.3f} to {-default.low:.3f}, six seeds)"
    assert f"The default γ = 0.025 is below AdamW too, by {span}" in page
    span = (
        f"({-large.high:.3f} to {-large.low:.3f}, where the default is {-default.mean:.3f} below)"
    )
    assert f"at AdamW's betas {-large.mean:.3f} below AdamW {span}" in choosing


def test_the_example_of_a_study_is_told_as_its_runs_have_it() -> None:
    found = ladders("tiny-optimizers")
    adamw, ours = (found[arm].losses for arm in ("AdamW", "MARS-AdamW"))
    page = flat("docs/studies.md")
    assert f"took [{len(runs_of('tiny-optimizers'))} runs]" in page
    for seeds in (3, 5):
        first = [{s: losses[2.5e-3][s] for s in range(seeds)} for losses in (ours, adamw)]
        d = paired(*first)
        told = f"{d.mean:.4f} ({d.low:.4f} to {d.high:+.4f})".replace("-", "−")
        assert told in page, told
    higher = adamw[1.77e-3][0] - adamw[2.5e-3][0]
    assert f"AdamW ended {higher:.3f} higher at 0.00177 (seed 0)" in page
    now = paired(ours[3.54e-3], adamw[2.5e-3])
    assert now.n == 6
    assert f"the table's {now.mean:.4f}".replace("-", "−") in page


def test_best_rates_relative_to_adamw_are_those_of_the_tiny_studies() -> None:
    def ratio(study: str, arm: str, base: str) -> float:
        found = ladders(study)
        return found[arm].best / found[base].best

    matrices = ratio("tiny-search", "MARS-M", "AdamW")
    for page in ("docs/choosing.md", "docs/decisions.md"):
        assert f"5.3 times AdamW's best ({matrices:.0f} in runs of 150 steps)" in flat(page), page
        told = f"and {ratio('gpt2-small', 'MARS-M', 'AdamW'):.0f} times on GPT-2 small"
        assert told in flat(page), page
    between = {"tiny-optimizers": "", "tiny-batch": ", 1k", "tiny-length": ", 1200 steps"}
    for study, suffix in between.items():
        assert f"{ratio(study, f'MARS-AdamW{suffix}', f'AdamW{suffix}'):.1f}" == "1.4", study
    told = ", ".join(f"`{study}`" for study in between)
    assert f"1.4 times that ({told})" in flat("docs/choosing.md")


def test_sentences_on_the_length_of_a_run_are_those_of_its_verdict() -> None:
    found = ladders("tiny-length")
    page, choosing = map(flat, ("docs/results-small.md", "docs/choosing.md"))

    def final(arm: str, steps: int) -> float:
        ladder = found[f"{arm}, {steps} steps"]
        return fmean(ladder.losses[ladder.best].values())

    lead = {n: final("MARS-AdamW", n) - final("MARS-AdamW, γ = 0.1", n) for n in (150, 1200)}
    assert f"any more**: {lead[150]:.3f} in 150 steps, {lead[1200]:.3f} in 1,200" in page
    assert f"where the default does ({lead[1200]:.3f} below it)" in choosing
    default, large, less = verdicts("tiny-length")[1:]
    for judged, state, said in (
        (default, "holds", "the default by {:.3f} ({:.3f} to {:.3f}, resolved)"),
        (large, "not resolved", "γ = 0.1 by {:.3f} ({:.3f} to {:.3f}, not resolved)"),
        (less, "not resolved", "it loses {:.3f} ({:.3f} to {:.3f}), so that it does"),
    ):
        d = judged.difference
        assert judged.state == state
        told = said.format(-d.mean, -d.high, -d.low).replace("-", "−")
        assert told in page, told


def test_sentences_on_longer_runs_are_those_of_their_verdict() -> None:
    judged = [j for j in verdicts("tiny-tokens") if j.comparison.than is None]
    by = {(j.comparison.arm, j.comparison.baseline): j for j in judged}
    page, readme = map(flat, ("docs/results-small.md", "README.md"))
    adamw, ours, matrix, muon = "AdamW", "MARS-AdamW", "MARS-Shampoo", "Muon, original scale"
    one, twenty = ", 1 a parameter", ", 20 a parameter"

    def below(arm: str, length: str, base: str = adamw) -> tuple[str, str]:
        judged = by[arm + length, base + length]
        d = judged.difference
        text = f"{-d.mean:.3f} ({-d.high:.3f} to {-d.low:.3f})".replace("-", "−")
        return text, judged.state

    (first, held), (last, holds) = below(matrix, one), below(matrix, twenty)
    assert held == holds == below(muon, one)[1] == below(muon, twenty)[1] == "holds"
    told = f"{first[:5]} below AdamW after one byte per parameter and {last[:5]} after twenty"
    assert f"MARS-Shampoo is {told} {last[6:]}" in page
    told = f"Muon of its scale {below(muon, one)[0][:5]} and {below(muon, twenty)[0][:5]}"
    assert told in page
    (first, held), (last, open_) = below(ours, one), below(ours, twenty)
    assert (held, open_) == ("holds", "not resolved")
    told = f"{first[:5]} below AdamW in the short runs, resolved, and {last[:5]} in the long ones"
    assert f"MARS-AdamW** is {told} {last[6:]}, which is not" in page
    d = by[matrix + twenty, muon + twenty].difference
    told = (
        f"{-d.mean:.3f} below Muon of its scale in the long runs** ({-d.high:.3f} to {-d.low:.3f}"
    )
    assert told in page
    verdict = (ROOT / "docs/results/tiny-tokens/verdict.md").read_text()
    share = dict(re.findall(r"^\| (\S[^|]*) \|.* (\d+)% \|[^|]*\|$", verdict, flags=re.M))
    shown = "Muon, torch's default scale"
    told = "{} and {} % of its tokens in the short runs, with {} and {} % in the long ones"
    assert told.format(*(share[a + s] for s in (one, twenty) for a in (matrix, shown))) in page
    found = ladders("tiny-tokens")
    rates = [f"{found[a + s].best:g}" for a in (matrix, adamw) for s in (one, twenty)]
    assert "falls from {} to {}, AdamW's rises from {} to {}".format(*rates) in page
    d = by[matrix + twenty, adamw + twenty].difference
    assert share[matrix + twenty] == "71"
    short = -by[matrix + one, adamw + one].difference.mean
    told = f"falls from {short:.3f} at one byte per parameter to {-d.mean:.3f} at twenty"
    assert told in readme


def test_sentences_on_python_are_those_of_their_verdict() -> None:
    by = {(j.comparison.arm, j.comparison.baseline): j for j in verdicts("tiny-code")}
    page, found = flat("docs/results-small.md"), ladders("tiny-code")
    adamw, ours, matrix, muon = "AdamW", "MARS-AdamW", "MARS-Shampoo", "Muon, original scale"
    low = ", β₁ = 0.8"

    def of(arm: str, base: str, state: str) -> tuple[str, str]:
        judged = by[arm, base]
        d = judged.difference
        assert judged.state == state
        return f"{-d.mean:.3f}", f"{-d.high:.3f} to {-d.low:.3f}".replace("-", "−")

    lead, theirs = of(matrix, adamw, "holds")[0], of(muon, adamw, "holds")[0]
    assert f"MARS-Shampoo ends {lead} below AdamW, Muon of its scale {theirs}. (" in page
    d = by[matrix, muon].difference
    assert by[matrix, muon].state == "not resolved"
    told = f"MARS-Shampoo is {d.mean:.3f} above, {d.low:.3f} to {d.high:.3f}.)".replace("-", "−")
    assert told.replace("MARS−", "MARS-") in page
    gain, span = of(ours, adamw, "holds")
    assert f"MARS-AdamW is {gain} below AdamW** ({span}, resolved)" in page
    assert found[ours].best == found[adamw].best  # "its best rate is AdamW's here"
    gain, span = of(adamw + low, adamw, "not resolved")
    assert f"β₁ = 0.8 takes AdamW {gain} lower** ({span}, not resolved)" in page
    gain, span = of(ours + low, adamw + low, "not resolved")
    assert f"it MARS-AdamW is {gain} below it ({span}, not resolved)" in page


def test_sentences_on_a_smaller_beta1_are_those_of_their_verdict() -> None:
    by = {(j.comparison.arm, j.comparison.baseline): j for j in verdicts("tiny-momentum")}
    page, choosing, readme = map(flat, ("docs/results-small.md", "docs/choosing.md", "README.md"))
    adamw, ours, low = "AdamW", "MARS-AdamW", ", β₁ = 0.8"
    short, long = ", 150 steps", ", 1200 steps"

    def of(arm: str, base: str) -> tuple[str, str, str]:
        judged = by[arm, base]
        d = judged.difference
        span = f"({-d.high:.3f} to {-d.low:.3f}".replace("-", "−")
        return f"{-d.mean:.3f}", span, judged.state

    gain = {s: of(adamw + s + low, adamw + s) for s in (short, long)}
    theirs = {s: of(ours + s, adamw + s) for s in (short, long)}
    assert {g[2] for g in (*gain.values(), *theirs.values())} == {"holds"}
    told = "with 0.8 it ends {} lower than with 0.9 in 150 steps {}) and {} lower in 1,200 {})"
    assert told.format(*gain[short][:2], *gain[long][:2]) in page
    told = f"MARS-AdamW at 0.9 gains {theirs[short][0]} and {theirs[long][0]}."
    assert told in page
    left, span, state = of(ours + short + low, adamw + short + low)
    assert state == "holds"
    assert f"in 150 steps MARS-AdamW is {left} below AdamW {span}, resolved)" in page
    judged = by[ours + long + low, adamw + long + low]
    d = judged.difference
    assert judged.state == "not resolved"
    span = f"({d.low:.3f} to {d.high:+.3f}".replace("-", "−")
    assert f"in 1,200 it is {d.mean:.3f} above it {span}, not resolved)" in page
    told = f"takes AdamW {gain[long][0]} lower in 1,200 steps (resolved), MARS-AdamW at 0.9 ends"
    assert f"{told} {theirs[long][0]} lower" in choosing
    assert f"In 150 steps {gain[short][0]} and {theirs[short][0]}, and at 0.8" in choosing
    told = f" {gain[long][0]}, and MARS-AdamW {theirs[long][0]}, but nothing over an AdamW with"
    assert told in readme
    equal, span, state = of("MARS-Lion" + long, "Lion, betas (.926, .95)" + long)
    assert state == "holds"
    assert f"they end {equal.removeprefix('-')} apart {span}), as predicted" in page


def test_sentences_on_the_decay_are_those_of_its_verdict() -> None:
    judged = verdicts("tiny-decay")
    by = {(j.comparison.arm, j.comparison.baseline): j for j in judged}
    page = flat("docs/results-small.md")

    def span(arm: str, base: str, state: str) -> tuple[str, str]:
        found = by[arm, base]
        assert found.state == state
        d = found.difference
        return f"{-d.mean:.3f}", f"({-d.high:.3f} to {-d.low:.3f}"

    lead, between = span("MARS-Shampoo", "AdamW", "holds")
    assert f"ends {lead} below AdamW at the best decay" in page
    assert f"which is 0.1, too {between};" in page
    others = [j for j in judged if j.comparison.claim.by == 0.02]
    assert [j.state for j in others] == ["does not hold"] * 9
    assert all(j.difference.mean > 0 for j in others)  # so that 0.1 is the best of the four
    none = {arm: by[f"{arm}, decay 0", arm].difference for arm in ("AdamW", "MARS-Shampoo")}
    assert abs(none["MARS-Shampoo"].mean) < 0.001
    assert f"AdamW {none['AdamW'].mean:.3f} higher (not resolved)" in page
    assert none["AdamW"].low < 0
    lost = [by[f"{arm}, decay 0.5", arm].difference.mean for arm in ("MARS-Shampoo", "AdamW")]
    assert "at 0.5 it loses {:.3f}, AdamW {:.3f}".format(*lost) in page
    told = []
    for suffix, decay in ((", decay 0", "0"), ("", "0.1")):
        lead, between = span(f"MARS-AdamW{suffix}", f"AdamW{suffix}", "holds")
        told.append(f"by {lead} at {decay} {between})")
    assert " and ".join(told) in page
    for decay in ("0.5", "2.5"):
        span(f"MARS-AdamW, decay {decay}", f"AdamW, decay {decay}", "not resolved")


def test_sentences_on_gpt2_small_are_those_of_its_runs() -> None:
    every = {(r.arm, r.lr, r.seed): r for r in runs_of("gpt2-small")}
    runs = {(arm, lr): run for (arm, lr, seed), run in every.items() if seed == 0}
    lean = "MARS-AdamW, no clip, raw"
    best = {"AdamW": 2e-3, "Muon": 32e-3, "MARS-AdamW": 4e-3, "MARS-M": 32e-3, lean: 2e-3}
    final = {arm: runs[arm, lr].final or 0.0 for arm, lr in best.items()}
    below = {arm: final["AdamW"] - loss for arm, loss in final.items()}
    for (arm, _), run in runs.items():
        assert final[arm] <= (run.final or 0.0)
    readme, results = map(flat, ("README.md", "docs/results.md"))
    again = every["AdamW", 2e-3, 1].final or 0.0
    told = f"AdamW's second ends at {again:.3f}, {final['AdamW'] - again:.3f} below its first"
    assert told in results
    (judged,) = (j for j in verdicts("gpt2-small") if j.comparison.baseline == "Muon")
    d, found = judged.difference, ladders("gpt2-small")
    assert (judged.comparison.arm, judged.state, d.n) == ("MARS-M", "not resolved", 3)
    assert [found[arm].best for arm in ("MARS-M", "Muon")] == [32e-3, 32e-3]
    span = f"{d.low:.3f} to {d.high:+.3f}, three seeds".replace("-", "−")
    assert f"level with Muon**: {d.mean:.3f} above it ({span})" in results
    (promised,) = re.findall(r"MARS-M may end (\S+) lower at 0.0226", judged.why)
    assert f"at 0.0226, a parabola says, MARS-M may end {promised} lower" in results
    beyond = [runs[arm, 64e-3].final or 0.0 for arm in ("Muon", "MARS-M")]
    assert "end at {:.1f} and {:.1f}".format(*beyond) in results
    slow, fast = ((runs["AdamW", lr].final or 0.0) - final["AdamW"] for lr in (1e-3, 4e-3))
    told = f"ends {slow:.3f} above that at 0.001, and {fast:.3f} above it at 0.004"
    assert told in results
    second = [again - (every[arm, 32e-3, 1].final or 0.0) for arm in ("Muon", "MARS-M")]
    told = f"by {below['Muon']:.3f} and {below['MARS-M']:.3f} on seed 0, "
    assert told + "{:.3f} and {:.3f} on seed 1".format(*second) in results
    leads = [*second, below["Muon"], below["MARS-M"]]
    told = f"{min(leads):.3f} to {max(leads):.3f} below AdamW"
    assert f"{told} (three seeds, AdamW two); MARS-AdamW is level with AdamW (one seed" in readme
    assert f"{told} on the two seeds that it has" in results
    muon, ours = (
        [runs[arm, lr].final or 0.0 for lr in (4e-3, 8e-3, 16e-3, 32e-3)]
        for arm in ("Muon", "MARS-M")
    )
    ahead = [theirs - own for theirs, own in zip(muon, ours, strict=True)]
    told = "MARS-M ended {:.3f}, {:.3f} and {:.3f} below Muon (seed 0)".format(*ahead[:3])
    assert told in results
    gained = ["{:.3f}, {:.3f} and {:.3f}".format(*(a - b for a, b in pairwise(losses)))
              for losses in (muon, ours)]  # fmt: skip
    assert f"gained {gained[0]} for Muon, and {gained[1]} for MARS-M" in results
    assert f"level with AdamW** ({below['MARS-AdamW']:.3f} below it)" in results
    assert f"raw second moment it ends {below[lean]:.3f} below AdamW" in results
    above = [(r.final or 0.0) - (r.best or 0.0) for r in (runs["Muon", 8e-3], runs["MARS-M", 8e-3])]
    assert "(at 0.008 they end {:.3f} and {:.3f} above that)".format(*above) in results
    told = f"to {final['Muon']:.3f} and {final['MARS-M']:.3f}. Whether"
    assert f"from {runs['Muon', 32e-3].curve['loss'][-3]:.3f} {told}" in results
    lost = (runs[lean, 4e-3].final or 0.0) - final[lean]
    assert f"At twice that rate it loses {lost:.3f}, where AdamW loses {fast:.3f}" in results


def test_sentences_on_a_longer_warm_up_are_those_of_its_runs() -> None:
    found = ladders("baseline-50m")
    page = flat("docs/results.md")

    def first(arm: str, lr: float) -> float:
        return found[arm].losses[lr][0]

    usual, longer, faster = "AdamW", "AdamW, warm-up 30 %", "AdamW, tables and norms at 8 lr"
    at = [first(arm, lr) for lr in (2e-3, 4e-3) for arm in (usual, longer)]
    assert "from {:.3f} to {:.3f} at 0.002, and from {:.3f} to {:.3f} at 0.004".format(*at) in page
    assert f"That is {at[0] - at[3]:.3f} lower on one seed" in page
    told = "AdamW ends at {:.3f}, MARS-AdamW at {:.3f}, and AdamW with the longer warm-up at {:.3f}"
    assert told.format(at[2], first("MARS-AdamW", 4e-3), at[3]) in page
    assert f"takes it {at[0] - at[3]:.3f} lower with 51M parameters (one seed)" in page
    told = (
        "With 30 % of the steps as warm-up instead of 10 %, and twice the rate, AdamW itself ends"
    )
    assert f"{told} {at[0] - at[3]:.3f} lower" in flat("README.md")
    half = first(usual, 1e-3) - first(faster, 1e-3)
    assert f"{at[0] - first(faster, 2e-3):.3f} at its best rate, where" in page
    assert f"and {half:.3f} at half of it (one seed; higher rates" in page
    assert f"AdamW ends {at[0] - at[3]:.3f} lower, at twice its rate" in flat("docs/choosing.md")
    ours, matrix = (found[arm] for arm in ("MARS-AdamW", "MARS-Shampoo"))
    assert f"ends at {ours.losses[ours.best][0]:.3f} at its best rate, with 10 %" in page
    lead = at[3] - matrix.losses[matrix.best][0]
    assert f"ends at {matrix.losses[matrix.best][0]:.3f} on this seed, {lead:.2f} below" in page
    assert f"and {lead:.2f} above MARS-Shampoo" in page


def test_sentences_on_adamws_own_settings_on_a_tiny_model_are_those_of_its_verdict() -> None:
    found, judged = ladders("tiny-baseline"), verdicts("tiny-baseline")
    by = {(j.comparison.arm, j.comparison.baseline): j for j in judged}
    page, choosing = map(flat, ("docs/results-small.md", "docs/choosing.md"))
    usual, ours, matrix, more = "AdamW", "MARS-AdamW", "MARS-Shampoo", ", warm-up 30 %"

    def span(low: float, high: float) -> str:
        return f"({-high:.3f} to {-low:.3f}".replace("-", "−")

    leads = [j for j in judged if j.comparison.arm == matrix]
    assert [j.comparison.baseline for j in leads if j.state != "holds"] == ["AdamW, warm-up 2 %"]
    held = [-j.difference.mean for j in leads if j.state == "holds"]
    assert f"by {min(held):.3f} to {max(held):.3f}." in page
    lead = -by[matrix, usual + more].difference.mean
    assert f"is {lead:.3f} below AdamW with the longer one, resolved" in choosing
    at = [fmean(found[a].losses[2e-2][s] for s in range(3)) for a in (usual + more, usual)]
    assert "ends at {:.3f} with 30 % of the steps and at {:.3f} with 10 %".format(*at) in page
    d = paired(*(found[a].losses[2e-2] for a in (usual + more, usual)))
    told = f"{-d.mean:.3f} lower, {-d.high:.3f} to {-d.low:.3f}, not resolved)".replace("-", "−")
    assert told in page
    gain = by[usual + more, usual]
    d = gain.difference
    assert (gain.state, d.n) == ("not resolved", 6)
    told = f"{-d.mean:.3f} {span(d.low, d.high)}, six seeds, not resolved)"
    assert f"gains {told}" in page
    brief = f"on a tiny GPT {-d.mean:.3f}"
    told = f"On a tiny GPT, six seeds: the longer warm-up {-d.mean:.3f}, not resolved"
    assert told in flat("README.md")
    assert f"{brief} (six seeds, not resolved)" in flat("docs/results.md")
    assert f"{-d.mean:.3f} lower {span(d.low, d.high)}, six seeds, not resolved)" in choosing
    d = paired(*(found[a].losses[found[a].best] for a in (ours + more, ours)))
    assert f"gains nothing by it** ({-d.mean:.3f}, {span(d.low, d.high)[1:]})" in page
    d, before = by[ours + more, usual + more].difference, by[ours, usual]
    assert f"it is {-d.mean:.3f} below AdamW {span(d.low, d.high)}, not resolved)" in page
    assert before.state == "holds"
    told = f"from {-before.difference.mean:.3f}, hardly resolved, to {-d.mean:.3f}"
    assert f"its lead falls {told}, which is not" in choosing
    d = by[matrix + more, usual + more].difference
    assert f"is {-d.mean:.3f} below AdamW where both have it {span(d.low, d.high)})" in page
    d = paired(*(found[a].losses[found[a].best] for a in (matrix + more, matrix)))
    assert f"loses {d.mean:.3f} by it** ({d.low:.3f} to {d.high:.3f}, the seeds that both" in page
    d = by["AdamW, betas (.9, .99)", usual].difference
    assert f"(0.9, 0.99) end {-d.mean:.3f} lower {span(d.low, d.high)}, not resolved)" in page
    worse = [by[f"AdamW, {v}", usual].difference.mean
             for v in ("betas (.95, .95)", "tables and norms at 4 lr")]  # fmt: skip
    told = "(0.95, 0.95) {:.3f} higher. A rate four times as high for tables and norms costs {:.3f}"
    assert told.format(*worse) in page


def test_sentences_on_the_scale_are_those_of_its_verdict() -> None:
    judged = verdicts("tiny-scale")
    by = {(j.comparison.arm, j.comparison.baseline): j for j in judged}
    ours, tables = "MARS-Shampoo, tables by MARS-AdamW", "MARS-Shampoo, tables at lr"
    pairs = {
        (tables, "MARS-Shampoo"): "holds",
        (ours, tables): "not resolved",
        (ours, "Muon, original scale"): "holds",
        (ours, "Muon, lr_1d = 2 lr"): "not resolved",
    }
    text = (ROOT / "docs/results-small.md").read_text()
    for pair, state in pairs.items():
        assert by[pair].state == state, pair
        assert f"{-by[pair].difference.mean:.3f}" in text, pair


def test_the_first_trial_of_a_search_is_told_as_the_page_has_it() -> None:
    from mars.lab import arguments
    from mars.lab.search import advice

    found = advice(arguments.base_run("gpt2-small", ["--optimizer.name", "adamw"]), ["lr"])
    assert found is not None
    page = flat("docs/lab.md")
    assert f"first the recommended lr {found.setting.lr:g} ({found.evidence}; …)" in page


def test_the_sentence_on_a_step_on_a_cpu_is_that_of_its_measurement() -> None:
    rows = json.loads((ROOT / "docs/results/bench_cpu.json").read_text())["rows"]
    by = {(row["parameters"], row["name"]): row["ratio"] for row in rows}
    models = {model for model, _ in by}
    times = [by[m, name] / by[m, "torch AdamW fused"]
             for m in models for name in ("torch AdamW", "mars-adamw cpu")]  # fmt: skip
    told = f"`fused=True` is {min(times):.1f} to {max(times):.1f} times as fast as either"
    assert told in flat("README.md")


def test_figures_of_choosing_are_those_of_the_results() -> None:
    from mars.convert import noise_factor

    text = (ROOT / "docs/choosing.md").read_text()
    for name in ("convert_rates_h200.json", "convert_rates_cpu.json"):
        points = json.loads((ROOT / "docs/results" / name).read_text())["points"]
        best = {curve: min(p["mean"] for p in rows) for curve, rows in points.items()}
        for ours, theirs in (
            ("mars-adamw, AdamW's betas", "adamw"), ("mars-adamw", "adamw, betas of MARS"),
        ):  # fmt: skip
            difference = f"{best[ours] - best[theirs]:.3f}".replace("-", "−")
            assert f"| {best[theirs]:.3f} | {best[ours]:.3f} | {difference} |" in text, (name, ours)
        three = (best["muon"], best["mars-m"], best["adamw"])
        assert f"| {' | '.join(f'{loss:.3f}' for loss in three)} |" in text, name
    grid = json.loads((ROOT / "src/mars/lab/recipes/rates/gpt-tiny.json").read_text())["optimizers"]
    means = {name: min(sum(v) / len(v) for v in o["losses"].values()) for name, o in grid.items()}
    three = (means["muon"], means["mars-m"], means["adamw"])
    assert f"| {' | '.join(f'{loss:.3f}' for loss in three)} |" in text
    for gamma in (0.0125, 0.025, 0.05, 0.1):
        factors = " | ".join(f"{noise_factor(gamma, beta1):.2f}" for beta1 in (0.9, 0.95))
        assert re.search(rf"^\| {gamma}[^|]* \| {re.escape(factors)} \|$", text, flags=re.M), gamma


def test_factors_for_signal_and_noise_are_computed() -> None:
    from mars.convert import noise_factor

    text = (ROOT / "docs/math.md").read_text()
    for gamma in (0.025, 0.05, 0.1):
        cells = []
        for beta1 in (0.9, 0.95):
            weight = gamma**2 + 2 * gamma * (1 - gamma) * (1 - beta1)
            grown = (1 - gamma) ** 2 + weight * (1 + beta1) / (1 - beta1)
            signal = noise_factor(gamma, beta1)
            cells.append(f"{signal:.2f}, {signal / math.sqrt(grown):.2f}")
        assert f"| {gamma} | {' | '.join(cells)} |" in text


def test_bytes_of_state_are_those_that_are_held() -> None:
    """The table of docs/choosing.md, from optimizers that took a step."""
    from mars.lab.optimizers import label

    text = (ROOT / "docs/choosing.md").read_text().split("## Does it fit my memory?")[1]
    without_h = {"clip": None, "second_moment": "raw"}
    options = [{}, without_h, {"state_dtype": "bfloat16"}, {"state_dtype": "8bit"}]
    columns = [(torch.float32, o) for o in options]
    columns += [(torch.bfloat16, options[i]) for i in (0, 2, 3)]
    for kind in KINDS:
        held = []
        for dtype, option in columns:
            p = nn.Parameter(torch.zeros(128, 128, dtype=dtype))
            p.grad = torch.ones_like(p)
            optimizer = MARS([p], mars_type=kind, fused=False, **option)
            optimizer.step()
            buffers = [v for name, v in optimizer.state[p].items() if name != "step"]
            size = sum(v.numel() * v.element_size() for v in buffers) / p.numel()
            held.append(f"{size:.2f}".removesuffix(".00"))
        name = "plain AdamW" if kind == "plain-adamw" else label(kind)
        row = f"| {name} | {' | '.join(held)} |"
        assert row in text, row
    for name, theirs in (("AdamW", torch.optim.AdamW), ("Muon", torch.optim.Muon)):
        held = []
        for dtype in (torch.float32, torch.bfloat16):
            p = nn.Parameter(torch.zeros(128, 128, dtype=dtype))
            p.grad = torch.ones_like(p)
            optimizer = theirs([p])
            optimizer.step()
            buffers = [v for v in optimizer.state[p].values() if v.numel() > 1]
            held.append(str(sum(v.numel() * v.element_size() for v in buffers) // p.numel()))
        assert f"| torch's {name} | {held[0]} | | | | {held[1]} | | |" in text


def apply(diff: str, root: Path) -> None:
    """Make the changes of one block of docs/extending.md: a path, then hunks between lines @@."""
    head, _, body = diff.partition("\n")
    path = root / head.removeprefix("+++ ")
    for hunk in re.split(r"^@@\n", body, flags=re.M):
        lines = [line or " " for line in hunk.splitlines()]
        old, new = (
            "".join(line[1:] + "\n" for line in lines if line[0] in f" {sign}") for sign in "-+"
        )
        text = path.read_text() if path.exists() else ""
        assert text.count(old) == 1 if old else not text, f"{head}: not once there:\n{old}"
        path.write_text(text.replace(old, new) if old else new)


@pytest.mark.slow
def test_the_walk_through_adds_a_preconditioner(tmp_path: Path) -> None:
    """The changes of docs/extending.md, made to a copy, pass the test of the engines."""
    unneeded = shutil.ignore_patterns("__pycache__", "lab", "bench", "parity")
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unneeded)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for diff in re.findall(r"```diff\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.S):
        apply(diff, tmp_path)
    cells = "mars-sgd and ((float64 and not fused) or (float32 and fused and (-default- or clip-)))"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
         "tests/test_engines.py", "-k", f"test_cell_matches_oracle and {cells}"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True, text=True,
    )  # fmt: skip
    passed = re.search(r"^(\d+) passed", done.stdout, flags=re.M)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert passed, done.stdout
    assert int(passed[1]) >= 2 * 19 + 3


def test_sentences_on_the_cost_are_those_of_its_file() -> None:
    """README: MARS-AdamW and MARS-Lion to AdamW, 125M to 3B; matrix types at 512k tokens."""
    import cost_plan

    found = json.loads((ROOT / "docs/results/cost_h200.json").read_text())
    every = {(row["size"], row["optimizer"]): row for row in found["rows"]}

    def to_adamw(size: str, name: str) -> dict[str, float]:
        row = every[size, name]
        return cost_plan.ratios(row, row["adamw"], row["tokens"])

    sizes = ("125M", "355M", "774M", "1.5B", "3B")
    speeds = [
        to_adamw(size, name)["tokens_per_second"]
        for size in sizes
        for name in ("mars-adamw", "mars-lion")
    ]
    assert (f"{min(speeds):.2f}", f"{max(speeds):.2f}") == ("0.99", "1.02")
    matrices = [
        to_adamw(size, name)["accumulated"]
        for size in (*sizes, "7B")
        for name in ("mars-m", "mars-shampoo")
    ]
    assert min(matrices) >= 0.985
    text = flat("README.md")
    assert "have 0.99 to 1.02 of AdamW's tokens per second, its clip included" in text
    told = "MARS-M and MARS-Shampoo 0.79 to 0.96 at the 16k to 32k tokens per step"
    assert f"{told} that were measured, 0.99 or more computed for 512k" in text
    measured = [
        to_adamw(size, name)["tokens_per_second"]
        for size in sizes
        for name in ("mars-m", "mars-shampoo")
    ]
    assert (f"{min(measured):.2f}", f"{max(measured):.2f}") == ("0.79", "0.96")
