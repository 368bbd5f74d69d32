"""Checkpoints: bit by bit what was saved, the right one chosen, the right ones kept."""

from __future__ import annotations

import enum
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpu import needs_gpu
from mars import MARS, param_groups
from mars.lab import checkpoint, plainfile
from mars.lab.checkpoint import CheckpointError, rng_state, set_rng_state
from mars.lab.errors import LabError


class Tiny(nn.Module):
    """A tied table, a matrix, vectors, dropout and a buffer."""

    def __init__(self, width: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, width)
        self.fc = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.dropout(self.fc(self.wte(tokens)), 0.2)
        return self.head(self.norm(x))


class Both:
    """Two optimizers behind one interface."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        self.parts = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)


def build_mars(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: MARS(param_groups(model, **options), lr=1e-2)


def build_other(name: str) -> Callable[[nn.Module], Any]:
    def build(model: nn.Module) -> Any:
        module = pytest.importorskip("pytorch_optimizer")
        return getattr(module, name)(model.parameters(), lr=1e-2)

    return build


TYPES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "adamw, amsgrad, tensor lr": lambda model: torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-2), amsgrad=True, foreach=False
    ),
    "muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "both": Both,
    "Lion": build_other("Lion"),
    "ADOPT": build_other("ADOPT"),
    "SOAP": build_other("SOAP"),
    **{
        f"{kind} {form}": build_mars(mars_type=kind, state_dtype=form)
        for kind, form in itertools.product(TYPES, (None, "bfloat16", "8bit"))
    },
    "exact": build_mars(is_approx=False),
    "exact mars-m": build_mars(is_approx=False, mars_type="mars-m"),
}


def advance(model: nn.Module, optimizer: Any, steps: int) -> None:
    """Batches and dropout come from the global random numbers: resume must restore them."""
    exact = isinstance(optimizer, MARS) and not optimizer.param_groups[0]["is_approx"]
    for _ in range(steps):
        tokens = torch.randint(11, (6,)).roll(random.randrange(6))
        tokens = tokens.roll(int(np.random.randint(6)))

        def closure(tokens: Tensor = tokens) -> Tensor:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
            loss.backward()
            return loss

        if exact:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def trained(
    build: Callable[[nn.Module], Any] = OPTIMIZERS["adamw"], steps: int = 2, **options: Any
) -> tuple[nn.Module, Any]:
    model = Tiny(**options)
    optimizer = build(model)
    advance(model, optimizer, steps)
    return model, optimizer


def flat(value: Any, where: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict, tensors as (dtype, shape, bytes)."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {where: (value.dtype, value.shape, raw)}
    else:
        return {where: value}
    return {k: v for key, item in items for k, v in flat(item, f"{where}.{key}").items()}


def bits(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return flat({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


# The round trip.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_is_bit_exact(tmp_path: Path, name: str) -> None:
    random.seed(0)
    np.random.seed(0)
    model, optimizer = trained(OPTIMIZERS[name], steps=3)
    path = checkpoint.save(tmp_path, 3, model, optimizer, {"tokens": 18, "best": 0.5})
    saved = bits(model, optimizer)
    advance(model, optimizer, 3)

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    again = Tiny()
    other = OPTIMIZERS[name](again)
    training = checkpoint.load(path, again, other)
    assert bits(again, other) == saved
    assert again.head.weight is again.wte.weight
    assert (training["step"], training["tokens"], training["best"]) == (3, 18, 0.5)
    set_rng_state(training["rng"])
    advance(again, other, 3)
    assert bits(again, other) == bits(model, optimizer) != saved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(5, 3).to(dtype)
    optimizer = MARS(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    path = checkpoint.save(tmp_path, 1, model, optimizer, {})
    again = nn.Linear(5, 3).to(dtype)
    other = MARS(again.parameters())
    checkpoint.load(path, again, other)
    assert bits(again, other) == bits(model, optimizer)


def test_any_tensor_of_a_state_dict_is_kept(tmp_path: Path) -> None:
    model = nn.Module()
    kinds = [torch.int64, torch.int16, torch.uint8, torch.bool, torch.bfloat16, torch.complex64]
    for i, kind in enumerate(kinds):
        model.register_buffer(f"b{i}", torch.randn(3, 2).to(kind))
    model.register_buffer("scalar", torch.tensor(3.5))
    model.register_buffer("empty", torch.zeros(0, 4))
    model.register_buffer("also_empty", torch.zeros(0, 4))
    model.register_buffer("turned", torch.randn(4, 3).t())
    model.register_buffer("part", torch.randn(9)[2:5])
    optimizer = torch.optim.SGD([torch.zeros(1)])
    path = checkpoint.save(tmp_path, 0, model, optimizer, {})
    saved = flat(model.state_dict())
    for t in model.state_dict().values():
        t.zero_()
    checkpoint.load(path, model)
    assert flat(model.state_dict()) == saved


def test_the_weights_are_a_safetensors_file_like_any_other(tmp_path: Path) -> None:
    import safetensors.torch

    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, {}) / "model.safetensors"
    loaded = safetensors.torch.load_file(path)
    assert "head.weight" not in loaded  # tied: stored once
    for name, value in loaded.items():
        assert torch.equal(value, model.state_dict()[name])
    again = Tiny()
    safetensors.torch.load_model(again, path)
    assert flat(again.state_dict()) == flat(model.state_dict())


def test_tensors_in_the_file_are_aligned_to_their_type(tmp_path: Path) -> None:
    model = nn.Module()
    for i, kind in enumerate([torch.bool, torch.float32, torch.bfloat16, torch.float64]):
        model.register_buffer(f"b{i}", torch.ones(3).to(kind))
    optimizer = torch.optim.SGD([torch.zeros(1)])
    raw = (checkpoint.save(tmp_path, 0, model, optimizer, {}) / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    begins = [header[f"b{i}"]["data_offsets"][0] for i in range(4)]
    assert begins == [42, 24, 36, 0]


@needs_gpu
@pytest.mark.parametrize("fused", [None, True])
def test_resume_on_a_gpu_is_bit_exact(tmp_path: Path, fused: bool | None) -> None:
    def build(model: nn.Module) -> MARS:
        rate = torch.tensor(1e-2, device="cuda")
        return MARS(model.parameters(), lr=rate, fused=fused, capturable=True)

    def go_on(model: nn.Module, optimizer: MARS) -> None:
        for _ in range(3):
            model(torch.randint(11, (6,), device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def bits_of(model: nn.Module, optimizer: MARS) -> dict[str, Any]:
        both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return flat(torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, both))

    model = Tiny().cuda()
    optimizer = build(model)
    go_on(model, optimizer)
    path = checkpoint.save(tmp_path, 3, model, optimizer, {})
    go_on(model, optimizer)
    again = Tiny().cuda()
    other = build(again)
    set_rng_state(checkpoint.load(path, again, other)["rng"])
    assert other.param_groups[0]["lr"].is_cuda
    go_on(again, other)
    assert bits_of(again, other) == bits_of(model, optimizer)


def test_weights_alone_can_be_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, {})
    again = Tiny()
    before = rng_state()
    checkpoint.load(path, again)
    assert flat(again.state_dict()) == flat(model.state_dict())
    assert flat(rng_state()) == flat(before)


def test_saving_disturbs_no_random_numbers(tmp_path: Path) -> None:
    model, optimizer = trained()
    before = flat(rng_state())
    checkpoint.save(tmp_path, 1, model, optimizer, {})
    assert flat(rng_state()) == before


class Colour(str, enum.Enum):
    RED = "red"


def test_odd_values_are_saved_as_plain_ones(tmp_path: Path) -> None:
    """numpy.float64 is a float, and yet no weights_only load takes it."""
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    scaler = torch.amp.GradScaler("cpu").state_dict()
    training = {
        "a": np.int64(3), "b": [np.float32(0.5), (1, None)], "c": Colour.RED, "d": {1, 2},
        "e": np.arange(3), "f": nn.Parameter(torch.ones(2)), "scaler": scaler,
    }  # fmt: skip
    path = checkpoint.save(tmp_path, 1, model, optimizer, training)
    for name in ("optimizer.pt", "training.pt"):
        torch.load(path / name, weights_only=True)
    again = checkpoint.load(path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert (again["a"], again["b"], again["c"], again["d"]) == (3, [0.5, (1, None)], "red", {1, 2})
    assert again["scaler"] == scaler
    assert again["e"].tolist() == [0, 1, 2]
    assert again["f"].tolist() == [1, 1]


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match=r"training\.data\.1 is of type Posix.*cannot hold"):
        checkpoint.save(tmp_path, 1, model, optimizer, {"data": [0, tmp_path]})
    optimizer.param_groups[0]["rule"] = print
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\.0\.rule is of type b"):
        checkpoint.save(tmp_path, 1, model, optimizer, {})
    odd = nn.Module()
    odd.register_buffer("table", torch.eye(2).to_sparse())
    with pytest.raises(LabError, match="table of the model"):
        checkpoint.save(tmp_path, 1, odd, torch.optim.SGD([torch.zeros(1)]), {})
    assert not any((tmp_path / "checkpoints").glob("*"))


# What does not fit.

WRONG: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "shape": (lambda: Tiny(width=9), OPTIMIZERS["adamw"], r"wte\.weight has shape \(11, 8\)"),
    "more": (
        lambda: nn.ModuleDict({"wte": nn.Embedding(11, 8), "new": nn.Linear(1, 1)}),
        OPTIMIZERS["adamw"], r"it lacks new\.weight",
    ),
    "fewer": (
        lambda: nn.ModuleDict({"wte": nn.Embedding(11, 8)}),
        OPTIMIZERS["adamw"], r"it has fc\.bias, which the model lacks",
    ),
    "dtype": (
        lambda: Tiny().bfloat16(), OPTIMIZERS["adamw"], r"wte\.weight is of type torch\.float32",
    ),
    "class": (Tiny, OPTIMIZERS["sgd"], "saved by AdamW, this is SGD"),
    "groups": (
        Tiny,
        lambda model: torch.optim.AdamW([{"params": [p]} for p in model.parameters()]),
        "it has 1 parameter groups, this one 5",
    ),
    "size": (
        Tiny, lambda model: torch.optim.AdamW(list(model.parameters())[:2]),
        "group 0 has 5 parameters, this one's 2",
    ),
    "order": (
        Tiny, lambda model: torch.optim.AdamW(list(model.parameters())[::-1]),
        r"parameter 0 of its group 0 has shape \(11, 8\), this one's \(8,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path, case: str) -> None:
    path = checkpoint.save(tmp_path, 1, *trained(), {})
    make, build, text = WRONG[case]
    model = make()
    optimizer = build(model)
    before = bits(model, optimizer)
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(path, model, optimizer)
    assert bits(model, optimizer) == before


def test_untied_weights_take_a_tied_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model, optimizer, {})
    again = Tiny(tied=False)
    checkpoint.load(path, again)
    assert torch.equal(again.head.weight, model.wte.weight)


def test_a_full_gpu_is_not_taken_for_a_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(storage: Any, location: str) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = checkpoint.save(tmp_path, 1, model, optimizer, {})
    monkeypatch.setattr(plainfile, "_place", place)
    with pytest.raises(CheckpointError, match="does not fit in the GPU's memory"):
        checkpoint.load(saved, model, optimizer)


def test_an_optimizer_that_refuses_half_way_is_put_back(tmp_path: Path) -> None:
    model, optimizer = trained(Both)
    path = checkpoint.save(tmp_path, 1, model, optimizer, {})
    other = trained(Both)
    other[1].parts[1].add_param_group({"params": [torch.zeros(2)]})
    before = bits(*other)
    with pytest.raises(CheckpointError, match="is not of this optimizer: loaded state dict"):
        checkpoint.load(path, *other)
    assert bits(*other) == before
