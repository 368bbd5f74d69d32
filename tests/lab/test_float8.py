"""The 8-bit head: against float64, against what its own operands stand for, and in a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from miniature import run
from torch import Tensor
from torch.nn import functional as F

from mars.lab import hardware, recipes
from mars.lab.config import Run, check, from_json, read_config, to_json
from mars.lab.describe import describe
from mars.lab.differences import first_difference
from mars.lab.errors import LabError
from mars.lab.models import GPT, float8, linear_cross_entropy
from mars.lab.models import loss as loss_module
from mars.lab.planner import gpus, memory, models
from mars.lab.report import compare
from mars.lab.study import fingerprint
from mars.lab.study.questions import find
from mars.lab.study.results import Results
from mars.lab.train import prepare, train

N, V, D = 304, 512, 64  # three chunks of 128, the last of 48
RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_budget", lambda device: 128 * V * 2)


chunks = pytest.mark.usefixtures("_chunks")


def data(scale: float = 0.1, near: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised hidden states, some widths larger than the others, that know their targets."""
    weight = scale * torch.randn(V, D)
    targets = torch.randint(0, V, (N,))
    hidden = F.layer_norm(torch.randn(N, D) + near * F.normalize(weight[targets]), (D,))
    hidden[:, :3] *= 4
    targets[::7] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, fp8: bool, dtype=torch.bfloat16
) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = linear_cross_entropy(hidden, weight, targets, fp8=fp8)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


@chunks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [0.02, 0.1, 0.3])
def test_is_as_exact_as_8_bits_are(scale: float, dtype: torch.dtype) -> None:
    """Operands are off by 2 to 3 %, the gradient of logits by 5 to 7 %, at random."""
    hidden, weight, targets = data(scale)
    loss = F.cross_entropy(F.linear(hidden.double(), weight.double()), targets)
    exact = (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))
    got = gradients(hidden, weight, targets, fp8=True, dtype=dtype)
    assert [t.dtype for t in got] == [torch.float32] * 3
    assert abs(got[0] - exact[0]) < 0.01 * exact[0]
    for ours, want in zip(got[1:], exact[1:], strict=True):
        assert 0.005 < error(ours, want) < 0.1, "0.02 to 0.08, of which 16 bits have none"
        assert F.cosine_similarity(ours.flatten(), want.flatten(), dim=0) > 0.995


@chunks
def test_gradients_are_those_of_the_operands() -> None:
    """To the bit: what is stored stands for numbers, and those are multiplied, chunk by chunk."""
    hidden, weight, targets = data()
    got = gradients(hidden, weight, targets, fp8=True, dtype=torch.float32)
    h, w = float8.rounded(hidden.detach()), float8.rounded(weight.detach())
    kept = targets != -100
    d_hidden, d_weight = torch.empty(N, D), torch.zeros(V, D)
    losses = torch.empty(N)
    for first in range(0, N, 128):
        part = slice(first, first + 128)
        h8 = h.rows_RC[part].float()
        logits = h8 @ w.rows_RC.float().T * (h.scale * w.scale)
        losses[part] = F.cross_entropy(logits, targets[part], reduction="none", ignore_index=-100)
        d = logits.sub_(logits.logsumexp(1)[:, None]).exp_()
        d -= F.one_hot(targets[part].clamp(min=0), V)
        d = (d * kept[part, None] * 2.0**15).to(torch.float8_e5m2).float()
        d_hidden[part] = d @ w.rows_RC.float() * (w.scale * 2.0**-15)
        d_weight += d.T @ h8 * (h.scale * 2.0**-15)
    inverse = 1 / kept.sum()
    assert abs(got[0] - losses.sum() * inverse) < 1e-6 * got[0]
    assert torch.equal(got[1], d_hidden * inverse)
    # One product is of the transposed copy: another order of summation, in float32.
    torch.testing.assert_close(got[2], d_weight * inverse, rtol=1e-5, atol=1e-7)
    assert not got[1][~kept].any(), "an ignored row has no gradient"


def test_an_operand_is_the_matrix_in_both_orders() -> None:
    x = torch.randn(48, 32) * 5
    x[3, 4] = -37.0
    operand = float8.rounded(x)
    assert torch.equal(operand.rows_RC.float(), operand.columns_CR.float().T)
    assert float(operand.scale) == pytest.approx(37 / 448)
    assert operand.rows_RC[3, 4].float() == -448
    back = operand.rows_RC.float() * operand.scale
    # Half of the last of 3 bits; below 2⁻⁶ of the scale numbers have fewer.
    assert ((back - x).abs() <= x.abs() * 2**-4 + operand.scale * 2**-10).all()
    part = operand.part(slice(16, 32))
    assert torch.equal(part.rows_RC.float(), part.columns_CR.float().T)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_shows(bad: float, where: int) -> None:
    given = data()
    with torch.no_grad():
        given[where][5, 7] = bad
    for found in gradients(*given, fp8=True):
        assert found.isnan().any()
    assert gradients(*given, fp8=True)[0].isnan()


def test_zeros_are_no_division_by_zero() -> None:
    hidden, weight, targets = data()
    none = torch.zeros_like(hidden).requires_grad_()
    loss, d_hidden, d_weight = gradients(none, weight, targets, fp8=True)
    assert float(loss) == pytest.approx(math.log(V), abs=1e-6)
    assert d_hidden.isfinite().all()
    assert not d_weight.any()
    zero = torch.zeros_like(weight).requires_grad_()
    assert gradients(hidden, zero, targets, fp8=True)[2].isfinite().all()
    tiny = (hidden.detach() * 1e-30).requires_grad_()
    assert all(t.isfinite().all() for t in gradients(tiny, weight, targets, fp8=True))


def test_small_probabilities_keep_their_gradient() -> None:
    """Two words take nearly all: the others' 2⁻²⁰ is far below what e5m2 has without a factor."""
    hidden, weight, targets = data(near=0.0)
    hidden = torch.cat([hidden.detach(), torch.ones(N, 16)], 1).requires_grad_()
    weight = torch.cat([weight.detach() * 0.1, torch.zeros(V, 16)], 1)
    weight[:2, -1] = 14.0
    weight.requires_grad_()
    targets = targets.clamp(max=1)
    loss = F.cross_entropy(F.linear(hidden.double(), weight.double()), targets)
    rare = torch.autograd.grad(loss, weight)[0][2:]
    got = gradients(hidden, weight, targets, fp8=True)[2][2:]
    assert 0 < rare.abs().max() < 1e-6
    # Their common size is that of a logit of 14, which is off by a few tenths.
    assert F.cosine_similarity(got.flatten(), rare.flatten(), dim=0) > 0.999
    assert 0.3 < got.norm() / rare.norm() < 3


def test_nothing_at_all() -> None:
    hidden, weight, targets = data()
    assert math.isnan(linear_cross_entropy(hidden[:0], weight, targets[:0], fp8=True).item())
    ignored = torch.full_like(targets, -100)
    assert math.isnan(linear_cross_entropy(hidden, weight, ignored, fp8=True).item())


@chunks
def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, weight, targets = data()
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, targets, fp8=True)
    assert torch.equal(alone, linear_cross_entropy(hidden, weight, targets, fp8=True))
    assert not torch.equal(alone, linear_cross_entropy(hidden, weight, targets))


@chunks
def test_compiles_without_a_break() -> None:
    given = data()

    def function(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, t, fp8=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(*given)
    found = (loss.detach(), *torch.autograd.grad(loss, given[:2]))
    assert all(map(torch.equal, found, gradients(*given, fp8=True)))


# The kernels, in Triton's interpreter where there is no GPU.


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mars.lab.models import float8_kernel, loss_kernel

    monkeypatch.setattr(loss_kernel, "BLOCK", 64)
    monkeypatch.setattr(float8_kernel, "ROWS", 32)
    monkeypatch.setattr(float8_kernel, "COLUMNS", 64)


def same_in_8_bits(got: Tensor, want: Tensor, carries: bool) -> None:
    """The same but for neighbours, where the last bit of an exponential decides.

    Triton's interpreter forgets to carry: what should round up to a power of two has half of it.
    """
    a, b = got.float().cpu(), want.float().cpu()
    differs = a != b
    if not carries:
        forgotten = differs & (2 * a == b)
        assert forgotten.float().mean() < 0.08, "an eighth of the upper numbers of an octave"
        differs &= ~forgotten
    assert differs.float().mean() < 2e-3
    neighbours = (a - b).abs() <= 0.26 * b.abs() + 2.0**-16  # e5m2's least number
    assert neighbours[differs].all()


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_gradients_equals_torch(dtype: torch.dtype) -> None:
    from mars.lab.models import float8_kernel, loss_kernel

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    rows, columns = 80, 176  # tiles at the edges are not full
    logits = (3 * torch.randn(rows, columns, device=device)).to(dtype)
    targets = torch.randint(0, columns, (rows,), device=device)
    targets[::7] = -100
    losses, sums = (torch.full((rows,), math.nan, device=device) for _ in range(2))
    loss_kernel.losses_and_sums(logits, targets, losses, sums, -100)
    want = float8.gradient_like(logits.cpu())
    exact, on_cpu = torch.empty(rows), targets.cpu()
    loss_module._rows_fp8(logits.cpu().clone(), on_cpu, exact, -100, want)
    torch.testing.assert_close(losses.cpu(), exact, rtol=1e-5, atol=1e-5)  # exp2 instead of exp
    torch.testing.assert_close(
        sums.cpu() * math.log(2), logits.cpu().float().logsumexp(1), rtol=1e-5, atol=1e-5
    )

    wide = (torch.empty(rows, columns, device=device), torch.empty(columns, rows, device=device))
    float8_kernel.gradients(logits, targets, sums, *wide, -100, 1.0)
    d = loss_module._rows(logits.cpu().float().clone(), on_cpu, exact, -100, True)
    torch.testing.assert_close(wide[0].cpu(), d, rtol=1e-5, atol=2e-6)
    assert torch.equal(wide[0], wide[1].T)

    # As in the last chunk: narrower than the memory is.
    got = float8.gradient_like(logits.new_empty(rows + 16, columns)).part(slice(rows))
    float8_kernel.gradients(
        logits, targets, sums, got.rows_RC, got.columns_CR, -100, float8.GRADIENT
    )
    same_in_8_bits(got.rows_RC, want.rows_RC, carries=gpu)
    assert torch.equal(got.rows_RC.float(), got.columns_CR.float().T)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_that_casts_equals_torch(dtype: torch.dtype) -> None:
    from mars.lab.models import float8_kernel

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    x = torch.randn(112, 80, device=device).to(dtype)
    want = float8.rounded(x.cpu())
    factor = (448 / x.abs().max().float()).reshape(())
    wide = (torch.empty(112, 80, device=device), torch.empty(80, 112, device=device))
    float8_kernel.cast(x, factor, *wide)
    torch.testing.assert_close(wide[0], x.float() * factor, rtol=1e-6, atol=0)
    assert torch.equal(wide[0], wide[1].T)
    rows, columns = float8.empty(x, torch.float8_e4m3fn)
    float8_kernel.cast(x, factor, rows, columns)
    same_in_8_bits(rows, want.rows_RC, carries=gpu)
    assert torch.equal(rows.float(), columns.float().T)


# In a run.


def small(out: Path, **loop: object) -> Run:
    made = run(out, **{"fp8_head": True, **loop})
    return made.replace(model={"dropout": 0.0, "n_embd": 32, "block_size": 32})


def test_training_ends_where_it_does_in_16_bits(tmp_path: Path) -> None:
    """From 5.5 to 3.34, and 0.0004 apart; seeds are 0.02 apart."""
    loop = {"steps": 80, "batch_size": 8, "eval_every": 40, "eval_sequences": 32}
    ends = []
    for fp8 in (False, True):
        made = small(tmp_path / str(fp8), **loop, fp8_head=fp8)
        ends.append(train(made.replace(keep={"save_every": None})).valid)
    assert ends[0] < 3.6
    assert 0 < abs(ends[0] - ends[1]) < 0.015


def test_only_training_uses_it(tmp_path: Path) -> None:
    made = small(tmp_path)
    model, plain = GPT(made.gpt, fp8_head=True), GPT(made.gpt)
    tokens = torch.randint(0, 256, (2, 33))
    batch = tokens[:, :-1], tokens[:, 1:]
    assert model.training
    assert not torch.equal(model(*batch), plain(*batch))
    model.eval()
    assert torch.equal(model(*batch), plain.eval()(*batch))
    assert torch.equal(model(batch[0]), plain(batch[0]))

    with_, without = prepare(made), prepare(made.replace(loop={"fp8_head": False}))
    assert with_.model.fp8_head
    assert not without.model.fp8_head
    assert with_.validate() == without.validate()
    with_.advance()
    without.advance()
    assert float(with_.window) != float(without.window)


def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    whole = small(tmp_path / "whole").replace(schedule={"shape": "constant"})
    parts = whole.replace(keep={"out": str(tmp_path / "parts")})
    train(whole)
    train(parts.replace(loop={"steps": 6}))
    train(parts, extend=True)
    ends = []
    for made in (whole, parts):
        training = prepare(made)
        training.restore(Path(made.directory) / "checkpoints" / "step-00000012")
        ends.append(torch.cat([p.detach().flatten() for p in training.model.parameters()]))
    assert torch.equal(*ends)
    with pytest.raises(LabError, match=r"holds a run with loop\.fp8_head = True, not False"):
        train(parts.replace(loop={"fp8_head": False}))


def test_runs_from_before_there_was_such_a_field(tmp_path: Path) -> None:
    made = small(tmp_path / "run", fp8_head=False)
    old = to_json(made)
    del old["loop"]["fp8_head"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(old))
    assert read_config(path) == made
    assert first_difference(to_json(from_json(old)), to_json(made)) is None
    assert compare._told(compare.flatten(old), "loop.fp8_head") == "False", "in a report too"


@pytest.mark.parametrize("name", ["gpt2-small", "gpt2-small-rates", "optimizers-50m"])
def test_results_from_before_still_belong_to_their_studies(name: str) -> None:
    study = find(name)
    assert study.common()["loop.fp8_head"] is False
    made = {result.fingerprint["config"] for result in Results(RESULTS / name).read()}
    assert {fingerprint._hash(study.common())} == made
    assert fingerprint._hash({**study.common(), "loop.fp8_head": True}) not in made


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"n_embd": 40}}, "model.n_embd (40) and model.vocab_size (256) must be mult"),
        ({"model": {"vocab_size": 257}}, "and model.vocab_size (257) must be multiples of 16"),
    ],
)
def test_odd_sizes_are_refused(tmp_path: Path, changes: dict[str, dict], words: str) -> None:
    made = small(tmp_path).replace(**changes)
    with pytest.raises(LabError) as told:
        check(made)
    assert str(told.value).startswith("loop.fp8_head: ")
    assert words in str(told.value)
    assert check(made.replace(loop={"fp8_head": False}))


def test_odd_micro_batches_are_refused(tmp_path: Path) -> None:
    made = small(tmp_path, batch_size=4, micro_batch_size=2).replace(model={"block_size": 20})
    with pytest.raises(LabError, match=r"loop\.fp8_head: the tokens of a micro-batch .* 40\) must"):
        prepare(made)
    with pytest.raises(LabError, match=r"loop\.fp8_head: the tokens of a micro-batch"):
        describe(made)  # --dry-run
    prepare(made.replace(loop={"micro_batch_size": 4}))


def test_a_plan_counts_its_memory() -> None:
    usual = models.find("gpt2-small")
    eight = models.of_run(usual.run.replace(loop={"fp8_head": True}), "gpt2-small")
    gpu, rows = gpus.GPUS["h200"], 32 * 1024
    more = memory.logits_bytes(eight, gpu, 32) - memory.logits_bytes(usual, gpu, 32)
    operands, head = 2 * (rows + 50304) * 768, 4 * 50304 * 768
    assert more == rows // 2 * 50304 * 2 + operands + head  # two chunks


def test_images_are_refused() -> None:
    made = recipes.make("digits-cnn").replace(loop={"fp8_head": True})
    with pytest.raises(LabError, match=r"^loop\.fp8_head is for GPTs"):
        check(made)


def test_gpus_that_cannot_are_refused_by_name() -> None:
    bf16 = torch.bfloat16
    assert "NVIDIA A100 has no 8-bit" in str(
        hardware.why_not_fp8(("NVIDIA A100", (8, 0)), bf16, 64)
    )
    assert hardware.why_not_fp8(("NVIDIA L4", (8, 9)), bf16, 64) is None
    assert hardware.why_not_fp8(("NVIDIA H200", (9, 0)), bf16, 64) is None
    for dtype, name in ((torch.float16, "float16"), (torch.float32, "float32")):
        told = hardware.why_not_fp8(("NVIDIA H200", (9, 0)), dtype, 64)
        assert told == f"loop.precision must be bf16 on a GPU, it is {name}"
        assert hardware.why_not_fp8(None, dtype, 64) is None, "a CPU emulates it"
