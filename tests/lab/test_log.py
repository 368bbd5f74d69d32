"""The log: whole lines, rewound on resume; TensorBoard read by its own reader."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_rundir import file_size_limit

from mars.lab.errors import LabError
from mars.lab.log import Log, read
from mars.lab.sinks import scalars

WRITER = """
import sys
from pathlib import Path
from mars.lab.log import Log
log = Log(Path(sys.argv[1]))
print("ready", flush=True)
step = 0
while True:
    step += 1
    log.write("train", step=step, text="x" * 500)
"""


def fill(directory: Path, steps: range, **sinks: bool) -> None:
    with Log(directory, **sinks) as log:
        for step in steps:
            log.write("train", step=step, tokens=step * 10, loss=1.0 / step)


def steps_in(directory: Path) -> list[int]:
    return [record["step"] for record in read(directory)]


def test_numbers_are_numbers_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.write(
            "train", step=1, loss=torch.tensor(0.5), norm=np.float64(2.5), count=np.int64(3),
            bad=[math.nan, {"x": math.inf}, torch.tensor(-math.inf)], place=tmp_path, pair=(1, 2),
            flag=True, none=None,
        )  # fmt: skip
    assert read(tmp_path) == [{
        "kind": "train", "step": 1, "loss": 0.5, "norm": 2.5, "count": 3,
        "bad": [None, {"x": None}, None], "place": str(tmp_path), "pair": [1, 2],
        "flag": True, "none": None,
    }]  # fmt: skip
    assert "NaN" not in (tmp_path / "log.jsonl").read_text()


def test_a_log_that_cannot_be_opened_again_closes_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, opened = Log(tmp_path), os.open
    log.write("header", a=1)

    def refused(path: Any, *args: Any) -> int:
        if str(path).endswith("log.jsonl"):
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *args)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(LabError, match="Too many open files"):
        log.replace_header(b=2)
    monkeypatch.undo()
    with open(tmp_path / "other", "w") as other:
        log.close()
        other.write("x")
        other.flush()


def test_a_record_is_on_file_when_write_returns(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write("train", step=1)
    assert read(tmp_path / "log.jsonl") == [{"kind": "train", "step": 1}]
    log.sync()
    log.close()
    log.close()


def test_a_kill_tears_nothing_but_the_last_line(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    path = tmp_path / "log.jsonl"
    while path.stat().st_size < 200_000:
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    steps = steps_in(tmp_path)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 100


@pytest.mark.parametrize("torn", [b"{", b'{"kind": "train", "step": 4', b"\0" * 70_000])
def test_a_torn_tail_is_ignored_and_not_written_on(tmp_path: Path, torn: bytes) -> None:
    fill(tmp_path, range(1, 4))
    with open(tmp_path / "log.jsonl", "ab") as file:
        file.write(torn)
    assert steps_in(tmp_path) == [1, 2, 3]
    fill(tmp_path, range(4, 6))
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


def test_a_log_that_is_all_torn_begins_again(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"kind"')
    fill(tmp_path, range(1, 2))
    assert steps_in(tmp_path) == [1]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 4))
    path = tmp_path / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][5:] + lines[2])
    with pytest.raises(LabError, match=r"log\.jsonl: line 2 is damaged"):
        read(tmp_path)
    with Log(tmp_path) as log:
        log.rewind(3)  # a run can go on all the same
    assert steps_in(tmp_path) == [1, 3]


def test_no_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"cannot read .*log\.jsonl: No such file"):
        read(tmp_path)


def test_rewinding_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.write("header", format=1)
        for step in (1, 2, 3):
            log.write("train", step=step)
            log.write("valid", step=step, loss=1.0)
        log.write("end", step=2, status="stopped")
        os.write(log._descriptor, b'{"kind": "tr')
        log.rewind(2)
        log.write("event", step=2, what="resumed")
        log.write("train", step=3)
    kinds = [(record["kind"], record.get("step")) for record in read(tmp_path)]
    assert kinds == [
        ("header", None), ("train", 1), ("valid", 1), ("train", 2), ("valid", 2), ("event", 2),
        ("train", 3),
    ]  # fmt: skip
    assert os.listdir(tmp_path) == ["log.jsonl"]


def test_rewinding_to_nothing_empties_the_log(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.write("header", format=1)
        log.write("valid", step=0)
        log.rewind(None)
        log.write("header", format=1)
    assert read(tmp_path) == [{"kind": "header", "format": 1}]


def test_a_full_disk_is_said_and_leaves_whole_lines(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 3))
    size = (tmp_path / "log.jsonl").stat().st_size
    with Log(tmp_path) as log:
        with file_size_limit(size + 20), pytest.raises(LabError, match=r"log\.jsonl: the file"):
            log.write("train", step=3, text="x" * 1000)
        assert (tmp_path / "log.jsonl").stat().st_size == size
        log.write("train", step=3)  # there is room again
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_log_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(LabError, match=r"cannot write .*log\.jsonl"):
        Log(tmp_path)


def test_names_of_scalars() -> None:
    record = {"kind": "train", "step": 3, "tokens": 30, "loss": 1.5, "lr": 0.1, "mfu": None}
    assert scalars(record) == {"tokens": 30.0, "train/loss": 1.5, "lr": 0.1}
    assert scalars({"kind": "valid", "step": 3, "loss": 1.0}) == {"valid/loss": 1.0}
    groups = [{"name": "matrices", "cosine": 0.5, "independent": True, "c_norm": None}]
    record = {"kind": "diagnostics", "step": 3, "groups": groups}
    assert scalars(record) == {"diagnostics/cosine/matrices": 0.5}
    assert scalars({"kind": "end", "step": 3, "valid": 1.0}) == {}


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory / "tensorboard"))
    reader.Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def test_tensorboard_shows_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    fill(tmp_path, range(1, 6), tensorboard=True)
    with Log(tmp_path, tensorboard=True) as log:
        log.rewind(3)
        log.write("event", step=3, what="resumed")
        for step in (4, 5, 6):
            log.write("train", step=step, tokens=step * 10, loss=8.0 * step)
    shown = events(tmp_path)
    assert shown["tokens"] == [(step, step * 10.0) for step in range(1, 7)]
    expected = [1.0, 0.5, 1 / 3, 32.0, 40.0, 48.0]
    assert shown["train/loss"] == [
        (step, pytest.approx(value)) for step, value in enumerate(expected, 1)
    ]


def test_what_is_not_installed_is_said_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LabError, match="pip install wandb"):
        Log(tmp_path, wandb="project")
    with pytest.raises(LabError, match="pip install tensorboard"):
        Log(tmp_path, tensorboard=True)
    assert os.listdir(tmp_path) == []


WANDB = """
import sys
from pathlib import Path
from mars.lab.log import Log
for steps in (1, 2), (2, 3):
    with Log(Path(sys.argv[1]), wandb="project", config={"lr": 0.1}) as log:
        for step in steps:
            log.write("train", step=step, loss=1.0 / step)
            log.write("valid", step=step, loss=2.0 / step)
"""


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(tmp_path: Path) -> None:
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)], env=environment, check=True, timeout=100
    )
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    identity = (tmp_path / "wandb-id").read_text()
    assert len(runs) == 2  # of one identity: the server joins them
    assert all(identity in run.name for run in runs)
    for run in runs:
        sent = next(run.glob("*.wandb")).read_bytes()
        assert b"train/loss" in sent
        assert b"valid/loss" in sent
