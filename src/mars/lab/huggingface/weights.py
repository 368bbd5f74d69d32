"""The same GPT-2 in two spellings: our configuration and weights, and those of Hugging Face.

They differ in three things. Theirs stores the matrices of a block as (in, out), ours as (out, in).
Theirs always has biases: those that ours lacks are zero. Theirs has one row of the embedding for
each token of the tokenizer, ours may have some more, which are no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mars.lab.config import Model
from mars.lab.dtensors import fill as put
from mars.lab.dtensors import whole
from mars.lab.errors import LabError
from mars.lab.models import GPT

# Stored by theirs as (in, out).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# Buffers that old versions stored: the causal mask.
BUFFERS = (".attn.bias", ".attn.masked_bias")
# GELU in its tanh approximation.
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
# What our model has no option for: field of their configuration, their default, what we can do.
FIXED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "activation_function": ("gelu_new", ACTIVATIONS),
    "layer_norm_epsilon": (1e-5, (1e-5,)),
    "scale_attn_weights": (True, (True,)),
    "add_cross_attention": (False, (False,)),
    "tie_word_embeddings": (True, (True,)),
}
SIZES = {
    "n_layer": ("n_layer", 12), "n_head": ("n_head", 12), "n_embd": ("n_embd", 768),
    "block_size": ("n_positions", 1024), "vocab_size": ("vocab_size", 50257),
}  # fmt: skip


def to_config(model: Model, vocab_size: int, eot: int | None) -> dict[str, Any]:
    """The config.json of a model, of which this many tokens are the tokenizer's."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": model.block_size,
        "n_ctx": model.block_size,
        "n_embd": model.n_embd,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": model.scale_attn_by_inverse_layer_idx,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "dtype": "float32",
    }


def from_config(config: dict[str, Any], where: str) -> Model:
    """Our configuration, with biases and without dropout; what ours cannot be is refused."""
    if config.get("model_type") != "gpt2":
        raise LabError(f"{where} is a {config.get('model_type', 'model')}: only gpt2 can be read")
    for name, (default, allowed) in FIXED.items():
        value = config.get(name, default)
        if value not in allowed:
            raise LabError(f"{where} has {name} = {value!r}: our GPT-2 has {allowed[0]!r}")
    sizes: dict[str, Any] = {}
    for name, (theirs, usual) in SIZES.items():
        sizes[name] = config.get(theirs, usual)
        if type(sizes[name]) is not int or sizes[name] < 1:
            raise LabError(f"{where} has {theirs} = {sizes[name]!r}: it must be a number above 0")
    if sizes["n_embd"] % sizes["n_head"]:
        raise LabError(
            f"{where} has n_embd = {sizes['n_embd']}, which its n_head = {sizes['n_head']} cannot "
            "divide"
        )
    if config.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise LabError(f"{where} has n_inner = {config['n_inner']}: ours is always 4 x n_embd")
    scaled = bool(config.get("scale_attn_by_inverse_layer_idx", False))
    return replace(Model(bias=True, scale_attn_by_inverse_layer_idx=scaled), **sizes)


def to_theirs(model: GPT, vocab_size: int) -> dict[str, Tensor]:
    """The tensors of a model under the names and in the shapes of theirs; on the CPU."""
    own = {name: p.detach().cpu() for name, p in model.named_parameters()}
    own["transformer.wte.weight"] = own["transformer.wte.weight"][:vocab_size]
    out = {}
    for name, p in own.items():
        out[name] = p.T.contiguous() if name.endswith(TRANSPOSED) else p
        bias = name.removesuffix("weight") + "bias"
        if ".wte." not in name and ".wpe." not in name and bias not in own:
            out[bias] = p.new_zeros(p.shape[0])
    return out


def plain_name(name: str) -> str | None:
    """Our name of a stored tensor: the base model's have no prefix; None for what is no weight."""
    if name == "lm_head.weight":
        return name
    name = name if name.startswith("transformer.") else f"transformer.{name}"
    return None if name.endswith(BUFFERS) else name


@torch.no_grad()
def fill(target: nn.Module, stored: Iterator[tuple[str, Tensor]], where: str) -> None:
    """Put their tensors into a model of ours; where it has no biases, theirs must be zero."""
    own = dict(target.named_parameters())
    missing = set(own)
    head: Tensor | None = None
    for theirs, value in stored:
        name = plain_name(theirs)
        if name is None:
            continue
        if name == "lm_head.weight":
            head = value
            continue
        if name not in own:
            if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in own:
                if bool(value.any()):
                    raise LabError(f"{where} has biases ({name}): give --model.bias")
                continue
            raise LabError(f"{where} has {theirs}, which our GPT-2 has not")
        value = value.T if name.endswith(TRANSPOSED) else value
        p = own[name]
        if p.shape != value.shape:
            raise LabError(
                f"{where}: {theirs} has shape {tuple(value.shape)}, the model's {tuple(p.shape)}"
            )
        put(p, value)
        missing.discard(name)
    if missing:
        raise LabError(f"{where} lacks {min(missing)}")
    if head is None:
        return
    table = whole(own["transformer.wte.weight"])
    if not torch.equal(head.to(table), table):
        raise LabError(f"{where} has a head (lm_head.weight) of its own: ours is the embedding")
