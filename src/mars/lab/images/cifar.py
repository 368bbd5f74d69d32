"""CIFAR-10 and CIFAR-100 as their makers distribute them: Python's pickles, or plain binary.

Both versions hold the same images in the same order; an image is 1024 bytes of red, 1024 of green
and 1024 of blue. (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mars.lab.errors import LabError
from mars.lab.images.dataset import SPLITS, Bytes, Labels, Raw, Split
from mars.lab.images.tree import Tree
from mars.lab.images.unpickle import load

SIDE = 32
IMAGE = 3 * SIDE * SIDE
_FIVE = tuple(f"data_batch_{i}" for i in range(1, 6))


@dataclass(frozen=True)
class Layout:
    """Which files there are, and where one has its labels: the key, or how many bytes before."""

    files: dict[Split, tuple[str, ...]]
    meta: str
    labels: bytes | int
    names: bytes | None = None


LAYOUTS = (
    Layout({"train": _FIVE, "valid": ("test_batch",)}, "batches.meta", b"labels", b"label_names"),
    Layout({"train": ("train",), "valid": ("test",)}, "meta", b"fine_labels", b"fine_label_names"),
    Layout(
        {"train": tuple(f"{name}.bin" for name in _FIVE), "valid": ("test_batch.bin",)},
        "batches.meta.txt", 1,
    ),
    Layout({"train": ("train.bin",), "valid": ("test.bin",)}, "fine_label_names.txt", 2),
)  # fmt: skip


def layout_of(names: frozenset[str]) -> Layout | None:
    """The layout that files have, be it with one missing."""
    return next((way for way in LAYOUTS if way.meta in names and _some(way) & names), None)


def _some(way: Layout) -> set[str]:
    return {name for split in SPLITS for name in way.files[split]}


def read_cifar(tree: Tree, progress: Callable[[int, int], None] | None = None) -> Raw:
    """Both splits of an archive or its unpacked folder."""
    way = layout_of(tree.names)
    assert way is not None
    total, done = len(_some(way)), 0
    pixels: dict[Split, Bytes] = {}
    labels: dict[Split, Labels] = {}
    for split in SPLITS:
        parts = []
        for name in way.files[split]:
            parts.append(_batch(tree.read(name), way.labels, f"{name} of {tree.source}"))
            done += 1
            if progress is not None:
                progress(done, total)
        pixels[split] = np.concatenate([part[0] for part in parts]).reshape(-1, 3, SIDE, SIDE)
        labels[split] = np.concatenate([part[1] for part in parts])
    return Raw(pixels, labels, _classes(tree, way))


def _batch(data: bytes, labels: bytes | int, where: str) -> tuple[Bytes, Labels]:
    if isinstance(labels, int):
        record = labels + IMAGE
        if len(data) % record:
            raise LabError(f"{where} has {len(data)} bytes, not a multiple of {record}")
        rows = np.frombuffer(data, np.uint8).reshape(-1, record)
        return rows[:, labels:], rows[:, labels - 1].astype(np.int64)
    found = load(data, where)
    pixels: Any = found.get(b"data")
    numbers: Any = found.get(labels)
    right = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.ndim == 2
    if not right or pixels.shape[1] != IMAGE:
        raise LabError(f"{where} has no 'data' of uint8 with {IMAGE} columns")
    if (
        not isinstance(numbers, list)
        or len(numbers) != len(pixels)
        or not all(type(number) is int for number in numbers)
    ):
        raise LabError(f"{where} has no {labels.decode()!r} for its {len(pixels)} images")
    return pixels, np.array(numbers, np.int64)


def _classes(tree: Tree, way: Layout) -> tuple[str, ...]:
    where = f"{way.meta} of {tree.source}"
    data = tree.read(way.meta)
    names: Any = data.splitlines() if way.names is None else load(data, where).get(way.names)
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise LabError(f"{where} does not name the classes")
    return tuple(name.decode("utf-8", "replace") for name in names if name.strip())
