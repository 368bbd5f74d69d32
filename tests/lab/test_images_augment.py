"""Crops and flips: a pure function of (seed, step, row), and equal to a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mars.lab.images import draws, transform

SEEDS = st.integers(0, 2**64 - 1)
RECORDED = [[1, 8, 1], [4, 2, 1], [1, 7, 0]]
PLACES = [[20, 13], [25, 10], [21, 14]]
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


@given(SEEDS, st.integers(0, 10**6), st.integers(1, 40), st.data())
@settings(deadline=None)
def test_micro_batches_and_ranks_draw_the_same(
    seed: int, step: int, rows: int, data: st.DataObject
) -> None:
    whole = draws(seed, step, 0, rows, 4, True)
    assert whole.shape == (rows, 3)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    parts = [
        draws(seed, step, a, b, 4, True) for a, b in zip([0, *cuts], [*cuts, rows], strict=True)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_draws_are_even_and_differ_between_rows_steps_and_seeds() -> None:
    many = draws(5, 9, 0, 9000, 4, True)
    for column, values in ((0, 9), (1, 9), (2, 2)):
        counts = torch.bincount(many[:, column], minlength=values)
        assert len(counts) == values
        assert counts.sub(9000 / values).abs().max() < 5 * (9000 / values) ** 0.5
    pairs = torch.bincount(many[:, 0] * 9 + many[:, 1], minlength=81)
    assert pairs.min() > 60  # dy tells nothing of dx
    for other in (draws(6, 9, 0, 9000, 4, True), draws(5, 10, 0, 9000, 4, True), many.roll(1, 0)):
        assert 20 < (other == many).all(1).sum() < 100  # 9000/162 = 56 by chance
    assert draws(5, 9, 0, 50, 4, False)[:, 2].eq(0).all()
    assert draws(5, 9, 0, 50, 0, False).eq(0).all()


def test_draws_are_the_same_on_every_machine_and_version() -> None:
    """Recorded: a change would silently break the resuming of every run."""
    assert draws(1234, 56, 3, 6, 4, True).tolist() == RECORDED


def test_draws_are_not_the_words_that_order_an_epoch() -> None:
    order = np.random.Philox(key=np.array([7, 3], np.uint64)).random_raw(400).reshape(-1, 4)
    drawn = draws(7, 3, 0, 100, 2**62, False)[:, 0].numpy()
    assert not set(drawn.tolist()) & set((order[:, 0] % np.uint64(2**63 + 1)).tolist())


def one_by_one(
    pixels: Tensor, moved: Tensor, pad: int, dtype: torch.dtype, cutout: int = 0
) -> Tensor:
    """What torchvision's transforms, then Cutout do to an image, in plain loops over pixels."""
    count, channels, height, width = pixels.shape
    out = torch.empty(pixels.shape)
    for n in range(count):
        dy, dx, flipped = moved[n, :3].tolist()
        top, left = (moved[n, 3:] - cutout // 2).tolist() if cutout else (0, 0)
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    row, column = i + dy - pad, (width - 1 - j if flipped else j) + dx - pad
                    inside = 0 <= row < height and 0 <= column < width
                    byte = pixels[n, c, row, column] if inside else torch.tensor(0)
                    out[n, c, i, j] = (byte / 255 - torch.tensor(MEAN[c])) / torch.tensor(STD[c])
                    if top <= i < top + cutout and left <= j < left + cutout:
                        out[n, c, i, j] = 0
    return out.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "pad"), [((6, 3, 8, 8), 2), ((4, 2, 5, 7), 4), ((3, 3, 4, 4), 0)]
)
def test_a_batch_is_what_a_loop_over_images_gives(
    shape: tuple[int, ...], pad: int, dtype: torch.dtype
) -> None:
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    moved = draws(0, 1, 0, shape[0], pad, True)
    moved[:3] = torch.tensor([[0, 0, 1], [2 * pad, 2 * pad, 0], [2 * pad, 0, 1]])  # the corners
    channels = shape[1]
    got = transform(pixels, moved, pad, MEAN[:channels], STD[:channels], dtype)
    assert torch.equal(got, one_by_one(pixels, moved, pad, dtype))
    assert got.dtype == dtype
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("cutout", [1, 2, 5, 20])
def test_a_square_of_every_image_is_blank(cutout: int) -> None:
    pixels = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    moved = draws(0, 1, 0, 40, 2, True, size=8)
    moved[:2, 3:] = torch.tensor([[0, 0], [7, 7]])  # the corners
    got = transform(pixels, moved, 2, MEAN, STD, torch.float32, cutout)
    assert torch.equal(got, one_by_one(pixels, moved, 2, torch.float32, cutout))
    assert got.is_contiguous(memory_format=torch.channels_last)
    plain = transform(pixels, None, 2, MEAN, STD, torch.float32, cutout)
    assert torch.equal(plain, transform(pixels, None, 2, MEAN, STD, torch.float32))  # validation


def test_the_places_of_squares_are_even_and_the_rest_stays_as_it_was() -> None:
    many = draws(5, 9, 0, 9000, 4, True, size=5)
    assert torch.equal(many[:, :3], draws(5, 9, 0, 9000, 4, True))
    counts = torch.bincount(many[:, 3] * 5 + many[:, 4], minlength=25)
    assert len(counts) == 25
    assert counts.sub(360).abs().max() < 5 * 360**0.5
    assert draws(1234, 56, 3, 6, 4, True, size=32)[:, 3:].tolist() == PLACES


def test_without_draws_it_only_normalises() -> None:
    pixels = torch.randint(0, 256, (5, 3, 6, 6), dtype=torch.uint8)
    plain = transform(pixels, None, 4, MEAN, STD, torch.float32)
    still = torch.tensor([[4, 4, 0]]).expand(5, 3)
    assert torch.equal(plain, transform(pixels, still, 4, MEAN, STD, torch.float32))
    assert plain.is_contiguous(memory_format=torch.channels_last)
    tensors = transform(pixels, None, 4, torch.tensor(MEAN), torch.tensor(STD), torch.float32)
    assert torch.equal(plain, tensors)


def test_it_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(transform, backend=counter, fullgraph=True)
    pixels = torch.randint(0, 256, (5, 3, 6, 6), dtype=torch.uint8)
    for step in range(3):
        moved = draws(0, step, 0, 5, 2, True)
        wanted = transform(pixels, moved, 2, MEAN, STD, torch.float32)
        torch.testing.assert_close(compiled(pixels, moved, 2, MEAN, STD, torch.float32), wanted)
    assert counter.frame_count == 1
