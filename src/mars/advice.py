"""What is allowed and hardly meant: told once, of a new optimizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from mars.options import SMALLEST_BASE_LR, as_float, ratio_1d
from mars.roles import in_layers, is_table, only
from mars.rule import KINDS
from mars.state import kind_of

logger = logging.getLogger("mars")

DEFAULT_LR_1D = 3e-3
# Where to begin with types whose rate does not follow from AdamW's (docs/choosing.md), and the rate
# that is far below all that were best.
BEGIN = {"mars-shampoo": "lr=0.032, lr_1d=0.016", "mars-lion": "lr a tenth of AdamW's"}
FAR_BELOW = {"mars-shampoo": 4e-3}
FLAT = 1 << 16  # numbers of a tensor that may have been matrices
WIDE, TALL = 64, 10  # columns, and rows over columns, of what is a table if it has no name


def warn(groups: Sequence[dict[str, Any]], lr: float, lr_1d: float, weight_decay: Any) -> None:
    """Say what of this a new optimizer has."""
    _warn_about_rates(groups, lr, lr_1d)
    _warn_about_decay(groups, weight_decay)
    _warn_about_flat_tensors(groups)
    _warn_about_tables(groups)
    _warn_about_more_dimensions(groups)


THEIRS = "what AdamW trains ({}: biases, norms, what is routed to it)"


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _warn_about_rates(groups: Sequence[dict[str, Any]], lr: float, lr_1d: float) -> None:
    """A small lr beside the default lr_1d is a trap: most people mean both. So is AdamW's rate, or
    the default, for a type that wants ten times as much.
    """
    for group in groups:
        kind, rate = group["mars_type"], as_float(group["lr"])
        if SMALLEST_BASE_LR < rate <= FAR_BELOW.get(kind, 0.0):
            logger.warning(
                "lr=%g is far below what is best for %s from scratch, whatever AdamW's rate is: "
                "begin with %s", rate, kind, BEGIN[kind],
            )  # fmt: skip
            return
    own = [group for group in groups if group["lr_1d"] == lr_1d]
    count = sum(len(_adamws(group)) for group in own)
    theirs = THEIRS.format(_tensors(count))
    if count and lr <= SMALLEST_BASE_LR:
        logger.warning(
            "lr_1d=%g is kept as a ratio to lr, which is %g: %s will be trained at whatever lr "
            "becomes. Begin with the lr that a scheduler shall scale", lr_1d, lr, theirs,
        )  # fmt: skip
    elif count and lr_1d == DEFAULT_LR_1D and lr < lr_1d / 2:
        logger.warning(
            "lr=%g is for what MARS trains. The rate of %s is lr_1d=%g, %.3g times more: set "
            "lr_1d=%g if you meant one rate for all, or use MARS.from_adamw",
            lr, theirs, lr_1d, lr_1d / lr, lr,
        )  # fmt: skip
    elif count and lr_1d == DEFAULT_LR_1D and lr > lr_1d * 100:
        logger.warning(
            "lr=%g is for what MARS trains. The rate of %s is lr_1d=%g, and whatever lowers lr "
            "lowers that as well: set lr_1d=%g too if a schedule brings lr down from there",
            lr, theirs, lr_1d, lr,
        )  # fmt: skip
    _warn_about_rates_of_vectors(groups, lr, lr_1d)


def _warn_about_rates_of_vectors(
    groups: Sequence[dict[str, Any]], base: float, lr_1d: float
) -> None:
    """Groups without a matrix that were given lr alone, as for AdamW, where it is their rate. Where
    matrices have the same, as with a rate a layer, its proportion to theirs is meant.
    """
    of_matrices = {as_float(group["lr"]) for group in groups if not _all_adamws(group)}
    wrong = [
        (i, lr, rate)
        for i, group in enumerate(groups)
        if (group["base_lr"], group["lr_1d"]) == (base, lr_1d)
        and _all_adamws(group)
        and (lr := as_float(group["lr"])) not in (of_matrices | {base})
        and (rate := lr * ratio_1d(group)) != lr
    ]
    if wrong:
        i, lr, rate = wrong[0]
        more = f", and of {len(wrong) - 1} more groups" if len(wrong) > 1 else ""
        logger.warning(
            "lr=%g of group %d, which has no matrix, is not the rate of its tensors: that is lr_1d "
            "in proportion, %g. Set lr_1d in the group%s", lr, i, rate, more,
        )  # fmt: skip


def _warn_about_decay(groups: Sequence[dict[str, Any]], weight_decay: Any) -> None:
    """A weight_decay that no group has is a trap: Hugging Face's Trainer sets its own in each."""
    own = [group["weight_decay"] for group in groups]
    if isinstance(weight_decay, Tensor) or not weight_decay or weight_decay in own:
        return
    logger.warning(
        "weight_decay=%g is used nowhere: every group sets its own (%s). Say it in the groups, or "
        "in TrainingArguments of Hugging Face's Trainer (docs/trainers.md)",
        weight_decay, ", ".join(f"{as_float(value):g}" for value in own),
    )  # fmt: skip


def warn_about_their_decay(
    added: dict[str, Any], given: dict[str, Any], defaults: dict[str, Any]
) -> bool:
    """A decay is that of matrices, and most people mean all tensors: told of a group whose tensors
    AdamW trains and for which nobody has said ``weight_decay_1d``. Whether it was.
    """
    routed = added["mars_type"] == "plain-adamw"
    decay, theirs = added["weight_decay"], added["weight_decay_1d"]
    if routed and "routed" in given and "weight_decay" not in given:
        asked, theirs = given["routed"]["weight_decay"], decay
        decay = defaults["weight_decay"] if asked is None else asked
    elif routed or "weight_decay_1d" in given:
        return False
    if isinstance(decay, Tensor) or decay in (0, theirs):
        return False
    count = len(_trained(added) if routed else _vectors(added))
    if count:
        logger.warning(
            "weight_decay=%g is for what MARS trains; %s decays by weight_decay_1d, %g by default: "
            "set that too if you meant both", decay, THEIRS.format(_tensors(count)), theirs,
        )  # fmt: skip
    return bool(count)


def _warn_about_flat_tensors(groups: Sequence[dict[str, Any]]) -> None:
    """FSDP1 and DeepSpeed hand over flat tensors, all of which AdamW would train without a word."""
    asked = [p for group in groups for p in _left(group)]
    every = [p for group in groups for p in _trained(group)]
    flat = not any(p.ndim > 1 or isinstance(p, UninitializedParameter) for p in every)
    # A bias that has an optimizer of its own, as in backward, is none of theirs.
    if asked and flat and (len(every) > 1 or every[0].numel() >= FLAT):
        logger.warning(
            "no parameter is a matrix, so that AdamW trains all of them. If these were matrices: "
            "FSDP1 and DeepSpeed flatten them, and MARS needs FSDP2 (fully_shard)"
        )


def _warn_about_more_dimensions(groups: Sequence[dict[str, Any]]) -> None:
    """A network of convolutions, or of experts in stacks, would hardly be trained by MARS."""
    trained = [p for group in groups for p in _trained(group)]
    if any(isinstance(p, UninitializedParameter) for p in trained):
        return  # nobody knows yet
    adamws = {p for group in groups for p in _left(group) if p.ndim > 2}
    count, total = (
        sum(p.numel() for p in some) for some in (adamws.intersection(trained), trained)
    )
    if 2 * count > total:
        logger.warning(
            "%.0f %% of all numbers are in tensors of more than two dimensions, which AdamW "
            "trains: for MARS, set matrix_rule='flatten' for convolutions, or 'stack' for experts",
            100 * count / total,
        )  # fmt: skip


def _trained(group: dict[str, Any]) -> list[Tensor]:
    """Without what is frozen: beside adapters, nearly all."""
    return [p for p in group["params"] if p.requires_grad]


def _vectors(group: dict[str, Any]) -> list[Tensor]:
    """What AdamW trains in a group of MARS, because it is no matrix."""
    if group["optimize_1d"]:
        return []
    return [p for p in _trained(group) if kind_of(p, group) != group["mars_type"]]


def _left(group: dict[str, Any]) -> list[Tensor]:
    """What AdamW trains because it is no matrix; of groups of param_groups, too."""
    by_routing = group["mars_type"] == "plain-adamw" and group.get("name") == "vectors"
    return _trained(group) if by_routing else _vectors(group)


def _adamws(group: dict[str, Any]) -> list[Tensor]:
    """What AdamW trains at lr_1d: no matrices, and what is routed to it."""
    routed = group["mars_type"] == "plain-adamw" and group["lr_1d"] != group["lr"]
    return _trained(group) if routed else _vectors(group)


def _all_adamws(group: dict[str, Any]) -> bool:
    trained = _trained(group)
    return bool(trained) and len(_vectors(group)) == len(trained)


def _warn_about_tables(groups: Sequence[dict[str, Any]]) -> None:
    """Orthogonal steps are for hidden matrices: names and shapes tell what is hardly one."""
    found, kinds, routed = [], set(), False
    for group in groups:
        if group.get("name", "matrices") != "matrices":
            continue  # a route of the user's
        names = group.get("param_names", [""] * len(group["params"]))
        for name, p in zip(names, group["params"], strict=True):
            kind = kind_of(p, group)
            table = is_table(name, p) or (_tall(p) and not in_layers(name))
            if p.requires_grad and KINDS[kind].matrix and table:
                found.append(name or f"a tensor of shape {tuple(p.shape)}")
                kinds.add(kind)
                routed |= "name" in group
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        kind = min(kinds)
        logger.warning(
            "%s%s: by name or shape an embedding or a head, whose rows %s would mix in an "
            "orthogonal step. To leave such to AdamW: %s", ", ".join(found[:3]), more, kind,
            f"mars.param_groups(..., routes=[({only(found[0])!r}, 'adamw'), …])"
            if routed else f"mars.param_groups(model, mars_type={kind!r})",
        )  # fmt: skip


def _tall(p: Tensor) -> bool:
    """A row a token, and a width of its own, which factors of low rank have not."""
    return p.ndim == 2 and p.shape[1] >= WIDE and p.shape[0] >= TALL * p.shape[1]
