"""`mars data` for images: what it writes, when it goes on, and what it refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import Cifar, picture, tar, unpacked
from test_images_download import Server, server

from mars.lab.cli import main
from mars.lab.data import open_tokens
from mars.lab.errors import LabError
from mars.lab.images import Sizes, open_images, sizes
from mars.lab.images.catalogue import CATALOGUE, Official
from mars.lab.images.preparation import prepare_images

__all__ = ["server"]  # a fixture
SMALL = Sizes(15, 3, 10, 3, 32)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["data", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out + err


def archive(folder: Path) -> Path:
    return tar(folder / "mine.tar.gz", Cifar().python())


def test_a_prepared_directory_holds_the_same_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = archive(tmp_path), tmp_path / "out"
    code, text = run(capsys, source, "--out", out)
    assert (code, text) == (0, f"{out}: 15 + 3 images of 32×32, 10 classes\n")  # and no bar
    assert sorted(p.name for p in out.iterdir()) == ["manifest.json", "train.bin", "valid.bin"]
    for split in ("train", "valid"):
        direct, stored = (open_images(str(path), split) for path in (source, out))  # type: ignore[arg-type]
        assert torch.equal(direct.pixels, stored.pixels)
        assert torch.equal(direct.labels, stored.labels)
        for name in ("classes", "mean", "std", "sha256"):
            assert getattr(direct, name) == getattr(stored, name)
        assert hashlib.sha256((out / f"{split}.bin").read_bytes()).hexdigest() == stored.sha256
    assert sizes(str(out)) == SMALL
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run(capsys, source, "--out", out)[0] == 0  # again: nothing is written
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    code, text = run(capsys, out, "--verify")
    assert (code, "every sha256 is right" in text) == (0, True)


def test_digits_and_folders_are_prepared_too(tmp_path: Path) -> None:
    prepare_images("digits", tmp_path / "digits")
    both = [open_images(name, "valid").sha256 for name in ("digits", str(tmp_path / "digits"))]
    assert both[0] == both[1]
    black = picture(np.zeros((4, 4, 3), np.uint8))
    files = {f"{s}/{c}/0.png": black for s in ("train", "val") for c in "ab"}
    seen: list[tuple[str, int, int | None]] = []
    source = unpacked(tmp_path / "folder", files)
    prepare_images(str(source), tmp_path / "out", lambda *all_: seen.append(all_))
    assert sizes(str(tmp_path / "out")) == Sizes(2, 2, 2, 3, 4)
    assert seen == [("decode", 4, 4)]


@pytest.fixture
def official(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    """A server of a small `cifar10`."""
    server.content = tar(tmp_path / "made.tar.gz", Cifar().binary()).read_bytes()
    md5 = hashlib.md5(server.content).hexdigest()
    monkeypatch.setitem(CATALOGUE, "cifar10", Official(server.url, md5, SMALL))
    return server


def test_a_named_data_set_is_downloaded_once(
    official: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data" / "cifar10"
    code, text = run(capsys, "cifar10", "--out", out)
    assert (code, "15 + 3 images" in text) == (0, True)
    assert open_images(str(out), "train").labels.tolist() == Cifar().labels[:15]
    assert sorted(p.name for p in out.iterdir()) == ["manifest.json", "train.bin", "valid.bin"]
    assert run(capsys, "cifar10", "--out", out)[0] == 0
    assert len(official.asked) == 1


def test_an_interrupted_preparation_goes_on(official: Server, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "file.tar.gz.part").write_bytes(official.content[:5000])
    (out / ".tmp-train.bin-1-2").write_bytes(b"of a writer that was killed")
    (out / "train.bin").write_bytes(b"written before a kill, without a manifest")
    prepare_images("cifar10", out)
    assert official.asked == ["bytes=5000-"]
    assert len(open_images(str(out), "train")) == 15
    assert sorted(p.name for p in out.iterdir()) == ["manifest.json", "train.bin", "valid.bin"]


def test_a_finished_download_is_not_fetched_again(official: Server, tmp_path: Path) -> None:
    """A kill came between the download and the manifest."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "file.tar.gz").write_bytes(official.content)
    prepare_images("cifar10", out)
    assert official.asked == []
    assert len(open_images(str(out), "valid")) == 3


def test_a_failed_download_leaves_nothing(
    official: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    official.content = b"<html>please log in</html>"
    code, text = run(capsys, "cifar10", "--out", tmp_path / "out")
    assert code == 1
    assert text.count("mars: error:") == 1
    assert "wrong checksum" in text
    assert not (tmp_path / "out").exists()


def test_other_content_than_promised_is_refused(
    official: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CATALOGUE["cifar10"]
    wrong = Official(right.url, right.md5, Sizes(50_000, 10_000, 10, 3, 32))
    monkeypatch.setitem(CATALOGUE, "cifar10", wrong)
    with pytest.raises(LabError, match=r"cifar10 has \(15, 3, 10\) images and classes instead of"):
        prepare_images("cifar10", tmp_path / "out")


def test_a_directory_of_something_else_is_left_alone(official: Server, tmp_path: Path) -> None:
    source = str(archive(tmp_path))
    mine = unpacked(tmp_path / "mine", {"notes.txt": b"x"})
    with pytest.raises(LabError, match=r"mine is not empty \(notes.txt\) and has no manifest.json"):
        prepare_images(source, mine)
    prepare_images("cifar10", tmp_path / "named")
    with pytest.raises(LabError, match="named holds cifar10 already: take another --out"):
        prepare_images(source, tmp_path / "named")
    prepare_images("digits", tmp_path / "digits")
    for other in ("cifar10", source):
        with pytest.raises(LabError, match=r"digits holds .*digits.*: take another --out"):
            prepare_images(other, tmp_path / "digits")
    assert (mine / "notes.txt").read_bytes() == b"x"
    assert len(open_images(str(tmp_path / "digits"), "valid")) == 360


def test_damage_is_found_when_images_are_opened(tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = archive(tmp_path)
    prepare_images(str(source), out)
    good = {path.name: path.read_bytes() for path in out.iterdir()}

    def refused(name: str, content: bytes | None, text: str) -> None:
        if content is None:
            (out / name).unlink()
        else:
            (out / name).write_bytes(content)
        with pytest.raises(LabError, match=text):
            open_images(str(out), "train")
        (out / name).write_bytes(good[name])

    flipped = bytearray(good["train.bin"])
    flipped[777] ^= 1
    refused("train.bin", bytes(flipped), "train.bin is damaged: its sha256 is not the manifest's")
    refused("train.bin", good["train.bin"][:-1], "train.bin has 46199 bytes, but .* says 46200")
    refused("train.bin", None, r"train.bin: the manifest names it, but it cannot be read")
    manifest = json.loads(good["manifest.json"])
    refused("manifest.json", b"{", "manifest.json is not JSON")
    refused("manifest.json", b"{}", "out holds no images: its manifest.json is of another kind")
    for change, text in (
        ({"version": 2}, "has version 2; this mars reads version 1"),
        ({"shape": [3, 32, 31]}, r"ill-typed \(file 'train.bin'\)"),
        ({"more": 1}, "ill-typed"),
        ({"classes": None}, "ill-typed"),
    ):
        refused("manifest.json", json.dumps({**manifest, **change}).encode(), text)
    assert len(open_images(str(out), "train")) == 15


def test_words_of_text_are_refused_for_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, archive(tmp_path), "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert (code, "--tokenizer is for text, and" in text) == (1, True)
    assert not (tmp_path / "out").exists()


def test_images_are_not_taken_for_tokens_nor_tokens_for_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_images("digits", tmp_path / "digits")
    with pytest.raises(LabError, match="holds images, not tokens"):
        open_tokens(str(tmp_path / "digits"), "train")
    (tmp_path / "book.txt").write_text("A text. " * 1000)
    assert run(capsys, tmp_path / "book.txt", "--out", tmp_path / "book")[0] == 0
    with pytest.raises(LabError, match="book holds no images"):
        open_images(str(tmp_path / "book"), "train")
    assert run(capsys, tmp_path / "book", "--verify")[0] == 0


def test_what_is_missing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, tmp_path / "none.zip", "--out", tmp_path / "out")
    assert (code, text.count("\n")) == (1, 1)
    assert "no such file" in text
    assert not (tmp_path / "out").exists()
