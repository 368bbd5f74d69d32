"""What is to be trained: the tensors of a recipe, or of a GPT-3 or Llama, for plans only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import torch

import mars
from mars.bench.shapes import Shape, llama
from mars.lab import recipes
from mars.lab.arguments import base_run
from mars.lab.config import Loop, Run
from mars.lab.config import Model as Config
from mars.lab.errors import LabError, meant
from mars.lab.hardware import activation_bytes
from mars.lab.models import GPT


@dataclass(frozen=True)
class Model:
    """Tensors, and what a token costs."""

    name: str
    run: Run  # depth, width, context, vocabulary and batch; for a Llama, only these are meant
    blocks: Sequence[Shape]  # of all layers
    tables: Sequence[Shape]  # embeddings, head, last norm

    @property
    def shapes(self) -> list[Shape]:
        return [*self.tables, *self.blocks]

    @property
    def layers(self) -> int:
        return self.run.gpt.n_layer

    @cached_property
    def elements(self) -> int:
        return sum(shape.numel for shape in self.shapes)

    @cached_property
    def matrices(self) -> list[tuple[int, int]]:
        """Hidden matrices: what Newton–Schulz is for."""
        return [(shape.size[0], shape.size[1]) for shape in self.shapes if shape.hidden]

    @property
    def flops_per_token(self) -> int:
        """6·N + 12·L·D·T, as `mars.lab.models.flops_per_token`, for any hidden matrices."""
        return self.layer_flops_per_token + self.attention_flops_per_token

    @property
    def layer_flops_per_token(self) -> int:
        m = self.run.gpt
        weights = sum(rows * cols for rows, cols in self.matrices) + m.vocab_size * m.n_embd
        return 6 * weights

    @property
    def attention_flops_per_token(self) -> int:
        m = self.run.gpt
        return 12 * self.layers * m.n_embd * m.block_size

    def kept_bytes_per_token(self, recompute: bool) -> float:
        """What the forward pass keeps of a token; with recomputation the blocks' inputs, and one
        block."""
        everything = activation_bytes(self.run, torch.bfloat16)
        if not recompute:
            return everything
        per_width = 2.0 * self.run.gpt.n_embd
        return (self.layers + 17 + 2) * per_width


# Layers, heads, width, sequences of a step (arXiv 2005.14165, table 2.1, where 13B has a width of
# 5140, which 40 heads of 128 do not give).
GPT3: dict[str, tuple[int, int, int, int]] = {
    "gpt3-2.7b": (32, 32, 2560, 1 << 9),
    "gpt3-6.7b": (32, 32, 4096, 1 << 10),
    "gpt3-13b": (40, 40, 5120, 1 << 10),
}
GPT3_CONTEXT = 2048

# Layers, width, width of keys and values, width of the MLP, vocabulary, head tied, context.
LLAMAS: dict[str, tuple[int, int, int, int, int, bool, int]] = {
    "llama-1b": (16, 2048, 512, 8192, 128256, True, 8192),
    "llama-7b": (32, 4096, 4096, 11008, 32000, False, 4096),
    "llama-8b": (32, 4096, 1024, 14336, 128256, False, 8192),
    "llama-13b": (40, 5120, 5120, 13824, 32000, False, 4096),
    "llama-70b": (80, 8192, 1024, 28672, 32000, False, 4096),
}
LLAMA_BATCH_TOKENS = 1 << 22
KNOWN = [name for name in recipes.RECIPES if name.startswith("gpt")] + [*GPT3, *LLAMAS]


def find(name: str) -> Model:
    """The model of a recipe, a configuration file, a run's directory, or a known shape."""
    if name in LLAMAS:
        return _llama(name)
    if name in GPT3:
        return _gpt3(name)
    if name in recipes.RECIPES or Path(name).is_dir() or name.endswith(".json"):
        return of_run(base_run(name, []), name)
    hint = meant(name, KNOWN) or f"known: {', '.join(KNOWN)}"
    raise LabError(f"unknown model {name!r}: {hint}")


def at_context(model: Model, tokens: int) -> Model:
    """The same with sequences of so many tokens; a GPT has a table of their positions."""
    run = model.run.replace(model={"block_size": tokens})
    return replace(model, run=run) if model.name in LLAMAS else of_run(run, model.name)


def of_run(run: Run, name: str) -> Model:
    """The GPT of a configuration: its own tensors, routed as MARS-M routes them."""
    return Model(name, run, *_tensors(run.gpt))


@cache
def _tensors(config: Config) -> tuple[list[Shape], list[Shape]]:
    """Those of the blocks, and the tables; --validate asks for a few models many times."""
    with torch.device("meta"):
        model = GPT(config, seed=None)
    groups = mars.param_groups(model, mars_type="mars-m")
    hidden = {p for g in groups if g["name"] == "matrices" for _, p in g["params"]}
    blocks: list[Shape] = []
    tables: list[Shape] = []
    for own, p in model.named_parameters():
        part = blocks if own.startswith("transformer.h.") else tables
        part.append(Shape(tuple(p.shape), p in hidden))
    return blocks, tables


def _gpt3(name: str) -> Model:
    """With GPT-2's vocabulary and no biases, as our GPT has it."""
    layers, heads, width, batch = GPT3[name]
    config = Config(n_layer=layers, n_head=heads, n_embd=width, block_size=GPT3_CONTEXT)
    return of_run(Run(recipe=name, model=config, loop=Loop(batch_size=batch)), name)


def _llama(name: str) -> Model:
    layers, width, kv, ffn, vocabulary, tied, context = LLAMAS[name]
    config = Config(n_layer=layers, n_embd=width, block_size=context, vocab_size=vocabulary)
    run = Run(recipe=name, model=config, loop=Loop(batch_size=LLAMA_BATCH_TOKENS // context))
    shapes = llama(layers, width, kv, ffn, vocabulary, tied)
    first = 1 if tied else 2  # tables; the last norm is the last of all
    return Model(name, run, shapes[first:-1], [*shapes[:first], shapes[-1]])
