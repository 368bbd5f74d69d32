"""Parameter sets: the shapes of known models, and which of them are hidden matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Shape(NamedTuple):
    """One tensor. Hidden matrices are what Muon is for: not embeddings, positions or heads."""

    size: tuple[int, ...]
    hidden: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.size)


def _plain(*sizes: tuple[int, ...]) -> list[Shape]:
    return [Shape(size) for size in sizes]


def _hidden(*sizes: tuple[int, ...]) -> list[Shape]:
    return [Shape(size, hidden=True) for size in sizes]


def gpt(depth: int, w: int, vocabulary: int = 50304, context: int = 1024) -> list[Shape]:
    """nanoGPT without biases; the head is the embedding."""
    block = [*_plain((w,)), *_hidden((3 * w, w), (w, w))]
    block += [*_plain((w,)), *_hidden((4 * w, w), (w, 4 * w))]
    return [*_plain((vocabulary, w), (context, w)), *block * depth, *_plain((w,))]


def _llama_block(w: int, kv: int, ffn: int) -> list[Shape]:
    attention = _hidden((w, w), (kv, w), (kv, w), (w, w))
    return [*_plain((w,)), *attention, *_plain((w,)), *_hidden((ffn, w), (ffn, w), (w, ffn))]


def llama(
    depth: int, w: int, kv: int, ffn: int, vocabulary: int, tied: bool = False
) -> list[Shape]:
    """A Llama of any size: kv is the width of keys and values; tied: the head is the embedding."""
    tables = _plain(*[(vocabulary, w)] * (1 if tied else 2))
    return [*tables, *_llama_block(w, kv, ffn) * depth, *_plain((w,))]


def llama_1b() -> list[Shape]:
    """Llama 3.2 1B; the head is the embedding."""
    return llama(16, 2048, 512, 8192, 128256, tied=True)


def llama_7b_layers() -> list[Shape]:
    """Eight of the layers of Llama 7B, no embedding: as much as a GPU of a larger group holds."""
    return _llama_block(4096, 4096, 11008) * 8


def resnet18() -> list[Shape]:
    """ResNet-18 as CIFAR-10 has it: a 3x3 stem, convolutions without bias, batch norms."""
    shapes = _plain((64, 3, 3, 3), (64,), (64,))
    before = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            shapes += _plain((width, before, 3, 3), (width,), (width,))
            shapes += _plain((width, width, 3, 3), (width,), (width,))
            if before != width:
                shapes += _plain((width, before, 1, 1), (width,), (width,))
            before = width
    return shapes + _plain((10, 512), (10,))


def vit_b() -> list[Shape]:
    """ViT-B/16 for 224 pixels and 1000 classes: class token, positions, patches, blocks, head."""
    w = 768
    block = [*_plain((w,), (w,)), *_hidden((3 * w, w)), *_plain((3 * w,))]
    block += [*_hidden((w, w)), *_plain((w,), (w,), (w,))]
    block += [*_hidden((4 * w, w)), *_plain((4 * w,)), *_hidden((w, 4 * w)), *_plain((w,))]
    stem = _plain((1, 1, w), (1, 197, w), (w, 3, 16, 16), (w,))
    return [*stem, *block * 12, *_plain((w,), (w,), (1000, w), (1000,))]


def tiny_10k() -> list[Shape]:
    """Ten thousand small tensors: what the host has to do. 2-D, so that MARS trains them."""
    return _plain((40, 25)) * 10_000


PARAMETER_SETS: dict[str, Callable[[], list[Shape]]] = {
    "gpt-tiny": lambda: gpt(4, 128, vocabulary=4096, context=256),
    "gpt2-small": lambda: gpt(12, 768),
    "gpt2-medium": lambda: gpt(24, 1024),
    "gpt2-large": lambda: gpt(36, 1280),
    "gpt2-xl": lambda: gpt(48, 1600),
    "llama-1b": llama_1b,
    "llama-7b-layers": llama_7b_layers,
    "resnet18": resnet18,
    "vit-b": vit_b,
    "tiny-10k": tiny_10k,
}
