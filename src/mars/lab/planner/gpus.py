"""What a GPU has by its datasheet, and which share of that was reached on the one we measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mars.lab.errors import LabError, meant
from mars.lab.models.flops import peak_of

MIB = 2**20
GB = 1e9

# Measured on an H200 (docs/performance.md), assumed of the others.
COPY_SHARE = 4.2e12 / 4.8e12  # of the memory's bandwidth: a large copy, and our kernels
TORCH_SHARE = 3.46e12 / 4.8e12  # torch's fused AdamW
PRODUCT_SHARE = 640e12 / 989e12  # of the dense peak: cuBLAS, sustained, tiles that idle counted
SYMMETRIC_SHARE = 540e12 / 989e12  # our kernel for symmetric products: 33.9 ms of GPT-2 XL
EIGHT_BIT_ELEMENTS_PER_SM_SECOND = 89.8e9 / 132  # decoding and encoding, not memory, is the limit
# Of forward and backward. The first and the third from 125M and 3B parameters (cost_h200.json),
# attention from a profile of GPT-2 small: 9.5 ms of 32 x 1024 tokens.
LAYER_SHARE = 0.69  # of the dense peak: products
ATTENTION_SHARE = 0.395  # of the dense peak, counted as if it were not causal
BLOCK_BYTES = 90  # a token, block and unit of width: norms, casts, whatever else is not a product
CAST_BYTES = 6  # a float32 weight and pass, to 16 bits

# Assumed: there is nothing here to measure it on.
LINK_SHARE = 0.8  # of a link's bandwidth, by a large collective
RESERVED_BYTES = 2 * 2**30  # context, NCCL's buffers, fragments


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, and the usual server of eight of them."""

    name: str
    memory_bytes: float  # as the driver reports it
    memory_bytes_per_second: float
    processors: int
    link_bytes_per_second: float  # to the others in the node, one direction
    node_bytes_per_second: float  # out of the node, a GPU's part of it, one direction
    halves: bool  # symmetric products by one half: the kernel needs compute capability 9.0
    source: str

    @property
    def peak_flops_per_second(self) -> float:
        """Dense bfloat16."""
        peak = peak_of(_DRIVER_NAMES[self.name])
        assert peak is not None
        return peak

    @property
    def copy_bytes_per_second(self) -> float:
        return COPY_SHARE * self.memory_bytes_per_second

    @property
    def product_flops_per_second(self) -> float:
        return PRODUCT_SHARE * self.peak_flops_per_second

    @property
    def symmetric_flops_per_second(self) -> float:
        return SYMMETRIC_SHARE * self.peak_flops_per_second


_DRIVER_NAMES = {
    "h200": "NVIDIA H200",
    "h100": "NVIDIA H100 80GB HBM3",
    "a100": "NVIDIA A100-SXM4-80GB",
    "b200": "NVIDIA B200",
    "l40s": "NVIDIA L40S",
    "rtx4090": "NVIDIA GeForce RTX 4090",
}

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "h200", 143771 * MIB, 4.8e12, 132, 450 * GB, 50 * GB, True,
            "H200 SXM datasheet; NVLink 4; DGX H200: a 400 Gb/s adapter a GPU",
        ),
        Gpu(
            "h100", 81559 * MIB, 3.35e12, 132, 450 * GB, 50 * GB, True,
            "H100 SXM datasheet; NVLink 4; DGX H100: a 400 Gb/s adapter a GPU",
        ),
        Gpu(
            "a100", 81920 * MIB, 2.039e12, 108, 300 * GB, 25 * GB, False,
            "A100 80GB SXM datasheet; NVLink 3; DGX A100: a 200 Gb/s adapter a GPU",
        ),
        Gpu(
            "b200", 183359 * MIB, 8.0e12, 148, 900 * GB, 50 * GB, True,
            "B200 datasheet; NVLink 5; DGX B200: a 400 Gb/s adapter a GPU",
        ),
        Gpu(
            "l40s", 46068 * MIB, 0.864e12, 142, 32 * GB, 1.5625 * GB, False,
            "L40S datasheet; PCIe 4 x16; assumed: one 100 Gb/s adapter for eight GPUs",
        ),
        Gpu(
            "rtx4090", 24564 * MIB, 1.008e12, 128, 32 * GB, 1.5625 * GB, False,
            "RTX 4090 specifications; PCIe 4 x16; assumed: one 100 Gb/s adapter for eight GPUs",
        ),
    )
}  # fmt: skip


def by_driver(name: str, memory_bytes: float | None = None) -> Gpu | None:
    """The GPU that the driver calls so, with the memory that is here; None if it is not known."""
    known = next((own for own, driver in _DRIVER_NAMES.items() if driver == name), None)
    if known is None or memory_bytes is None:
        return GPUS.get(known or "")
    return replace(GPUS[known], memory_bytes=memory_bytes)


def find(name: str) -> Gpu:
    """The GPU of a name, in capitals or not."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    hint = meant(name, GPUS) or f"known: {', '.join(GPUS)}"
    raise LabError(f"unknown GPU {name!r}: {hint}")
