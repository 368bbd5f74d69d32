"""Measured settings: the file is what the results say, recipes take their rates from it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import settings as script  # bench/settings.py
import small_study

from mars.lab import recipes
from mars.lab.cli import main
from mars.lab.config import Optimizer, Run
from mars.lab.recipes import settings
from mars.lab.recipes.settings import Setting, at_rate, besides, fields, of_recipe, recommended
from mars.lab.study import Study
from mars.lab.study.questions import find
from mars.lab.study.results import Results

STUDY = "docs/results/optimizers-50m/results.jsonl"
ADAMW = Optimizer(name="adamw", lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
Use = Callable[[list[Setting]], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Put settings in the place of the committed ones."""

    def replace(found: list[Setting]) -> None:
        monkeypatch.setattr(settings, "read", lambda: tuple(found))

    return replace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one grid, and nothing made of it."""
    rates = Path("src/mars/lab/recipes/rates")
    (tmp_path / rates).mkdir(parents=True)
    shutil.copy(script.ROOT / rates / "gpt-50m.json", tmp_path / rates)
    return tmp_path


def add(root: Path, study: Study, finals: dict[str, dict[float, list[float]]]) -> None:
    """The results of a study: final losses by arm, rate and seed."""
    folder = root / "docs/results" / study.name
    folder.mkdir(parents=True)
    Results(folder).add(
        small_study.result(study, arm, lr, seed, loss)
        for arm, by_rate in finals.items()
        for lr, losses in by_rate.items()
        for seed, loss in enumerate(losses)
    )


def study_of_50m(root: Path) -> None:
    add(root, find("optimizers-50m"), {
        "AdamW": {0.001: [4.4], 0.002: [4.3], 0.004: [4.2, 4.22, 4.21], 0.008: [4.5]},
        "MARS-AdamW (.9, .95)": {0.002: [4.2], 0.004: [float("inf")]},
        "MARS-AdamW (.95, .99)": {0.002: [4.3], 0.004: [4.1]},
        "Muon": {0.004: [float("inf")]},
    })  # fmt: skip


def test_the_committed_file_is_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, "run python bench/settings.py"
    assert capsys.readouterr().out == ""


def test_every_entry_names_its_run() -> None:
    for s in settings.read():
        path = script.ROOT / s.source
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            own = [r for r in lines if r["arm"] == s.arm and r["lr"] == s.lr]
            assert len(own) == s.seeds
            assert s.loss == pytest.approx(sum(r["final"] for r in own) / len(own), abs=1e-6)
            assert {r["tokens"] for r in own} == {s.seen}
        else:
            grid = json.loads(path.read_text())
            assert grid["optimizers"][s.arm]["best"] == s.lr
            assert grid["command"] == s.command
            assert grid[s.unit] == s.seen


def test_runs_that_two_studies_share_are_listed_once() -> None:
    """scale-50m has four arms of optimizers-50m."""
    found = [(str(s.optimizer), s.recipe, s.seen, s.loss) for s in script.collect(script.ROOT)]
    shared = [own for own in found if "'mars-m'" in own[0] and own[1] == "gpt-50m"]
    assert shared
    assert len(set(shared)) == len(shared)


def test_rewriting_is_asked_for_and_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"], root) == 1
    assert "behind its results: src/mars/lab/recipes/settings.json" in capsys.readouterr().out
    assert not (root / script.FILE).exists()
    assert script.main([], root) == 0
    assert script.main(["--check"], root) == 0
    study_of_50m(root)
    assert script.main(["--check"], root) == 1


def test_a_studys_results_become_settings_and_rates_without_a_change_of_code(
    root: Path, use: Use
) -> None:
    assert recipes.make("gpt-50m", "adamw").optimizer.lr == 0.002  # of a grid of a third the tokens
    study_of_50m(root)
    found = script.collect(root)
    use(found)
    mine = {s.arm: s for s in found if s.source == STUDY}
    assert list(mine) == ["AdamW", "MARS-AdamW (.9, .95)", "MARS-AdamW (.95, .99)"]  # none of Muon
    adamw = mine["AdamW"]
    assert (adamw.lr, adamw.seeds, adamw.rates, adamw.bracketed) == (0.004, 3, 4, True)
    assert (adamw.loss, adamw.spread) == (4.21, 0.01)
    assert (adamw.recipe, adamw.batch, adamw.seen) == ("gpt-50m", 65536, 900 * 65536)
    assert adamw.parameters == 51_454_464
    assert not mine["MARS-AdamW (.95, .99)"].bracketed
    assert recipes.make("gpt-50m", "adamw").optimizer.lr == 0.004
    # The recipe's betas are its own: it takes the rate that was best with those.
    ours = recipes.make("gpt-50m", "mars-adamw").optimizer
    assert (ours.lr, ours.betas) == (0.002, (0.9, 0.95))
    assert recipes.make("gpt-50m", "muon").optimizer.lr == 0.004  # a guess still
    # Who asks for a setting gets the better one, betas and all; of one seed, if there is no other.
    advice = recommended(ours, 51_454_464, 900 * 65536)
    assert advice is not None
    assert advice.setting.source == "src/mars/lab/recipes/rates/gpt-50m.json"
    use(list(mine.values()))
    assert str(recommended(ours, 51_454_464, 900 * 65536)) == (
        "lr 0.004, betas (0.95, 0.99): best of 2 rates by one seed, not bracketed "
        f"({STUDY}, MARS-AdamW (.95, .99))"
    )


def test_a_rate_of_another_warm_up_is_no_setting_of_the_recipe(root: Path) -> None:
    """At the recipe's own warm-up AdamW loses 0.4 at the rate that is best with a longer one."""
    add(root, find("baseline-50m"), {
        "AdamW": {0.001: [4.4], 0.002: [4.3], 0.004: [4.7]},
        "AdamW, warm-up 30 %": {0.002: [4.28], 0.004: [4.25], 0.008: [4.3]},
    })  # fmt: skip
    own = [s for s in script.collect(root) if s.source == "docs/results/baseline-50m/results.jsonl"]
    assert [(s.arm, s.lr) for s in own] == [("AdamW", 0.002)]


def test_results_of_an_arm_that_was_changed_are_refused(root: Path) -> None:
    add(root, find("optimizers-50m"), {"AdamW": {0.002: [4.3]}})
    path = root / STUDY
    record = json.loads(path.read_text())
    record["fingerprint"]["arm"] = "0" * 12
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(SystemExit, match=r"'AdamW' in .* was run with other settings than study"):
        script.main([], root)
    assert not (root / script.FILE).exists()


def test_a_grid_with_other_settings_than_the_recipes_is_refused(root: Path) -> None:
    path = root / "src/mars/lab/recipes/rates/gpt-50m.json"
    grid = json.loads(path.read_text())
    grid["command"] += " --optimizer.weight-decay 0"
    path.write_text(json.dumps(grid))
    with pytest.raises(SystemExit, match=r"gpt-50m\.json: --optimizer\.… changes the recipe"):
        script.main([], root)


def made(lr: float, parameters: int, seen: int, loss: float = 3.0, **more: object) -> Setting:
    values: dict[str, object] = {
        "optimizer": {**fields(ADAMW), "lr": lr}, "recipe": "r", "parameters": parameters,
        "unit": "tokens", "seen": seen, "batch": 10, "loss": loss, "spread": None, "seeds": 2,
        "rates": 3, "bracketed": True, "source": "s", "arm": "a", "command": "c",
    }  # fmt: skip
    return Setting(**{**values, **more})  # type: ignore[arg-type]


def lr_of(optimizer: Optimizer, parameters: int, seen: int, unit: str = "tokens") -> float | None:
    found = recommended(optimizer, parameters, seen, unit)
    return None if found is None else found.setting.lr


def test_the_nearest_in_size_and_tokens_is_recommended(use: Use) -> None:
    use([made(0.1, 1000, 1000), made(0.2, 1000, 10**6), made(0.3, 10**6, 10**6)])
    assert lr_of(ADAMW, 1100, 900) == 0.1
    assert lr_of(ADAMW, 1100, 10**7) == 0.2
    assert lr_of(ADAMW, 40_000, 10**9) == 0.3  # nearer in size: 25 times, not 40
    assert lr_of(ADAMW, 30_000, 10**9) == 0.2
    assert lr_of(ADAMW, 1100, 900, "images") is None
    assert lr_of(Optimizer(name="muon"), 1100, 900) is None
    assert lr_of(dataclasses.replace(ADAMW, options={"amsgrad": "True"}), 1100, 900) is None
    assert lr_of(dataclasses.replace(ADAMW, exact=True), 1100, 900) is None


def test_of_equally_near_ones_the_best_is_recommended(use: Use) -> None:
    faster = {**fields(ADAMW), "betas": [0.8, 0.9]}
    use([made(0.1, 10, 10, 3.0), made(0.2, 10, 10, 2.9, optimizer={**faster, "lr": 0.2})])
    assert lr_of(ADAMW, 10, 10) == 0.2
    alike = recommended(ADAMW, 10, 10, free=())
    assert alike is not None
    assert alike.setting.lr == 0.1


def test_a_batch_decides_between_equals(use: Use) -> None:
    use([made(0.1, 10, 1000, 2.9, batch=10), made(0.2, 10, 1000, 3.0, batch=80)])
    wide = recommended(ADAMW, 10, 1000, batch=160)
    assert wide is not None
    assert wide.setting.lr == 0.2
    assert "in batches 2.0 times smaller" in str(wide)
    assert lr_of(ADAMW, 10, 1000) == 0.1  # who does not say gets the best


def test_how_near_it_is_is_said(use: Use) -> None:
    use([made(0.1, 1000, 1000, bracketed=False, seeds=1)])
    near, far = recommended(ADAMW, 1010, 990), recommended(ADAMW, 2_500_000, 400)
    assert str(near) == "lr 0.1: best of 3 rates by one seed, not bracketed (s, a)"
    assert "on a model 2,500 times smaller, with 2.5 times more tokens (s, a)" in str(far)
    other = recommended(dataclasses.replace(ADAMW, betas=None, gamma=0.1), 1000, 1000)
    assert str(other).startswith("lr 0.1, betas (0.9, 0.95), gamma not set: best of 3 rates")


def run(optimizer: Optimizer, steps: int) -> Run:
    return recipes.make("gpt-tiny", "adamw").replace(
        optimizer=dict(vars(optimizer)), loop={"steps": steps}
    )


def test_a_recipes_rate_is_that_of_its_options_and_tokens(use: Use) -> None:
    own = {"recipe": "gpt-tiny", "batch": 1024}
    use([
        made(0.1, 10, 1024 * 100, **own), made(0.2, 10, 1024 * 1000, **own),
        made(0.3, 10, 1024 * 150, recipe="gpt-tiny", batch=8192), made(0.4, 10, 1024 * 150),
    ])  # fmt: skip
    rates = {steps: of_recipe(run(ADAMW, steps)) for steps in (150, 900)}
    assert {steps: s.lr for steps, s in rates.items() if s} == {150: 0.1, 900: 0.2}
    assert of_recipe(run(dataclasses.replace(ADAMW, betas=(0.9, 0.99)), 150)) is None
    assert recipes.make("gpt-tiny", "adamw").optimizer.lr == 0.2
    assert recipes.make("gpt-tiny", "adopt").optimizer.lr == 0.01  # nothing measured: a guess


def test_two_rates_keep_their_proportion() -> None:
    muon = Optimizer(name="muon", lr=0.004, lr_1d=0.002)
    assert at_rate(muon, 0.032) == {"lr": 0.032, "lr_1d": 0.016}
    assert at_rate(Optimizer(name="adamw"), 0.032) == {"lr": 0.032}
    assert besides(fields(muon)) == {
        "name": "muon", "weight_decay": 0.0, "max_grad_norm": 1.0, "lr_1d / lr": 0.5,
    }  # fmt: skip
    assert recipes.make("gpt-tiny", "muon").optimizer.lr_1d == 0.008


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", *words, "--dry-run"]) == 0
    return capsys.readouterr().out.split("learning rate\n-------------\n")[1].split("\n\n")[0]


def test_a_dry_run_says_where_the_rate_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    grid = "src/mars/lab/recipes/rates/gpt-tiny.json"
    assert dry(capsys, "gpt-tiny", "--optimizer", "adamw") == (
        f"lr 0.005: best of 5 rates by 2 seeds ({grid}, adamw)"
    )
    text = dry(capsys, "gpt2-small", "--optimizer", "adamw")
    assert text.startswith(
        "lr 0.0006: not the best of a grid here\nnearest that is: lr 0.002: best"
    )
    assert "with 244 times fewer tokens, in batches 3.8 times smaller" in text
    text = dry(capsys, "gpt2-xl", "--optimizer", "adamw")
    assert "on a model 13 times smaller" in text
    text = dry(capsys, "gpt2-small", "--optimizer", "muon")  # as published: of the original scale
    assert text.endswith("(docs/results/optimizers-50m/results.jsonl, Muon, original scale)")
    own = ("--optimizer.options", "nesterov", "False")
    assert dry(capsys, "gpt2-small", "--optimizer", "muon", *own) == (
        "lr 0.02: no grid here had this optimizer with these options"
    )
    assert "rates/digits-cnn.json, mars-m)" in dry(capsys, "digits-cnn", "--optimizer", "mars-m")
