"""GPT-2: names, initial weights, arithmetic against a plain float64 version, and its cost."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import mars
from gpu import needs_gpu
from mars.lab.errors import LabError
from mars.lab.models import GPT, flops_per_token, peak_flops, products
from mars.lab.models.flops import peak_of


@dataclass(frozen=True)
class Config:
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    block_size: int = 12
    vocab_size: int = 40
    dropout: float = 0.0
    bias: bool = False
    scale_attn_by_inverse_layer_idx: bool = False


TINY = Config()
SMALL = Config(12, 12, 768, 1024, 50304)


def batch(config: Config = TINY, rows: int = 3) -> tuple[Tensor, Tensor]:
    size = (rows, config.block_size)
    return tuple(torch.randint(0, config.vocab_size, size) for _ in range(2))


def test_names_are_those_of_gpt2() -> None:
    """As in Hugging Face's GPT2LMHeadModel, whose head is tied and not in its files."""
    block = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    ends = ["weight", "bias"]
    want = ["transformer.wte.weight", "transformer.wpe.weight"]
    want += [f"transformer.h.{i}.{part}.{end}" for i in range(2) for part in block for end in ends]
    want += [f"transformer.ln_f.{end}" for end in ends]
    model = GPT(Config(bias=True))
    assert [name for name, _ in model.named_parameters()] == want
    assert list(model.state_dict()) == want
    without = [name for name in want if not name.endswith("bias")]
    assert list(GPT(Config()).state_dict()) == without


def test_gpt2_small_has_its_size() -> None:
    with torch.device("meta"):
        model = GPT(SMALL)
    weights = sum(p.numel() for p in model.parameters())
    assert weights == 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768


@pytest.mark.parametrize("bias", [False, True])
def test_mars_m_takes_exactly_the_hidden_matrices(bias: bool) -> None:
    model = GPT(Config(bias=bias))
    groups = mars.param_groups(model, mars_type="mars-m")
    by_kind: dict[str, set[str]] = {}
    for group in groups:
        by_kind.setdefault(group["mars_type"], set()).update(name for name, _ in group["params"])
    hidden = {n for n, p in model.named_parameters() if ".h." in n and p.ndim == 2}
    assert len(hidden) == 4 * 2
    assert by_kind["mars-m"] == hidden
    assert by_kind["plain-adamw"] == {n for n, _ in model.named_parameters()} - hidden


def test_initial_weights_are_a_function_of_the_seed() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = GPT(Config(bias=True), seed=3)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are used"
    torch.manual_seed(2)
    two = GPT(Config(bias=True), seed=4).double()
    other = two.transformer.wte.weight.clone()
    two.initialise(3)
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(p.double(), q), name
    assert not torch.equal(other, two.transformer.wte.weight)


@needs_gpu
def test_initial_weights_are_the_same_on_a_gpu() -> None:
    one, two = GPT(Config(), seed=5), GPT(Config(), seed=0).cuda()
    two.initialise(5)
    assert all(
        torch.equal(p, q.cpu()) for p, q in zip(one.parameters(), two.parameters(), strict=True)
    )


def test_initial_weights_have_the_published_sizes() -> None:
    config = Config(n_layer=8, n_embd=64, vocab_size=1000, block_size=200, bias=True)
    for name, p in GPT(config).named_parameters():
        if p.ndim == 2:
            want = 0.02 / math.sqrt(16) if "c_proj" in name else 0.02
            # The deviation of a sample's deviation is want/√(2n); n is at least 4096.
            assert abs(p.std().item() / want - 1) < 5 / math.sqrt(2 * p.numel()), name
        else:
            assert torch.equal(p, torch.full_like(p, 0.0 if "bias" in name else 1.0)), name


def plain_logits(model: GPT, tokens: Tensor, config: Config) -> Tensor:
    """GPT-2 spelled out, from the weights."""
    w = dict(model.named_parameters())

    def layer(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"transformer.{name}.weight"].T
        return y + w[f"transformer.{name}.bias"] if config.bias else y

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        x = x * w[f"transformer.{name}.weight"]
        return x + w[f"transformer.{name}.bias"] if config.bias else x

    t, size = tokens.shape[1], config.n_embd // config.n_head
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:t]
    mask = torch.full((t, t), -math.inf).triu(1)
    for i in range(config.n_layer):
        q, k, v = layer(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(config.n_embd, -1)
        heads = []
        for h in range(config.n_head):
            own = slice(h * size, (h + 1) * size)
            scores = q[..., own] @ k[..., own].transpose(1, 2) / math.sqrt(size)
            if config.scale_attn_by_inverse_layer_idx:
                scores = scores / (i + 1)
            heads.append((scores + mask).softmax(-1) @ v[..., own])
        x = x + layer(torch.cat(heads, -1), f"h.{i}.attn.c_proj")
        h = layer(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        gelu = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + layer(gelu, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["transformer.wte.weight"].T


@pytest.mark.parametrize("change", [{}, {"bias": True}, {"scale_attn_by_inverse_layer_idx": True}])
def test_logits_and_gradients_are_those_of_gpt2(change: dict) -> None:
    config = replace(Config(), **change)
    model = GPT(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # far from the start, where everything is linear
    tokens, targets = batch(config)
    targets[0, :4] = -100
    logits = plain_logits(model, tokens, config)
    torch.testing.assert_close(model(tokens), logits)
    torch.testing.assert_close(model(tokens, last_only=True), logits[:, -1:])
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = model(tokens, targets)
    torch.testing.assert_close(loss, want)
    names, p = zip(*model.named_parameters(), strict=True)
    for name, a, b in zip(
        names, torch.autograd.grad(loss, p), torch.autograd.grad(want, p), strict=True
    ):
        torch.testing.assert_close(a, b, msg=name)


def test_starts_at_the_logarithm_of_the_vocabulary() -> None:
    loss = GPT(Config())(*batch())
    assert loss.dtype == torch.float32
    # Logits are N(0, 0.02² · 16) = N(0, 0.08²); the mean of 36 of them is 0.013 off.
    assert abs(loss.item() - math.log(40)) < 0.05


def test_a_token_sees_only_what_came_before() -> None:
    model = GPT(Config()).double()
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 40
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


def test_dropout_only_while_training() -> None:
    tokens, _ = batch()
    model, plain = GPT(Config(dropout=0.5)), GPT(Config())
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), plain(tokens))


@pytest.mark.parametrize("lean", [False, True])
def test_the_residual_stream_under_autocast(lean: bool) -> None:
    model = GPT(Config(), lean_residual=lean)
    seen = []
    for block in model.transformer.h:
        block.register_forward_hook(lambda module, args, out: seen.append(out[0].dtype))
    tokens, targets = batch()
    exact = model(tokens, targets)
    assert seen == [torch.float32] * 2
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
    assert seen[2:] == [torch.bfloat16 if lean else torch.float32] * 2
    assert loss.dtype == torch.float32
    assert abs(loss - exact) < 0.01 * exact  # bfloat16 has 2⁻⁹


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks, nobody else
@pytest.mark.parametrize("whole", [False, True])
def test_compiles_without_a_break(whole: bool) -> None:
    model = GPT(Config(n_layer=3))
    tokens, targets = batch()
    model(tokens, targets).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    graphs = CompileCounterWithBackend("aot_eager")
    options = {"backend": graphs, "fullgraph": True}
    compiled = torch.compile(model, **options) if whole else model
    if not whole:
        model.compile(**options)
    compiled(tokens, targets).backward()
    # In pieces: the embedding, the first block, every other block, the last norm.
    assert graphs.frame_count == (1 if whole else 4)
    for a, p in zip(want, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-5, atol=1e-7)  # float32, other orders
    assert list(model.state_dict()) == list(GPT(Config(n_layer=3)).state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_blocks_that_scale_attention_each_their_own_way_are_compiled_once() -> None:
    config = Config(n_layer=10, scale_attn_by_inverse_layer_idx=True)  # torch gives up after 8
    model, plain = GPT(config), GPT(config)
    graphs = CompileCounterWithBackend("aot_eager")
    model.compile(backend=graphs, dynamic=False)
    tokens, targets = batch()
    for each in (model, plain):
        each(tokens, targets).backward()
    # As above, but a block is two: before its attention, and after.
    assert graphs.frame_count == 5
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(LabError, match=r"n_embd=16.*n_head=3"):
        GPT(Config(n_head=3))
    with pytest.raises(LabError, match=r"13 tokens.*12 \(block_size\)"):
        GPT(Config())(torch.zeros(1, 13, dtype=torch.long))


def some(*shapes: tuple[int, ...], dtype=torch.float64, device="cpu") -> list[Tensor]:
    return [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]


def test_products_are_torchs() -> None:
    """On a GPU the layers go through these operators; they are the same function."""
    x, up, down, dy = some((6, 8), (16, 8), (8, 16), (6, 8))
    ours = products.ops.gelu_mlp(x, up, down, up.detach(), down.detach())[0]
    theirs = F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down)
    for a, b in zip(
        (ours, *torch.autograd.grad(ours, (x, up, down), dy)),
        (theirs, *torch.autograd.grad(theirs, (x, up, down), dy)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    ours, theirs = products.ops.linear(x, down.T, down.T.detach()), F.linear(x, down.T)
    (d16,) = some((6, 16))
    for a, b in zip(
        torch.autograd.grad(ours, (x, down), d16),
        torch.autograd.grad(theirs, (x, down), d16),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_heads_are_torchs(compiled: bool) -> None:
    x, w, *dy = some((6, 8), (24, 8), (6, 8), (6, 8), (6, 8))

    def ours(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k, v = products.Heads.apply(x, w, w.detach())
        return q * 2, k.sin(), v.view(2, 3, 8).transpose(1, 2).reshape(6, 8)

    function = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    got = function(x, w)
    q, k, v = F.linear(x, w).chunk(3, dim=1)
    want = (q * 2, k.sin(), v.view(2, 3, 8).transpose(1, 2).reshape(6, 8))
    for a, b in zip(
        (*got, *torch.autograd.grad(got, (x, w), dy)),
        (*want, *torch.autograd.grad(want, (x, w), dy)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["linear", "gelu_mlp", "heads_gradients"])
def test_operators_are_well_formed(name: str) -> None:
    x, up, down = some((8, 8), (16, 8), (8, 16), dtype=torch.float32)
    halves = [w.detach().bfloat16() for w in (up, down)]
    half = x.detach().bfloat16()
    trained = half.clone().requires_grad_()
    args = {
        "linear": (trained, up, halves[0]),
        "gelu_mlp": (trained, up, down, *halves),
        "heads_gradients": (half, half + 1, half + 2, half + 3, torch.cat([half] * 3)),
    }[name]
    op = getattr(torch.ops.mars_lab, name).default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(op, args, test_utils=tests, rtol=0.02, atol=0.02)


def test_weight_gradients_come_out_in_float32() -> None:
    """Of 16-bit products of many rows: autocast would round each to 16 bits."""
    x, w, dy = some((512, 8), (16, 8), (512, 16), dtype=torch.float32)
    half = x.detach().bfloat16().requires_grad_()
    y = products.ops.linear(half, w, w.detach().bfloat16())
    (got,) = torch.autograd.grad(y, w, dy.bfloat16())
    want = dy.detach().bfloat16().double().T @ half.detach().double()
    assert got.dtype == torch.float32
    assert (got - want).norm() < 1e-5 * want.norm()


@needs_gpu
def test_a_training_step_on_a_gpu_is_that_of_the_cpu() -> None:
    config = Config(n_layer=3, n_embd=64, vocab_size=512, block_size=64)
    model, tokens = GPT(config), torch.randint(0, 512, (4, 64))
    model(tokens, tokens.roll(-1, 1)).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.cuda()
    tokens = tokens.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    for a, p in zip(want, model.parameters(), strict=True):
        assert (p.grad.cpu() - a).norm() < 0.03 * a.norm()  # bfloat16 through three blocks


def test_flops_are_counted_as_nanogpt_counts() -> None:
    assert flops_per_token(SMALL) == 6 * (12 * 12 * 768**2 + 50304 * 768) + 12 * 12 * 768 * 1024
    assert round(515e3 * flops_per_token(SMALL) / 989e12, 3) == 0.445


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Some other GPU", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops("cpu") is None
    assert peak_flops(torch.device("cpu")) is None


def test_the_speed_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parents[2] / "bench" / "train_speed.py"
    out = tmp_path / "deep" / "speed.json"
    options = "--model tiny --device cpu --no-compile --batch 2 --rounds 1 --steps 1 --out"
    monkeypatch.setattr(sys, "argv", [str(script), *options.split(), str(out)])
    runpy.run_path(str(script), run_name="__main__")
    result = json.loads(out.read_text())
    assert [row["name"] for row in result["rows"]] == [
        "plain, AdamW", "ours, AdamW", "ours, MARS-AdamW", "ours, MARS-M",
    ]  # fmt: skip
    assert all(row["tokens_per_second"] > 0 for row in result["rows"])
    assert result["rows"][0]["ratio"] == 1.0
    assert result["rows"][0]["mfu"] is None


def test_the_compiler_is_not_imported_by_who_does_not_compile() -> None:
    told = "import sys, mars.lab.models; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", told], check=True)
