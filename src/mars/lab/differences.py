"""In what two runs may differ and still be the same run."""

from __future__ import annotations

from typing import Any

# None of it changes what is computed, but for rounding; of a part that is None, nothing does.
FREE: dict[str, set[str] | None] = {
    "keep": None,
    "loop": {
        "device", "threads", "compile", "graphs", "deterministic", "micro_batch_size",
        "log_every", "eval_every", "diagnose_every", "skip_nan", "parallel", "shards",
        "epochs",  # steps are what counts
    },
}  # fmt: skip


def first_difference(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first field in which two configurations disagree though they must not."""
    # The schedule last: its warm-up follows the steps, which are what was asked for.
    for part, fields in sorted(new.items(), key=lambda item: item[0] == "schedule"):
        free = FREE.get(part, set())
        if free is None or not isinstance(fields, dict):
            continue
        for name, value in fields.items():
            if name not in free and _plain(old[part].get(name)) != _plain(value):
                return f"{part}.{name}", old[part].get(name), value
    return None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
