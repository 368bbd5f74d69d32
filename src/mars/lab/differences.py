"""In what two runs may differ and still be the same run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

# None of it changes what is computed, but for rounding. Of keep, nothing does.
FREE = frozenset({
    "device", "threads", "compile", "graphs", "deterministic", "micro_batch_size", "log_every",
    "eval_every", "diagnose_every", "skip_nan", "parallel", "shards",
    "epochs",  # steps are what counts
})  # fmt: skip
# Fields that came later than runs which are kept, and what those runs were.
LATER = {"loop.fp8_head": False}


def is_free(config: Mapping[str, Any], part: str, name: str) -> bool:
    """Whether a field of a configuration, as JSON has it, changes nothing that is computed."""
    arch = (config.get("model") or {}).get("arch")
    if name == "micro_batch_size" and arch not in (None, "vit"):  # they have batch norm
        return False
    return part == "keep" or (part == "loop" and name in FREE)


def first_difference(
    old: Mapping[str, Any], new: Mapping[str, Any], strict: Collection[str] = ()
) -> tuple[str, Any, Any] | None:
    """The first field in which two configurations disagree though they must not.

    ``strict`` are fields of the loop that are not free here.
    """
    # The schedule last: its warm-up follows the steps, which are what was asked for.
    for part, fields in sorted(new.items(), key=lambda item: item[0] == "schedule"):
        before = old.get(part)
        if not isinstance(fields, dict):
            continue
        if not isinstance(before, dict):
            return part, before, fields
        for name in {**fields, **before}:  # another kind of model has other fields
            free = name not in strict and is_free(new, part, name)
            if not free and _plain(before.get(name)) != _plain(fields.get(name)):
                return f"{part}.{name}", before.get(name), fields.get(name)
    return None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
