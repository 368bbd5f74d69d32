"""Which runs may stand in one table: same data, same model, same batches, same length."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from mars.lab.differences import LATER, is_free
from mars.lab.report.runs import RunLog

Setting = tuple[tuple[str, str], ...]  # (facet, value) pairs

# Where configurations of equal optimizers may differ without being different optimizers.
OWN = ("loop.seed", "optimizer.lr", "optimizer.lr_1d", "optimizer.name")
OPTIONS = "optimizer.options"
TUNED = ("optimizer", "schedule")  # parts in which one grid of rates must agree
ELSEWHERE = ("model", "data", "keep")  # parts that are compared otherwise, or say nothing


def setting(run: RunLog) -> Setting:
    """What two runs must share for their losses to mean the same."""
    unit = run.measure.unit
    pad, flip, cutout = (run.at("config", "data", name) for name in ("pad", "flip", "cutout"))
    varied = f"{pad or 0} pixels, {'yes' if flip else 'no'}"
    if cutout:
        varied += f", cutout of {cutout}"
    return (
        ("training data", _sha(run.at("data", "train", "sha256"))),
        ("validation data", _sha(run.at("data", "valid", "sha256"))),
        ("model", json.dumps(run.at("config", "model"), sort_keys=True)),
        (f"{unit} per step", str(run.at(f"{unit}_per_step"))),
        ("steps", str(run.steps)),
        ("validation sequences", str(run.at("config", "loop", "eval_sequences"))),
        ("crops and flips", varied),
    )


def _field(part: str, *names: str) -> Callable[[RunLog], Any]:
    def value(run: RunLog) -> Any:
        own = run.at("config", part)
        return " ".join(str(own.get(name)) for name in names) if isinstance(own, dict) else None

    return value


# What should be equal too, but is one optimizer's own in some published recipes: it is told.
UNEQUAL: dict[str, Callable[[RunLog], Any]] = {
    "precision": lambda run: run.header.get("precision"),
    "fp8_head": lambda run: _told(flatten(run.header.get("config")), "loop.fp8_head"),
    "schedule": _field("schedule", "shape", "warmup_steps"),
    "clip of the gradients": _field("optimizer", "max_grad_norm"),
}


def reference(runs: Sequence[RunLog], baseline: str) -> Setting:
    """The setting of most of the baseline's runs; without them, of most runs."""
    base = [run for run in runs if is_baseline(run, baseline)]
    counts = Counter(setting(run) for run in base or runs)
    return counts.most_common(1)[0][0]


def is_baseline(run: RunLog, baseline: str) -> bool:
    return baseline.casefold() in (run.optimizer.casefold(), run.label.casefold())


def contrast(own: Setting, other: Setting) -> str:
    """In words, what differs: "steps 200 (not 400)"."""
    parts = []
    for (facet, mine), (_, theirs) in zip(own, other, strict=True):
        if mine != theirs:
            parts.append(facet if facet == "model" else f"{facet} {mine} (not {theirs})")
    if own[2] != other[2]:
        parts[parts.index("model")] = _model_contrast(own[2][1], other[2][1])
    return ", ".join(parts)


ROUNDED = ("loop.precision", "loop.fp8_head")  # runs that differ in these are no grid of rates


def labels(runs: Sequence[RunLog]) -> list[str]:
    """A label a run; where one label hides several configurations, what differs is added to it."""
    groups: dict[tuple[Setting, str], list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        groups[setting(run), run.label].append(i)
    names = [run.label for run in runs]
    for (_, label), members in groups.items():
        configs = [runs[i].header.get("config") for i in members]
        flat = [flatten(config) for config in configs]
        for own in flat:  # without any it is {}, or None in older logs
            own.pop(OPTIONS, None)
        keys = dict.fromkeys(key for config in flat for key in config if not _own(configs[0], key))
        differ = [k for k in keys if len({_told(c, k) for c in flat}) > 1]
        facets = [k for k in differ if k.split(".")[0] in TUNED or k in ROUNDED]
        if len({(runs[i].lr, runs[i].seed) for i in members}) < len(members):  # no grid either
            facets = [k for k in differ if k.split(".")[0] not in ELSEWHERE]
        for i, config in zip(members, flat, strict=True):
            told = ((k.split(".")[-1], _told(config, k)) for k in facets)
            extra = ", ".join(f"{name}={value}" for name, value in told if value is not None)
            names[i] = f"{label} {extra}" if extra else label
    return names


def _told(config: dict[str, Any], key: str) -> str | None:
    """A value in words. A field that an older log lacks is as it was then; an option that is not
    given is the optimizer's own, which need not be None."""
    given = key in config or not key.startswith(f"{OPTIONS}.")
    return str(config.get(key, LATER.get(key))) if given else None


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """
    >>> flatten({"model": {"width": 64}, "seed": 0})
    {'model.width': 64, 'seed': 0}
    """
    if not isinstance(config, dict):
        return {prefix.rstrip("."): config} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _own(config: Any, key: str) -> bool:
    part, _, name = key.partition(".")
    return key in OWN or is_free(config if isinstance(config, dict) else {}, part, name)


def _sha(value: object) -> str:
    return str(value)[:12] if value else "unknown"


def _model_contrast(mine: str, theirs: str) -> str:
    own, other = flatten(json.loads(mine)), flatten(json.loads(theirs))
    if not own.keys() & other.keys():
        return "a model of another kind"
    keys = [k for k in dict.fromkeys([*own, *other]) if own.get(k) != other.get(k)]
    return ", ".join(f"model.{k} {own.get(k)} (not {other.get(k)})" for k in keys) or "model"
