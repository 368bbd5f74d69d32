"""`open_images`: the embedded digits, prepared directories, and what is refused."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from mars.lab.errors import LabError
from mars.lab.images import Sizes, open_images, sizes


def test_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    given = datasets.load_digits()
    both = [open_images("digits", split) for split in ("train", "valid")]
    pixels = torch.cat([part.pixels for part in both]).squeeze(1).numpy()
    assert np.array_equal(pixels, np.floor(given.images * 255 / 16 + 0.5))
    assert np.array_equal(torch.cat([part.labels for part in both]), given.target)
    assert both[0].classes == tuple(map(str, given.target_names))


def test_digits_need_nothing_but_the_package() -> None:
    train, valid = open_images("digits", "train"), open_images("digits", "valid")
    assert (train.pixels.shape, valid.pixels.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (train.pixels.dtype, train.labels.dtype) == (torch.uint8, torch.int64)
    assert train.pixels.max() == 255
    # Every digit is in both, about as often.
    assert train.labels.bincount().min() > 130
    assert valid.labels.bincount().min() > 30
    values = train.pixels.double() / 255
    assert train.mean == valid.mean == pytest.approx((values.mean().item(),), rel=1e-12)
    assert train.std == pytest.approx((values.std(correction=0).item(),), rel=1e-12)
    whole = train.pixels.numpy().tobytes() + train.labels.numpy().astype("<i8").tobytes()
    assert train.sha256 == hashlib.sha256(whole).hexdigest() != valid.sha256
    assert sizes("digits") == Sizes(1437, 360, 10, 1, 8)
    assert len(train) == 1437


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(LabError, match="unknown split 'test'"):
        open_images("digits", "test")  # type: ignore[arg-type]
