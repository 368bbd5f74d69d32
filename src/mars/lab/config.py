"""What a run is: typed data. Recipes return it, the command line overrides any field of it."""

from __future__ import annotations

import dataclasses
import json
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mars.lab.errors import LabError, check_name, meant

Precision = Literal["auto", "bf16", "fp16", "fp32"]
Shape = Literal["cosine", "wsd", "exp", "linear", "constant", "multistep", "onecycle"]
Arch = Literal["resnet18", "vit", "cnn"]
Parallel = Literal["auto", "ddp", "fsdp2"]
AnyRun = TypeVar("AnyRun", bound="Run")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network: a GPT-2 as nanoGPT and the authors of MARS train it."""

    n_layer: int = 12
    """Transformer blocks."""
    n_head: int = 12
    """Attention heads in a block."""
    n_embd: int = 768
    """Width."""
    block_size: int = 1024
    """Context: tokens in a sequence, in training too."""
    vocab_size: int = 50304
    """Rows of the embedding: at least the tokenizer's (GPT-2 has 50257, padded for speed)."""
    dropout: float = 0.0
    """Share of activations set to zero while training."""
    bias: bool = False
    """Biases in linear layers and norms."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Divide attention scores by the number of the block, as the authors' GPT-2 runs do."""
    init: str | None = None
    """Initial weights: a Hugging Face GPT-2 folder, a run or a checkpoint, which also brings these
    sizes and the tokenizer; by default they are drawn from the seed."""


@dataclass(frozen=True, kw_only=True)
class ImageModel:
    """The network: one that tells images apart."""

    arch: Arch = "resnet18"
    """resnet18 for small images (11M parameters), a small vit, or a cnn of a few layers."""
    classes: int = 10
    """What it tells apart: as many as the data have."""
    channels: int = 3
    """3 for colours, 1 for grey."""
    size: int = 32
    """Height and width of an image."""
    patch: int = 4
    """vit: height and width of a patch, which divides the image's."""
    depth: int = 6
    """vit: blocks."""
    width: int = 384
    """vit: width."""
    heads: int = 6
    """vit: attention heads in a block."""
    label_smoothing: float = 0.0
    """Share of a target that all classes have in equal parts, in the loss while training."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where tokens come from."""

    source: str = "tinyshakespeare"
    """The embedded corpus, a text file, a token file (.bin), or a directory made by `mars data`."""
    valid: str | None = None
    """Where validation tokens come from; by default from the same source, which sets some aside."""
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    """How text became (or becomes) tokens."""


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Where images come from, and how they are varied while training."""

    source: str = "digits"
    """The embedded digits, a directory made by `mars data`, a CIFAR archive, or a folder with a
    folder of images for every class in train/ and val/."""
    valid: str | None = None
    """Where validation images come from; by default from the same source."""
    pad: int = 4
    """Random crops: pixels that an image may be shifted by; 0 for none."""
    flip: bool = True
    """Mirror every other image, at random."""
    cutout: int = 0
    """Pixels of the side of a square that is blanked somewhere in every image; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer. Where a field is None, the optimizer's own default holds."""

    name: str = "mars-adamw"
    """A registered name (`mars doctor` lists them), or your own class as package.module:Class."""
    lr: float = 3e-3
    """Peak learning rate (of matrices, where the optimizer tells them apart)."""
    weight_decay: float = 0.0
    """Decoupled weight decay (of matrices, where the optimizer tells them apart)."""
    betas: tuple[float, float] | None = None
    """Averages of first and second moment. Muon takes the first as its momentum."""
    lr_1d: float | None = None
    """Rate of what is not a hidden matrix: norms and biases; for Muon and MARS-M embeddings too."""
    betas_1d: tuple[float, float] | None = None
    """Averages for those."""
    weight_decay_1d: float | None = None
    """Weight decay of those (norms and biases never decay)."""
    gamma: float | None = None
    """MARS: strength of the correction, 0.025 as published; 0 switches it off."""
    exact: bool = False
    """MARS: exact mode, two gradients a step on the same batch."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient of the whole model to this norm, for every optimizer alike."""
    options: dict[str, str] = field(default_factory=dict)
    """More arguments of the constructor, added to the recipe's: --optimizer.options ns_steps 6"""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over time, as a share of its peak."""

    shape: Shape = "cosine"
    """wsd holds the peak, then falls linearly; exp is the authors' 0.9^(100·progress); multistep
    falls to a tenth at half of the steps and again at three quarters; onecycle rises, then falls,
    both linearly and from and to zero."""
    warmup_steps: int = 2000
    """Linear warm-up from zero. (onecycle has its own.)"""
    min_lr: float = 0.1
    """What cosine, exp and linear end at, as a share of the peak."""
    decay_share: float = 0.2
    """wsd: share of the steps that it falls in, to zero."""
    rise_share: float = 0.25
    """onecycle: share of the steps that it rises in."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How training goes."""

    steps: int = 100_000
    """Optimizer steps; where epochs are set they count, and this follows from them."""
    epochs: float | None = None
    """How often to go through the training data."""
    batch_size: int = 480
    """Sequences or images in an optimizer step, over all micro-batches and processes."""
    micro_batch_size: int | None = None
    """Sequences or images in one forward pass of a process; by default what the memory holds, at
    most 32k tokens, or all images of the batch."""
    precision: Precision = "auto"
    """Of the forward and backward pass; auto is bf16 on a GPU that has it, fp32 on a CPU."""
    compile: bool | None = None
    """torch.compile the model; by default on a GPU only."""
    fp8_head: bool = False
    """GPT: multiply by the vocabulary in 8 bits while training: faster, with coarser gradients. In
    bf16, on a GPU of compute capability 8.9 or more; sizes in multiples of 16. CPUs emulate it."""
    graphs: bool | None = None
    """Replay forward and backward as CUDA graphs, so that the host does not start every kernel; by
    default where passes are short. One process, bf16 or fp32, not exact mode."""
    deterministic: bool = False
    """The same bits from run to run on a GPU too, whose fastest kernels for attention and
    embeddings add in whatever order they come; slower. On a CPU it is so anyway."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1; under torchrun each process takes the GPU of its number."""
    parallel: Parallel = "auto"
    """Under torchrun: every process holds the whole model (ddp, which is what auto means) or a
    shard of parameters, gradients and state (fsdp2)."""
    shards: int | None = None
    """fsdp2: processes that share one copy of the model; by default all of them. With 8 of 64
    processes there are 8 copies, each within a machine (HSDP)."""
    threads: int | None = None
    """Threads on a CPU; by default torch's choice."""
    seed: int = 0
    """Of initial weights, batches and dropout."""
    eval_every: int = 1000
    """Steps between validations; the first come earlier, at doubling distances."""
    eval_sequences: int = 1000
    """Sequences of a validation: always the same ones. (Images are validated on all.)"""
    log_every: int = 10
    """Steps between records of training."""
    diagnose_every: int | None = None
    """MARS: steps between readings of what the correction does; by default eval_every."""
    skip_nan: bool = False
    """Skip a step whose gradient is not finite, instead of stopping."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What is kept on disk."""

    out: str | None = None
    """Run directory, or --out for short; by default runs/RECIPE-OPTIMIZER-sSEED."""
    save_every: int | None = 1000
    """Steps between checkpoints, in addition to the end and Ctrl-C. None: none, as in studies."""
    last: int = 2
    """How many of the newest checkpoints to keep; the best one stays in addition."""
    resume: bool = True
    """Go on from the newest valid checkpoint in the run directory, if there is one."""
    tensorboard: bool = False
    """Log to TensorBoard too, in the run directory."""
    wandb: str | None = None
    """Log to this project of Weights & Biases too."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of one model by one optimizer."""

    recipe: str = "custom"
    """A label: what the run is called. The recipe itself is RECIPE, the command's first word."""
    model: Model | ImageModel = field(default_factory=Model)
    data: Data | ImageData = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    loop: Loop = field(default_factory=Loop)
    keep: Keep = field(default_factory=Keep)

    @property
    def directory(self) -> str:
        name = self.optimizer.name.replace(":", ".")
        out = self.keep.out or f"runs/{check_name('recipe', self.recipe)}-{name}-s{self.loop.seed}"
        return str(Path(out).expanduser())

    @property
    def gpt(self) -> Model:
        """The model, of a run on text: what is asked of one on images is a LabError."""
        if isinstance(self.model, Model):
            return self.model
        raise LabError(f"{self.recipe} trains on images: this is for runs on text")

    @property
    def text(self) -> Data:
        """Where the tokens come from, of a run on text."""
        if isinstance(self.data, Data):
            return self.data
        raise LabError(f"{self.recipe} trains on images: this is for runs on text")

    def replace(self: AnyRun, **changes: dict[str, Any]) -> AnyRun:
        """A copy with fields of its parts changed: ``run.replace(optimizer={"lr": 1e-3})``.

        Who sets steps means them: epochs, from which they would follow, are forgotten.
        """
        if "steps" in changes.get("loop", {}):
            changes["loop"] = {"epochs": None, **changes["loop"]}
        parts = {
            part: dataclasses.replace(getattr(self, part), **fields)
            for part, fields in changes.items()
        }
        return dataclasses.replace(self, **parts)


# What must hold of a field, whatever the others are.
_ABOVE_ZERO = {
    "model": [
        "n_layer", "n_head", "n_embd", "block_size", "vocab_size",
        "classes", "channels", "size", "patch", "depth", "width", "heads",
    ],
    "loop": [
        "steps", "epochs", "batch_size", "micro_batch_size", "threads", "shards", "eval_every",
        "eval_sequences", "log_every", "diagnose_every",
    ],
    "keep": ["save_every", "last"],
    "optimizer": ["lr", "max_grad_norm"],
}  # fmt: skip
_NOT_BELOW_ZERO = {
    "schedule": ["warmup_steps", "min_lr", "decay_share"],
    "optimizer": ["weight_decay", "lr_1d", "weight_decay_1d"],
    "model": ["dropout", "label_smoothing"],
    "data": ["pad", "cutout"],
}


def check(run: Run) -> Run:
    """The run itself, or a LabError that names the field."""
    for table, allowed in ((_ABOVE_ZERO, "above 0"), (_NOT_BELOW_ZERO, "0 or above")):
        for part, names in table.items():
            for name in names:
                value = getattr(getattr(run, part), name, None)
                right = value is None or (value > 0 if table is _ABOVE_ZERO else value >= 0)
                if not right:
                    raise LabError(f"{part}.{name} must be {allowed}, not {value}")
    loop, schedule = run.loop, run.schedule
    _check_text(run) if isinstance(run.model, Model) else _check_images(run, run.model)
    if not 0 <= schedule.min_lr <= 1:
        raise LabError(f"schedule.min_lr is a share of the peak, 0 to 1, not {schedule.min_lr}")
    if not 0 < schedule.decay_share <= 1:
        raise LabError(f"schedule.decay_share is above 0 and up to 1, not {schedule.decay_share}")
    if not 0 <= schedule.rise_share < 1:
        raise LabError(f"schedule.rise_share is 0 or above, below 1, not {schedule.rise_share}")
    if not 0 <= loop.seed < 2**63:
        raise LabError(f"loop.seed must be 0 to 2**63 - 1, not {loop.seed}")
    if loop.threads and loop.threads > 1024:
        raise LabError(f"loop.threads must be at most 1024, not {loop.threads}")
    if schedule.warmup_steps > loop.steps:
        raise LabError(
            f"schedule.warmup_steps ({schedule.warmup_steps}) is longer than the run "
            f"(loop.steps, {loop.steps})"
        )
    if loop.micro_batch_size:
        _check_multiple(loop, "loop", "batch_size", "micro_batch_size")
    return run


def _check_multiple(fields: object, part: str, name: str, divisor: str) -> None:
    value, by = getattr(fields, name), getattr(fields, divisor)
    if value % by:
        raise LabError(f"{part}.{name} ({value}) must be a multiple of {part}.{divisor} ({by})")


def _check_text(run: Run) -> None:
    model = run.gpt
    if not isinstance(run.data, Data):
        raise LabError("model is a GPT, but data are images: take a recipe for one or the other")
    _check_multiple(model, "model", "n_embd", "n_head")
    if run.loop.fp8_head and (model.n_embd % 16 or model.vocab_size % 16):
        sizes = f"model.n_embd ({model.n_embd}) and model.vocab_size ({model.vocab_size})"
        raise LabError(f"loop.fp8_head: {sizes} must be multiples of 16")
    if model.dropout >= 1:
        raise LabError(f"model.dropout must be below 1, not {model.dropout}")


def _check_images(run: Run, model: ImageModel) -> None:
    if not isinstance(run.data, ImageData):
        raise LabError("model is for images, but data are text: take a recipe for one or the other")
    if model.arch == "vit":
        _check_multiple(model, "model", "size", "patch")
        _check_multiple(model, "model", "width", "heads")
    if model.label_smoothing >= 1:
        raise LabError(f"model.label_smoothing must be below 1, not {model.label_smoothing}")
    if run.loop.fp8_head:
        raise LabError("loop.fp8_head is for GPTs: an image model has no head worth 8 bits")
    if run.loop.parallel == "fsdp2":
        raise LabError("loop.parallel fsdp2 is for GPTs: image models fit one GPU, use ddp")


def to_json(run: Run) -> dict[str, Any]:
    return dataclasses.asdict(run)


def from_json(values: Any, kind: type = Run, where: str = "") -> Any:
    """A dataclass from nested JSON; an unknown or ill-typed field is refused by name."""
    if not isinstance(values, dict):
        raise LabError(f"{where.rstrip('.') or 'it'} must be an object, not {values!r}")
    hints = get_type_hints(kind)
    for name in sorted(set(values) - set(hints)):
        raise LabError(f"unknown field {where}{name}; {meant(name, hints)}".rstrip("; "))
    return kind(**{n: _convert(v, hints[n], where + n) for n, v in values.items()})


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, choices = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_json(value, hint, where + ".")
    if origin in (Union, types.UnionType):
        if value is None and type(None) in choices:
            return None
        inner = [choice for choice in choices if choice is not type(None)]
        return _convert(value, _fitting(inner, value), where)
    if origin is Literal and value in choices:
        return value
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(choices):
        return tuple(_convert(v, c, where) for v, c in zip(value, choices, strict=True))
    if origin is dict and isinstance(value, dict):
        return {str(k): str(v) for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (
        hint is bool or not isinstance(value, bool)
    ):  # fmt: skip
        return value
    meant = getattr(hint, "__name__", hint)
    raise LabError(f"{where} cannot be {json.dumps(value)}: it is {meant}")


def read_config(path: Path) -> Run:
    """The configuration that a run was started with."""
    if path.parent.is_dir() and not path.exists():
        raise LabError(f"{path.parent} is not a run: it has no {path.name}")
    try:
        return check(from_json(json.loads(path.read_text())))
    except (OSError, ValueError, LabError) as error:
        raise LabError(
            f"{path} is not the configuration of a run: {error} (restore it; or, if it is a run's, "
            "remove it and repeat the command that started the run)"
        ) from error


def _fitting(kinds: list[Any], value: Any) -> Any:
    """Of several dataclasses, the one with most of a JSON object's fields; the first if equal."""
    names = set(value) if isinstance(value, dict) else set()
    return max(kinds, key=lambda kind: len(names & set(getattr(kind, "__annotations__", ()))))
