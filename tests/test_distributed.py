"""Many processes: the trajectory of one, whatever the strategy. Gloo on CPU, real collectives.

The oracle is MARS on plain tensors in one process. Both compute in float64 (Newton–Schulz too), so
what differs is the order of a few sums over ranks: differences of 1e-16 a step, which Newton–Schulz
multiplies by at most 3.4445⁵ ≈ 500. 1e-11 of the way travelled is far above that and far below any
mistake: clipping by the norm of one shard is off by more than 1e-3 (`test_the_table_can_fail`).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

import distributed_cases
from mars import MARS
from mars.rule import KINDS
from mars.sharding import Ranks as Spread
from mars.sharding import block, flops, owners, rounds
from ranks import Ranks

CASES = "distributed_cases"
STRATEGIES = ("fsdp", "ddp", "ddp-view", "ddp-static", "ddp-no-sync", "ddp-shared", "zero")
MODES = ("approximate", "closure", "protocol")
TYPES = [kind for kind in KINDS if kind != "plain-adamw"]
TOLERANCE = 1e-11

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed"),
    pytest.mark.filterwarnings("ignore"),  # torch.distributed's own notices
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(("strategy", "kind"), list(product(STRATEGIES, TYPES)))
def test_the_trajectory_is_that_of_one_process(strategy: str, kind: str, two: Ranks) -> None:
    cases = []
    for mode, clip in product(MODES, ("tensor", "global", None)):
        if (strategy, mode) != ("zero", "closure"):  # refused, see below
            cases.append((strategy, {"mars_type": kind, "clip": clip}, mode))
    more: list[dict] = [
        {"max_grad_norm": 0.5},
        {"max_grad_norm": 0.5, "clip": "global", "consume_grads": True},
        {"consume_grads": True, "amsgrad": True, "second_moment": "raw"},
        {"optimize_1d": True, "maximize": True, "amsgrad": True},
    ]
    cases += [(strategy, {"mars_type": kind, **options}) for options in more]
    for answers in two.run(CASES, "compare_many", cases):
        for case, difference in zip(cases, answers, strict=True):
            assert difference < TOLERANCE, case


@pytest.mark.parametrize("strategy", ["fsdp", "ddp-shared", "zero"])
@pytest.mark.parametrize("kind", TYPES)
def test_in_the_precision_of_training(strategy: str, kind: str, two: Ranks) -> None:
    """float32, with Newton–Schulz in bfloat16: a last bit of m may flip one of 8 bits there."""
    options = {"mars_type": kind, "ns_dtype": "bfloat16"}
    tolerance = 0.05 if KINDS[kind].matrix else 1e-4
    (first, second) = two.run(CASES, "compare", strategy, options, "approximate", "float32")
    assert first == second < tolerance


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(
    ("strategy", "kind"), [("fsdp", "mars-adamw"), ("fsdp", "mars-lion"), ("zero", "mars-adamw")]
)
def test_the_fused_engine_steps_parts(strategy: str, kind: str, two: Ranks) -> None:
    more: list[dict] = [{}, {"clip": "global", "max_grad_norm": 0.5, "consume_grads": True}]
    if (strategy, kind) == ("fsdp", "mars-adamw"):
        more += [
            {"clip": "global"},
            {"max_grad_norm": 0.5},
            {"clip": None, "second_moment": "raw"},
            {"maximize": True, "amsgrad": True, "optimize_1d": True},
            {"mars_type": "plain-adamw"},
        ]
    cases = [
        (strategy, {"mars_type": kind, "fused": True, **options}, "approximate", "float32")
        for options in more
    ]
    cases.append((strategy, {"mars_type": kind, "fused": True}, "protocol", "float32"))
    for answers in two.run(CASES, "compare_many", cases):
        for case, difference in zip(cases, answers, strict=True):
            assert difference < 1e-4, case


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize("clip", ["tensor", "global", None])
def test_shards_are_fused_and_ranks_need_not_agree(clip: str | None, two: Ranks) -> None:
    for table, parts in two.run(CASES, "fused_parts", {"clip": clip}):
        assert parts == 8
        assert "foreach" not in table
    for options in ({"clip": clip}, {"clip": clip, "max_grad_norm": 0.5}):
        assert max(two.run(CASES, "engines_differ", options)) < 1e-5


@pytest.mark.parametrize("kind", ["mars-adamw", "mars-m"])
def test_moments_of_16_bits(kind: str, two: Ranks, tmp_path: Path) -> None:
    """Rounded at random, by other numbers than on one process; alike after a checkpoint."""
    engines: list[dict] = [{}]
    if kind == "mars-adamw" and find_spec("triton") is not None:
        engines.append({"fused": True})
    for engine in engines:
        path = str(tmp_path / str(bool(engine)))
        for away, again in two.run(CASES, "lean_state", engine, kind, path):
            assert 0 < away < (0.4 if kind == "mars-m" else 0.05)  # Newton–Schulz multiplies it
            assert again == 0


@pytest.mark.parametrize("kind", ["mars-adamw", "mars-m"])
def test_16_bit_parameters(kind: str, two: Ranks) -> None:
    """Gradients are rounded to bfloat16 in another order: 2⁻⁸ of them a step."""
    options = {"mars_type": kind, "ns_dtype": "float32"}
    for difference in two.run(CASES, "compare", "fsdp", options, "approximate", "bfloat16"):
        assert difference < 0.25


def test_the_table_can_fail(two: Ranks) -> None:
    """The usual mistake, the norm of the part that is here, is seen, and is not small."""
    for kind in ("mars-adamw", "mars-m"):
        assert min(two.run(CASES, "with_norms_of_parts", kind)) > 1e-3


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((1, 7), (Shard(0),)),
        ((3, 4), (Shard(0),)),
        ((5, 4), (Shard(1),)),
        ((4, 3), (Shard(1),)),
        ((3, 2, 5), (Shard(0),)),
        ((3, 2, 5), (Shard(2),)),
    ],
)
@pytest.mark.parametrize("kind", ["mars-adamw", "mars-shampoo", "mars-m"])
def test_every_cut(kind: str, shape: tuple, placements: tuple, two: Ranks) -> None:
    """Uneven, empty, by columns, and tensors of more dimensions."""
    for rule in ("flatten", "stack"):
        options = {"mars_type": kind, "matrix_rule": rule}
        for difference in two.run(CASES, "given_gradients", placements, shape, options, (2,)):
            assert difference < TOLERANCE, rule


def test_four_ranks() -> None:
    """HSDP on a mesh of 2 × 2; matrices cut twice; parts of four, most of them uneven or empty."""
    four = Ranks(4)
    try:
        cases = [
            ("hsdp", {"mars_type": kind, "clip": "global"}) for kind in ("mars-lion", "mars-m")
        ]
        cases += [("fsdp", {"mars_type": "mars-m"}), ("ddp-shared", {"mars_type": "mars-shampoo"})]
        for answers in four.run(CASES, "compare_many", cases):
            assert max(answers) < TOLERANCE, dict(zip(map(str, cases), answers, strict=True))
        for placements in ((Shard(0), Shard(1)), (Shard(0), Shard(0))):
            options = {"mars_type": "mars-m", "max_grad_norm": 0.5}
            answers = four.run(CASES, "given_gradients", placements, (6, 5), options, (2, 2))
            assert max(answers) < TOLERANCE
    finally:
        four.stop()


def test_a_gradient_that_is_a_sum_over_ranks(two: Ranks) -> None:
    assert max(two.run(CASES, "summed_gradient")) < TOLERANCE


def test_an_exact_step_after_approximate_ones(two: Ranks) -> None:
    assert max(two.run(CASES, "exact_after_approximate")) < TOLERANCE


def test_exact_steps_with_validations_between(two: Ranks) -> None:
    assert max(two.run(CASES, "exact_with_validation")) < TOLERANCE


def test_matrices_without_rows_that_ranks_share(two: Ranks) -> None:
    two.run(CASES, "empty_replicas")


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero"])
def test_grad_norm_is_that_of_all_gradients(strategy: str, two: Ranks) -> None:
    for got, alone in two.run(CASES, "grad_norms", strategy):
        assert got == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp-view"])
def test_consumed_gradients(strategy: str, two: Ranks) -> None:
    assert all(two.run(CASES, "consumed", strategy))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["mars-adamw", "mars-m"])
def test_what_is_not_finite_on_one_rank_is_so_for_all(kind: str, value: float, two: Ranks) -> None:
    """The part of rank 1 is broken: ranks agree about every tensor, as one process would."""
    for options in ({}, {"clip": "global"}, {"max_grad_norm": 1.0}):
        first, second = two.run(
            CASES, "one_rank_is_not_finite", value, {"mars_type": kind, **options}
        )
        assert first == second
        finite, alone = first
        assert finite == alone
        assert not all(finite)


def test_grad_scaler_skips_on_all_ranks(two: Ranks) -> None:
    assert two.run(CASES, "scaler_skips_everywhere") == [[1.0, 1.0, 2.0]] * 2


@pytest.mark.parametrize("kind", TYPES)
def test_state_is_sharded_like_its_parameter(kind: str, two: Ranks) -> None:
    two.run(CASES, "state_is_sharded", kind)


@pytest.mark.parametrize("kind", TYPES)
def test_saved_on_two_ranks_and_loaded_on_one_and_two(kind: str, two: Ranks, tmp_path) -> None:
    expected, _ = two.run(CASES, "save", str(tmp_path / "two"), kind)
    for got in (
        *two.run(CASES, "load", str(tmp_path / "two"), kind),
        *two.run(CASES, "load", str(tmp_path / "two"), kind, "ddp"),
        distributed_cases.load(str(tmp_path / "two"), kind),
    ):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_saved_on_two_ranks_and_loaded_on_three(two: Ranks, tmp_path) -> None:
    three = Ranks(3)
    try:
        for kind in TYPES:
            path = str(tmp_path / kind)
            expected, _ = two.run(CASES, "save", path, kind)
            for got in three.run(CASES, "load", path, kind):
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    finally:
        three.stop()


@pytest.mark.parametrize(
    "options",
    [{}, {"clip": "global", "max_grad_norm": 0.1}, {"mars_type": "mars-m"}],
    ids=str,
)
def test_a_compiled_step(options: dict, two: Ranks) -> None:
    """Dynamo cannot trace what ranks do together: that step is taken as it is."""
    assert max(two.run(CASES, "compiled", options)) < TOLERANCE


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_rank_can_have_the_state_of_16_bit_parameters(
    dtype: str, strategy: str, two: Ranks
) -> None:
    """Low halves are int16, which no collective takes: they travel in a wider dtype."""
    for broadcast in (False, True):
        assert two.run(CASES, "gathered", dtype, broadcast, strategy) == [0.0, 0.0]


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_exact_state_by_closure_loads_after_a_step_without_a_batch(
    strategy: str, two: Ranks, tmp_path: Path
) -> None:
    assert two.run(CASES, "closure_state", strategy, str(tmp_path / "saved")) == [0.0, 0.0]


def test_the_state_of_zero_is_that_of_one_process(two: Ranks) -> None:
    assert max(two.run(CASES, "zero_state")) < TOLERANCE


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("partial_parameter", "cannot step blocks.0.weight: its placements"),
        ("eight_bits", 'cannot be kept in 8 bits; use "bfloat16"'),
        ("other_part", "they are cut in different places"),
        ("plain_state", "is a plain tensor, and the parameter a DTensor"),
        ("unprepared_closure", "take one step in the way of exact mode that saved this"),
        ("zero_closure", "exact mode with a closure needs all parameters here"),
    ],
)
def test_what_is_refused(function: str, words: str, two: Ranks) -> None:
    for message in two.run(CASES, "raises", function):
        assert words in message


def test_diagnostics_see_whole_tensors(two: Ranks) -> None:
    for sharded, alone in two.run(CASES, "diagnosed"):
        assert sharded == pytest.approx(alone, rel=1e-6)


def test_the_plan_is_printed(two: Ranks) -> None:
    first, second = two.run(CASES, "plan")
    assert first == second
    assert "Newton–Schulz of 4 matrices over 2 ranks" in first
    assert first.splitlines()[1].split()[:6] == ["0", "mars-m", "4", "0.003", "0", "foreach"]


def test_the_plan_of_what_is_not_cut_names_the_engine_of_one_process(two: Ranks) -> None:
    for text in two.run(CASES, "plan_of_one"):
        assert [line.split()[5] for line in text.splitlines()[1:]] == ["cpu", "cpu"]


def test_processes_may_part_and_meet_again(two: Ranks, tmp_path: Path) -> None:
    assert two.run(CASES, "begin_anew", str(tmp_path / "store")) == [0.0, 0.0]


def test_a_rank_without_gradients_knows_the_norm(two: Ranks) -> None:
    assert two.run(CASES, "rank_without_gradients") == [4.0, 4.0]


def test_a_copy_has_the_process_group_and_a_pickle_is_refused(two: Ranks) -> None:
    assert two.run(CASES, "copied_group") == [True, True]


def test_ranks_is_checked() -> None:
    p = [torch.nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(ValueError, match="Invalid ranks: 'ddp'"):
        MARS(p, ranks="ddp")
    with pytest.raises(ValueError, match="process_group needs ranks"):
        MARS(p, process_group=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of the whole optimizer"):
        MARS([{"params": p, "ranks": "replicate"}])
    alone = MARS(p, ranks="replicate")  # no process group: one process, as ever
    p[0].grad = torch.ones(2, 2)
    alone.step()
    assert not Spread("replicate").replicate


COSTS = st.lists(st.integers(0, 10**9), max_size=40).map(tuple)


@given(COSTS, st.integers(1, 9))
def test_the_plan_is_total_balanced_and_the_same_every_time(costs: tuple, ranks: int) -> None:
    plan = owners(costs, ranks)
    assert plan == owners.__wrapped__(costs, ranks)
    assert len(plan) == len(costs)
    assert set(plan) <= set(range(ranks))
    load = [sum(c for c, r in zip(costs, plan, strict=True) if r == rank) for rank in range(ranks)]
    assert max(load) - min(load) <= max(costs, default=0)


@given(COSTS, st.integers(1, 9), st.integers(1, 4))
def test_rounds_cover_an_owners_work(costs: tuple, ranks: int, count: int) -> None:
    plan = owners(costs, ranks)
    turn = rounds(costs, plan, count)
    assert len(turn) == len(costs)
    assert all(0 <= t < count for t in turn)


@given(st.integers(0, 40), st.integers(1, 9))
@settings(max_examples=60)
def test_blocks_are_those_of_torch(length: int, ranks: int) -> None:
    parts = [len(part) for part in torch.zeros(length).chunk(ranks)] if length else []
    own = [block(length, ranks, rank) for rank in range(ranks)]
    assert own == parts + [0] * (ranks - len(parts))


def test_the_count_of_operations() -> None:
    """Of the products that the iteration is made of, on the short side."""
    assert flops("mars-m", (4, 3), 5) == 5 * (2 * (3 * 3 * 4) * 2 + 2 * 27)
    assert flops("mars-shampoo", (3, 4), 1) == 2 * (3 * 3 * 4) * 3
    assert flops("mars-shampoo", (5, 3, 4), 1) == 5 * flops("mars-shampoo", (3, 4), 1)  # a stack
