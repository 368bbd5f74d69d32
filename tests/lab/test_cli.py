"""The command: help that teaches, one line for every mistake, and a non-zero exit."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from miniature import run

from mars.lab.arguments import (
    base_run,
    overridden,
    parse,
    shorthands,
)
from mars.lab.cli import COMMANDS, main
from mars.lab.config import to_json
from mars.lab.errors import first_line
from mars.lab.log import read
from mars.lab.models import GPT
from mars.lab.recipes import RECIPES
from mars.lab.train_command import TrainArgs

Capture = pytest.CaptureFixture[str]


def given(tmp_path: Path) -> str:
    """A configuration file for a miniature run."""
    path = tmp_path / "given.json"
    path.write_text(json.dumps(to_json(run(tmp_path / "run"))))
    return str(path)


def test_usage_names_every_command(capsys: Capture) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert main(["--version"]) == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 8


@pytest.mark.parametrize("name", ["report", "eval", "export", "sample", "convert"])
def test_help_says_where_a_path_is_wanted(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    text = capsys.readouterr().out
    first = text.split("positional arguments")[1].split(" options ")[0]
    assert "PATH" in first
    assert "STR" not in first
    assert "--out {None}|STR" not in text


def test_recipes_are_listed_in_columns(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    abouts = {line.index(r.about) for line in lines for n, r in RECIPES.items()
              if line.split()[:1] == [n]}  # fmt: skip
    assert len(abouts) == 1


def test_a_recipes_help_groups_and_explains_all_fields(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["train", "gpt2-small", "--help"])
    text = capsys.readouterr().out
    for part in ("model", "data", "optimizer", "schedule", "loop", "keep"):
        assert f" {part} options " in text
    assert "(default: 0.006)" in text  # the recipe's own rate


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian': did you mean train?"),
        (["frobnicate"], "unknown command 'frobnicate': known: race, train"),
        (["train"], "needs a recipe, as its first word: gpt-tiny"),
        (["train", "--loop.steps", "3", "gpt-tiny"], "needs a recipe, as its first word"),
        (["train", "."], "holds no run"),
        (["plan", "--gpus", "8", "llama-13b"], "(MODEL is the first word)"),
        (["race", "gpt-tiny", "--optimizers", "adamw@"], "'adamw@' is not NAME@RATE"),
        (["train", "gpt-tiny", "--keep.out", "x" * 300], "xxx: the name is too long"),
        (["train", "x" * 300], "xxx: the name is too long"),
        (["train", "gpt-tinny"], "unknown recipe 'gpt-tinny': did you mean gpt-tiny?"),
        (["train", "gpt2"], "unknown recipe 'gpt2': did you mean gpt2-small, gpt2-small-fineweb"),
        (["race", "--optimizers", "adamw,mars-m"], "separate names by spaces"),
        (["train", "gpt-tiny", "--optimizer.betas", "0.9,0.95"], "'0.9,0.95', but FLOAT FLOAT"),
        (["train", "gpt-tiny", "--optimizer.options", "foo"], "it takes NAME VALUE or NAME=VALUE"),
        (["train", "gpt-tiny", "--loop.steps", "many"], "'many' is not a whole number"),
        (["race", "--rates", "1,2"], "error: --rates cannot be '1,2': it takes a number"),
        (["train", "gpt-tiny", "--optimizer.gamma", "x"], "--optimizer.gamma: 'x' is not a number"),
        (["tune", "gpt-tiny", "--jobs", "x"], "error: --jobs: 'x' is not a whole number"),
        (["train", "gpt-tiny", "--data.source", ""], "--data.source is empty: is a variable of"),
        (["race", "gpt-tiny", "--out="], "--out is empty: is a variable of"),
        (["race", "--optimizers", "adamw", ""], "a word of the command line is empty: is a"),
        (["study", "tiny-optimizers", "--verdict-only", "--out", ""], "--out is empty: is a"),
        (["study", "variance", "--out", ""], "--out is empty: is a variable of"),
        (["report", "--out", "", "runs"], "--out is empty: is a variable of"),
        (["report", ""], "a word of the command line is empty: is a variable of"),
        (["plan", "gpt2-small", "--results="], "--results is empty: is a variable of"),
        (["sample", "nowhere", "--prompt", ""], "nowhere"),
        (["train", ""], "a word of the command line is empty: is a variable of"),
        (["convert"], "mars convert needs, as its first word, the checkpoint: runs/NAME"),
        (["data", "--verify"], "mars data needs, as its first word, a file, directory or glob"),
        (["data", ".", "--verify"], ". was not made by `mars data`: it has no manifest.json"),
        (["data", "nope.txt"], "no such file: nope.txt; by name there are openwebtext"),
        (["train", "gpt-tiny", "--loop.stepz", "3"], "--loop.stepz"),
        (["train", "gpt-tiny", "--optimzer", "mars-m"], "(perhaps --optimizer?)"),
        (["train", "gpt-tiny", "--optimizer.nme", "mars-m"], "(perhaps --optimizer.name?)"),
        (["race", "gpt-tiny", "--optimzer", "mars-m"], "(perhaps --optimizers?)"),
        (["train", "gpt-tiny", "--outt", "x"], "(perhaps --out?)"),
        (["train", "gpt-tiny", "--optimizer.exact", "True"], "--optimizer.exact is a switch, it "
         "takes no value; --optimizer.no-exact turns it off"),
        (["data", "x.txt", "--no-verify=True"], "--verify is a switch, it takes no value"),
        (["train", "gpt-tiny", "--loop.steps", "3", "--dry-run", "3"], "--dry-run is a switch"),
        (["train", "gpt-tiny", "--loop.steps", "3", "4"], "'4' is a word too many"),
        (["data", "a.txt", "b.txt"], "'b.txt' is a word too many: quote a text that has spaces, "
         "and a glob; see mars data --help"),
        (["data", "a.txt", "b.txt", "--tokeniser", "bytes"], "(perhaps --tokenizer?)"),
        (["sample", "nowhere", "--prompt", "To", "be"], "'be' is a word too many"),
        (["train", "gpt-tiny", "--optimizer.options", "gamma=0.1"],
         "--optimizer.options gamma: say --optimizer.gamma"),
        (["train", "gpt-tiny", "--loop.compile"], "needs a value: True, False or None;"),
        (["train", "gpt-tiny", "--loop.precision"], "needs a value: auto, bf16, fp16 or fp32;"),
        (["data", "x.txt", "--shard-tokens"], "--shard-tokens needs a value: a whole number;"),
        (["train", "digits-cnn", "--loop.epochs", "0.5", "--loop.steps=3"],
         "give --loop.steps or --loop.epochs, not both"),
        (["train", "gpt-tiny", "--loop.steps", "many"], "--loop.steps"),
        (["train", "gpt-tiny", "--loop.steps", "0"], "loop.steps must be above 0"),
        (["train", "gpt-tiny", "--optimizer", "sgdd"], "unknown optimizer 'sgdd'"),
        (["train", "gpt-tiny", "--data.source", "none.txt"], "none.txt"),
        (["train", "gpt-tiny", "--data.tokenizer", "gpt2"], "raise model.vocab_size"),
        (["train", "gpt-50m"], "mars data YOUR.txt --out data/text"),
        (["train", "gpt-tiny", "--loop.device", "cuda:99"], "GPU"),
        (["train", "gpt-tiny", "--loop.device", "tpu"], "loop.device 'tpu' is unknown"),
        (["sample", "nowhere", "--device", "tpu"], "--device 'tpu' is unknown"),
        (["eval", "nowhere", "--device", "tpu"], "--device 'tpu' is unknown"),
        (["eval", "nowhere", "--out", "/"], "--out / is a folder"),
        (["data", "CIFAR10"], "no such file: CIFAR10; did you mean cifar10?"),
        (["train", "none.json"], "none.json cannot be read: No such file"),
        (["train", "gpt2-xl", "--optimizer", "muon"], "no settings of muon are published"),
        (["train", "gpt2-xl", "--optimizer", "mars-m"], "for gpt2-xl on openwebtext"),
        (["train", "gpt-tiny", "--loop.device", "mps"], "loop.device 'mps' is unknown"),
        (["train", "gpt-tiny", "--loop.threads", "100000"], "at most 1024"),
        (["train", "gpt-tiny", "--schedule.decay-share", "3"], "decay_share"),
        (["train", "gpt-tiny", "--optimizer", ":X"], "cannot be imported"),
        (["train", "gpt-tiny", "--optimizer", "antigravity_:X"], "cannot be imported"),
        (["train", "gpt2-small"], "make it with `mars data openwebtext --out data/openwebtext`"),
        (["race", "--optimizers", "adamw", "nadam"], "unknown optimizer 'nadam'"),
        (["train", "gpt-tiny", "--schedule.warmup-steps", "501"], "longer than the run"),
        (["race", "--seeds", "0"], "at least one seed"),
        (["race", "--recipe", "gpt-50m"], "--recipe is a label, which a race has no use for: the "
         "recipe is the first word"),
        (["race", "gpt-50m", "--optimizers", "adamw"], "mars data YOUR.txt --out data/text"),
        (["race", "cifar10-resnet18-short", "--optimizers", "adamw"],
         "run `mars data cifar10 --out data/cifar10`"),
        (["report", "nowhere"], "nowhere"),
        (["sample", "nowhere"], "nowhere does not exist: no run, no"),
        (["train", "gpt-tiny", "--model.init", "nowhere"], "nowhere does not exist: no run"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    words: list[str], message: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) in (1, 2)
    captured = capsys.readouterr()
    assert captured.err.startswith("mars: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert list(tmp_path.iterdir()) == []  # nothing was written


def test_a_rate_that_stays_behind_is_told(capsys: Capture) -> None:
    words = ["train", "gpt-tiny", "--dry-run", "--optimizer"]
    assert main([*words, "mars-m", "--optimizer.lr", "0.003"]) == 0
    assert "optimizer.lr_1d, for all else, stays 0.008" in capsys.readouterr().err
    assert main([*words, "mars-m", "--optimizer.lr", "0.003", "--optimizer.lr-1d", "0.001"]) == 0
    assert main([*words, "adamw", "--optimizer.lr", "0.003"]) == 0
    assert capsys.readouterr().err == ""


def test_a_rate_of_a_file_that_stays_behind_is_told(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.json"
    for own, more, said in (
        ({"lr": 0.003}, [], "lr_1d, for all else, stays 0.008"),
        ({"lr": 0.003}, ["--optimizer.lr-1d", "0.001"], None),
        ({"lr": 0.003, "lr_1d": 0.001}, [], None),
        ({"lr": 0.003, "lr_1d": 0.001}, ["--optimizer.lr", "0.004"], "stays 0.001"),
        ({"gamma": 0.0}, [], None),
    ):
        values = {"recipe": "gpt-tiny", "optimizer": {"name": "mars-m", **own}}
        path.write_text(json.dumps(values))
        assert main(["train", str(path), "--dry-run", *more]) == 0
        told = capsys.readouterr().err
        assert said in told if said else told == ""


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"recipe": "gpt-tiny", "loop": {"steps": 77}}', encoding="utf-8-sig")
    assert main(["train", str(path), "--dry-run"]) == 0
    assert "77 steps" in capsys.readouterr().out


def test_a_file_without_a_recipe_is_refused(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"optimizer": {"name": "muon"}}')
    assert main(["train", str(path)]) == 1
    assert "mine.json names no recipe" in capsys.readouterr().err
    path.write_text('{"recipe": "gpt-tinny", "loop": {"steps": 3}}')
    assert main(["train", str(path), "--dry-run"]) == 1
    assert "unknown recipe 'gpt-tinny': did you mean gpt-tiny?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "race", "tune"])
def test_data_that_are_too_small_name_the_option(
    command: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "small.txt").write_text("To be, or not to be. " * 9)
    words = [command, "gpt-tiny", "--data.source", str(tmp_path / "small.txt")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.endswith("take more data or a smaller context (--model.block-size)\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "race", "tune"])
def test_what_a_run_is_called_is_no_recipe(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main([command, "gpt-tiny", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "A label: what the run is called. The recipe itself is RECIPE, the command's" in text


@pytest.mark.parametrize("name", ["../evil", "own / x", ".hidden", "a\\b"])
@pytest.mark.parametrize("command", ["train", "race", "tune"])
def test_a_recipe_has_a_name_that_a_directory_can_have(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """It was taken as a path: runs were written beside runs/."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    values = to_json(run(tmp_path / "run"))
    values["keep"].pop("out")
    Path("mine.json").write_text(json.dumps({**values, "recipe": name}))
    words = ["gpt-tiny", "--recipe", name] if command == "train" else ["mine.json"]
    assert main([command, *words]) == 1
    said = capsys.readouterr().err
    assert f"recipe {name!r} is no name that a directory could have: leave out / and" in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "mine.json"]
    if command == "train":  # in a directory of the file's name it is a label, as it was before
        assert main([command, "mine.json", "--dry-run"]) == 0


def test_data_in_place_of_a_recipe_are_told(tmp_path: Path, capsys: Capture) -> None:
    book, made = tmp_path / "book.txt", tmp_path / "made"
    book.write_text("To be, or not to be. " * 50)
    assert main(["data", str(book), "--out", str(made), "--tokenizer", "bytes"]) == 0
    for path in (book, made):
        for command in ("train", "race", "tune"):
            assert main([command, str(path)]) == 1
            said = capsys.readouterr().err
            assert f"{path} holds no recipe: data are given as --data.source {path}, after" in said


def test_without_the_extra_a_command_says_what_it_needs(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(words: list[str]) -> int:
        import_module("a_package_that_is_not_there")
        return 0

    monkeypatch.setitem(COMMANDS, "doctor", lacks)
    assert main(["doctor"]) == 1
    wanted = "mars doctor needs a_package_that_is_not_there, which is not installed (pip install"
    assert wanted in capsys.readouterr().err


def test_a_longer_run_of_the_same_recipe_goes_on(tmp_path: Path, capsys: Capture) -> None:
    """Though the recipe's warm-up would be in proportion to the new number of steps."""
    words = ["train", "gpt-tiny", "--loop.eval-every", "1000", "--loop.eval-sequences", "2"]
    words += ["--keep.out", str(tmp_path / "run")]
    for steps in ("20", "40"):
        assert main([*words, "--loop.steps", steps]) == 0
    assert "extended 20 to 40 steps" in capsys.readouterr().err
    for run_ in (words, ["train", str(tmp_path / "run")]):  # not told of the warm-up
        assert main([*run_, "--loop.steps", "3"]) == 1
        said = capsys.readouterr().err
        assert "holds a run with loop.steps = 40, not 3" in said
        assert "choose another --keep.out" in said
    for option in ("--schedule.warmup-steps", "--schedule.warmup_steps"):
        assert main([*words, "--loop.steps", "60", option, "9"]) == 1
        assert "schedule.warmup_steps" in capsys.readouterr().err


@pytest.mark.parametrize("own", [{}, {"schedule": {"warmup_steps": 7}}])
def test_a_longer_run_of_a_json_recipe_goes_on(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """It was refused for a warm-up that nobody had asked for, where a recipe's name goes on."""
    monkeypatch.chdir(tmp_path)

    def write(steps: int, **more: Any) -> None:
        loop = {"steps": steps, "batch_size": 4, "eval_every": 1000, "eval_sequences": 2}
        values = {"recipe": "gpt-tiny", "optimizer": {"name": "adamw"}, "loop": loop}
        Path("mine.json").write_text(json.dumps({**values, **own, **more}))

    write(20)
    words = ["train", "mine.json", "--out", "run"]
    for more in ([], ["--loop.steps", "24"], ["--loop.steps", "28"]):
        assert main([*words, *more]) == 0
    write(32)
    assert main(words) == 0
    assert "extended 28 to 32 steps" in capsys.readouterr().err
    config = json.loads(Path("run", "config.json").read_text())
    assert config["schedule"]["warmup_steps"] == (7 if own else 2)
    assert main([*words, "--loop.steps", "36", "--schedule.warmup-steps", "9"]) == 1
    assert "schedule.warmup_steps" in capsys.readouterr().err
    write(36, schedule={"warmup_steps": 9})  # asked for as well
    assert main(words) == 1
    assert "holds a run with schedule.warmup_steps = " in capsys.readouterr().err
    write(20)
    assert main(words) == 1
    assert "holds a run with loop.steps = 32, not 20" in capsys.readouterr().err


def test_a_json_recipe_that_was_begun_with_other_steps_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its warm-up was in proportion to the steps of the command line."""
    monkeypatch.chdir(tmp_path)
    given(tmp_path)
    for steps in ("6", "12"):
        assert main(["train", "given.json", "--loop.steps", steps]) == 0
    config = json.loads(Path("run", "config.json").read_text())
    assert (config["schedule"]["warmup_steps"], config["loop"]["steps"]) == (1, 12)


def test_train_resume_and_dry_run(tmp_path: Path, capsys: Capture) -> None:
    assert main(["train", given(tmp_path), "--dry-run"]) == 0
    text = capsys.readouterr().out
    size = sum(p.numel() for p in GPT(run(tmp_path).model).parameters())
    for words in ("configuration\n", f"{size:,} in all", "mars-adamw", "optimizer state", "epochs"):
        assert words in text
    assert not (tmp_path / "run").exists()
    assert main(["train", given(tmp_path), "--loop.steps", "4"]) == 0
    assert "done at step 4, validation loss" in capsys.readouterr().out
    # The directory itself is a name for the run; it may go on for longer.
    assert main(["train", str(tmp_path / "run"), "--loop.steps", "6"]) == 0
    captured = capsys.readouterr()
    assert "resumed from step-00000004" in captured.err
    assert "extended 4 to 6 steps" in captured.err
    assert "done at step 6" in captured.out
    assert read(tmp_path / "run")[0]["steps"] == 6
    # For less it is refused: what was trained cannot be taken back.
    assert main(["train", str(tmp_path / "run"), "--loop.steps", "5"]) == 1
    assert "holds a run with loop.steps = 6, not 5" in capsys.readouterr().err


def test_a_dry_run_refuses_the_directory_that_training_refuses(
    tmp_path: Path, capsys: Capture
) -> None:
    """It printed a plan of what could not begin: only fewer steps were noticed."""
    words, there = ["train", given(tmp_path), "--loop.steps", "4"], tmp_path / "run"
    assert main(words) == 0
    kept = {path: path.read_bytes() for path in there.rglob("*") if path.is_file()}
    capsys.readouterr()
    for more, said in (
        (["--optimizer.lr", "0.5"], "holds a run with optimizer.lr = 0.01, not 0.5: choose anoth"),
        (["--loop.seed", "1", "--loop.steps", "6"], "holds a run with loop.seed = 0, not 1"),
        (["--loop.steps", "3"], "holds a run with loop.steps = 4, not 3"),
        (["--keep.no-resume"], "holds a run already: choose another --keep.out"),
    ):
        for dry in ([], ["--dry-run"]):
            assert main([*words, *more, *dry]) == 1
            captured = capsys.readouterr()
            assert said in captured.err
            assert captured.out == ""
    for more in ([], ["--loop.steps", "6"], ["--out", str(tmp_path / "new")]):
        assert main([*words, *more, "--dry-run"]) == 0
    assert {path: path.read_bytes() for path in there.rglob("*") if path.is_file()} == kept
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / "race.json").write_text("{}")
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "race"), "--dry-run"]) == 1
    assert "holds a race (race.json): choose another directory" in capsys.readouterr().err


@pytest.mark.parametrize("apart", [False, True])
def test_a_run_goes_on_where_its_data_are_now(tmp_path: Path, capsys: Capture, apart: bool) -> None:
    before, now, valid = (tmp_path / name for name in ("a.txt", "b.txt", "v.txt"))
    text = "To be, or not to be, that is the question. " * 60
    before.write_text(text)
    valid.write_text(text[7:])
    where = str(tmp_path / "run")
    more = ["--data.valid", str(valid)] if apart else []
    first = ["train", given(tmp_path), "--loop.steps", "4"]
    assert main([*first, "--data.source", str(before), *more]) == 0
    before.rename(now)
    on = ["train", where, "--loop.steps", "6"]
    assert main(on) == 1
    assert "a.txt" in capsys.readouterr().err
    # Other data are refused, as ever.
    other = tmp_path / "other.txt"
    other.write_text(text.upper())
    assert main([*on, "--data.source", str(other)]) == 1
    assert "holds a run with data.source" in capsys.readouterr().err
    assert main([*on, "--data.source", str(other), "--dry-run"]) == 1
    assert main([*on, "--data.source", str(now), "--dry-run"]) == 0
    capsys.readouterr()
    assert main([*on, "--data.source", str(now)]) == 0
    captured = capsys.readouterr()
    assert f"the data of {where} are in {now} now, and the same" in captured.err
    assert "resumed from step-00000004" in captured.err
    assert "done at step 6" in captured.out
    assert main(["train", where, "--loop.steps", "8"]) == 0  # it is kept in mind


def test_a_run_that_was_killed_before_its_first_checkpoint_says_that_it_starts_again(
    tmp_path: Path, capsys: Capture
) -> None:
    words = ["train", given(tmp_path), "--loop.steps", "2", "--keep.save-every", "None"]
    assert main(words) == 0
    assert "starts again" not in capsys.readouterr().err
    log = tmp_path / "run" / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))  # as kill -9 leaves it
    assert main(words) == 0
    assert "left no checkpoint: it starts again at step 0\n" in capsys.readouterr().err


def test_epochs_can_be_switched_off_for_steps(capsys: Capture) -> None:
    words = ["--loop.epochs", "None", "--loop.steps", "3", "--dry-run"]
    assert main(["train", "digits-cnn", *words]) == 0
    assert "3 steps of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("race.json", "a race: `mars race DIR` resumes it"),
        ("tune.json", "a search: `mars tune` resumes it, and its best.json is a recipe"),
        ("results.jsonl", "a study: `mars study` resumes it"),
        ("notes.txt", "no run\n"),
    ],
)
def test_what_a_directory_holds_instead_of_a_run(
    tmp_path: Path, capsys: Capture, file: str, said: str
) -> None:
    (tmp_path / file).write_text("{}")
    assert main(["train", str(tmp_path)]) == 1
    assert f"holds {said}" in capsys.readouterr().err


def test_warm_up_shrinks_with_the_steps(tmp_path: Path, capsys: Capture) -> None:
    assert main(["train", "gpt-tiny", "--loop.steps", "100", "--dry-run"]) == 0
    assert '"warmup_steps": 10,' in capsys.readouterr().out
    words = ["--loop.steps", "100", "--schedule.warmup-steps", "30", "--dry-run"]
    assert main(["train", "gpt-tiny", *words]) == 0
    assert '"warmup_steps": 30,' in capsys.readouterr().out


def test_warm_up_shrinks_with_the_steps_of_a_file(tmp_path: Path) -> None:
    assert overridden({"recipe": "gpt-tiny", "loop": {"steps": 40}}).schedule.warmup_steps == 4
    own = {"steps": 100}
    kept = overridden({"recipe": "gpt-tiny", "loop": own, "schedule": {"warmup_steps": 50}})
    assert kept.schedule.warmup_steps == 50


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "mars.lab", "--help"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "mars: error: the disk is full (standard output)\n"


def test_a_home_is_meant_by_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert run(Path("~/out")).directory == "/home/somebody/out"


def test_no_colours_if_they_are_not_wanted(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit):
        main(["plan", "gpt2-small", "--help"])
    text = capsys.readouterr().out
    assert "usage: mars plan" in text
    assert "\x1b" not in text


def test_a_gpu_can_be_planned_for_without_one(capsys: Capture) -> None:
    assert main(["train", "gpt2-small", "--loop.device", "cuda", "--dry-run"]) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_full_disk(tmp_path: Path, capsys: Capture) -> None:
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    assert main(["train", given(tmp_path), "--loop.steps", "3"]) == 0
    capsys.readouterr()
    more = ["train", str(tmp_path / "run"), "--loop.steps", "30"]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        assert main(more) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert "cannot " in capsys.readouterr().err
    assert main(more) == 0  # nothing was lost
    assert "resumed from" in capsys.readouterr().err


def test_shorthands_and_overrides(tmp_path: Path) -> None:
    assert shorthands(["--optimizer=muon", "--loop.steps", "3"]) == [
        "--optimizer.name", "muon", "--loop.steps", "3",
    ]  # fmt: skip
    chosen = base_run("gpt2-small", ["--optimizer.name", "adamw"])
    assert (chosen.optimizer.lr, chosen.optimizer.betas) == (6e-4, (0.9, 0.95))
    made = overridden({"recipe": "gpt-tiny", "optimizer": {"name": "muon", "lr": 0.5}})
    assert (made.optimizer.name, made.optimizer.lr, made.model.n_layer) == ("muon", 0.5, 3)
    words = ["--optimizer.options", "clip=None", "second_moment", "raw", "--loop.steps=3"]
    said = ["--optimizer.options", "clip", "None", "second_moment", "raw", "--loop.steps", "3"]
    assert shorthands(words) == said


def test_options_are_added_to_those_of_the_recipe() -> None:
    def options(*words: str) -> dict[str, str]:
        base = base_run("gpt2-small", ["--optimizer.name", "muon"])
        given = ["--optimizer.options", *words] if words else []
        return parse(TrainArgs, given, "mars", "", base).optimizer.options

    assert options() == {"adjust_lr_fn": "original"}
    assert options("nesterov", "False") == {"adjust_lr_fn": "original", "nesterov": "False"}
    assert options("adjust_lr_fn", "match_rms_adamw") == {"adjust_lr_fn": "match_rms_adamw"}


@pytest.mark.parametrize("size", ["small", "large"])
def test_what_is_not_published_has_its_proportion_to_adamw(size: str) -> None:
    names = ("adamw", "mars-shampoo", "soap")
    ours, theirs = (
        {name: RECIPES[recipe].make(name).optimizer for name in names}
        for recipe in ("gpt-50m", f"gpt2-{size}")
    )
    for name in ("mars-shampoo", "soap"):
        times = ours[name].lr / ours["adamw"].lr
        assert theirs[name].lr / theirs["adamw"].lr == pytest.approx(times, rel=1e-2)
        assert theirs[name].betas == ours[name].betas
    assert times > 1
    assert theirs["mars-shampoo"].lr_1d == pytest.approx(theirs["mars-shampoo"].lr / 2, rel=1e-2)


def test_published_settings() -> None:
    """As in the tables of the authors' READMEs and their configuration files."""
    rates = {
        ("gpt2-small", "adamw"): 6e-4, ("gpt2-medium", "adamw"): 3e-4,
        ("gpt2-large", "adamw"): 2e-4, ("gpt2-small", "muon"): 2e-2,
        ("gpt2-medium", "muon"): 1e-2, ("gpt2-large", "muon"): 6.67e-3,
        ("gpt2-small", "mars-adamw"): 6e-3, ("gpt2-medium", "mars-adamw"): 3e-3,
        ("gpt2-large", "mars-adamw"): 2e-3, ("gpt2-xl-fineweb", "mars-adamw"): 2e-3,
        ("gpt2-small", "mars-m"): 6e-3, ("gpt2-small-fineweb", "mars-m"): 1e-2,
        ("gpt2-medium", "mars-m"): 5e-3, ("gpt2-xl-fineweb", "mars-m"): 3e-3,
    }  # fmt: skip
    for (recipe, optimizer), lr in rates.items():
        made = RECIPES[recipe].make(optimizer)
        assert made.optimizer.lr == lr, (recipe, optimizer)
        assert (made.loop.batch_size, made.model.block_size, made.loop.steps) == (
            480,
            1024,
            100_000,
        )
        assert (made.schedule.warmup_steps, made.optimizer.max_grad_norm) == (2000, 1.0)
    mars_small = RECIPES["gpt2-small"].make("mars-adamw").optimizer
    assert (mars_small.lr_1d, mars_small.weight_decay, mars_small.gamma) == (3e-3, 0.01, 0.025)
    least = RECIPES["gpt2-small"].make("mars-adamw").schedule.min_lr * 6e-3
    assert least == pytest.approx(3e-5)


def test_a_model_that_no_memory_holds_is_told_in_one_line(capsys: Capture) -> None:
    assert main(["train", "gpt-tiny", "--model.n-embd", "300000", "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert "parameters are too many for this machine even to lay them out: `mars plan`" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("\n"), RuntimeError("no room\n!")])
def test_the_first_line_of_an_error_is_there_even_if_it_says_nothing(
    error: Exception, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: object) -> None:
        raise error

    monkeypatch.setattr("mars.lab.wrapping.make", make)
    assert main(["train", given(tmp_path)]) == 1
    said = "no room" if "no" in str(error) else type(error).__name__
    assert f"error: the model does not fit in memory: {said}\n" in capsys.readouterr().err
    assert first_line(error, named=True).startswith(type(error).__name__)
    assert "\n" not in first_line(error, named=True)
