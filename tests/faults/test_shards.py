"""Several processes: checkpoints in shards that are damaged, and ranks that are killed."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import checkpoints, die, disturb, launch, train_all
from runs import config, set_length, steps, texts
from test_checkpoints import DAMAGES

from mars.lab import checkpoint
from mars.lab.config import Run
from mars.lab.train import prepare

SHARD, INDEX = "__1_0.distcp", ".metadata"


def shards(out: Path, length: int = 6) -> Run:
    """A run in two shards, with a checkpoint at every third step, and dropout on both ranks."""
    made = config(out, "mars-adamw", parallel="fsdp2", steps=length, batch_size=4)
    return made.replace(model={"dropout": 0.1})


def end(made: Run) -> list[torch.Tensor]:
    """Weights and state of the optimizer at the end, in one process."""
    training = prepare(made.replace(loop={"parallel": "auto"}))
    path = checkpoint.newest(Path(made.directory), print)
    assert path is not None
    training.restore(path)
    states = training.optimizer.state_dict()["state"]
    kept = [states[i][key] for i in sorted(states) for key in sorted(states[i])]
    return [*(p.detach() for p in training.model.parameters()), *kept]


def assert_same_end(a: Run, b: Run) -> None:
    for mine, theirs in zip(end(a), end(b), strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks, undisturbed."""
    made = shards(tmp_path_factory.mktemp("shards") / "whole")
    outcome = launch(2, train_all, made)
    assert outcome[0][0][:2] == ("done", 6)
    assert checkpoints(Path(made.directory)) == ["best.json", "step-00000003", "step-00000006"]
    return made


@pytest.mark.parametrize("name", [SHARD, INDEX, "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_index_or_manifest(
    whole: Run, tmp_path: Path, damage: str, name: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.directory, run)
    DAMAGES[damage](run / "checkpoints" / "step-00000006" / name)
    told: list[str] = []
    assert checkpoint.newest(run, told.append) == run / "checkpoints" / "step-00000003"
    assert len(told) == 1
    assert told[0].startswith("checkpoint refused: step-00000006")
    assert name in told[0]


def test_two_ranks_go_on_from_the_one_before_when_a_shard_is_missing(
    whole: Run, tmp_path: Path
) -> None:
    made = shards(tmp_path / "run")
    shutil.copytree(whole.directory, made.directory)
    log = Path(made.directory) / "log.jsonl"
    *lines, last = log.read_text().splitlines(keepends=True)
    assert '"end"' in last
    log.write_text("".join(lines))  # as if it had been killed just before
    (Path(made.directory) / "checkpoints" / "step-00000006" / SHARD).unlink()
    results = launch(2, train_all, made)
    assert results[0] == results[1]
    assert results[0][0][:2] == ("done", 6)
    assert texts(Path(made.directory), "resumed") == ["from step-00000003"]
    assert SHARD in texts(Path(made.directory), "refused")[0]
    assert_same_end(made, whole)


def kill_in_write(run: Any) -> Any:
    """Rank 1 dies with half of its second shard on disk."""
    from mars.lab.sealed import HashedFile

    write = HashedFile.write

    def half(self: HashedFile, data: Any) -> int:
        if "step-00000006" in str(self._file.name) and SHARD in str(self._file.name):
            self._file.write(bytes(data)[: len(data) // 2])
            self._file.flush()
            die(None)
        return write(self, data)

    if os.environ["RANK"] == "1":
        HashedFile.write = half  # type: ignore[method-assign]
    return train_all(run)


def kill_before_rename(run: Any) -> Any:
    """Rank 0 dies when all shards are written and nothing has its name yet."""
    from mars.lab import retention

    publish = retention.publish

    def late(temporary: Path, final: Path) -> None:
        if final.name == "step-00000006":
            die(None)
        publish(temporary, final)

    if os.environ["RANK"] == "0":
        retention.publish = late
    return train_all(run)


def on_own_disks(disks: Path, run: Any) -> Any:
    """Every rank works in a directory of its own, as on machines that share no disk."""
    os.chdir(disks / os.environ["RANK"])
    return train_all(run)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_run_on_machines_that_share_no_disk_is_refused(tmp_path: Path, mode: str) -> None:
    for rank in "01":
        (tmp_path / rank).mkdir()
    made = shards(Path("run")).replace(loop={"parallel": mode})
    first, second = launch(2, on_own_disks, tmp_path, made)
    assert (first[1], second[1]) == ("Elsewhere", "LabError")
    assert "what rank 0 writes in run is not there for rank 1" in second[2]
    assert not (tmp_path / "0" / "run" / "log.jsonl").exists()


def test_a_checkpoint_that_lacks_the_shards_of_another_disk_is_none(tmp_path: Path) -> None:
    for rank in "01":
        (tmp_path / rank / "run").mkdir(parents=True)
        (tmp_path / rank / "run" / "lock").touch()  # of another time
    first, second = launch(2, on_own_disks, tmp_path, shards(Path("run")))
    assert (first[1], second[1]) == ("CheckpointError", "Elsewhere")
    assert "all machines must share the disk" in first[2]
    assert checkpoints(tmp_path / "0" / "run") == []


@pytest.mark.parametrize("harm", [kill_in_write, kill_before_rename])
def test_a_rank_killed_while_shards_are_written(
    whole: Run, tmp_path: Path, harm: Callable[..., Any]
) -> None:
    made = shards(tmp_path / "run")
    results = launch(2, harm, made)
    assert "dead" in results
    survivor = next(result for result in results if result != "dead")
    assert survivor[:2] == ("error", "LabError"), survivor
    assert "step-00000006" not in checkpoints(Path(made.directory))
    results = launch(2, train_all, made)
    assert results[0][0][:2] == ("done", 6)
    assert texts(Path(made.directory), "resumed") == ["from step-00000003"]
    assert texts(Path(made.directory), "refused") == []
    assert checkpoints(Path(made.directory)) == ["best.json", "step-00000003", "step-00000006"]
    assert_same_end(made, whole)


def reached(run: Run) -> int:
    """The step of the newest checkpoint, intact or not."""
    return max((0, *steps(Path(run.directory))))


def kill_at_random(run: Run, rank: int, patient: bool, seconds: float) -> Any:
    """One of the ranks is killed some seconds after it began, or after the next checkpoint."""
    before = reached(run)

    def kill() -> None:
        while patient and reached(run) == before:
            time.sleep(0.005)
        time.sleep(seconds)
        die(None)

    if os.environ["RANK"] == str(rank):
        threading.Thread(target=kill, daemon=True).start()
    return train_all(run)


def kill_again_and_again(folder: Path, kills: int) -> None:
    never = shards(folder / "run", length=1_000_000)
    dice = random.Random(kills)
    for kill in range(kills):
        patient = kill % 3 == 0  # else it might never come forward
        results = launch(2, kill_at_random, never, kill % 2, patient, dice.uniform(0.0, 0.5))
        assert results[kill % 2] == "dead"
    length = reached(never) + 4
    assert length > kills
    set_length(folder / "run", length)
    made, alone = shards(folder / "run", length), shards(folder / "alone", length)
    results = launch(2, train_all, made, alone)
    assert results[0][0] == results[0][1] == ("done", length, results[0][0][2])
    assert texts(folder / "run", "refused") == []
    assert not [name for name in checkpoints(folder / "run") if name.startswith(".tmp-")]
    assert_same_end(made, alone)


@pytest.mark.slow
def test_one_rank_killed_three_times_changes_nothing(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 3)


@pytest.mark.exhaustive
def test_one_rank_killed_fifty_times_changes_nothing(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 50)


def die_after_a_save(training: Any) -> None:
    """Saves go on behind the training: this one waits for the first."""
    while not steps(Path(training.run.directory)):
        time.sleep(0.005)
    die(training)


def test_a_rank_that_dies_leaves_a_run_that_one_process_can_end(tmp_path: Path) -> None:
    made = shards(tmp_path / "run")
    dead, other = launch(2, disturb, 0, 5, die_after_a_save, made)
    assert dead == "dead"
    assert other[:2] == ("error", "LabError")
    assert "rank 1: another process has ended or is lost" in other[2]
    alone = made.replace(loop={"parallel": "auto"})
    assert train_all(alone)[0][:2] == ("done", 6)
    assert texts(tmp_path / "run", "resumed") == ["from step-00000003"]
