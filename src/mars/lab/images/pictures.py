"""Pictures decoded by Pillow: folders of them, and mosaics."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mars.lab.errors import LabError
from mars.lab.images.cifar import SIDE
from mars.lab.images.dataset import SPLITS, Bytes, Labels, Raw, Split
from mars.lab.images.tree import Tree

Progress = Callable[[int, int], None]
# What Pillow does not read here is refused by name, where leaving it out would lose it in silence.
SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm",
    ".avif", ".heic",
)  # fmt: skip
ANNOTATIONS = "val/val_annotations.txt"
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_MOSAIC = re.compile(r"(train|test)_(\d+)\.jpg")
_LARGEST = 1 << 24  # pixels: what is more is no picture to train on as it is


def is_folder(names: frozenset[str]) -> bool:
    """Whether there are pictures under train/."""
    return any(name.startswith("train/") and _is_picture(name) for name in names)


def is_mosaic(names: frozenset[str]) -> bool:
    """Whether these are mosaics with labels beside them."""
    return {"y_train.npy", "y_test.npy"} <= names and any(map(_MOSAIC.fullmatch, names))


def read_folder(tree: Tree, progress: Progress | None = None) -> Raw:
    """``train/CLASS/…`` and ``valid``, ``val`` or ``test``, or tiny-imagenet-200's own layout.

    Classes are the sorted names of the folders in train/; every picture becomes RGB, and all must
    have one size.
    """
    files = {"train": _by_folder(tree, "train"), "valid": _validation(tree)}
    classes = tuple(sorted({label for _, label in files["train"]}))
    if len(classes) < 2:
        raise LabError(f"{tree.source} has one class only, {classes[0]!r}: nothing to tell apart")
    numbers = {name: number for number, name in enumerate(classes)}
    for name, label in files["valid"]:
        if label not in numbers:
            raise LabError(f"{name} of {tree.source} is a {label!r}, a class that train/ lacks")
    total, done = sum(map(len, files.values())), 0
    first = _decode(tree, files["train"][0][0], None)
    pixels: dict[Split, Bytes] = {}
    labels: dict[Split, Labels] = {}
    for split in SPLITS:
        pixels[split] = np.empty((len(files[split]), *first.shape), np.uint8)
        labels[split] = np.array([numbers[label] for _, label in files[split]], np.int64)
        for row, (name, _) in zip(pixels[split], files[split], strict=True):
            row[:] = _decode(tree, name, first.shape[1:])
            done += 1
            if progress is not None and (done % 100 == 0 or done == total):
                progress(done, total)
    return Raw(pixels, labels, classes)


def read_mosaic(tree: Tree, progress: Progress | None = None) -> Raw:
    """CIFAR-10 in a zip of mosaics: tiles of 32×32, row by row, named by the first one's number."""
    pixels: dict[Split, Bytes] = {}
    labels: dict[Split, Labels] = {}
    total, done = sum(1 for name in tree.names if _MOSAIC.fullmatch(name)), 0
    for split in SPLITS:
        word = "train" if split == "train" else "test"
        labels[split] = _labels(tree, f"y_{word}.npy")
        out = np.empty((len(labels[split]), 3, SIDE, SIDE), np.uint8)
        filled = 0
        found = (match for name in tree.names if (match := _MOSAIC.fullmatch(name)))
        for start, name in sorted((int(m[2]), m[0]) for m in found if m[1] == word):
            if start != filled:
                raise LabError(f"{tree.source} lacks the {word} images {filled} … {start - 1}")
            tiles = _tiles(_decode(tree, name, None), name, tree.source)[: len(out) - start]
            out[start : start + len(tiles)] = tiles
            filled, done = start + len(tiles), done + 1
            if progress is not None:
                progress(done, total)
        if filled != len(out):
            raise LabError(f"{tree.source} has {filled} {word} images and {len(out)} labels")
        pixels[split] = out
    return Raw(pixels, labels, CIFAR10)


def _tiles(picture: Bytes, name: str, source: str) -> Bytes:
    _, height, width = picture.shape
    if height % SIDE or width % SIDE:
        raise LabError(f"{name} of {source} is not a mosaic of {SIDE}×{SIDE}: {width}×{height}")
    split = picture.reshape(3, height // SIDE, SIDE, width // SIDE, SIDE)
    return split.transpose(1, 3, 0, 2, 4).reshape(-1, 3, SIDE, SIDE)


def _labels(tree: Tree, name: str) -> Labels:
    try:
        values = np.load(io.BytesIO(tree.read(name)), allow_pickle=False)
        return np.asarray(values, np.int64).reshape(-1)
    except (ValueError, EOFError) as error:
        raise LabError(f"{name} of {tree.source} is not an array of labels ({error})") from error


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _by_folder(tree: Tree, split: str) -> list[tuple[str, str]]:
    """Names and classes of a split's pictures, sorted."""
    found = []
    for name in sorted(tree.names):
        if name.startswith(f"{split}/") and _is_picture(name):
            parts = name.split("/")
            if len(parts) < 3:
                raise LabError(
                    f"{name} of {tree.source} is not in the folder of a class, {split}/CLASS"
                )
            found.append((name, parts[1]))
    return found


def _validation(tree: Tree) -> list[tuple[str, str]]:
    if ANNOTATIONS in tree.names:
        lines = tree.read(ANNOTATIONS).decode("utf-8", "replace").splitlines()
        rows = [line.split("\t") for line in lines if line.strip()]
        if any(len(row) < 2 for row in rows):
            raise LabError(f"{ANNOTATIONS} of {tree.source} has a line without a class")
        return sorted((f"val/images/{row[0]}", row[1]) for row in rows)
    for name in ("valid", "val", "test"):
        found = _by_folder(tree, name)
        if found:
            return found
    raise LabError(f"{tree.source} has pictures in train/, but none in valid/, val/ or test/")


def _decode(tree: Tree, name: str, size: tuple[int, ...] | None) -> Bytes:
    """A picture as RGB, (3, H, W)."""
    image_module = _pillow(tree.source)
    data = tree.read(name)
    try:
        with image_module.open(io.BytesIO(data)) as image:
            width, height = image.size
            if size is not None and (height, width) != size:
                raise LabError(
                    f"{name} of {tree.source} is {width}×{height}, others {size[1]}×{size[0]}: "
                    "bring all to one size first"
                )
            if width * height > _LARGEST:
                raise LabError(f"{name} of {tree.source} is too large: {width}×{height}")
            if image.mode == "F":
                raise LabError(
                    f"{name} of {tree.source} has pixels of 32-bit floats: make them 8 bits first"
                )
            if image.mode.startswith("I"):  # 16 bits of grey, which would be cut off at 255
                image = image_module.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except LabError:
        raise
    except Exception as error:  # a damaged picture can raise anything
        why = str(error).partition(" <_io")[0]  # the name of an object says nothing
        raise LabError(
            f"{name} of {tree.source} is not a picture that Pillow reads, or is damaged: {why}"
        ) from error


def _pillow(source: str) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise LabError(f"{source} holds pictures: pip install pillow") from error
    return Image
