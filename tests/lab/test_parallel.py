"""Two processes and more: the same run as one, whatever befalls one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from miniature import OPTIMIZERS, run
from processes import (
    checkpoints,
    count_graphs,
    die,
    disturb,
    fill_up,
    gathered_gradients,
    launch,
    poison,
    save_and_change,
    slowly,
    small_files,
    terminate,
    train_all,
    unreadable,
    without_memory,
)

from mars.lab import checkpoint, hardware, parallel
from mars.lab.config import Run, to_json
from mars.lab.errors import LabError
from mars.lab.log import read
from mars.lab.loop import Training
from mars.lab.models import GPT
from mars.lab.train import prepare, train

# Newton–Schulz in float32: in bfloat16 a last bit of m can flip one in 2⁸.
OPTIMIZERS.setdefault("mars-m-32", {
    "name": "mars-m", "lr": 1e-2, "options": {"ns_dtype": "float32"},
})  # fmt: skip


def config(out: Path, optimizer: str = "adamw", **loop: Any) -> Run:
    """12 sequences a step: for 1, 2, 3 and 4 processes. The rate does not depend on the end."""
    made = run(out, optimizer, **{"batch_size": 12, "eval_sequences": 7, "steps": 6, **loop})
    return made.replace(model={"dropout": 0.0}, schedule={"shape": "constant"})


def restored(made: Run) -> Training:
    """The end of a run, in this one process."""
    training = prepare(made.replace(loop={"parallel": "auto", "micro_batch_size": None}))
    path = checkpoint.newest(Path(made.directory), print)
    assert path is not None
    training.restore(path)
    return training


def flat(training: Training) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


def state(training: Training) -> torch.Tensor:
    """Everything that the optimizer keeps."""
    saved = training.optimizer.state_dict()
    return torch.cat([
        value.double().flatten()
        for one in saved.get("together", [saved])
        for number in sorted(one["state"])
        for _, value in sorted(one["state"][number].items())
    ])  # fmt: skip


def distance(a: Training, b: Training) -> float:
    """Between two ends, as a share of the way from the beginning."""
    start = torch.cat([p.detach().flatten() for p in GPT(a.run.gpt, seed=0).parameters()])
    return float((flat(a) - flat(b)).norm() / (flat(b) - start).norm())


def numbers(directory: Path, kind: str, name: str) -> list[float]:
    return [r[name] for r in read(directory) if r["kind"] == kind]


def readings(directory: Path) -> list[float]:
    """What the diagnostics tell of whole tensors."""
    groups = [group for r in read(directory) if r["kind"] == "diagnostics" for group in r["groups"]]
    assert groups
    # A variance is taken of some elements, of the first process's shards if there are shards.
    kinds = ("clipped", "c_norm", "cosine", "update_rms")
    return [g[name] for g in groups for name in kinds if g[name] is not None]


CASES = [
    *((mode, name) for mode in ("ddp", "fsdp2") for name in ("adamw", "muon", "mars-adamw")),
    ("ddp", "mars-m-32"), ("fsdp2", "mars-m-32"), ("ddp", "exact"), ("fsdp2", "exact"),
]  # fmt: skip


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """With micro-batches, for every way to clip; the log and the checkpoints are the same."""
    cut = {"micro_batch_size": 3, "log_every": 1}  # two micro-batches on each
    configs = [config(tmp_path / f"{m}-{o}", o, parallel=m, **cut) for m, o in CASES]
    results = launch(2, train_all, *configs)
    assert results[0] == results[1]
    for name in dict.fromkeys(name for _, name in CASES):
        train(config(tmp_path / name, name, log_every=1))
    worst: dict[str, float] = {}
    for made, (mode, name), (status, step, valid) in zip(configs, CASES, results[0], strict=True):
        where = f"{mode}-{name}"
        assert (status, step) == ("done", 6)
        theirs, ours = restored(made), restored(config(tmp_path / name, name))
        worst[where] = distance(theirs, ours)
        far = 1e-2 if name == "muon" else 1e-3  # Muon of torch iterates in bfloat16
        assert torch.allclose(state(theirs), state(ours), rtol=far, atol=far / 100), where
        directory = tmp_path / where
        for kind, field in (("train", "loss"), ("train", "grad_norm"), ("valid", "loss")):
            alone = numbers(tmp_path / name, kind, field)
            assert numbers(directory, kind, field) == pytest.approx(alone, rel=far / 10), where
        assert valid == numbers(directory, "valid", "loss")[-1]
        if name.startswith("mars") or name == "exact":
            assert readings(directory) == pytest.approx(readings(tmp_path / name), rel=1e-3), where
        assert checkpoints(directory) == ["best.json", "step-00000003", "step-00000006"]
        header = read(directory)[0]
        assert header["parallel"]["mode"] == mode
        assert header["parallel"]["ranks"] == 2
    assert max(value for name, value in worst.items() if "muon" not in name) < 3e-4, worst
    assert max(worst.values()) < 1e-2, worst


def test_bf16_on_two_processes(tmp_path: Path) -> None:
    configs = [
        config(tmp_path / mode, parallel=mode, precision="bf16", micro_batch_size=3)
        for mode in ("ddp", "fsdp2")
    ]
    configs.append(config(tmp_path / "hybrid", parallel="fsdp2", shards=1))
    launch(2, train_all, *configs)
    alone = config(tmp_path / "one", precision="bf16")
    train(alone)
    for made in configs[:2]:
        assert distance(restored(made), restored(alone)) < 0.2  # bf16 has 8 bits
    train(config(tmp_path / "32"))
    assert distance(restored(configs[2]), restored(config(tmp_path / "32"))) < 1e-4


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_signal_to_one_stops_all_at_one_step_and_the_run_goes_on(
    tmp_path: Path, mode: str
) -> None:
    name = "mars-adamw" if mode == "ddp" else "adamw"
    long = config(tmp_path / "run", name, parallel=mode, steps=9, eval_every=3).replace(
        model={"dropout": 0.1}
    )
    whole = long.replace(keep={"out": str(tmp_path / "whole")})
    results = launch(2, disturb, 1, 4, terminate, long)
    assert results[0] == results[1]
    assert results[0][0][:2] == ("stopped", 6)  # told one step later
    last = read(tmp_path / "run")[-1]
    assert (last["kind"], last["status"], last["step"]) == ("end", "stopped", 6)
    # To the bit, with the random numbers of both.
    results = launch(2, train_all, long, whole)
    assert results[0][0] == results[0][1] == results[1][0]
    assert torch.equal(flat(restored(long)), flat(restored(whole)))
    assert torch.equal(state(restored(long)), state(restored(whole)))


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_what_is_not_finite_on_one_stops_all(tmp_path: Path, mode: str) -> None:
    results = launch(2, disturb, 1, 4, poison, config(tmp_path, parallel=mode))
    assert [result[1] for result in results] == ["Diverged", "Elsewhere"]
    assert {result[2] for result in results} == {results[0][2]}
    assert "not finite at step 5" in results[0][2]
    assert read(tmp_path)[-1]["status"] == "diverged"
    assert checkpoint.newest(tmp_path, print) == tmp_path / "checkpoints" / "step-00000003"


def test_what_is_not_finite_on_one_is_skipped_by_all(tmp_path: Path) -> None:
    configs = [
        config(tmp_path / mode, parallel=mode, skip_nan=True, steps=5) for mode in ("ddp", "fsdp2")
    ]
    for made in configs:
        results = launch(2, disturb, 1, 4, poison, made)
        assert results[0] == results[1]
        assert results[0][0][:2] == ("done", 5)
        before = checkpoint.newest(tmp_path / Path(made.directory).name, print)
        assert before is not None
    assert torch.allclose(flat(restored(configs[0])), flat(restored(configs[1])), atol=1e-5)
    assert bool(flat(restored(configs[0])).isfinite().all())


def test_one_that_dies_does_not_hang_the_others(tmp_path: Path) -> None:
    dead, other = launch(2, disturb, 0, 4, die, config(tmp_path / "first", parallel="ddp"))
    assert dead == "dead"
    assert other[1] == "LabError"
    assert "rank 1: another process has ended or is lost" in other[2]
    # The directory is free, and what was saved is good.
    outcome = train(config(tmp_path / "first"))
    assert (outcome.status, outcome.step) == ("done", 6)
    alone = config(tmp_path / "alone")
    train(alone)
    assert distance(restored(config(tmp_path / "first")), restored(alone)) < 1e-4


def test_one_that_cannot_begin_does_not_hang_the_others(tmp_path: Path) -> None:
    """DDP's first messages come when all have what they need."""
    first, second = launch(2, without_memory, 1, config(tmp_path, parallel="ddp"), seconds=20)
    assert (first[1], second[1]) == ("Elsewhere", "LabError")
    assert "the model does not fit in memory: CUDA out of memory" in second[2]


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [(2, 1, "adamw"), (1, 2, "mars-adamw"), (2, 3, "mars-m-32"), (4, 2, "adamw")],
)
def test_saved_on_some_loaded_on_others(
    tmp_path: Path, before: int, after: int, optimizer: str
) -> None:
    made = config(tmp_path / "run", optimizer, parallel="fsdp2", steps=4)
    alone = config(tmp_path / "alone", optimizer, steps=4)
    saved = launch(before, train_all, made)[0][0][2]
    train(alone)
    ours, theirs = restored(alone), restored(made)
    # The same, in one process and in shards of another number.
    assert theirs.validate()["loss"] == pytest.approx(saved, rel=1e-6)
    assert torch.allclose(flat(theirs), flat(ours), atol=1e-5)
    assert torch.allclose(state(theirs), state(ours), rtol=1e-3, atol=1e-5)
    longer = made.replace(loop={"steps": 7, "parallel": "auto" if after == 1 else "fsdp2"})
    results = [train_all(longer)] if after == 1 else launch(after, train_all, longer)
    whole = train(alone.replace(loop={"steps": 7}), extend=True)
    assert results[0][0][:2] == ("done", 7)
    assert results[0][0][2] == pytest.approx(whole.valid, rel=1e-6)
    texts = [r["text"] for r in read(tmp_path / "run") if r.get("what") == "resumed"]
    assert texts == ["from step-00000004"]
    layout = json.loads((tmp_path / "run/checkpoints/step-00000007/manifest.json").read_text())
    assert layout.get("ranks", 1) == after
    assert layout.get("layout") == ("sharded" if after > 1 else None)


def test_one_file_is_loaded_in_shards(tmp_path: Path) -> None:
    """And DDP's checkpoints, which are single files, by FSDP2; Muon is two optimizers in one."""
    made = config(tmp_path / "run", "muon", steps=3)
    train(made)
    results = launch(2, train_all, made.replace(loop={"steps": 6, "parallel": "fsdp2"}))
    alone = config(tmp_path / "alone", "muon")
    train(alone)
    assert results[0][0][:2] == ("done", 6)
    longer = made.replace(loop={"steps": 6})
    # A last place of bfloat16, in which Muon iterates: 0.0030 on a CPU with AMX. Without the
    # momenta of the file it is 0.045.
    assert distance(restored(longer), restored(alone)) < 2**-8
    with pytest.raises(LabError, match="is not of this model"):
        checkpoint.load(
            tmp_path / "run/checkpoints/step-00000006",
            GPT(made.replace(model={"n_layer": 2}).model),
        )


def test_weights_from_elsewhere_begin_a_run_of_shards(tmp_path: Path) -> None:
    """From one file, from shards, and from a Hugging Face folder that stores its head as well."""
    from safetensors.torch import save_file

    from mars.lab.converting import ConvertArgs, convert_command
    from mars.lab.huggingface.weights import to_config, to_theirs

    before = config(tmp_path / "before", steps=3)
    train(before)
    path = tmp_path / "before" / "checkpoints" / "step-00000003"
    folder = tmp_path / "folder"
    folder.mkdir()
    model = restored(before).model
    assert isinstance(model, GPT)
    vocabulary = before.model.vocab_size
    tensors = to_theirs(model, vocabulary)
    save_file(
        {**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(to_config(before.model, vocabulary, None)))
    shards = convert_command(ConvertArgs(path, "sharded", tmp_path / "before/checkpoints/shards"))
    runs = [
        config(tmp_path / name, parallel="fsdp2", steps=2).replace(model={"init": str(init)})
        for name, init in {"a": path, "b": shards, "c": folder}.items()
    ]
    alone = config(tmp_path / "alone", steps=2).replace(model={"init": str(path)})
    ended = train(alone).valid
    results = launch(2, train_all, *runs)[0]
    assert [result[:2] for result in results] == [("done", 2)] * 3
    assert [result[2] for result in results] == pytest.approx([ended] * 3, rel=1e-6)
    begun = numbers(tmp_path / "before", "valid", "loss")
    assert numbers(tmp_path / "c", "valid", "loss")[0] == pytest.approx(begun[-1], rel=1e-6)


@pytest.mark.parametrize("name", ["training.pt", "optimizer.pt"])
def test_what_one_rank_cannot_read_ends_all(tmp_path: Path, name: str) -> None:
    made = config(tmp_path / "run", parallel="fsdp2", steps=3)
    launch(2, train_all, made)
    results = launch(2, unreadable, name, made.replace(loop={"steps": 6}), seconds=40)
    assert [result[1] for result in results] == ["Elsewhere", "CheckpointError"]
    assert {f"{name} cannot be read" in result[2] for result in results} == {True}


def test_a_flipped_bit_in_a_shard_is_told_and_the_one_before_used(tmp_path: Path) -> None:
    made = config(tmp_path / "run", parallel="fsdp2")
    whole = launch(2, train_all, made)[0]
    folder = tmp_path / "run" / "checkpoints" / "step-00000006"
    files = ["__0_0.distcp", "optimizer.pt", "training.pt", ".metadata", "__1_0.distcp"]
    assert {path.name for path in folder.iterdir()} == {*files, "manifest.json"}
    for name in files:
        data = (folder / name).read_bytes()
        damaged = bytearray(data)
        damaged[len(data) // 2] ^= 1
        (folder / name).write_bytes(damaged)
        told: list[str] = []
        before = checkpoint.newest(tmp_path / "run", told.append)
        assert before == folder.with_name("step-00000003")
        assert told == [f"checkpoint refused: step-00000006: {name} does not match its checksum"]
        if name != files[-1]:
            (folder / name).write_bytes(data)
    log = tmp_path / "run" / "log.jsonl"
    *lines, end = log.read_text().splitlines(keepends=True)
    assert '"end"' in end
    log.write_text("".join(lines))  # as if it had been killed just before
    again = launch(2, train_all, made)
    assert again[0] == again[1] == whole
    records = read(tmp_path / "run")
    assert [r["text"] for r in records if r.get("what") == "refused"] == told
    assert [r["text"] for r in records if r.get("what") == "resumed"] == ["from step-00000003"]


def test_both_forms_of_a_checkpoint_convert_into_each_other(tmp_path: Path) -> None:
    """Muon is two optimizers in one, MARS has its own format of state."""
    from mars.lab import loading
    from mars.lab.converting import ConvertArgs, convert_command

    for name in ("muon", "mars-adamw"):
        made = config(tmp_path / name, name, steps=3)
        train(made)
        path = tmp_path / name / "checkpoints" / "step-00000003"
        before = restored(made)
        with pytest.raises(LabError, match="is not a checkpoint: give runs/NAME/checkpoints"):
            convert_command(ConvertArgs(tmp_path / name, "sharded"))
        assert convert_command(ConvertArgs(path, "sharded")) == path
        assert (path / ".metadata").exists()
        assert not (path / "model.safetensors").exists()
        shards = restored(made)
        with pytest.raises(LabError, match="is sharded already"):
            convert_command(ConvertArgs(path, "sharded"))
        single = convert_command(ConvertArgs(path, "single", tmp_path / f"{name}-out"))
        training = prepare(made)
        training.restore(single)
        for other in (shards, training):
            assert torch.equal(flat(other), flat(before))
            assert torch.equal(state(other), state(before))
        assert loading.find(single)[0].optimizer == made.optimizer  # as sample and init find it
        with pytest.raises(LabError, match="already exists"):
            convert_command(ConvertArgs(path, "single", tmp_path / f"{name}-out"))
        assert checkpoints(tmp_path / name) == ["best.json", "step-00000003"]


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    import os
    import pickle

    from mars.lab import sharded

    class Bomb:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'exploded'}",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(checkpoint.CheckpointError, match="is not allowed there"):
        sharded.index(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_a_save_that_fails_behind_the_training_ends_it_with_one_error(tmp_path: Path) -> None:
    made = config(tmp_path, parallel="fsdp2", steps=40)
    results = launch(2, disturb, 1, 5, small_files, made)
    assert [result[1] for result in results] == ["CheckpointError", "Elsewhere"]
    text = results[0][2]
    assert "cannot save checkpoint" in text
    assert "step-00000006" in text
    assert "the file would be larger than the limit" in text
    assert "earlier ones are untouched" in text
    assert checkpoints(tmp_path) == ["step-00000003"]  # and nothing half written
    assert checkpoint.newest(tmp_path, print) == tmp_path / "checkpoints" / "step-00000003"
    # Not at the next save, but as soon as all know.
    assert max(r.get("step", 0) for r in read(tmp_path)) < 9


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_block_is_one_graph(tmp_path: Path, mode: str) -> None:
    """Of more weights than DDP's first bucket holds."""
    made = config(tmp_path, parallel=mode, compile=True).replace(model={"n_embd": 192})
    assert launch(1, count_graphs, made) == [3]  # embedding, block, last norm


@pytest.mark.parametrize("shards", [None, 1])
def test_between_micro_batches_gradients_stay_in_shards(tmp_path: Path, shards: int | None) -> None:
    made = config(tmp_path, parallel="fsdp2", shards=shards, micro_batch_size=2)
    for held in launch(2, gathered_gradients, made):
        assert held == [0, 0, 0]


@pytest.mark.parametrize("name", ["soap", "adopt"])
def test_who_cannot_step_shards_says_so_before_the_first_step(tmp_path: Path, name: str) -> None:
    made = config(tmp_path, parallel="fsdp2").replace(optimizer={"name": name, "lr": 1e-2})
    told = launch(2, train_all, made)
    assert all(one[0] == "error" for one in told)
    assert any(f"{name} cannot step sharded parameters" in one[2] for one in told)


def test_a_rank_without_memory_ends_after_the_checkpoint_that_is_being_written(
    tmp_path: Path,
) -> None:
    made = config(tmp_path, parallel="fsdp2")
    other, full = launch(2, slowly, 1, 3, fill_up, made)
    assert full[1] == "LabError"
    assert "the GPU's memory is full: lower loop.micro_batch_size (6)" in full[2]
    assert other[1] == "LabError"  # its partner is lost
    assert checkpoint.newest(tmp_path, print) == tmp_path / "checkpoints" / "step-00000003"


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    made = config(tmp_path, parallel="fsdp2")
    before = launch(2, save_and_change, made, 1)[0]
    model = GPT(made.model, seed=None)
    checkpoint.load(tmp_path / "checkpoints" / "step-00000001", model)
    for name, p in model.named_parameters():
        assert torch.equal(p, torch.from_numpy(before[name])), name
    assert 7.0 not in state(restored(made))


DYING = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import processes
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    processes.At(7, processes.die)
from mars.lab.cli import command
sys.argv[1:] = ["train", {config!r}]
command()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_torchrun_restarts_a_run_of_which_a_process_died(tmp_path: Path, mode: str) -> None:
    made = config(tmp_path / "run", parallel=mode, steps=9).replace(model={"dropout": 0.1})
    given = tmp_path / "given.json"
    given.write_text(json.dumps(to_json(made)))
    script = tmp_path / "script.py"
    script.write_text(DYING.format(tests=str(Path(__file__).parent), config=str(given)))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*words, "--max-restarts=1", str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done at step 9") == 1
    assert "resumed from step-0000000" in done.stderr  # 3 or 6, which was being written
    whole = made.replace(keep={"out": str(tmp_path / "whole")})
    launch(2, train_all, whole)
    assert torch.equal(flat(restored(made)), flat(restored(whole)))
    assert torch.equal(state(restored(made)), state(restored(whole)))


@pytest.mark.parametrize(
    ("loop", "ranks", "message"),
    [
        ({"parallel": "ddp"}, 5, r"batch_size \(12\) must be a multiple of the number of proc"),
        ({"parallel": "fsdp2", "shards": 4}, 6, r"shards \(4\) must divide the number of proc"),
        ({"parallel": "fsdp2", "precision": "fp16"}, 2, "fp16 does not go with"),
        ({"parallel": "ddp", "shards": 2}, 2, "shards is for"),
        ({"parallel": "fsdp2"}, None, "this is one process: start it with"),
    ],
)
def test_what_cannot_be_is_refused(
    loop: dict[str, Any], ranks: int | None, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if ranks is not None:
        values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_PORT": 1}
        for name, value in {**values, "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, str(value))
    with pytest.raises(LabError, match=message):
        parallel.shape(config(tmp_path / "run", **loop))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_more_processes_than_gpus_are_refused_by_the_first_too(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another than the first says before they are connected, nobody hears."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(LabError, match="started 2 processes on this machine, which has 1 GPUs"):
        hardware.choose_device("auto", rank)


def test_nobody_to_connect_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in {**values, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(parallel, "TIMEOUT", timedelta(seconds=1))
    with (
        pytest.raises(LabError, match="rank 1 cannot connect to the other processes"),
        parallel.joined(config(tmp_path, parallel="ddp"), torch.device("cpu")),
    ):
        pass
