"""What a parameter is in its network: an embedding, a head, a vector or a hidden matrix.

By the module it belongs to, where there is one, by its name and by its shape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from mars.rule import KINDS
from mars.rule.update import matrix_shape
from mars.state import kind_of

# Modules whose whole name it is, or that end so: "time_emb_proj" and "linear_pos" are layers like
# others, as is "embeddings_project"; and parameters of their own, as "rel_pos_h".
_EMBEDDING = re.compile(
    r"(^|[._])(wte|wpe|emb|(tok|pos)?embed(?!\w*(proj|mapping))\w*|cls_token|bias_table|A_log)(\.|$)"
    r"|(^|\.)pos\.|(^|[._])pos(_(?!proj)\w+)?$"
)
_PATCHES = re.compile(r"(^|[._])patch_?embed")
_HEAD = re.compile(
    r"(^|\.)((\w+_)?(heads?|classifier)|score|embed_out|qa_outputs|logits_proj|output_layer"
    r"|seq_relationship|decoder_pred)(\.|$)"
    r"|^(fc|output|out|logits|to_logits|readout|proj_out|unembed)\."
)
# However many dimensions they have: those of experts are stacked, those of attention one a head.
_BIAS = re.compile(r"(^|[._])bias(es|_[uv])?$")
_NUMBERED = re.compile(r"\.\d+\.")  # a layer of many
_DEEP = re.compile(r"\.\d+\.\w+\.")  # in one that is more than a layer: "3.mlp.", not "6.weight"
# Modules that hold a model and nothing else call it so.
_HOLDERS = ("model.", "net.", "network.", "base_model.")
# What torch.compile, DDP, FSDP and checkpointing put into names: a wrapped model is routed alike.
_WRAPPED = re.compile(
    r"^(module\.)+|(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# What torch.nn.utils.parametrize makes of a "weight", weight_norm for one.
_PARAMETRIZED = re.compile(r"parametrizations\.(\w+)\.original\d*$")


def roles(
    model: object, named: Sequence[tuple[str, Tensor]], mars_type: str, matrix_rule: str
) -> list[str]:
    """ "embeddings", "vectors", "head" or "matrices", of each of a model's named parameters."""
    tables, norms = _embedding_tables(model), _norms(model)
    pairs = list(zip(_bare_names([name for name, _ in named]), (p for _, p in named), strict=True))
    outputs = _outputs(pairs, tables)
    shape = {"mars_type": "mars-adamw", "matrix_rule": matrix_rule, "optimize_1d": False}

    def role(name: str, p: Tensor) -> str:
        if p in norms:
            return "vectors"
        if p in tables or is_table(name, p):
            return "embeddings"
        if _BIAS.search(name) or kind_of(p, shape) != "mars-adamw":
            return "vectors"
        if p in outputs:
            return "head"
        # A magnitude a row, or a gate: to orthogonalise it is to normalise it.
        one_row = 1 in matrix_shape(p.shape, matrix_rule == "stack")[-2:]
        return "vectors" if one_row and KINDS[mars_type].matrix else "matrices"

    return [role(*pair) for pair in pairs]


def only(name: str) -> str:
    """A pattern of a route for this parameter and no other."""
    return f"^{name.replace('.', '[.]')}$"


def in_layers(name: str) -> bool:
    """Whether a parameter is one of many that are called alike, by the number of its layer."""
    return _NUMBERED.search(name) is not None


def is_table(name: str, p: Tensor) -> bool:
    """By the name of its module: what lies deeper in an "embedder" is a network of its own."""
    own = ".".join(name.split(".")[-2:])
    return p.ndim >= 2 and bool(_EMBEDDING.search(own) or _PATCHES.search(name))


def _embedding_tables(model: object) -> set[Tensor]:
    """Under a parametrization too, where the module's ``weight`` is no parameter."""
    if not isinstance(model, nn.Module):
        return set()
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {
        p
        for module in model.modules()
        if isinstance(module, kinds)
        for name, p in module.named_parameters()
        if "." not in name or name.startswith("parametrizations.")
    }


def _norms(model: object) -> set[Tensor]:
    """What scales and shifts: of a LayerNorm over two dimensions it has two."""
    if not isinstance(model, nn.Module):
        return set()
    kinds = [m for m in model.modules() if type(m).__name__.endswith("Norm")]
    return {p for module in kinds for p in module.parameters(recurse=False)}


def _bare_names(names: Sequence[str]) -> list[str]:
    """Names as they are in the model itself, without what wraps it (Lightning's module that holds
    nothing but the model, say) or computes a weight.
    """
    bare = []
    for name in names:
        while (less := _WRAPPED.sub("", name)) != name:
            name = less
        bare.append(_PARAMETRIZED.sub(r"\1", name))
    while any(all(name.startswith(holder) for name in bare) for holder in _HOLDERS):
        bare = [name.split(".", 1)[1] for name in bare]
    return bare


def _outputs(named: Sequence[tuple[str, Tensor]], tables: set[Tensor]) -> set[Tensor]:
    """The output layers: by shape, and by names outside of numbered layers, where "heads" are
    those of attention.
    """
    below: dict[str, list[tuple[str, Tensor]]] = {}
    for name, p in named:
        found = _HEAD.search(name)
        if p.ndim < 2 or p in tables or is_table(name, p) or found is None:
            continue
        if not _NUMBERED.search(name[: found.start() + 1]):
            below.setdefault(name[: found.end()], []).append(("." + name[found.end() :], p))
    outputs = {p for layers in below.values() for p in _last_layers(layers)}
    by_shape = _head_by_shape([p for _, p in named], tables)
    return outputs if by_shape is None else outputs | {by_shape}


def _last_layers(layers: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """What is called a head may be a classifier of three layers, several heads or a whole model:
    those are hidden whose rows are the columns of a later one, and what lies in numbered layers.
    """
    if len(layers) == 1:
        return [layers[0][1]]
    return [
        p
        for i, (name, p) in enumerate(layers)
        if not _DEEP.search(name) and all(q.shape[1] != p.shape[0] for _, q in layers[i + 1 :])
    ]


def _head_by_shape(parameters: Sequence[Tensor], tables: set[Tensor]) -> Tensor | None:
    """The last matrix, if it alone has the shape of the largest table, of more rows than columns:
    whatever it is called, it turns vectors into tokens.
    """
    whole = (table for table in tables if table.ndim == 2)  # FSDP1 has flattened them
    largest = max(whole, key=lambda table: table.numel(), default=None)
    if largest is None or largest.shape[0] <= largest.shape[1]:
        return None
    matrices = [p for p in parameters if p.ndim == 2 and p not in tables]
    alike = [p for p in matrices if p.shape == largest.shape]
    return alike[0] if len(alike) == 1 and alike[0] is matrices[-1] else None
