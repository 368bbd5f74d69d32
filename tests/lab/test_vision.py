"""Images in the one loop: configuration, rows, resume to the bit, exact mode, rules, recipes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import launch, train_all

import mars
from mars.lab import cli, recipes, tasks, workers
from mars.lab.arguments import counted, with_defaults
from mars.lab.config import (
    Data,
    ImageData,
    ImageModel,
    Keep,
    Loop,
    Optimizer,
    Run,
    Schedule,
    check,
    from_json,
    to_json,
)
from mars.lab.errors import LabError
from mars.lab.images.preparation import prepare_images
from mars.lab.log import read
from mars.lab.muon import Muon
from mars.lab.optimizer_state import parts
from mars.lab.optimizers import REGISTRY, build
from mars.lab.race import FIELD, RaceArgs, plan
from mars.lab.recipes.vision import NETWORKS
from mars.lab.report import read_rates
from mars.lab.report.rates import from_grid
from mars.lab.train import prepare, read_config, train

FLATTEN = {"matrix_rule": "flatten"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "muon": {"name": "muon"},
    "mars-adamw": {"name": "mars-adamw", "options": FLATTEN},
    "mars-adamw-2d": {"name": "mars-adamw-2d"},
    "mars-m": {"name": "mars-m", "options": FLATTEN},
    "exact": {"name": "mars-adamw", "options": FLATTEN, "exact": True},
}


def run(out: Path, optimizer: str = "mars-adamw", **loop: Any) -> Run:
    """A CNN on digits: 12 steps of 16, in a directory."""
    settings = {
        "steps": 12, "batch_size": 16, "eval_every": 6, "log_every": 3, "diagnose_every": 8,
        "threads": 1, "device": "cpu", **loop,
    }  # fmt: skip
    return Run(
        recipe="miniature",
        model=ImageModel(arch="cnn", channels=1, size=8),
        data=ImageData(source="digits", pad=1, flip=True),
        optimizer=Optimizer(lr=1e-2, **OPTIMIZERS[optimizer]),
        schedule=Schedule(shape="onecycle", warmup_steps=0),
        loop=Loop(**settings),
        keep=Keep(out=str(out), save_every=4),
    )


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint's tensors, BatchNorm's running statistics among them."""
    training = prepare(read_config(directory / "config.json"))
    training.restore(max((directory / "checkpoints").glob("step-*")))
    return training.model.state_dict()


def test_labels_are_smoothed_in_training_alone(tmp_path: Path) -> None:
    own = run(tmp_path)
    model = tasks.of(own.replace(model={"label_smoothing": 0.2})).model(0)
    x, labels = torch.rand(6, 1, 8, 8), torch.arange(6)
    with torch.no_grad():
        log_p = model(x).log_softmax(1)
        hard = -log_p[range(6), labels].mean()
        torch.testing.assert_close(model(x, labels), 0.8 * hard - 0.2 * log_p.mean())
        model.eval()
        torch.testing.assert_close(
            model(x, labels), -model(x).log_softmax(1)[range(6), labels].mean()
        )


def test_squares_are_blanked_in_training_alone(tmp_path: Path) -> None:
    own = run(tmp_path).replace(data={"pad": 0, "flip": False})
    plain, cut = (tasks.of(own.replace(data={"cutout": n})).open() for n in (0, 4))
    for a, b in zip(plain.held_out_rows(0, 20), cut.held_out_rows(0, 20), strict=True):
        assert torch.equal(a, b)
    (whole, labels), (blank, same) = plain.rows(3, 0, 16), cut.rows(3, 0, 16)
    assert torch.equal(labels, same)
    blanked = (blank == 0).flatten(1).sum(1)
    assert 4 <= blanked.min() <= blanked.max() == 16  # fewer in a corner
    assert torch.equal(torch.where(blank == 0, 0, whole), blank)


# Configuration.


def test_the_kind_of_a_run_survives_json_and_is_found_without_being_named() -> None:
    made = recipes.make("cifar10-vit")
    again = from_json(json.loads(json.dumps(to_json(made))))
    assert again == made
    assert isinstance(again.model, ImageModel)
    assert isinstance(again.data, ImageData)
    old = to_json(recipes.make("gpt-tiny"))  # as before there were images and epochs
    del old["loop"]["epochs"], old["schedule"]["rise_share"]
    assert from_json(old) == recipes.make("gpt-tiny")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": {"arch": "resnet18", "depht": 3}}, "unknown field model.depht"),
        ({"model": {"arch": "vgg"}}, 'model.arch cannot be "vgg"'),
        ({"data": {"source": "digits", "pad": 1, "tokeniser": 1}}, "unknown field data.tokeniser"),
    ],
)
def test_wrong_fields_of_images_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError) as error:
        from_json(values)
    assert words in str(error.value)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    own = run(tmp_path)
    mixed = Run(model=own.model, data=Data(), loop=own.loop, schedule=own.schedule)
    cases = {
        "data are text": mixed,
        "model.size (30) must be a multiple of model.patch (4)": own.replace(
            model={"arch": "vit", "size": 30}
        ),
        "fsdp2 is for GPTs": own.replace(loop={"parallel": "fsdp2"}),
        "data.pad must be 0 or above": own.replace(data={"pad": -1}),
        "data.cutout must be 0 or above": own.replace(data={"cutout": -1}),
        "model.label_smoothing must be 0 or above": own.replace(model={"label_smoothing": -0.1}),
        "model.label_smoothing must be below 1": own.replace(model={"label_smoothing": 1.0}),
        "schedule.rise_share": own.replace(schedule={"rise_share": 1.0}),
    }
    for words, wrong in cases.items():
        with pytest.raises(LabError) as error:
            check(wrong)
        assert words in str(error.value)
    with pytest.raises(LabError, match=r"but model\.classes is 7: give --model\.classes 10"):
        tasks.of(own.replace(model={"classes": 7})).open()
    with pytest.raises(LabError, match=r"give --model\.channels 1 --model\.size 8"):  # all at once
        tasks.of(own.replace(model={"channels": 3, "size": 16})).open()


def test_validation_by_other_classes_is_refused(tmp_path: Path) -> None:
    """Labels are numbers: in another order they would mean other things, and nobody would see."""
    prepare_images("digits", tmp_path / "held")
    own = run(tmp_path).replace(data={"valid": str(tmp_path / "held")})
    assert tasks.of(own).open().held_out == 360
    manifest = tmp_path / "held" / "manifest.json"
    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**values, "classes": values["classes"][::-1]}))
    with pytest.raises(LabError, match=r"other classes than digits.*: '9' where that has '0'"):
        tasks.of(own).open()


@pytest.mark.parametrize(
    ("recipe", "has", "lacks"),
    [
        ("digits-cnn", "--data.pad", "--model.n-layer"),
        ("gpt-tiny", "--model.n-layer", "--data.pad"),
    ],
)
def test_help_shows_the_fields_of_the_recipes_own_kind(
    recipe: str, has: str, lacks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", recipe, "--help"])
    shown = capsys.readouterr().out
    assert has in shown
    assert lacks not in shown
    assert "subcommand" not in shown.lower()


def test_a_dry_run_needs_no_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "cifar10-resnet18", "--optimizer", "muon", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "11,173,962 in all, 11,159,232 in hidden matrices and convolutions" in shown
    assert "10M images: 78,125 steps of 128 images" in shown
    assert "data: " in shown
    assert "tokens" not in shown.split("routing")[1]


def test_epochs_become_steps_and_asking_for_steps_takes_their_place(tmp_path: Path) -> None:
    made = run(tmp_path).replace(loop={"epochs": 2.0})
    assert tasks.with_steps(made).loop.steps == 180  # 2 × 1437 / 16, rounded up
    base = recipes.make("digits-cnn")
    assert tasks.with_steps(base).loop.steps == base.loop.steps

    fewer = counted(base.replace(loop={"steps": 10}), base)
    assert (fewer.loop.steps, fewer.loop.epochs) == (10, None)


# Rows.


def test_an_epoch_has_every_image_once_and_rows_are_a_function_of_their_number(
    tmp_path: Path,
) -> None:
    task = tasks.of(run(tmp_path)).open()
    assert isinstance(task, tasks.Vision)
    count = task.epoch_rows
    for epoch in (0, 1):
        own = task.numbers(epoch * count, (epoch + 1) * count)
        assert np.array_equal(np.sort(own), np.arange(count))
    across = task.numbers(count - 3, count + 3)
    parts = [task.numbers(i, i + 1) for i in range(count - 3, count + 3)]
    assert np.array_equal(across, np.concatenate(parts))
    x, labels = task.rows(7, 0, 16)
    for first in range(0, 16, 4):
        piece, own = task.rows(7, first, first + 4)
        assert torch.equal(piece, x[first : first + 4])
        assert torch.equal(own, labels[first : first + 4])
    assert x.shape == (16, 1, 8, 8)


def test_batches_made_ahead_are_those_made_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU makes them; from any step, across an epoch's end, up to the run's, in any parts."""
    own = run(tmp_path, steps=100)  # an epoch is 90 steps
    alone = tasks.of(own).open()
    wanted = {step: alone.rows(step, 0, 16) for step in range(80, 101)}
    made: list[range] = []
    make = tasks.Vision._make

    def counted_make(task: tasks.Vision, steps: range, first: int, last: int) -> Any:
        made.append(steps)
        return make(task, steps, first, last)

    monkeypatch.setattr(tasks.Vision, "ahead", lambda task: 7)
    monkeypatch.setattr(tasks.Vision, "_make", counted_make)
    for start in (80, 88, 99):
        task = tasks.of(own).open()
        for step in range(start, 100):
            for first, last in ((0, 16), (0, 4), (4, 16)):
                x, labels = task.rows(step, first, last)
                assert torch.equal(x, wanted[step][0][first:last])
                assert torch.equal(labels, wanted[step][1][first:last])
                assert x.is_contiguous(memory_format=torch.channels_last)
    assert made[::3] == [
        range(80, 87), range(87, 94), range(94, 100), range(88, 95), range(95, 100), range(99, 100)
    ]  # fmt: skip
    task.to(torch.device("cpu"), torch.bfloat16)  # what was made before is not given again
    assert torch.equal(task.rows(99, 0, 16)[0], wanted[99][0].bfloat16())
    beyond = task.rows(100, 0, 16)  # nobody trains there, but who asks is answered
    assert torch.equal(beyond[0], wanted[100][0].bfloat16())


def test_a_validation_is_of_all_images_whatever_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = prepare(run(tmp_path))
    whole = training.validate()
    monkeypatch.setattr(training.task, "validation_rows", lambda micro: 7)
    parts = training.validate()
    assert whole["accuracy"] == pytest.approx(parts["accuracy"], abs=1e-7)
    assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-6)
    assert whole["accuracy"] * 360 == pytest.approx(round(whole["accuracy"] * 360), abs=1e-4)


# Training.


def test_the_first_validation_can_be_stopped_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can last minutes on a CPU; the run that goes on makes it again."""
    train(run(tmp_path / "whole"))
    monkeypatch.setattr(tasks.Vision, "validation_rows", lambda task, micro: 90)
    measure, measured = tasks.Vision.measure, []

    def interrupted(task: tasks.Vision, model: Any, batch: Any) -> torch.Tensor:
        measured.append(len(batch[1]))
        os.kill(os.getpid(), signal.SIGTERM)
        return measure(task, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.Vision, "measure", interrupted)
        stopped = train(run(tmp_path / "stopped"))
    assert (stopped.status, stopped.step, stopped.valid, measured) == ("stopped", 0, None, [90])
    assert train(run(tmp_path / "stopped")).status == "done"
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    validations = [r["step"] for r in read(tmp_path / "stopped") if r["kind"] == "valid"]
    assert validations == [r["step"] for r in read(tmp_path / "whole") if r["kind"] == "valid"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_was_stopped_ends_to_the_bit_like_one_that_was_not(
    tmp_path: Path, optimizer: str
) -> None:
    straight = train(run(tmp_path / "straight", optimizer))
    short = run(tmp_path / "stopped", optimizer)

    def stop(record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # after the checkpoint of step 4
        train(short, watch=stop)
    resumed = train(short)
    assert (straight.valid, straight.accuracy) == (resumed.valid, resumed.accuracy)
    first, second = weights(tmp_path / "straight"), weights(tmp_path / "stopped")
    assert "bn1.running_mean" in first
    assert float(first["bn1.num_batches_tracked"]) == (23 if optimizer == "exact" else 12)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_log_counts_images_and_epochs_and_says_how_many_are_right(tmp_path: Path) -> None:
    outcome = train(run(tmp_path))
    records = read(tmp_path)
    head, end = records[0], records[-1]
    assert head["unit"] == "images"
    assert head["images_per_step"] == 16
    assert head["images_per_epoch"] == head["data"]["train"]["images"] == 1437
    assert (end["images"], end["epoch"]) == (192, pytest.approx(192 / 1437, abs=1e-5))
    assert end["accuracy"] == outcome.accuracy
    assert not any("tokens" in key for record in records for key in record)
    assert all(0 <= r["accuracy"] <= 1 for r in records if r["kind"] == "valid")
    again = train(run(tmp_path))  # complete: nothing to do
    assert again.accuracy == outcome.accuracy


def test_micro_batches_average_and_batchnorm_sees_each_alone(tmp_path: Path) -> None:
    """Without BatchNorm (a ViT) the gradient is the batch's, however it is cut."""
    model = {"arch": "vit", "patch": 4, "depth": 1, "width": 16, "heads": 2}
    found = []
    for micro in (16, 4):
        training = prepare(run(tmp_path, micro_batch_size=micro).replace(model=model))
        training._gradients()
        found.append([p.grad.clone() for p in training.model.parameters() if p.grad is not None])
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(whole, cut, rtol=1e-4, atol=1e-6)


def test_a_run_does_not_go_on_in_other_micro_batches(tmp_path: Path) -> None:
    """Of text it may: there nothing is a mean over a micro-batch."""
    train(run(tmp_path, steps=2, micro_batch_size=4))
    with pytest.raises(LabError, match=r"holds a run with loop\.micro_batch_size = 4, not 2"):
        train(run(tmp_path, steps=4, micro_batch_size=2), extend=True)


def test_a_worker_compiles_once_for_all_runs_of_the_same_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes a minute on a GPU, and a short run not much more."""
    compile_, graphs = torch.nn.Module.compile, []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(torch.is_grad_enabled())
        return graph.forward

    def compiled(self: Any, **options: Any) -> None:
        compile_(self, backend=backend, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    torch.compiler.reset()
    one = run(tmp_path / "1", compile=True, steps=2)
    other = run(tmp_path / "2", "muon", compile=True, steps=3, seed=1)
    larger = run(tmp_path / "3", compile=True, steps=2, batch_size=24)
    counts = []
    for each in (one, other, larger):
        with workers.at_work(each):
            train(each)
        counts.append(len(graphs))
    torch.compiler.reset()
    assert counts == [2, 2, 4]  # one for validation, one for training


# Rules: which tensors are matrices.


def routed(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, str]:
    """The rule of every parameter."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: g.get("mars_type", type(part).__name__)
        for part in parts(optimizer)
        for g in part.param_groups
        for p in g["params"]
    }


def test_the_authors_rule_and_flatten_differ_in_convolutions_alone(tmp_path: Path) -> None:
    model = tasks.of(run(tmp_path).replace(model={"arch": "resnet18"})).model(None)
    flat = build(model, Optimizer(name="mars-adamw", options=FLATTEN))
    published = build(model, Optimizer(name="mars-adamw-2d", weight_decay=0.5))
    same = build(model, Optimizer(name="mars-adamw", options={"matrix_rule": "2d"}))
    assert routed(published, model) == routed(same, model)
    by_mars = {name for name, rule in routed(published, model).items() if rule == "mars-adamw"}
    assert by_mars == {"fc.weight"}
    by_mars = {name for name, rule in routed(flat, model).items() if rule == "mars-adamw"}
    assert by_mars == {n for n, p in model.named_parameters() if p.ndim > 1}
    decays = {
        name: g["weight_decay_1d"]
        for g in published.param_groups
        for name, p in model.named_parameters()
        if any(p is q for q in g["params"])
    }
    assert (decays["conv1.weight"], decays["bn1.weight"]) == (0.5, 0.0)


def test_muon_takes_a_convolution_as_a_matrix_without_copying_it() -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(6, 4, 3, bias=False)
    last = torch.nn.Conv2d(6, 4, 3, bias=False).to(memory_format=torch.channels_last)
    last.load_state_dict(conv.state_dict())
    matrix = torch.nn.Parameter(conv.weight.detach().flatten(1).clone())
    place = last.weight.data_ptr()
    ours = [Muon([layer.weight], lr=0.1) for layer in (conv, last)]
    theirs = torch.optim.Muon([matrix], lr=0.1)
    for _ in range(3):
        g = torch.randn_like(conv.weight)
        conv.weight.grad, last.weight.grad, matrix.grad = g, g.clone(), g.flatten(1)
        for optimizer in (*ours, theirs):
            optimizer.step()
        assert torch.equal(conv.weight.flatten(1), matrix)
    # Columns in another order are summed in another order, in bfloat16.
    torch.testing.assert_close(last.weight.flatten(1), matrix.data, rtol=0.02, atol=1e-3)
    assert last.weight.data_ptr() == place
    state = ours[1].state[last.weight]["momentum_buffer"]
    assert state.is_contiguous(memory_format=torch.channels_last)


def test_muon_and_mars_m_have_the_same_tensors_of_a_resnet(tmp_path: Path) -> None:
    model = tasks.of(run(tmp_path).replace(model={"arch": "resnet18"})).model(None)
    muon = routed(build(model, Optimizer(name="muon")), model)
    matrix = routed(build(model, Optimizer(name="mars-m", options=FLATTEN)), model)
    by_muon = {name for name, rule in muon.items() if rule == "Muon"}
    assert by_muon == {name for name, rule in matrix.items() if rule == "mars-m"}
    assert len(by_muon) == 20
    assert "fc.weight" not in by_muon


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - {"soap", "lion", "adopt"}))
@pytest.mark.parametrize("arch", ["resnet18", "vit"])
def test_every_optimizer_can_be_made_for_a_miniature(tmp_path: Path, name: str, arch: str) -> None:
    task = tasks.of(run(tmp_path).replace(model={"arch": arch, "size": 8}))
    model, real = task.miniature(), task.model(None)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in real.named_parameters()]
    assert sum(p.numel() for p in model.parameters()) < 20_000
    groups = [len(build(m, Optimizer(name=name)).param_groups) for m in (model, real)]
    assert groups[0] == groups[1]


# Around it.


def test_the_final_line_has_the_accuracy_and_sampling_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    words = ["--loop.steps", "8", "--loop.threads", "1", "--loop.device", "cpu", "--keep.out", out]
    assert cli.main(["train", "digits-cnn", "--optimizer", "adamw", *words]) == 0
    done = capsys.readouterr()
    assert ", accuracy " in done.out
    assert "epoch 0.36" in done.err
    assert "tokens" not in done.err
    assert cli.main(["sample", out]) == 1
    assert "trains on images: this is for runs on text" in capsys.readouterr().err
    assert cli.main(["plan", "cifar10-resnet18"]) == 1
    assert "trains on images" in capsys.readouterr().err


@pytest.mark.parametrize(("data", "arch"), [network[:2] for network in NETWORKS])
def test_published_and_short_recipes_say_what_they_say(data: str, arch: str) -> None:
    published = recipes.make(f"{data}-{arch}", "mars-adamw-2d")
    assert (published.loop.epochs, published.loop.batch_size) == (200, 128)
    assert (published.schedule.shape, published.optimizer.weight_decay) == ("multistep", 5e-4)
    assert isinstance(published.model, ImageModel)
    assert (published.model.arch, published.model.label_smoothing) == (arch, 0.0)
    short = recipes.make(f"{data}-{arch}-short", "mars-adamw")
    assert (short.loop.epochs, short.loop.batch_size) == (40, 128)
    assert (short.schedule.shape, short.optimizer.options) == ("onecycle", FLATTEN)
    assert isinstance(short.model, ImageModel)
    assert short.model.label_smoothing == 0.1
    for made, cutout in ((published, 0), (short, short.model.size * 3 // 8)):
        assert isinstance(made.data, ImageData)
        assert (made.data.pad, made.data.flip, made.data.cutout) == (4, True, cutout)
    assert isinstance(build(tasks.of(short).miniature(), short.optimizer), mars.MARS)


def test_the_authors_rule_gives_mars_the_last_layer_alone() -> None:
    for recipe in ("cifar10-resnet18", "cifar10-resnet18-short"):
        own = recipes.make(recipe, "mars-adamw-2d")
        model = tasks.of(own).model(None)
        by_mars = [
            n for n, rule in routed(build(model, own.optimizer), model).items() if "mars" in rule
        ]
        assert by_mars == ["fc.weight"]


def test_two_processes_share_the_images_and_agree(tmp_path: Path) -> None:
    """By DDP, without BatchNorm the run of one process; with it, each has its own statistics."""
    model = {"arch": "vit", "patch": 4, "depth": 1, "width": 16, "heads": 2}
    alone = run(tmp_path / "alone", "adamw", steps=6).replace(model=model)
    pair = alone.replace(keep={"out": str(tmp_path / "pair")})
    normed = run(tmp_path / "normed", "mars-adamw", steps=6, micro_batch_size=4)
    first, second = launch(2, train_all, pair, normed)
    assert first == second
    assert first[0][:2] == ("done", 6)
    train(alone)
    ours, theirs = weights(tmp_path / "alone"), weights(tmp_path / "pair")
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-5)
    valid = [r for r in read(tmp_path / "pair") if r["kind"] == "valid"]
    expected = [r for r in read(tmp_path / "alone") if r["kind"] == "valid"]
    assert [r["accuracy"] for r in valid] == pytest.approx([r["accuracy"] for r in expected])
    assert float(weights(tmp_path / "normed")["bn1.num_batches_tracked"]) == 12


def test_a_race_and_its_grid_are_told_in_accuracies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "race", "digits-cnn", "--optimizers", "adamw", "mars-adamw", "mars-adamw-2d", "--seeds",
        "1", "--rates", "0.5", "1", "--loop.steps", "9", "--jobs", "1", "--loop.threads", "1",
        "--loop.device", "cpu", "--keep.out", str(tmp_path / "race"),
    ]  # fmt: skip
    assert cli.main(words) == 0
    told = capsys.readouterr()
    assert "MARS-AdamW 2-D" in told.out
    assert "an accuracy of" in told.out
    assert "token" not in told.out
    assert ", accuracy " in told.err
    grid = json.loads((tmp_path / "race" / "rates.json").read_text())
    assert grid["images"] == 9 * 64
    errors = grid["optimizers"]["adamw"]["errors"]
    assert all(0 <= error <= 1 for found in errors.values() for error in found)
    assert read_rates(tmp_path / "race" / "rates.json") == grid
    page = (tmp_path / "race" / "report.html").read_text().split("<script")[0]
    assert "Best accuracy" in page
    assert "token" not in page.lower()


def test_the_digits_grid_has_every_best_rate_inside() -> None:
    found = {curve.optimizer: curve for curve in from_grid(recipes.rates("digits-cnn"))}
    assert set(FIELD) <= set(found)
    assert all(curve.bracketed for curve in found.values())
    for name, curve in found.items():
        assert recipes.make("digits-cnn", name).optimizer.lr == curve.best


def test_a_search_is_judged_by_the_error_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    words = [
        "tune", "digits-cnn", "--optimizer", "adamw", "--trials", "2", "--search", "lr", "--jobs",
        "1", "--loop.steps", "9", "--loop.threads", "1", "--loop.device", "cpu", "--out",
        str(tmp_path / "tune"),
    ]  # fmt: skip
    assert cli.main(words) == 0
    assert "error rate" in capsys.readouterr().out
    found = json.loads((tmp_path / "tune" / "tune.json").read_text())
    best = read(tmp_path / "tune" / f"trial-{found['best']:04d}")[-1]
    losses = [trial["loss"] for trial in found["trials"]]
    assert min(losses) == pytest.approx(1 - best["accuracy"])


def test_who_sets_steps_means_them(tmp_path: Path) -> None:
    """From Python and in a race, with or without a warm-up of its own."""
    made = recipes.make("digits-cnn").replace(loop={"steps": 3})
    assert (made.loop.steps, made.loop.epochs) == (3, None)
    base = recipes.make("digits-cnn", "adamw")
    args = with_defaults(RaceArgs, base, optimizers=("adamw", "muon"), seeds=1)
    asked = {"loop": {"steps": 9}, "schedule": {"warmup_steps": 1}}
    assert [job.run.loop.steps for job in plan(args, base, asked, tmp_path)] == [9, 9]
    asked = {"loop": {"epochs": 1.0}}
    assert [job.run.loop.steps for job in plan(args, base, asked, tmp_path)] == [23, 23]
