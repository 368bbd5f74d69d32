"""How much arithmetic a token costs, and how much a device can do: what MFU is made of."""

from __future__ import annotations

import re
from typing import Protocol

import torch


class Shape(Protocol):
    """What of a model's configuration the count needs."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


# Dense bfloat16 (float16 where there is no bfloat16), without sparsity, FLOP/s, from NVIDIA's
# datasheets; the first that is a word of the device's name counts.
PEAKS = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("RTX 6000 Ada", 364e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("T4", 65e12),
)


def flops_per_token(model: Shape) -> int:
    """Floating-point operations to train on one token, forward and backward: 6·N + 12·L·D·T.

    As PaLM (arXiv 2204.02311, appendix B) and nanoGPT count: N are the weights that are
    multiplied, that is hidden matrices (12·D² a layer) and the head once, with norms and biases
    (too few to matter) and the position table left out; attention is counted as if it were not
    causal; nothing that is computed twice is counted twice.

    GPT-2 small, vocabulary 50304, 1024 tokens: 515k tokens/s are 44.5 % of 989 TFLOP/s.
    """
    layers, width = model.n_layer, model.n_embd
    weights = 12 * layers * width * width + model.vocab_size * width
    return 6 * weights + 12 * layers * width * model.block_size


def peak_flops(device: torch.device | str) -> float | None:
    """What the device can do in a second, by its datasheet; None for a CPU or an unknown one."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """`peak_flops` by the name that the driver gives."""
    if "Laptop" in name:  # the same names, other chips
        return None
    return next((peak for known, peak in PEAKS if re.search(rf"\b{known}\b", name)), None)
