"""The loop: right gradients, the same for all, resumed to the bit."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import own_module
import pytest
import torch
from miniature import OPTIMIZERS, run

from mars.lab import checkpoint, hardware
from mars.lab.config import Run, to_json
from mars.lab.data import Batches, open_tokens
from mars.lab.errors import LabError
from mars.lab.log import read
from mars.lab.loop import Training
from mars.lab.models import GPT
from mars.lab.parallel import World
from mars.lab.schedule import factor
from mars.lab.train import prepare, train


def weights(directory: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def state(directory: Path, step: int) -> Any:
    path = directory / "checkpoints" / f"step-{step:08d}" / "optimizer.pt"
    return torch.load(path, weights_only=True)


def flat(value: Any) -> list[Any]:
    """The leaves of a nest, tensors as lists."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in flat(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flat(item)]
    return [value.tolist() if isinstance(value, torch.Tensor) else value]


def losses(directory: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read(directory) if r["kind"] in ("train", "valid")]


class StopAt:
    """Stops a run from outside after some step, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_the_loop_is_the_loop_one_would_write(tmp_path: Path) -> None:
    config = run(tmp_path / "run", "adamw").replace(model={"dropout": 0.0})
    train(config)
    model = GPT(config.model, seed=0)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0,
    )  # fmt: skip
    tokens = open_tokens("tinyshakespeare", "train", "bytes")
    batches = Batches(tokens, 16, 4, 0)
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor(config.schedule, step, 12)
        optimizer.zero_grad()
        model(*batches.rows(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    saved = weights(tmp_path / "run", 12)
    for name, p in model.named_parameters():
        assert torch.equal(saved[name], p.detach()), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    whole = train(run(tmp_path / "whole", optimizer))
    # Step 4 lies between checkpoints, inside no window of the log; step 8 is another part of it.
    halves = run(tmp_path / "halves", optimizer)
    assert train(halves, watch=StopAt(4)).status == "stopped"
    assert train(halves, watch=StopAt(8)).status == "stopped"
    outcome = train(halves)
    assert (whole.status, outcome.status) == ("done", "done")
    assert outcome.valid == whole.valid
    for name, tensor in weights(tmp_path / "whole", 12).items():
        assert torch.equal(tensor, weights(tmp_path / "halves", 12)[name]), name
    assert flat(state(tmp_path / "whole", 12)) == flat(state(tmp_path / "halves", 12))
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")
    events = [r["what"] for r in read(tmp_path / "halves") if r["kind"] == "event"]
    assert events == ["interrupted", "resumed", "interrupted", "resumed"]


def test_a_complete_run_is_not_trained_again(tmp_path: Path) -> None:
    config = run(tmp_path)
    first = train(config)
    before = (tmp_path / "log.jsonl").read_bytes()
    again = train(config)
    assert (again.status, again.step, again.valid) == ("done", 12, first.valid)
    assert (tmp_path / "log.jsonl").read_bytes() == before


class Sits:
    """Somebody before the run."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, record: dict[str, Any]) -> None:
        """Nothing is done with records."""

    def answer(self, text: str) -> None:
        self.told.append(text)


def test_a_run_that_is_done_is_not_that_of_data_that_have_changed(tmp_path: Path) -> None:
    text, somebody = tmp_path / "my.txt", Sits()
    text.write_text("To be, or not to be, that is the question. " * 60)
    config = run(tmp_path / "run").replace(data={"source": str(text)})
    first = train(config, watch=somebody)
    assert somebody.told == []
    assert train(config, watch=somebody).valid == first.valid
    assert somebody.told == ["this run was done already: nothing is run"]
    before, log = text.read_text(), (tmp_path / "run" / "log.jsonl").read_bytes()
    text.write_text(before.upper())
    with pytest.raises(LabError, match=r"my\.txt \(train\) has changed .* another --keep\.out$"):
        train(config)
    text.write_text("short")
    with pytest.raises(LabError):
        train(config)
    text.unlink()  # what is done needs it no more
    assert train(config).valid == first.valid
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("steps", [12, 16])
def test_a_run_is_not_that_of_an_own_optimizer_that_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    own_module.written(tmp_path, monkeypatch)
    config = run(tmp_path / "run").replace(optimizer={"name": own_module.NAME, "lr": 0.01})
    first = train(config)
    assert len(read(tmp_path / "run")[0]["optimizer_code"]) == 64
    own_module.written(tmp_path, monkeypatch, "# another one\n")
    with pytest.raises(LabError, match=r"^the module of own_sgd:Own has changed since the run in"):
        train(config.replace(loop={"steps": steps}), extend=True)
    path = own_module.written(tmp_path, monkeypatch)
    assert train(config).valid == first.valid
    own_module.written(tmp_path, monkeypatch)
    path.unlink()  # it is not here any more: nothing can be compared
    assert train(config).valid == first.valid


def test_registered_optimizers_have_no_code_of_their_own() -> None:
    assert hardware.own_code("mars-m") is None
    assert hardware.own_code("no.such:Thing") is None
    assert hardware.own_code("torch.optim:SGD") == hardware.own_code("torch.optim.sgd:SGD")


def test_a_run_without_checkpoints_leaves_its_log_alone(tmp_path: Path) -> None:
    config = run(tmp_path).replace(keep={"save_every": None})
    first = train(config)
    assert not (tmp_path / "checkpoints").exists()
    before = (tmp_path / "log.jsonl").stat().st_mtime_ns
    assert train(config).valid == first.valid
    with pytest.raises(LabError, match="is done, and has no checkpoint to go on from"):
        train(config.replace(loop={"steps": 20}), extend=True)
    assert (tmp_path / "log.jsonl").stat().st_mtime_ns == before


def test_damaged_checkpoints_are_told_and_passed_over(tmp_path: Path) -> None:
    train(run(tmp_path, steps=6))
    whole = train(run(tmp_path / "whole", steps=9))
    newest = tmp_path / "checkpoints" / "step-00000006" / "optimizer.pt"
    flipped = bytearray(newest.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    newest.write_bytes(flipped)
    outcome = train(run(tmp_path, steps=9), extend=True)
    texts = [r["text"] for r in read(tmp_path) if r.get("what") == "refused"]
    assert len(texts) == 1
    assert "step-00000006" in texts[0]
    assert outcome.valid is not None
    assert whole.valid is not None
    for path in (tmp_path / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(LabError, match="is intact: remove it to begin again"):
        train(run(tmp_path, steps=12), extend=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_micro_batches_do_not_change_the_step(tmp_path: Path, precision: str) -> None:
    """The clip and the loss are of the mean over the batch, however it is cut."""
    finals = []
    for micro in (1, 2, 4):
        config = run(
            tmp_path / str(micro), "mars-adamw", micro_batch_size=micro, precision=precision
        )
        train(config.replace(model={"dropout": 0.0}))
        finals.append(torch.cat([t.flatten() for t in weights(tmp_path / str(micro), 12).values()]))
    moved = (
        finals[0] - torch.cat([p.detach().flatten() for p in GPT(config.model).parameters()])
    ).norm()
    tolerance = 1e-4 if precision == "fp32" else 0.2  # sums in another order; bf16 has 8 bits
    for other in finals[1:]:
        assert (other - finals[0]).norm() / moved < tolerance


def test_all_optimizers_see_the_same_weights_and_batches(tmp_path: Path) -> None:
    first = {}
    for name in OPTIMIZERS:
        training = prepare(run(tmp_path / name, name).replace(model={"dropout": 0.0}))
        first[name] = float(training._gradients())
    assert len(set(first.values())) == 1, first


def test_what_a_log_says(tmp_path: Path) -> None:
    train(run(tmp_path, "mars-adamw"), command="mars train miniature")
    header, *records = read(tmp_path)
    assert header["kind"] == "header"
    assert header["command"] == "mars train miniature"
    assert header["config"]["optimizer"]["lr"] == 0.01
    assert header["parameters"]["total"] == sum(
        p.numel() for p in GPT(run(tmp_path).model).parameters()
    )
    assert header["tokens_per_step"] == 64
    trained = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in trained] == [2, 4, 6, 8, 10, 12]
    assert all(r["tokens"] == 64 * r["step"] for r in records)
    assert all(0 < r["optimizer_seconds"] < r["step_seconds"] for r in trained)
    assert all(r["grad_norm"] > 0 for r in trained)
    seconds = [r["seconds"] for r in records]
    assert seconds == sorted(seconds)
    # Early validations at doubling distances, then every fourth step.
    assert [r["step"] for r in records if r["kind"] == "valid"] == [0, 1, 2, 4, 8, 12]
    readings = [r for r in records if r["kind"] == "diagnostics"]
    assert [r["step"] for r in readings] == [8]
    assert readings[0]["groups"][0]["variance_ratio"] > 0
    assert records[-1]["kind"] == "end"
    assert records[-1]["status"] == "done"


def test_diagnostics_change_nothing(tmp_path: Path) -> None:
    train(run(tmp_path / "with"))
    train(run(tmp_path / "without", diagnose_every=1000))
    for name, tensor in weights(tmp_path / "with", 12).items():
        assert torch.equal(tensor, weights(tmp_path / "without", 12)[name]), name


def test_the_gradient_norm_is_that_of_all_gradients(tmp_path: Path) -> None:
    for name in ("adamw", "mars-m"):
        config = run(tmp_path / name, name, log_every=1).replace(model={"dropout": 0.0})
        train(config)
        training = prepare(config)
        training._gradients()
        grads = [p.grad.flatten() for p in training.model.parameters() if p.grad is not None]
        logged = next(r for r in read(tmp_path / name) if r["kind"] == "train")["grad_norm"]
        assert logged == pytest.approx(float(torch.cat(grads).norm()), rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "mars-adamw", "muon"])
def test_fp16_scales_its_loss(tmp_path: Path, optimizer: str) -> None:
    outcome = train(run(tmp_path / "half", optimizer, precision="fp16"))
    single = train(run(tmp_path / "single", optimizer, precision="fp32"))
    assert outcome.valid == pytest.approx(single.valid, abs=0.1)
    header = read(tmp_path / "half")[0]
    assert header["precision"] == "float16"


def test_exact_mode_and_fp16_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="exact does not go with"):
        train(run(tmp_path / "x", "exact", precision="fp16"))
    assert not (tmp_path / "x").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_saved(tmp_path: Path) -> None:
    config = run(tmp_path / "nan", "adamw", steps=40)
    train(run(tmp_path / "nan", "adamw", steps=6))
    good = weights(tmp_path / "nan", 6)
    training = prepare(config)
    path = checkpoint.newest(tmp_path / "nan", print)
    assert path is not None
    training.restore(path)
    with torch.no_grad():
        next(training.model.parameters()).fill_(math.nan)
    checkpoint.save(
        tmp_path / "nan", 7, training.model, training.optimizer, training.training_state()
    )
    with pytest.raises(LabError, match="the loss is not finite at step"):
        train(config, extend=True)
    end = read(tmp_path / "nan")[-1]
    assert (end["kind"], end["status"]) == ("end", "diverged")
    for name, tensor in weights(tmp_path / "nan", 6).items():
        assert torch.equal(tensor, good[name])


def test_a_step_without_finite_gradients_can_be_skipped(tmp_path: Path) -> None:
    training = prepare(run(tmp_path, "mars-adamw", skip_nan=True))
    training.advance()
    before = [p.clone() for p in training.model.parameters()]
    model = training.loss_of
    training.loss_of = lambda *pair: model(*pair) * math.nan
    training.advance()
    assert training.step == 2
    for p, old in zip(training.model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    training.loss_of = model
    training.advance()
    assert not torch.equal(next(training.model.parameters()), before[0])


def test_a_directory_belongs_to_one_run(tmp_path: Path) -> None:
    train(run(tmp_path, "adamw", steps=3))
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    with pytest.raises(LabError, match=r"holds a run with optimizer\.lr = 0\.01, not 0\.5"):
        train(run(tmp_path, "adamw").replace(optimizer={"lr": 0.5}))
    with pytest.raises(LabError, match="holds a run already"):
        train(run(tmp_path, "adamw").replace(keep={"resume": False}))
    after = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.name != "lock")
    assert after == [pair for pair in before if pair[0].name != "lock"]


def test_a_directory_taken_meanwhile_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look at it and the lock there are minutes on a large machine."""
    ours, theirs = (run(tmp_path, "adamw", steps=3, seed=seed) for seed in (0, 1))

    def slowly(config: Run, world: World) -> Training:
        monkeypatch.undo()
        train(theirs)
        return prepare(config, world)

    monkeypatch.setattr("mars.lab.train.prepare", slowly)
    with pytest.raises(LabError, match=r"holds a run with loop\.seed = 1, not 0"):
        train(ours)


@contextmanager
def started(config: Run, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, which does not outlive a test that fails."""
    path = directory / "given.json"
    path.write_text(json.dumps(to_json(config)))
    words = [sys.executable, "-m", "mars.lab", "train", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_log(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if path.exists() and '"train"' in path.read_text():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("no training record in a minute")


@pytest.mark.slow
def test_a_signal_saves_and_ends_cleanly(tmp_path: Path) -> None:
    """As a shell starts it; every signal, in processes that are begun faster: tests/faults."""
    with started(run(tmp_path / "run", steps=10_000_000), tmp_path) as process:
        wait_for_log(tmp_path / "run" / "log.jsonl", process)
        with pytest.raises(LabError, match="in use by process"):
            train(run(tmp_path / "run", steps=10_000_000))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped at step" in out
    assert "the same command resumes" in out
    end = read(tmp_path / "run")[-1]
    assert (end["kind"], end["status"]) == ("end", "stopped")
    newest = checkpoint.newest(tmp_path / "run", print)
    assert newest is not None
    assert newest.name == f"step-{end['step']:08d}"


def test_weights_that_are_not_finite_are_neither_saved_nor_a_result(tmp_path: Path) -> None:
    """The loss of a step is that of the weights before it: it may be the last that was finite."""
    config = run(tmp_path, "adamw", steps=1).replace(optimizer={"lr": 1e30}, keep={"save_every": 1})
    with pytest.raises(LabError, match="not finite at step 1"):
        train(config)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    assert read(tmp_path)[-1]["status"] == "diverged"


def test_skipping_does_not_go_with_exact_mode_and_leaves_fp16_to_its_scaler(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="does not go with"):
        prepare(run(tmp_path, "exact", skip_nan=True))
    training = prepare(run(tmp_path, "adamw", skip_nan=True, precision="fp16"))
    training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for _ in range(3):
        training.advance()
    assert training.scaler.get_scale() < 2.0**40


def test_the_log_tells_how_large_the_state_is(tmp_path: Path) -> None:
    train(run(tmp_path))
    header = read(tmp_path)[0]
    matrices = sum(p.numel() for p in GPT(run(tmp_path).model).parameters() if p.ndim == 2)
    assert header["state_bytes"] > 12 * matrices  # m, v and h of matrices, and a little more


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks, nobody else
def test_a_validation_of_other_sizes_leaves_training_compiled_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else torch takes the number of rows for something that varies, in training too."""
    compile_, kinds = torch.nn.Module.compile, []

    def backend(graph: Any, examples: Any) -> Any:
        varies = any(isinstance(e, torch.SymInt) for e in examples)
        kinds.append(("train" if torch.is_grad_enabled() else "valid", varies))
        return graph.forward

    def compiled(self: Any, **options: Any) -> None:
        compile_(self, backend=backend, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    training = prepare(run(tmp_path, compile=True, eval_sequences=7).replace(model={"dropout": 0}))
    sizes = []
    held_out = training.task.held_out_rows
    monkeypatch.setattr(
        training.task, "held_out_rows", lambda a, b: sizes.append(b - a) or held_out(a, b)
    )
    training.validate()
    training.advance()
    torch.compiler.reset()
    assert sizes == [4, 3]
    assert {kind for kind, _ in kinds} == {"train", "valid"}
    assert not any(varies for _, varies in kinds)


@pytest.mark.parametrize(("held_out", "micro", "rows"), [(3000, 32, 30), (128, 16, 16), (7, 4, 4)])
def test_a_validation_goes_in_parts_of_one_size_if_there_is_a_good_one(
    tmp_path: Path, held_out: int, micro: int, rows: int
) -> None:
    task = prepare(run(tmp_path)).task
    task.held_out = held_out
    assert task.validation_rows(micro) == rows


def test_deterministic_kernels_are_asked_for_while_it_trains(tmp_path: Path) -> None:
    asked: list[bool] = []

    def watch(record: dict[str, Any]) -> None:
        asked.append(torch.are_deterministic_algorithms_enabled())

    train(run(tmp_path / "as-it-is", steps=4), watch=watch)
    assert set(asked) == {False}
    asked.clear()
    train(run(tmp_path / "asked", steps=4, deterministic=True), watch=watch)
    assert set(asked) == {True}
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    ours, theirs = (weights(tmp_path / name, 4) for name in ("as-it-is", "asked"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_has_no_deterministic_kernel_is_named() -> None:
    with (
        pytest.raises(LabError, match=r"^loop\.deterministic: .*put_.* deterministic impl"),
        hardware.deterministic(True),
    ):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_first_step_for_which_all_is_compiled_is_not_on_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, waits = Training.advance, iter([2.0])

    def slow_at_first(self: Training) -> None:
        time.sleep(next(waits, 0.0))
        advance(self)

    monkeypatch.setattr(Training, "advance", slow_at_first)
    train(run(tmp_path))
    assert 0 < read(tmp_path)[-1]["seconds"] < 2.0
