"""Which parameter is trained by what: routing by name and shape.

>>> import torch, mars
>>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 4))
>>> print(mars.param_groups(model, mars_type="mars-m", lr=0.02))
parameter  shape    count  group       trained by   lr     weight_decay
1.weight   (4, 4)      16  matrices    mars-m       0.02   default
0.weight   (10, 4)     40  embeddings  plain-adamw  lr_1d  weight_decay_1d
1.bias     (4,)         4  vectors     plain-adamw  lr_1d  weight_decay_1d
No output layer was recognised. If 1.weight is one, leave it to AdamW:
routes=[('^1[.]weight$', 'adamw')]
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from mars.options import as_float, check_known, check_values, with_names
from mars.roles import in_layers, only, roles
from mars.rule import KINDS
from mars.state import beside, kind_of
from mars.table import format_table

Destination = str | dict[str, Any]
Route = tuple[str | re.Pattern[str] | Callable[[str, Tensor], bool], Destination]

# AdamW's options and the ones of MARS(...) that they come from.
ADAMW_OPTIONS = {"betas": "betas_1d", "weight_decay": "weight_decay_1d"}

# Options that decide the routing, with the defaults of MARS.
ROUTED_BY = {"mars_type": "mars-adamw", "matrix_rule": "2d", "optimize_1d": False}


class ParamGroups(list[dict[str, Any]]):
    """Groups for `MARS`, that print as a table."""

    def unnamed(self) -> list[dict[str, Any]]:
        """Without the names of parameters, which ZeroRedundancyOptimizer does not take."""
        return [{**group, "params": [p for _, p in group["params"]]} for group in self]

    def table(self) -> str:
        """One line a parameter: where it goes and what trains it."""
        rows = [("parameter", "shape", "count", "group", "trained by", "lr", "weight_decay")]
        for group in self:
            group = {**ROUTED_BY, "name": "", **group}
            for name, p in group["params"]:
                kind = kind_of(p, group)
                adamw = not KINDS[kind].corrected
                vectors = beside(kind, group)
                rate = group.get("lr_1d", "lr_1d") if adamw else group.get("lr", "default")
                if _own_rate(group):
                    rate = group["lr"]
                if rate == "lr_1d" and "lr" in group and vectors:
                    rate = f"lr_1d × {group['lr']}/lr"  # it moves with lr
                decay = group.get("weight_decay", "weight_decay_1d" if adamw else "default")
                if vectors:  # a group without decay is one for them, too
                    unsaid = decay if decay == 0 else "weight_decay_1d"
                    decay = group.get("weight_decay_1d", unsaid)
                trained = kind if p.requires_grad else f"{kind}, if not frozen"
                rows.append((
                    name, str(tuple(p.shape)), f"{p.numel():,}", str(group["name"]), trained,
                    str(rate), str(decay),
                ))  # fmt: skip
        return format_table(rows, right=(2,))

    def without_head(self) -> str | None:
        """The last of the matrices that are orthogonalised, where none was known as the head."""
        names = [group.get("name") for group in self]
        if "head" in names or any(str(name).startswith("route") for name in names):
            return None
        matrices = [
            name
            for group in self
            if group.get("name") == "matrices" and KINDS[group["mars_type"]].matrix
            for name, p in group["params"]
        ]
        return matrices[-1] if matrices and not in_layers(matrices[-1]) else None

    def __str__(self) -> str:
        last = self.without_head()
        if last is None:
            return self.table()
        return (
            f"{self.table()}\n"
            f"No output layer was recognised. If {last} is one, leave it to AdamW:\n"
            f"routes=[({only(last)!r}, 'adamw')]"
        )


def resolve(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A group as the optimizer takes it: one that param_groups made, completed; others as is.

    A group routed to AdamW takes lr_1d, betas_1d and weight_decay_1d as its own. What decides the
    routing must have been said to param_groups: it is too late to say it to MARS.
    """
    if "routed" not in group:
        return group
    group = dict(group)
    if _own_rate(group):
        group["lr_1d"] = as_float(group["lr"])
    routed = group.pop("routed")
    for name, default in ROUTED_BY.items():
        if defaults[name] not in (routed[name], default):
            raise ValueError(
                f"{name}={defaults[name]!r} decides which parameter goes where: give it to "
                f"mars.param_groups, which was called with {name}={routed[name]!r}"
            )
    if _is_adamw(group):
        # lr is the main rate and lr_1d AdamW's: who sets the lr of all groups moves both.
        for name in ("lr", "lr_1d"):
            group.setdefault(name, defaults[name])
        for name, source in ADAMW_OPTIONS.items():
            group.setdefault(name, defaults[source])
    return group


def _is_adamw(group: dict[str, Any]) -> bool:
    return group.get("mars_type") == "plain-adamw"


def _own_rate(group: dict[str, Any]) -> bool:
    """Whether somebody has given a group that param_groups routed to AdamW another lr since."""
    if "routed" not in group or not _is_adamw(group) or "lr_1d" in group:
        return False
    own, routed = group.get("lr"), group["routed"]["lr"]
    return own is not None and own is not routed and own != routed


def param_groups(
    model: nn.Module | Iterable[tuple[str, Tensor]],
    *,
    mars_type: str = "mars-adamw",
    routes: Sequence[Route] = (),
    embeddings: Destination | None = None,
    head: Destination | None = None,
    vectors: Destination | None = None,
    **options: Any,
) -> ParamGroups:
    """Route every parameter of a model to exactly one group for ``mars.MARS``.

    The first match wins: your ``routes``, then embeddings, then vectors (all that is not a matrix:
    norms, biases), then the head, then matrices. A destination is

    - ``"mars"``: trained by ``mars_type``;
    - ``"adamw"``: trained by AdamW with ``lr_1d``, ``betas_1d`` and ``weight_decay_1d``;
    - ``"no-decay"``: the same without weight decay;
    - a dict: the options of a group of its own, which is trained by what trains it otherwise; for
      a route, by ``mars_type``.

    Args:
        model: a module, or ``(name, parameter)`` pairs, of which embeddings are known by their
            names alone.
        mars_type: the type of the matrices' group.
        routes: pairs (pattern, destination); the pattern is a regular expression searched in the
            parameter's name, or a function of (name, parameter).
        embeddings: default ``"mars"`` for MARS-AdamW and MARS-Lion, as in the authors' code;
            ``"adamw"`` for the matrix types, whose rule makes no sense for a table of rows.
        head: the same.
        vectors: default ``"adamw"``; ``"mars"`` if ``optimize_1d=True``.
        options: any option of MARS, for all groups; the rest is given to ``MARS`` itself.

    Returns:
        A list of groups; ``print`` it to see the routing.
    """
    check_known(options, "param_groups")
    options = with_names(options)
    check_values({**options, "mars_type": mars_type})
    _check_routes(routes)
    usual = "adamw" if KINDS[mars_type].matrix else "mars"
    trained_by_mars = "mars" if options.get("optimize_1d") else "adamw"
    destinations: dict[str, Destination] = {
        "matrices": "mars",
        "embeddings": usual if embeddings is None else embeddings,
        "head": usual if head is None else head,
        "vectors": trained_by_mars if vectors is None else vectors,
    }
    for what, to in destinations.items():
        _check_destination(what, to)
    for what in ("embeddings", "head") if usual == "adamw" else ():
        destinations[what] = _of_adamw(destinations[what])
    if not {**options, **(vectors if isinstance(vectors, dict) else {})}.get("optimize_1d"):
        destinations["vectors"] = _of_adamw(destinations["vectors"])
    named = _named_parameters(model)
    usual_roles = roles(model, named, mars_type, options.get("matrix_rule", "2d"))
    members: dict[str, list[tuple[str, Tensor]]] = {"matrices": []}
    seen: dict[Tensor, str] = {}
    for (name, p), role in zip(named, usual_roles, strict=True):
        if p in seen:
            raise ValueError(f"parameter {name!r} is also given as {seen[p]!r}")
        seen[p] = name
        i = _route(name, p, routes)
        if i is not None:
            pattern, destination = routes[i]
            role = f"route {i}: {_text(pattern)}"
            destinations[role] = destination
        members.setdefault(role, []).append((name, p))
    routed = {**ROUTED_BY, "mars_type": mars_type}
    routed |= {name: options[name] for name in ROUTED_BY if name in options}
    groups = ParamGroups()
    for role, pairs in members.items():
        own = _options(destinations[role], mars_type, options)
        given = {**routed, "lr": own.get("lr"), "weight_decay": options.get("weight_decay")}
        groups += [{"params": pairs, "name": role, "routed": given, **own}] if pairs else []
    for i, (pattern, _) in enumerate(routes):
        if not any(role.startswith(f"route {i}:") for role in members):
            warnings.warn(f"route {i}, {pattern!r}: no parameter was left for it", stacklevel=2)
    for what, asked in (("embeddings", embeddings), ("head", head)):
        if asked is not None and what not in members:
            tied = " (one that is tied to its table counts as embeddings)" if what == "head" else ""
            warnings.warn(
                f"{what}={asked!r}: no parameter was recognised as such{tied}; "
                "routes=[(pattern, destination)] go by names",
                stacklevel=2,
            )
    count = sum(len(group["params"]) for group in groups)
    if count != len(named):  # the routing is total by construction; say so if that breaks
        raise RuntimeError(f"{len(named)} parameters, but {count} were routed")
    return groups


def _route(name: str, p: Tensor, routes: Sequence[Route]) -> int | None:
    """The first of the user's routes that matches."""
    for i, (pattern, _) in enumerate(routes):
        if isinstance(pattern, (str, re.Pattern)):
            if re.search(pattern, name):
                return i
        elif pattern(name, p):
            return i
    return None


def _text(pattern: object) -> str:
    """Of a route, in the name of its group."""
    if isinstance(pattern, (str, re.Pattern)):
        return str(getattr(pattern, "pattern", pattern))
    return str(getattr(pattern, "__name__", ""))


def _of_adamw(to: Destination) -> Destination:
    """A dict of options for what AdamW trains is AdamW's: its lr is their rate."""
    if not isinstance(to, dict) or "mars_type" in to:
        return to
    own = {name: to[source] for name, source in ADAMW_OPTIONS.items() if source in to}
    return {**own, **to, "mars_type": "plain-adamw"}


def _options(to: Destination, mars_type: str, options: dict[str, Any]) -> dict[str, Any]:
    if isinstance(to, dict):
        if not _is_adamw(to):
            return {"mars_type": mars_type, **options, **to}
        own = {**_options("adamw", mars_type, options), **to}
        return {**own, "lr_1d": to["lr"]} if "lr" in to and "lr_1d" not in to else own
    if to == "mars":
        return {"mars_type": mars_type, **options}
    sources = {*ADAMW_OPTIONS, *ADAMW_OPTIONS.values()}
    group = {name: value for name, value in options.items() if name not in sources}
    for name, source in ADAMW_OPTIONS.items():
        if source in options:
            group[name] = options[source]
    if to == "no-decay":
        group["weight_decay"] = 0.0
    return {**group, "mars_type": "plain-adamw"}


def _check_destination(what: str, to: object) -> None:
    if isinstance(to, dict):
        check_known(to, f"param_groups, {what}")
        check_values(with_names(to))
    elif to not in ("mars", "adamw", "no-decay"):
        raise ValueError(
            f"{what}: unknown destination {to!r}: it must be 'mars', 'adamw', 'no-decay' or a dict "
            "of options"
        )


def _check_routes(routes: object) -> None:
    if not isinstance(routes, (list, tuple)) or not all(
        isinstance(route, (list, tuple)) and len(route) == 2 for route in routes
    ):
        raise TypeError(f"routes must be a list of (pattern, destination) pairs, not {routes!r}")
    for pattern, to in routes:
        of_text = isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str)
        if not isinstance(pattern, str) and not of_text and not callable(pattern):
            raise TypeError(f"route {pattern!r} must be a regular expression or a function")
        try:
            re.compile(pattern if isinstance(pattern, str) else "")
        except re.error as error:
            raise ValueError(f"route {pattern!r} is no regular expression: {error}") from None
        _check_destination(f"route {pattern!r}", to)


def _what(model: object, pair: object) -> str:
    return "a dict: give its .items()" if isinstance(model, dict) else type(pair).__name__


def _named_parameters(model: object) -> list[tuple[str, Tensor]]:
    given: Any = model.named_parameters() if isinstance(model, nn.Module) else model
    pairs: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                "param_groups takes a module or (name, parameter) pairs, such as "
                f"model.named_parameters(); it got {_what(model, pair)}"
            )
        if isinstance(pair[1], nn.parameter.UninitializedParameter):
            raise ValueError(f"{pair[0]} has no shape yet: run a forward pass before param_groups")
    if not pairs:
        raise ValueError("param_groups got no parameters (an exhausted generator?)")
    return pairs
