"""A directory made by `mars data`: a file of bytes for each split, and manifest.json.

`train.bin` and `valid.bin` hold the pixels (uint8, N × C × H × W) and then the labels (int64,
little-endian), so that a file's sha256 is that of the images. The manifest is written last: a
directory without one is not prepared.

{"format": "mars.images", "version": 1, "source": "cifar10", "classes": ["airplane", …],
 "shape": [3, 32, 32], "mean": […], "std": […],
 "splits": {"train": {"file": "train.bin", "images": 50000, "bytes": …, "sha256": "…"}, "valid": …}}
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from mars.lab.data.manifest import FILE, check_version, contents
from mars.lab.errors import LabError
from mars.lab.images.dataset import SPLITS, Images, Raw, Sizes, Split, check, statistics
from mars.lab.rundir import write_atomically

FORMAT = "mars.images"


@dataclass(frozen=True)
class Entry:
    """One split's file."""

    file: str
    images: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ImageManifest:
    """The contents of manifest.json."""

    source: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    splits: dict[Split, Entry]
    format: str = FORMAT
    version: int = 1

    @property
    def sizes(self) -> Sizes:
        """What `mars train --dry-run` wants to know."""
        train, valid = (self.splits[split].images for split in SPLITS)
        return Sizes(train, valid, len(self.classes), self.shape[0], self.shape[1])


def write(raw: Raw, source: str, directory: Path) -> ImageManifest:
    """Write both splits and then the manifest; a kill leaves whole files or none."""
    check(raw, source)
    entries = {split: _write_split(raw, split, directory) for split in SPLITS}
    mean, std = statistics(raw.pixels["train"])
    _, channels, height, width = raw.pixels["train"].shape
    manifest = ImageManifest(source, raw.classes, (channels, height, width), mean, std, entries)
    text = json.dumps(asdict(manifest), indent=1, ensure_ascii=False)
    write_atomically(directory / FILE, text.encode("utf-8"))
    return manifest


def _write_split(raw: Raw, split: Split, directory: Path) -> Entry:
    pixels = np.ascontiguousarray(raw.pixels[split])
    labels = np.ascontiguousarray(raw.labels[split], "<i8")
    digest = hashlib.sha256()

    def put(file: BinaryIO) -> None:
        for array in (pixels, labels):
            digest.update(array.data)
            file.write(array.data)

    name = f"{split}.bin"
    write_atomically(directory / name, put)
    return Entry(name, len(labels), pixels.nbytes + labels.nbytes, digest.hexdigest())


def is_prepared(directory: Path) -> bool:
    """Whether a directory's manifest is one of images."""
    try:
        return contents(directory).get("format") == FORMAT
    except LabError:
        return False


def load(directory: Path) -> ImageManifest:
    """Read and check a directory's manifest."""
    path, data = directory / FILE, contents(directory, "images")
    if data.get("format") != FORMAT:
        raise LabError(f"{directory} holds no images: its {FILE} is of another kind")
    check_version(path, data)
    try:
        for name in ("classes", "shape", "mean", "std"):
            data[name] = tuple(data[name])
        data["splits"] = {split: Entry(**data["splits"][split]) for split in SPLITS}
        manifest = ImageManifest(**data)
        for entry in manifest.splits.values():
            if Path(entry.file).name != entry.file or entry.bytes != entry.images * (
                math.prod(manifest.shape) + 8
            ):
                raise ValueError(f"file {entry.file!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(f"{path} is incomplete or ill-typed ({error}): prepare it again") from error
    return manifest


def read(directory: Path, split: Split, source: str) -> Images:
    """One split, its sha256 checked."""
    manifest = load(directory)
    entry = manifest.splits[split]
    data = _content(directory / entry.file, entry)
    cut = entry.bytes - 8 * entry.images
    pixels = data[:cut].reshape(entry.images, *manifest.shape)
    labels = data[cut:].view("<i8").astype(np.int64)
    return Images(
        source, torch.from_numpy(pixels), torch.from_numpy(labels), manifest.classes,
        manifest.mean, manifest.std, entry.sha256,
    )  # fmt: skip


def verify(directory: Path, progress: Callable[[str], None]) -> ImageManifest:
    """Check the size and the sha256 of both files."""
    manifest = load(directory)
    for entry in manifest.splits.values():
        progress(entry.file)
        _content(directory / entry.file, entry)
    return manifest


def _content(path: Path, entry: Entry) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise LabError(f"{path}: the manifest names it, but it cannot be read") from error
    if len(data) != entry.bytes:
        raise LabError(f"{path} has {len(data)} bytes, but the manifest says {entry.bytes}")
    if hashlib.sha256(data.data).hexdigest() != entry.sha256:
        raise LabError(f"{path} is damaged: its sha256 is not the manifest's; prepare it again")
    return data
