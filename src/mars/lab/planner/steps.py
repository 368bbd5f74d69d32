"""What an optimizer keeps and moves, an element, and how long its step takes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mars.bench.shapes import Shape
from mars.lab.planner import newton_schulz
from mars.lab.planner.gpus import EIGHT_BIT_ELEMENTS_PER_SM_SECOND, TORCH_SHARE, Gpu
from mars.sharding import flops

Form = Literal["float32", "bfloat16", "8bit"]
Engine = Literal["fused", "foreach"]

FORM_BYTES: dict[str, float] = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1 + 1 / 128}

# The host, on the machine of the benchmarks; others were up to 1.7 times as fast.
HOST_SECONDS_PER_TENSOR = {"torch": 5.9e-6, "mars": 3.1e-6}
HOST_SECONDS_PER_CLIPPED_TENSOR = 7e-6  # clip_grad_norm_
HOST_SECONDS_PER_CONSUMED_TENSOR = 7e-6  # the gradient handed over, after the launches
HOST_SECONDS_PER_LAUNCH = 60e-6  # of Newton–Schulz
HOST_SECONDS_PER_MUON_MATRIX = 500e-6
HOST_SECONDS_PER_FOREACH_TENSOR = 13e-6  # assumed: as torch's step with its clip

# torch.optim.Muon, an element: momentum 12, Nesterov's step 12, cast 6, norm 2 and division 4,
# five copies for addmm 20, decay 8, update 10.
MUON_BYTES = 74
# Multi-tensor engines make temporaries. An element: effective bytes at the speed of a copy (from
# GPT-2 XL), the same of Newton–Schulz beside its products, and what is held at the peak.
FOREACH_BYTES = {
    "torch-adamw": 92.0, "plain-adamw": 104.6, "mars-adamw": 145.6, "mars-lion": 90.4,
    "mars-m": 90.4, "mars-shampoo": 90.4,
}  # fmt: skip
FOREACH_ITERATION_BYTES = {"mars-m": 159.6, "mars-shampoo": 273.6}
FOREACH_SPACE_BYTES = {
    "torch-adamw": 4, "plain-adamw": 8, "mars-adamw": 12, "mars-lion": 8, "mars-m": 11,
    "mars-shampoo": 13,
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What trains a tensor."""

    moments: int
    last_grad: bool = False
    matrix: bool = False
    torch: bool = False  # torch.optim's own: moments in the parameter's dtype


RULES = {
    "torch-adamw": Rule(2, torch=True),
    "torch-muon": Rule(1, matrix=True, torch=True),
    "plain-adamw": Rule(2),
    "mars-adamw": Rule(2, last_grad=True),
    "mars-lion": Rule(1, last_grad=True),
    "mars-shampoo": Rule(1, last_grad=True, matrix=True),
    "mars-m": Rule(1, last_grad=True, matrix=True),
}


@dataclass(frozen=True)
class Optimizer:
    """A line of the plan: which rule trains hidden matrices, other matrices, and the rest."""

    name: str
    label: str
    hidden: str
    tables: str
    vectors: str
    consume: bool = False
    unclipped: bool = False  # and with a raw second moment: no last gradient is kept

    def rule(self, shape: Shape) -> str:
        if shape.hidden:
            return self.hidden
        return self.tables if len(shape.size) == 2 else self.vectors

    @property
    def torch(self) -> bool:
        return RULES[self.vectors].torch


def _mars(kind: str, label: str, suffix: str = "", **options: bool) -> Optimizer:
    tables = "plain-adamw" if RULES[kind].matrix else kind
    return Optimizer(kind + suffix, label, kind, tables, "plain-adamw", **options)


NO_CLIP = "-no-clip"

OPTIMIZERS: dict[str, Optimizer] = {
    o.name: o
    for o in (
        Optimizer("adamw", "AdamW (torch, fused)", "torch-adamw", "torch-adamw", "torch-adamw"),
        Optimizer("muon", "Muon (torch)", "torch-muon", "torch-adamw", "torch-adamw"),
        _mars("mars-adamw", "MARS-AdamW"),
        _mars("mars-adamw", "MARS-AdamW, consume_grads", "-consume", consume=True),
        _mars("mars-adamw", "MARS-AdamW, no clip, raw", NO_CLIP, unclipped=True),
        _mars("mars-lion", "MARS-Lion"),
        _mars("mars-shampoo", "MARS-Shampoo"),
        _mars("mars-m", "MARS-M"),
        _mars("mars-m", "MARS-M, no clip", NO_CLIP, unclipped=True),
    )
}


@dataclass(frozen=True)
class Setting:
    """What the bytes depend on beside the rule."""

    param_bytes: int = 4
    state: Form = "float32"
    clip_tensor: bool = True  # MARS's own clip of the corrected gradient
    raw: bool = False  # second moment of g instead of c
    clip_all: bool = True  # the gradient of the whole model to a norm
    consume: bool = False  # gradients become last gradients: not for DDP's and FSDP2's, views
    engine: Engine = "fused"
    # Ranks share matrices or norms: foreach steps what they share, and norms are computed apart.
    shared: bool = False


def engine_of(rule: str, setting: Setting) -> Engine:
    """What steps tensors of this rule."""
    return "fused" if setting.shared and not RULES[rule].matrix else setting.engine


def keeps_last_grad(rule: str, setting: Setting) -> bool:
    """As the library decides: h cancels where nothing but the average needs c."""
    r = RULES[rule]
    needs_c = setting.clip_tensor or (r.moments == 2 and not setting.raw)
    return r.last_grad and needs_c


def state_bytes_per_element(rule: str, setting: Setting) -> float:
    """Moments, the last gradient, and the low half of a 16-bit parameter."""
    r = RULES[rule]
    if r.torch:
        return float(r.moments * setting.param_bytes)
    form = FORM_BYTES[setting.state]
    last = setting.param_bytes if setting.state == "float32" else form
    low = 2 if setting.param_bytes == 2 else 0
    return r.moments * form + (last if keeps_last_grad(rule, setting) else 0) + low


def step_bytes_per_element(rule: str, setting: Setting) -> float:
    """Read and written by a step, Newton–Schulz's own products left out."""
    r, p = RULES[rule], setting.param_bytes
    if engine_of(rule, setting) == "foreach" and rule in FOREACH_BYTES:
        return FOREACH_BYTES[rule] + (3 * p if r.torch and setting.clip_all else 0)
    state = state_bytes_per_element(rule, setting)
    if r.torch:
        clip = 3 * p if setting.clip_all else 0  # norm; then read and written by the factor
        return clip + (MUON_BYTES if r.matrix else 3 * p + 2 * state)
    corrected = setting.clip_tensor and r.last_grad
    moved = 3 * p + 2 * state
    if setting.shared:  # norms of g and of c are passes of their own
        last = p if setting.state == "float32" else FORM_BYTES[setting.state]
        moved += p * setting.clip_all + (p + last) * corrected
    elif setting.clip_all or corrected:
        moved += p
    if setting.consume and keeps_last_grad(rule, setting) and setting.state == "float32":
        moved -= p  # h is not written
    if r.matrix:  # moments are read once more, stacked in 16 bits, and read again
        moved += FORM_BYTES[setting.state] + 2 * newton_schulz.HALF_BYTES
    return moved


def state_bytes(optimizer: Optimizer, shapes: Sequence[Shape], setting: Setting) -> float:
    return sum(
        shape.numel * state_bytes_per_element(optimizer.rule(shape), setting) for shape in shapes
    )


def step_bytes(optimizer: Optimizer, shapes: Sequence[Shape], setting: Setting) -> float:
    return sum(
        shape.numel * step_bytes_per_element(optimizer.rule(shape), setting) for shape in shapes
    )


def moving_seconds(
    gpu: Gpu, optimizer: Optimizer, shapes: Sequence[Shape], setting: Setting
) -> float:
    """The step without Newton–Schulz: bytes by bandwidth; 8 bits are bound by arithmetic."""
    total = 0.0
    for shape in shapes:
        rule = optimizer.rule(shape)
        fused_torch = RULES[rule].torch and not RULES[rule].matrix and setting.engine == "fused"
        share = TORCH_SHARE * gpu.memory_bytes_per_second
        speed = share if fused_torch else gpu.copy_bytes_per_second
        seconds = shape.numel * step_bytes_per_element(rule, setting) / speed
        if setting.state == "8bit" and not RULES[rule].torch:
            most = EIGHT_BIT_ELEMENTS_PER_SM_SECOND * gpu.processors
            seconds = max(seconds, shape.numel / most)
        total += seconds
    return total


def host_seconds(
    optimizer: Optimizer, shapes: Sequence[Shape], setting: Setting, launches: int
) -> float:
    """What Python and the driver need: where it is longer than the GPU's work, it is the time."""
    tensors = len(shapes)
    if setting.engine == "foreach":
        engines = [engine_of(optimizer.rule(shape), setting) for shape in shapes]
        loops = HOST_SECONDS_PER_FOREACH_TENSOR * engines.count("foreach")
        return loops + HOST_SECONDS_PER_TENSOR["mars"] * engines.count("fused")
    if not optimizer.torch:
        own = HOST_SECONDS_PER_TENSOR["mars"] * tensors + HOST_SECONDS_PER_LAUNCH * launches
        handed = sum(keeps_last_grad(optimizer.rule(shape), setting) for shape in shapes)
        return own + (HOST_SECONDS_PER_CONSUMED_TENSOR * handed if setting.consume else 0.0)
    matrices = sum(RULES[optimizer.rule(shape)].matrix for shape in shapes)
    own = HOST_SECONDS_PER_TENSOR["torch"] * (tensors - matrices)
    own += HOST_SECONDS_PER_CLIPPED_TENSOR * tensors if setting.clip_all else 0.0
    return own + HOST_SECONDS_PER_MUON_MATRIX * matrices


def newton_schulz_seconds(
    gpu: Gpu, optimizer: Optimizer, matrices: Sequence[newton_schulz.Matrix], engine: Engine
) -> float:
    """The products of all these matrices on one GPU."""
    if not RULES[optimizer.hidden].matrix:
        return 0.0
    if optimizer.torch:
        return newton_schulz.muon_seconds(gpu, matrices)
    if engine == "fused":
        return newton_schulz.seconds(gpu, matrices)
    products = sum(ownership_costs(optimizer, matrices)) / gpu.product_flops_per_second
    elements = sum(rows * cols for rows, cols in matrices)
    moved = elements * FOREACH_ITERATION_BYTES[optimizer.hidden]
    return products + moved / gpu.copy_bytes_per_second


def ownership_costs(optimizer: Optimizer, matrices: Sequence[newton_schulz.Matrix]) -> list[int]:
    """By what the library balances: operations in the authors' orders, Muon's as MARS-M's."""
    kind = "mars-m" if optimizer.torch else optimizer.hidden
    return [flops(kind, matrix, newton_schulz.STEPS) for matrix in matrices]


def space_bytes(
    optimizer: Optimizer, shapes: Sequence[Shape], matrices: Sequence[newton_schulz.Matrix],
    setting: Setting,
) -> float:  # fmt: skip
    """Held during the step only: temporaries of what is here, or stacks of what is owned."""
    if setting.engine == "foreach":
        rules = (optimizer.rule(shape) for shape in shapes)
        each = [pair for pair in zip(shapes, rules, strict=True)
                if engine_of(pair[1], setting) == "foreach"]  # fmt: skip
        return float(sum(shape.numel * FOREACH_SPACE_BYTES.get(rule, 0) for shape, rule in each))
    if optimizer.torch or not RULES[optimizer.hidden].matrix:
        return 0.0
    return float(newton_schulz.work_space_bytes(matrices))


def one_gpu_seconds(
    gpu: Gpu, optimizer: Optimizer, shapes: Sequence[Shape], setting: Setting
) -> float:
    """A whole step on one GPU, every matrix orthogonalised there."""
    matrices = [(s.size[0], s.size[1]) for s in shapes if RULES[optimizer.rule(s)].matrix]
    launches = 0 if optimizer.torch else newton_schulz.launches(matrices)
    device = moving_seconds(gpu, optimizer, shapes, setting)
    device += newton_schulz_seconds(gpu, optimizer, matrices, setting.engine)
    return max(device, host_seconds(optimizer, shapes, setting, launches))
