"""A split of labelled images in memory, and its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mars.lab.errors import LabError

Split = Literal["train", "valid"]
SPLITS: tuple[Split, ...] = ("train", "valid")
Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

_BLOCK = 1000  # images that are counted or hashed at a time


@dataclass(frozen=True)
class Images:
    """Labelled images of one size.

    Mean and standard deviation are those of all pixels of the training split, for either split.
    """

    source: str
    pixels: Tensor  # uint8, (N, C, H, W)
    labels: Tensor  # int64, (N,)
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, in 0 … 1
    std: tuple[float, ...]
    sha256: str  # of the pixels, then the labels as little-endian int64

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Raw:
    """What a reader of a format returns: both splits and the names of the classes."""

    pixels: Mapping[Split, Bytes]
    labels: Mapping[Split, Labels]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """What is known of a source without its pixels."""

    train: int
    valid: int
    classes: int
    channels: int
    size: int  # height and width


def statistics(pixels: Bytes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of values 0 … 1.

    From counts of the 256 values, which are whole numbers: the same however they are summed.
    """
    counts = np.zeros((pixels.shape[1], 256), np.int64)
    for start in range(0, len(pixels), _BLOCK):
        block = pixels[start : start + _BLOCK]
        for channel, count in enumerate(counts):
            count += np.bincount(block[:, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    part = counts / counts.sum(1, keepdims=True)
    mean = part @ values
    std = np.sqrt((part * (values - mean[:, None]) ** 2).sum(1))
    return tuple(mean.tolist()), tuple(std.tolist())


def fingerprint(pixels: Bytes, labels: Labels) -> str:
    """The sha256 of the pixels and then the labels, as a prepared directory stores them."""
    digest = hashlib.sha256(np.ascontiguousarray(pixels).data)
    digest.update(np.ascontiguousarray(labels, "<i8").data)
    return digest.hexdigest()


def check(raw: Raw, source: str) -> Raw:
    """Refuse what cannot be trained on: no images, oblong ones, labels without a class."""
    for split in SPLITS:
        pixels, labels = raw.pixels[split], raw.labels[split]
        if not len(labels) or len(pixels) != len(labels):
            raise LabError(
                f"{source} has {len(pixels)} images and {len(labels)} labels for {split}"
            )
        if labels.min() < 0 or labels.max() >= len(raw.classes):
            raise LabError(
                f"{source} has labels {labels.min()} … {labels.max()}, but {len(raw.classes)} "
                "classes"
            )
    _, _, height, width = raw.pixels["train"].shape
    if height != width:
        raise LabError(f"{source} has images of {width}×{height}: make them square first")
    return raw


def images_of(raw: Raw, source: str, split: Split) -> Images:
    """One split of what a reader returned."""
    check(raw, source)
    mean, std = statistics(raw.pixels["train"])
    pixels, labels = raw.pixels[split], raw.labels[split]
    return Images(
        source, torch.from_numpy(pixels), torch.from_numpy(labels), raw.classes, mean, std,
        fingerprint(pixels, labels),
    )  # fmt: skip
