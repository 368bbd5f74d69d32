"""One table of optimizers: baselines from torch and pytorch_optimizer, MARS, and yours."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mars
from mars.lab.config import Optimizer
from mars.lab.errors import LabError, first_line, meant
from mars.lab.muon import Muon
from mars.lab.optimizer_state import parts
from mars.lab.own import imported
from mars.sharding import is_sharded

Build = Callable[[nn.Module, Optimizer, dict[str, Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Entry:
    """A registered optimizer: how people call it, and how it is made for a model."""

    label: str
    about: str
    build: Build
    uses: frozenset[str]  # fields of the configuration beyond lr
    lr: float | None = None  # its own default, if it has one


REGISTRY: dict[str, Entry] = {}


def register(
    name: str, label: str, about: str, uses: Iterable[str] = ()
) -> Callable[[Build], Build]:
    """Add an optimizer under a name; ``uses`` are the fields it reads beyond rate and decay."""

    def add(build: Build) -> Build:
        REGISTRY[name] = Entry(label, about, build, frozenset({"weight_decay", *uses}))
        return build

    return add


class Together(torch.optim.Optimizer):
    """Several optimizers, each with its own parameters, stepped and saved as one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([{"params": group["params"]} for group in self._groups()], {})
        self.param_groups = self._groups()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"together": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["together"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = self._groups()  # loading made new ones


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state, whatever it is nested in."""
    found: dict[int, int] = {}
    rest: list[Any] = [part.state for part in parts(optimizer)]
    while rest:
        value = rest.pop()
        if isinstance(value, Tensor):
            found[id(value)] = value.numel() * value.element_size()
        elif isinstance(value, dict):
            rest += value.values()
        elif isinstance(value, (list, tuple)):
            rest += value
    return sum(found.values())


def label(name: str) -> str:
    """What people call it."""
    return REGISTRY[name].label if name in REGISTRY else name.split(":")[-1]


def find(name: str) -> Entry:
    """The optimizer of a registered name or a dotted path."""
    return REGISTRY.get(name) or _dotted(name)


def build(
    model: nn.Module, config: Optimizer, *, replicated: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of a configuration, for a model; a wrong field is a LabError that names it.

    ``replicated``: other processes have the same parameters and gradients (DDP).
    """
    options = {name: _value(text) for name, text in config.options.items()}
    entry = find(config.name)
    if replicated and entry.build is _mars:
        options = {"ranks": "replicate", **options}
    for name in foreign(config):
        raise LabError(f"optimizer.{name} is no option of {config.name}")
    try:
        return entry.build(model, config, options)
    except LabError:
        raise
    except Exception as error:
        raise LabError(f"optimizer {config.name}: {first_line(error)}") from error


def foreign(config: Optimizer) -> list[str]:
    """Fields of a configuration that are set, and that its optimizer does not have."""
    fields = ("betas", "lr_1d", "betas_1d", "weight_decay_1d", "gamma", "exact")
    uses = find(config.name).uses
    return [n for n in fields if getattr(config, n) not in (None, False) and n not in uses]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _dotted(name: str) -> Entry:
    """A class of the user's, as ``package.module:Class``."""
    if "@" in name:
        raise LabError(f"{name!r}: NAME@RATE is for a race; here it is NAME, and --optimizer.lr")
    if ":" not in name:
        near = "separate names by spaces;" if "," in name else meant(name, REGISTRY)
        known = f"{near} known: {', '.join(sorted(REGISTRY))}".lstrip()
        raise LabError(f"unknown optimizer {name!r}; {known}; your own: package.module:Class")
    try:
        cls = imported(name)
    except Exception as error:  # whatever a module of somebody's does when it is imported
        raise LabError(f"optimizer {name!r} cannot be imported: {first_line(error)}") from error
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise LabError(f"optimizer {name!r} is no torch.optim.Optimizer")
    parameters = _parameters(cls)
    accepted = set(parameters)
    if "lr" not in accepted:
        raise LabError(f"optimizer {name!r} takes no lr: all rates would be the same one")

    def make(model: nn.Module, o: Optimizer, options: dict[str, Any]) -> torch.optim.Optimizer:
        fields = {"lr": o.lr, "weight_decay": o.weight_decay, "betas": o.betas, "gamma": o.gamma}
        given = {k: v for k, v in fields.items() if k in accepted and v is not None}
        return cls(decayed(model), **{**given, **options})

    lr = parameters["lr"].default
    lr = lr if isinstance(lr, float) else None
    uses = frozenset({"weight_decay", "betas", "gamma"} & accepted)
    return Entry(label(name), "your own", make, uses, lr)


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """What a class is made with; if it passes on **kwargs, what its bases are made with, too."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" in base.__dict__:
            own = inspect.signature(base.__init__).parameters  # type: ignore[misc]
            found = {**own, **found}
            if all(p.kind is not p.VAR_KEYWORD for p in own.values()):
                break
    return found


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: what decays, and norms and biases, which do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim >= 2]
    rest: list[Tensor] = [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}]
    if rest:
        groups.append({"params": rest, "weight_decay": 0.0})
    return groups


def _on_gpu(model: nn.Module) -> bool:
    return any(p.is_cuda for p in model.parameters())


def _set(**fields: Any) -> dict[str, Any]:
    """Those that are set: None leaves it to the optimizer."""
    return {name: value for name, value in fields.items() if value is not None}


@register("adamw", "AdamW", "torch.optim.AdamW, fused on a GPU", ["betas"])
def _adamw(model: nn.Module, o: Optimizer, options: dict[str, Any]) -> torch.optim.Optimizer:
    options = {"betas": o.betas or (0.9, 0.95), "fused": _on_gpu(model) or None, **options}
    return torch.optim.AdamW(decayed(model), lr=o.lr, weight_decay=o.weight_decay, **options)


def _from_library(cls: str, betas: tuple[float, float], more: dict[str, Any]) -> Build:
    def make(model: nn.Module, o: Optimizer, options: dict[str, Any]) -> torch.optim.Optimizer:
        try:
            library = importlib.import_module("pytorch_optimizer")
        except ImportError as error:
            raise LabError(
                f"{o.name} needs pytorch_optimizer: pip install pytorch_optimizer"
            ) from error
        if cls in UNSHARDED and any(map(is_sharded, model.parameters())):
            raise LabError(f"{o.name} cannot step sharded parameters: --loop.parallel ddp, or mars")
        options = {"betas": o.betas or betas, **more, **options}
        made = getattr(library, cls)(
            decayed(model), lr=o.lr, weight_decay=o.weight_decay, **options
        )
        assert isinstance(made, torch.optim.Optimizer)
        return made

    return make


UNSHARDED = ("SOAP", "ADOPT")  # their steps mix plain tensors with DTensors (4.1.0)

for _name, _class, _betas, _more in (
    ("lion", "Lion", (0.9, 0.99), {}),  # its decay is decoupled unless told otherwise
    ("soap", "SOAP", (0.95, 0.95), {}),  # and SOAP's always
    # By default the library adds ADOPT's decay to the gradient.
    ("adopt", "ADOPT", (0.9, 0.9999), {"weight_decouple": True}),
):
    _make = _from_library(_class, _betas, _more)
    register(_name, _class, f"pytorch_optimizer.{_class}", ["betas"])(_make)


@register(
    "muon",
    "Muon",
    "torch.optim.Muon on hidden matrices and convolutions, torch.optim.AdamW on the rest",
    ["betas", "lr_1d", "betas_1d", "weight_decay_1d"],
)
def _muon(model: nn.Module, o: Optimizer, options: dict[str, Any]) -> torch.optim.Optimizer:
    hidden: list[Tensor] = []
    tables: list[Tensor] = []
    vectors: list[Tensor] = []
    # The routing of MARS-M: the same tensors go to both, so the two can be compared.
    for group in mars.param_groups(model, mars_type="mars-m", matrix_rule="flatten"):
        to = hidden if group["name"] == "matrices" else tables
        for _, p in group["params"]:
            (vectors if p.ndim < 2 else to).append(p)
    decay = o.weight_decay if o.weight_decay_1d is None else o.weight_decay_1d
    # Muon's updates are scaled to the size of AdamW's, so that one rate serves both (Moonlight).
    options = {"adjust_lr_fn": "match_rms_adamw", **options}
    momentum = _set(momentum=o.betas[0] if o.betas else None)
    groups = [{"params": tables, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return Together([
        Muon(hidden, lr=o.lr, weight_decay=o.weight_decay, **momentum, **options),
        torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=o.lr if o.lr_1d is None else o.lr_1d,
            betas=o.betas_1d or (0.9, 0.95),
            fused=_on_gpu(model) or None,
        ),
    ])  # fmt: skip


ROUTING = ("matrix_rule", "optimize_1d", "embeddings", "head", "vectors")


def _mars(model: nn.Module, o: Optimizer, options: dict[str, Any]) -> torch.optim.Optimizer:
    decay = o.weight_decay if o.weight_decay_1d is None else o.weight_decay_1d
    kind = o.name.removesuffix(AS_PUBLISHED)
    # What decides the routing is for the routing, which tells the optimizer.
    routed: dict[str, Any] = {name: options[name] for name in ROUTING if name in options}
    groups = mars.param_groups(
        model,
        mars_type=kind,
        routes=_convolutions(model, routed),
        **{"vectors": "no-decay", **routed},
    )
    return mars.MARS(
        groups,
        lr=o.lr,
        weight_decay=o.weight_decay,
        lr_1d=o.lr if o.lr_1d is None else o.lr_1d,
        weight_decay_1d=decay,
        is_approx=not o.exact,
        # In exact mode the closure clips: both gradients of a step alike.
        max_grad_norm=None if o.exact else o.max_grad_norm,
        **_set(betas=o.betas, betas_1d=o.betas_1d, gamma=o.gamma),
        **{name: value for name, value in options.items() if name not in routed},
    )


def _convolutions(model: nn.Module, routed: dict[str, Any]) -> list[Any]:
    """Where they are no matrices, AdamW trains them, and they decay as for everybody."""
    if routed.get("matrix_rule") == "flatten" or all(p.ndim < 3 for p in model.parameters()):
        return []
    return [(convolution, "adamw")]


def convolution(name: str, p: Tensor) -> bool:
    return p.ndim > 2


AS_PUBLISHED = "-2d"  # the authors' rule, beside the one that takes convolutions as matrices

for _name, _label, _about in (
    ("mars-adamw", "MARS-AdamW", ""),
    ("mars-lion", "MARS-Lion", ""),
    ("mars-shampoo", "MARS-Shampoo", ""),
    ("mars-m", "MARS-M", ""),
    (f"mars-adamw{AS_PUBLISHED}", "MARS-AdamW 2-D", " on two dimensions, AdamW on all others"),
):
    register(
        _name, _label, f'mars.MARS(mars_type="{_name.removesuffix(AS_PUBLISHED)}"){_about}',
        ["betas", "lr_1d", "betas_1d", "weight_decay_1d", "gamma", "exact"],
    )(_mars)  # fmt: skip
