"""Kills, full disks, flipped bits, forged files: the last good checkpoint is found and loads."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from test_checkpoint import bits, trained
from test_retention import flip, refuse, save_steps
from test_rundir import file_size_limit, not_root

from mars.lab import checkpoint, sealed
from mars.lab.checkpoint import CheckpointError
from mars.lab.rundir import RunDirectory

FILES = ("model.safetensors", "optimizer.pt", "training.pt", "manifest.json")

# Saves in a child that kills itself before the n-th thing it does to the disk, for every n.
KILLER = """
import json, os, shutil, signal, sys
from pathlib import Path
import torch
from mars.lab import checkpoint, sealed
from mars.lab.rundir import RunDirectory

torch.set_num_threads(1)
base, target = Path(sys.argv[1]), int(sys.argv[2])

def state(value):
    model = torch.nn.Linear(4, 4)
    for p in model.parameters():
        torch.nn.init.constant_(p, value)
        p.grad = torch.full_like(p, value)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return model, optimizer

def tensors(model, optimizer):
    states = optimizer.state_dict()["state"].values()
    return [*model.state_dict().values(), *(t for own in states for t in own.values())]

def arm(run, limit):
    count = 0
    def tick(what):
        nonlocal count
        count += 1
        if count == limit:
            os.write(2, f"{what}\\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
    def audit(event, arguments):
        acts = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
        opens = event == "open" and arguments[1] and set(arguments[1]) & set("wax")
        if opens or event in acts:
            tick(f"{event} {os.path.basename(str(arguments[0]))}")
    sys.addaudithook(audit)
    fsync, write = os.fsync, sealed.HashedFile.write
    def slow_fsync(descriptor):
        tick("fsync")
        fsync(descriptor)
    def slow_write(self, data):
        half = bytes(data)[: len(data) // 2]
        self._file.write(half)
        self._file.flush()
        tick("write")
        self._file.seek(-len(half), 1)
        return write(self, data)
    os.fsync, sealed.HashedFile.write = slow_fsync, slow_write

for step, value in ((1, 1.0), (2, 2.0)):
    model, optimizer = state(value)
    checkpoint.save(base, step, model, optimizer, {"value": value}, best=value)
outcomes = []
for limit in range(1, 1000):
    run = base.with_name(f"{base.name}-{limit}")
    shutil.copytree(base, run)
    child = os.fork()
    if child == 0:
        model, optimizer = state(3.0)
        arm(run, limit)
        checkpoint.save(run, target, model, optimizer, {"value": 3.0}, keep=1, best=0.5)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    refused = []
    with RunDirectory(run).lock():
        left = sorted(os.listdir(run / "checkpoints"))
        newest = checkpoint.newest(run, refused.append)
        model, optimizer = state(0.0)
        value = checkpoint.load(newest, model, optimizer)["value"]
        pairs = zip(tensors(model, optimizer), tensors(*state(value)), strict=True)
        whole = all(torch.equal(a, b) for a, b in pairs)
        best = checkpoint.best(run)
        # The next save must not stumble over what is left.
        checkpoint.save(run, 5, model, optimizer, {}, keep=1)
        after = sorted(os.listdir(run / "checkpoints"))
    outcomes.append([status, newest.name, value, whole, refused, left, after, best and best.name])
    shutil.rmtree(run)
    if status == 0:
        break
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize(("target", "name"), [(3, "step-00000003"), (2, "step-00000002")])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, target: int, name: str
) -> None:
    """Step 3 is new; step 2 replaces one of that name, and must never be missing."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLER, str(tmp_path / "run"), str(target)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    stages = done.stderr.splitlines()
    outcomes = json.loads(done.stdout)
    assert [status for status, *_ in outcomes] == [-9] * len(stages) + [0]
    assert len(stages) > 25
    for what in ("mkdir", "write", "fsync", "rename", "best.json", "remove", "rmdir"):
        assert any(what in stage for stage in stages), what
    values = []
    for _, newest, value, whole, refused, left, after, best in outcomes:
        assert newest in (name, name + ".old", "step-00000002")
        assert (whole, refused) == (True, [])
        assert not [item for item in left if item.startswith(".tmp-")]
        assert best is not None or newest.endswith(".old")
        assert [item for item in after if "step" in item][-1] == "step-00000005"
        assert len(after) <= 3  # itself, the best, best.json
        values.append(value)
    assert values == sorted(values)  # the old one, until from one moment on it is the new one
    assert set(values) == {2.0, 3.0}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("intact")
    save_steps(run, 1, 2)
    return run


@pytest.fixture
def run(intact: Path, tmp_path: Path) -> Iterator[Path]:
    """Two intact checkpoints; whatever a test does to the second, the first must be found."""
    shutil.copytree(intact / "checkpoints", tmp_path / "checkpoints")
    yield tmp_path
    assert fallen_back(tmp_path)[0].name == "step-00000001"


def fallen_back(run: Path) -> tuple[Path, list[str]]:
    reports: list[str] = []
    path = checkpoint.newest(run, reports.append)
    assert path is not None
    return path, reports


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), "bytes|is damaged"),
    "one byte short": (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes|is damaged"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\n"), "bytes|is damaged"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes|is damaged"),
    "missing": (lambda path: path.unlink(), "is missing"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "bytes|read"),
    "one bit": (lambda path: flip(path, path.stat().st_size // 2), "checksum|is damaged"),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "checksum|is damaged"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name(run: Path, name: str, damage: str) -> None:
    broken = run / "checkpoints" / "step-00000002"
    act, text = DAMAGES[damage]
    act(broken / name)
    path, reports = fallen_back(run)
    assert path.name == "step-00000001"
    assert len(reports) == 1
    assert reports[0].startswith(f"checkpoint refused: step-00000002: {name} ")
    model, optimizer = trained()
    before = bits(model, optimizer)
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(broken, model, optimizer)
    assert bits(model, optimizer) == before
    checkpoint.load(path, model, optimizer)


def test_every_single_bit_counts(run: Path) -> None:
    """All bits of the manifest, and some hundred of each other file."""
    broken = run / "checkpoints" / "step-00000002"
    dice = random.Random(0)
    for name in FILES:
        size = (broken / name).stat().st_size
        places = [(byte, bit) for byte in range(size) for bit in range(8)]
        if name != "manifest.json":
            places = dice.sample(places, 300)
        for byte, bit in places:
            flip(broken / name, byte, bit)
            with pytest.raises(CheckpointError, match=name):
                sealed.verify(broken)
            flip(broken / name, byte, bit)
    sealed.verify(broken)
    (broken / "training.pt").unlink()


@pytest.mark.parametrize("text", ["null", "[]", "{}", '{"format": 1}', "1e999", '"'])
def test_a_foreign_manifest_is_refused(run: Path, text: str) -> None:
    (run / "checkpoints" / "step-00000002" / "manifest.json").write_text(text)
    assert fallen_back(run)[1] == ["checkpoint refused: step-00000002: manifest.json is damaged"]


def reseal(folder: Path, **changes: object) -> None:
    """Write a manifest that agrees with whatever is in the directory."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {name: (folder / name).read_bytes() for name in manifest.pop("files")}
    for name in (*files, "manifest.json"):
        (folder / name).unlink()
    writers = {
        name: lambda file, content=content: file.write(content) for name, content in files.items()
    }
    sealed.write(folder, writers, {**manifest, **changes})


def test_a_checkpoint_under_a_false_name_is_refused(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    shutil.copytree(run / "checkpoints" / "step-00000001", run / "checkpoints" / "step-00000009")
    assert fallen_back(run)[1] == [
        "checkpoint refused: step-00000009: its manifest is that of step 1"
    ]


def test_a_newer_format_is_refused(run: Path) -> None:
    reseal(run / "checkpoints" / "step-00000002", format=2)
    assert "format 2, and this version of mars reads 1" in fallen_back(run)[1][0]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", ["optimizer.pt", "training.pt"])
def test_code_in_a_checkpoint_is_never_run(tmp_path: Path, name: str) -> None:
    """With a manifest that agrees: the checksums protect from accidents, not from forgery."""
    model, optimizer = save_steps(tmp_path, 1)
    path = tmp_path / "checkpoints" / "step-00000001"
    torch.save({"state": Bomb(tmp_path / "boom"), "param_groups": []}, path / name)
    reseal(path)
    assert checkpoint.newest(tmp_path, refuse) == path
    before = bits(model, optimizer)
    with pytest.raises(CheckpointError, match=f"{name} is not loaded: it holds more than tensors"):
        checkpoint.load(path, model, optimizer)
    assert not (tmp_path / "boom").exists()
    assert bits(model, optimizer) == before


@pytest.mark.parametrize("limit", [100, 1000, 3000, 6000])
def test_a_full_disk_leaves_the_earlier_ones_and_nothing_else(tmp_path: Path, limit: int) -> None:
    model, optimizer = save_steps(tmp_path, 1, best=1.0)
    before = sorted(os.listdir(tmp_path / "checkpoints"))
    text = "cannot save checkpoint .*step-00000002: the file would be.*earlier ones are untouched"
    with file_size_limit(limit), pytest.raises(CheckpointError, match=text):
        checkpoint.save(tmp_path, 2, model, optimizer, {"big": torch.zeros(2000)}, best=0.5)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == before
    assert checkpoint.newest(tmp_path, refuse) == tmp_path / "checkpoints" / "step-00000001"
    checkpoint.save(tmp_path, 2, model, optimizer, {})  # there is room again
    assert checkpoint.newest(tmp_path, refuse) == tmp_path / "checkpoints" / "step-00000002"


def test_a_directory_that_became_read_only_is_said(tmp_path: Path) -> None:
    model, optimizer = save_steps(tmp_path, 1)
    home = Path("/tmp") / f"mars-{os.getpid()}"  # tmp_path is closed to others than root
    shutil.copytree(tmp_path, home)
    try:
        os.chmod(home / "checkpoints", 0o555)
        with not_root(), pytest.raises(CheckpointError, match="no permission to write there"):
            checkpoint.save(home, 2, model, optimizer, {})
    finally:
        os.chmod(home / "checkpoints", 0o755)
        shutil.rmtree(home)


class Interrupted:
    """A sha256 during whose n-th update somebody presses Ctrl-C."""

    def __init__(self, n: int) -> None:
        self.left = n

    def update(self, data: bytes) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def hexdigest(self) -> str:
        return ""


@pytest.mark.parametrize("n", [1, 2, 10, 20, 30, 40, 60])
def test_an_interrupted_save_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Also within torch.save, which makes a RuntimeError of it."""
    model, optimizer = save_steps(tmp_path, 1)
    hashing = Interrupted(n)
    monkeypatch.setattr(sealed.hashlib, "sha256", lambda data=b"": hashing)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, model, optimizer, {})
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_forged_weights_are_refused(tmp_path: Path) -> None:
    model, optimizer = save_steps(tmp_path, 1)
    path = tmp_path / "checkpoints" / "step-00000001"
    (path / "model.safetensors").write_bytes(b"not at all")
    reseal(path)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        checkpoint.load(path, model, optimizer)


def test_all_broken_is_none_and_all_are_reported(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, keep=None)
    for folder in (tmp_path / "checkpoints").iterdir():
        flip(folder / "optimizer.pt", 100)
    reports: list[str] = []
    with RunDirectory(tmp_path).lock():
        assert checkpoint.newest(tmp_path, reports.append) is None
    assert [report.split(": ")[1] for report in reports] == [
        "step-00000003", "step-00000002", "step-00000001",
    ]  # fmt: skip
    assert len(os.listdir(tmp_path / "checkpoints")) == 3  # refused, not deleted
