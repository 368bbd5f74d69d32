"""Batches are a pure function of (seed, step, position), and an epoch covers the data once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.lab.data import Batches, Tokens, Validation, open_tokens
from mars.lab.data.embedded import embedded
from mars.lab.data.shards import Shard, cut_shards
from mars.lab.errors import LabError


def ramp(count: int) -> Tokens:
    """Every token is its own place."""
    array = np.arange(count, dtype=np.uint16)
    return Tokens([Shard(count, array=array)], f"ramp of {count}")


RECORDED = [242, 662, 912, 892, 132, 72]
RECORDED_LATE = [566, 956, 116]
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(0, 2**64 - 1)).flatmap(
    lambda shape: st.tuples(st.integers(shape[0] + 1, 200), *map(st.just, shape))
)


@given(SHAPES, st.lists(st.integers(0, 300), min_size=1, max_size=8))
@settings(deadline=None)
def test_rows_depend_on_nothing_read_before(shape: tuple[int, ...], steps: list[int]) -> None:
    count, context, batch, seed = shape
    used = Batches(ramp(count), context, batch, seed)
    for step in steps:
        fresh = Batches(ramp(count), context, batch, seed)
        for a, b in zip(used.rows(step), fresh.rows(step), strict=True):
            assert torch.equal(a, b)


@given(SHAPES, st.integers(0, 50), st.data())
@settings(deadline=None)
def test_micro_batches_and_ranks_make_the_whole(
    shape: tuple[int, ...], step: int, data: st.DataObject
) -> None:
    count, context, batch, seed = shape
    batches = Batches(ramp(count), context, batch, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, batch), max_size=4)))
    parts = [batches.rows(step, a, b) for a, b in zip([0, *cuts], [*cuts, batch], strict=True)]
    for i, whole in enumerate(batches.rows(step)):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole)
        assert whole.dtype == torch.int64
        assert whole.shape == (batch, context)


@given(SHAPES, st.integers(0, 3))
@settings(deadline=None)
def test_an_epoch_predicts_every_token_exactly_once(shape: tuple[int, ...], epoch: int) -> None:
    count, context, batch, seed = shape
    batches = Batches(ramp(count), context, batch, seed)
    first = epoch * batches.windows
    targets = []
    for row in range(first, first + batches.windows):  # by (step, position), across the borders
        step, position = divmod(row, batch)
        inputs, wanted = batches.rows(step, position, position + 1)
        assert torch.equal(inputs + 1, wanted)
        targets += wanted.flatten().tolist()
    seen = sorted(targets)
    assert seen == list(range(seen[0], seen[-1] + 1))
    assert count - len(seen) < 2 * context + (count < 2 * context)


def test_phases_and_orders_differ_between_epochs_and_seeds() -> None:
    batches = Batches(ramp(5000), 50, 4, seed=1)
    epochs = [batches._epoch(i) for i in range(20)]
    assert len({phase for phase, _ in epochs}) > 10
    assert len({tuple(order) for _, order in epochs}) == 20
    other = Batches(ramp(5000), 50, 4, seed=2)
    assert other.starts(0, 99) != batches.starts(0, 99)
    assert list(epochs[0][1]) != sorted(epochs[0][1])


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    """Recorded: a change would silently break the resuming of every run."""
    batches = Batches(ramp(1000), 10, 4, seed=1234)
    assert batches.starts(0, 6) == RECORDED
    assert batches.starts(1_000_000, 1_000_003) == RECORDED_LATE


def test_a_batch_across_the_border_of_epochs() -> None:
    batches = Batches(ramp(1000), 10, 64, seed=0)  # 99 windows: the second batch crosses
    assert batches.windows == 99
    whole = batches.rows(1)[0][:, 0].tolist()
    ends = [phase + int(k) * 10 for phase, order in map(batches._epoch, (0, 1)) for k in order]
    assert whole == ends[64:128]


@given(st.integers(1, 9), st.integers(1, 60), st.integers(2, 300))
@settings(deadline=None)
def test_validation_is_spread_and_never_overlaps(context: int, sequences: int, count: int) -> None:
    if count < context + 1:
        return
    fixed = Validation(ramp(count), context, sequences)
    assert len(fixed) == min(sequences, (count - 1) // context)
    inputs, targets = fixed.rows()
    assert torch.equal(inputs + 1, targets)
    assert len(set(targets.flatten().tolist())) == targets.numel()
    assert inputs[0, 0] == 0
    if len(fixed) > 1:
        assert targets[-1, -1] == count - 1
    parts = [fixed.rows(i, i + 1)[0] for i in range(len(fixed))]
    assert torch.equal(torch.cat(parts), inputs)


def test_training_never_sees_validation() -> None:
    whole = ramp(60_000).shards
    train = Tokens(cut_shards(whole, 0, 54_000), "train")
    valid = Tokens(cut_shards(whole, 54_000, 60_000), "valid")
    batches = Batches(train, 64, 16, seed=3)
    seen = {int(t) for step in range(120) for part in batches.rows(step) for t in part.unique()}
    kept = {int(t) for part in Validation(valid, 64, 1000).rows() for t in part.unique()}
    assert len(seen) > 53_000
    assert len(kept) > 5_900
    assert not seen & kept


def test_the_splits_of_the_corpus_are_all_of_it_once() -> None:
    streams = [open_tokens("tinyshakespeare", split, "bytes") for split in ("train", "valid")]
    both = np.concatenate([stream.read(0, len(stream)) for stream in streams])
    assert both.astype(np.uint8).tobytes().decode() == embedded("tinyshakespeare.txt")


def test_short_streams_and_wrong_numbers_are_refused() -> None:
    with pytest.raises(LabError, match="ramp of 8 has 8 tokens, fewer than one context of 8"):
        Batches(ramp(8), 8, 1, 0)
    with pytest.raises(LabError, match="ramp of 8 has 8 tokens"):
        Validation(ramp(8), 8, 1)
    assert Batches(ramp(9), 8, 1, 0).rows(5)[1].tolist() == [list(range(1, 9))]
    for arguments in ((0, 1, 0), (1, 0, 0), (1, 1, -1), (1, 1, 2**64)):
        with pytest.raises(LabError):
            Batches(ramp(8), *arguments)
    with pytest.raises(LabError):
        Validation(ramp(9), 8, 0)
    for step, start, stop in ((-1, 0, 1), (0, 1, 0), (0, 0, 3)):
        with pytest.raises(IndexError):
            Batches(ramp(9), 8, 2, 0).rows(step, start, stop)
