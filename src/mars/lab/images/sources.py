"""From what the user names to images."""

from __future__ import annotations

from typing import get_args

from mars.lab.errors import LabError
from mars.lab.images.dataset import Images, Sizes, Split, images_of
from mars.lab.images.digits import SIZES, digits


def open_images(source: str, split: Split) -> Images:
    """Open one split of a source: ``"digits"`` (embedded)."""
    if split not in get_args(Split):
        raise LabError(f"unknown split {split!r}: it must be 'train' or 'valid'")
    if source == "digits":
        return images_of(digits(), source, split)
    raise LabError(f"no such images: {source}")


def sizes(source: str) -> Sizes | None:
    """What a source has, as far as that is known without reading pixels."""
    return SIZES if source == "digits" else None
