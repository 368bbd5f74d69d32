"""Archives, folders and mosaics: every form of the same data is the same; the rest is refused."""

from __future__ import annotations

import io
import os
import pickle
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import Cifar, picture, python2, tar, unpacked, zipped

from mars.lab.errors import LabError
from mars.lab.images import Images, Sizes, open_images, sizes

RNG = np.random.default_rng(1)


def both(source: Path) -> list[Images]:
    return [open_images(str(source), split) for split in ("train", "valid")]  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [10, 100])
def test_all_forms_of_a_cifar_give_the_same_images(tmp_path: Path, classes: int) -> None:
    made = Cifar(classes)
    sources = [
        tar(tmp_path / "python.tar.gz", made.python()),
        tar(tmp_path / "binary.tar.gz", made.binary()),
        unpacked(tmp_path / "python", made.python()),
        unpacked(tmp_path / "binary", made.binary()),
        next((tmp_path / "python").iterdir()),  # the folder itself, and the one that holds it
        zipped(tmp_path / "binary.zip", made.binary()),
    ]
    for source in sources:
        train, valid = both(source)
        assert np.array_equal(train.pixels.reshape(-1, 3072), made.pixels[:15])
        assert np.array_equal(valid.pixels.reshape(-1, 3072), made.pixels[15:])
        assert train.labels.tolist() + valid.labels.tolist() == made.labels
        assert train.pixels.shape == (15, 3, 32, 32)
        assert (train.pixels.dtype, train.labels.dtype) == (torch.uint8, torch.int64)
        assert train.classes == tuple(name.decode() for name in made.names)
        assert train.source == str(source)
    hashes = {tuple(images.sha256 for images in both(source)) for source in sources}
    assert len(hashes) == 1
    values = train.pixels.double() / 255
    assert valid.mean == pytest.approx(values.mean((0, 2, 3)).tolist(), rel=1e-12)
    assert valid.std == pytest.approx(values.std((0, 2, 3), correction=0).tolist(), rel=1e-12)


def test_pickles_of_python_3_are_read_too(tmp_path: Path) -> None:
    made = Cifar()
    batch = {b"labels": made.labels[:3], b"data": made.pixels[:3]}
    for protocol in (3, 4):
        files = made.python()
        files["cifar-10-batches-py/data_batch_1"] = pickle.dumps(batch, protocol)
        assert len(both(unpacked(tmp_path / str(protocol), files))[0]) == 15


class Bomb:
    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, ...]:
        return self.call[0], tuple(self.call[1:])


@pytest.mark.parametrize("where", ["data_batch_2", "batches.meta"])
def test_a_pickle_that_calls_something_is_refused_by_name(tmp_path: Path, where: str) -> None:
    trace = tmp_path / "trace"
    for bomb, name in (
        (Bomb(os.system, f"touch {trace}"), "system"),
        (Bomb(eval, f"open({str(trace)!r}, 'w')"), "eval"),
        (Bomb(np.ndarray, (10**13,)), "ndarray"),  # would ask for all memory
        (Bomb(getattr, "", "format"), "getattr"),
    ):
        files = Cifar().python()
        files[f"cifar-10-batches-py/{where}"] = pickle.dumps({b"data": bomb}, 3)
        source = tar(tmp_path / f"{name}.tar.gz", files)
        with pytest.raises(LabError, match=rf"{where} of .* is refused: .*{name}"):
            open_images(str(source), "valid")
    assert not trace.exists()


def test_a_pickle_cannot_change_the_reader_for_the_next(tmp_path: Path) -> None:
    """BUILD sets attributes of whatever was named; the next file must not see them."""
    evil = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(N}U\x0c__defaults__(K\x01tstb."
    files = Cifar().python()
    bad = unpacked(tmp_path / "bad", {**files, "cifar-10-batches-py/data_batch_1": evil})
    with pytest.raises(LabError, match="data_batch_1"):
        both(bad)
    assert len(both(unpacked(tmp_path / "good", files))[0]) == 15


def test_incomplete_and_damaged_archives_are_refused(tmp_path: Path) -> None:
    top = "cifar-10-batches-py"
    made = Cifar()

    def refused(files: dict[str, bytes], text: str) -> None:
        source = tar(tmp_path / "it.tar.gz", files)
        with pytest.raises(LabError, match=text):
            open_images(str(source), "train")

    files = made.python()
    del files[f"{top}/data_batch_3"]
    refused(files, "it.tar.gz lacks data_batch_3: it is incomplete")
    short = {b"labels": [1, 2], b"data": made.pixels[:3]}
    refused({**files, f"{top}/data_batch_3": python2(short)}, "no 'labels' for its 3 images")
    wide = {b"labels": [1, 2, 3], b"data": made.pixels[:3, :9]}
    refused({**files, f"{top}/data_batch_3": python2(wide)}, "no 'data' of uint8 with 3072")
    wrong = {b"labels": [1, 2, 10], b"data": made.pixels[:3]}
    refused({**files, f"{top}/data_batch_3": python2(wrong)}, "labels 0 … 10, but 10 classes")
    refused({**files, f"{top}/data_batch_3": python2([1])}, "holds a list, not the dict")
    refused({**files, f"{top}/data_batch_3": b""}, "data_batch_3 of .* is refused")
    refused({**files, f"{top}/data_batch_3": made.python()[f"{top}/data_batch_1"][:-40]}, "refused")
    refused({**files, f"{top}/batches.meta": python2({})}, "does not name the classes|lacks")
    binary = made.binary()
    binary["cifar-10-batches-bin/data_batch_2.bin"] += b"1"
    refused(binary, "data_batch_2.bin of .* has 9220 bytes, not a multiple of 3073")
    refused({"notes.txt": b"x"}, "holds no images that mars knows")
    whole = tar(tmp_path / "whole.tar.gz", made.binary()).read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.tar.gz").write_bytes(b"a text")
    for name in ("cut.tar.gz", "text.tar.gz"):
        with pytest.raises(LabError, match=f"{name} is not a tar or zip file, or is damaged"):
            open_images(str(tmp_path / name), "train")
    with pytest.raises(LabError) as error:  # tarfile has five lines to say about it
        open_images(str(tmp_path / "text.tar.gz"), "train")
    assert "\n" not in str(error.value)


def test_a_damaged_zip_is_refused(tmp_path: Path) -> None:
    good = zipped(tmp_path / "good.zip", Cifar().binary()).read_bytes()
    flipped = bytearray(good)
    flipped[2000] ^= 1  # in an image
    central = good.replace(b"PK\x01\x02", b"PK??", 1)
    for name, content, text in (
        ("flipped.zip", bytes(flipped), "cannot be read: Bad CRC-32"),
        ("central.zip", central, r"central.zip is damaged \(.*\): download it again"),
        ("cut.zip", good[:-100], "cut.zip is not a tar or zip file, or is damaged"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LabError, match=text):
            open_images(str(tmp_path / name), "train")


def test_a_flipped_bit_in_a_packed_tar_is_refused(tmp_path: Path) -> None:
    """Wherever it is: most lie in pixels, where nothing but gzip's checksum can tell."""
    good = tar(tmp_path / "good.tar.gz", Cifar().binary()).read_bytes()
    for place in range(40, len(good), len(good) // 25):
        flipped = bytearray(good)
        flipped[place] ^= 4
        (tmp_path / "flipped.tar.gz").write_bytes(bytes(flipped))
        with pytest.raises(LabError, match=r"flipped.tar.gz .*damaged"):
            open_images(str(tmp_path / "flipped.tar.gz"), "train")


def test_links_in_a_tar_lead_nowhere(tmp_path: Path) -> None:
    files = Cifar().binary()
    with tarfile.open(tmp_path / "it.tar", "w") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            if name.endswith("data_batch_1.bin"):
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
                packed.addfile(member)
            else:
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
    with pytest.raises(LabError, match=r"lacks data_batch_1\.bin"):
        open_images(str(tmp_path / "it.tar"), "train")


def folder(valid: str = "valid") -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    shown = {
        f"{split}/{label}/{number}.png": RNG.integers(0, 256, (6, 6, 3), np.uint8)
        for split, count in (("train", 3), (valid, 2))
        for label in ("dog", "cat")
        for number in range(count)
    }
    return {name: picture(pixels) for name, pixels in shown.items()}, shown


@pytest.mark.parametrize("valid", ["valid", "val", "test"])
def test_a_folder_of_pictures(tmp_path: Path, valid: str) -> None:
    files, shown = folder(valid)
    grey = RNG.integers(0, 256, (6, 6), np.uint8)
    files |= {"train/cat/grey.PNG": picture(grey), "train/notes.txt": b"not a picture",
              "train/.DS_Store": b"nor this"}  # fmt: skip
    for source in (
        unpacked(tmp_path / "folder", files),
        zipped(tmp_path / "flat.zip", files),
        zipped(tmp_path / "deep.zip", {f"name/{name}": data for name, data in files.items()}),
    ):
        train, held = both(source)
        assert train.classes == ("cat", "dog")
        assert train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
        assert held.labels.tolist() == [0, 0, 1, 1]
        assert np.array_equal(train.pixels[1].permute(1, 2, 0), shown["train/cat/1.png"])
        assert np.array_equal(held.pixels[3].permute(1, 2, 0), shown[f"{valid}/dog/1.png"])
        assert all(np.array_equal(channel, grey) for channel in train.pixels[3])


@pytest.mark.parametrize("kind", ["webp", "bmp", "gif", "tiff", "ppm", "jfif"])
def test_pictures_of_every_usual_kind_are_taken(tmp_path: Path, kind: str) -> None:
    """They were left out without a word, down to a class that had only such."""
    flat = np.full((6, 6, 3), 64, np.uint8)  # of which JPEG and a palette lose nothing
    options = {"webp": {"lossless": True}}.get(kind, {})
    data = picture(flat, {"jfif": "JPEG"}.get(kind, kind), **options)
    files = folder()[0] | {f"train/cat/x.{kind.upper()}": data, f"valid/dog/y.{kind}": data}
    train, valid = both(unpacked(tmp_path, files))
    assert (len(train), len(valid)) == (7, 5)
    assert (train.pixels[3] == 64).all()
    assert (valid.pixels[4] == 64).all()


def test_pictures_that_pillow_cannot_take_are_named(tmp_path: Path) -> None:
    floats = picture(RNG.random((6, 6), np.float32), "TIFF")
    for name, data, message in (
        (
            "photo.heic",
            b"ftypheic",
            r"train/cat/photo.heic of .* is not a picture that Pillow reads",
        ),
        ("f.tif", floats, r"train/cat/f.tif of .* has pixels of 32-bit floats: make them 8 bits"),
    ):
        source = unpacked(tmp_path / name, folder()[0] | {f"train/cat/{name}": data})
        with pytest.raises(LabError, match=message):
            both(source)


def test_16_bits_of_grey_keep_their_upper_half(tmp_path: Path) -> None:
    """As Pillow itself takes 16 bits of colour; of grey it would make everything white."""
    deep = RNG.integers(0, 1 << 16, (6, 6), np.uint16)
    files = folder()[0] | {"train/cat/deep.png": picture(deep)}
    train, _ = both(unpacked(tmp_path, files))
    assert all(np.array_equal(channel, deep >> 8) for channel in train.pixels[3])


def test_tiny_imagenets_own_layout(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (7, 4, 4, 3), np.uint8)
    top = "tiny-imagenet-200"
    files = {
        f"{top}/train/{label}/images/{label}_{i}.JPEG": picture(pixels[i], "PNG")
        for label in ("n02", "n01")
        for i in range(2)
    }
    files |= {f"{top}/val/images/val_{i}.JPEG": picture(pixels[i]) for i in range(3)}
    lines = ["val_2.JPEG\tn01\t0\t0\t62\t57", "val_0.JPEG\tn02\t1\t1\t9\t9", "val_1.JPEG\tn01\t0"]
    files[f"{top}/val/val_annotations.txt"] = "\n".join(lines).encode()
    files |= {f"{top}/test/images/test_0.JPEG": picture(pixels[6]), f"{top}/words.txt": b"n01\tx"}
    train, valid = both(zipped(tmp_path / "tiny.zip", files))
    assert train.classes == ("n01", "n02")
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert valid.labels.tolist() == [1, 0, 0]
    assert np.array_equal(valid.pixels[2].permute(1, 2, 0), pixels[2])


def test_wrong_pictures_are_refused(tmp_path: Path) -> None:
    files, _ = folder()

    def refused(changes: dict[str, bytes | None], text: str) -> None:
        mixed = {name: data for name, data in {**files, **changes}.items() if data is not None}
        with pytest.raises(LabError, match=text):
            open_images(str(zipped(tmp_path / "it.zip", mixed)), "train")

    other = picture(np.zeros((6, 7, 3), np.uint8))
    refused({"valid/dog/0.png": other}, r"valid/dog/0.png of .* is 7×6, others 6×6: bring all to")
    refused({"train/dog/1.png": b"text"}, r"damaged: cannot identify image file$")
    cut = files["train/dog/1.png"][:-30]
    refused(
        {"train/dog/1.png": cut},
        r"train/dog/1.png of .* is not a picture that Pillow reads, or is damaged",
    )
    refused({"valid/emu/0.png": files["valid/dog/0.png"]}, "'emu', a class that train/ lacks")
    refused({"train/0.png": other}, "train/0.png of .* is not in the folder of a class")
    gone = {name: None for name in files if name.startswith("valid")}
    refused(gone, "has pictures in train/, but none in valid/, val/ or test/")
    gone = {name: None for name in files if "/dog/" in name}
    refused(gone, "has one class only, 'cat': nothing to tell apart")
    oblong = {name: other for name in files}
    refused(oblong, "images of 7×6: make them square first")


def mosaics() -> tuple[dict[str, bytes], np.ndarray]:
    """Tiles of one colour, so that JPEG keeps them; 12 and 4 of them, the last ones not counted."""
    colours = RNG.integers(0, 256, (18, 3), np.uint8)
    tiles = np.broadcast_to(colours[:, None, None], (18, 32, 32, 3))

    def mosaic(first: int) -> bytes:  # 2 rows of 3
        rows = tiles[first : first + 6].reshape(2, 3, 32, 32, 3).transpose(0, 2, 1, 3, 4)
        return picture(rows.reshape(64, 96, 3), "JPEG", quality=95, subsampling=0)

    def labels(values: list[int]) -> bytes:
        file = io.BytesIO()
        np.save(file, np.array(values, np.uint8))
        return file.getvalue()

    names = {"train_00000.jpg": 0, "train_00006.jpg": 6, "test_00000.jpg": 12}
    files = {name: mosaic(first) for name, first in names.items()}
    files |= {"y_train.npy": labels([*range(10), 9, 9]), "y_test.npy": labels([3, 2, 1, 0])}
    return files, tiles.transpose(0, 3, 1, 2)


def test_a_zip_of_mosaics(tmp_path: Path) -> None:
    files, tiles = mosaics()
    train, valid = both(zipped(tmp_path / "it.zip", files))
    assert train.pixels.shape == (12, 3, 32, 32)
    assert np.abs(train.pixels.numpy().astype(int) - tiles[:12]).max() <= 3
    assert np.abs(valid.pixels.numpy().astype(int) - tiles[12:16]).max() <= 3
    assert valid.labels.tolist() == [3, 2, 1, 0]
    assert train.classes[:2] == ("airplane", "automobile")
    del files["train_00000.jpg"]
    with pytest.raises(LabError, match="lacks the train images 0 … 5"):
        both(zipped(tmp_path / "it.zip", files))
    files, _ = mosaics()
    del files["train_00006.jpg"]
    with pytest.raises(LabError, match="has 6 train images and 12 labels"):
        both(zipped(tmp_path / "it.zip", files))
    files["y_train.npy"] = b"x"
    with pytest.raises(LabError, match=r"y_train.npy of .* is not an array of labels"):
        both(zipped(tmp_path / "it.zip", files))


def test_without_pillow_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = unpacked(tmp_path / "folder", folder()[0])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(LabError, match="folder holds pictures: pip install pillow"):
        open_images(str(source), "train")


def test_what_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    for source, command in (
        (f"{tmp_path}/cifar10", f"`mars data cifar10 --out {tmp_path}/cifar10`"),
        ("cifar100", "`mars data cifar100`, then name data/cifar100"),
        (f"{tmp_path}/mine", "no such file or directory: .*mine; images are 'digits'"),
    ):
        with pytest.raises(LabError, match=command):
            open_images(source, "train")


def test_sizes_are_known_before_the_files_are(tmp_path: Path) -> None:
    assert sizes(f"{tmp_path}/cifar10") == Sizes(50_000, 10_000, 10, 3, 32)
    assert sizes("data/tiny-imagenet") == Sizes(100_000, 10_000, 200, 3, 64)
    assert sizes(f"{tmp_path}/mine") is None
    (tmp_path / "cifar10").mkdir()
    assert sizes(f"{tmp_path}/cifar10") is None  # something else is there
