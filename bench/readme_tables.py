"""Rewrite the tables of README.md and docs/ that come from result files, so that they cannot drift.

    python bench/readme_tables.py            # rewrite them
    python bench/readme_tables.py --check    # say which are not what the files say; status 1

A table stands between `<!-- table: NAME, by bench/readme_tables.py -->` and `<!-- end -->`; NAME is
a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import race_tables as races
import speed_tables as speed
import study_tables as studies
from table_cells import ROOT

BLOCK = re.compile(
    r"(?P<head><!-- table: (?P<name>[\w-]+), by bench/readme_tables\.py -->\n)"
    r".*?(?P<end><!-- end -->)",
    flags=re.S,
)

TABLES: dict[str, Callable[[], str]] = {
    "optimizers-50m": lambda: studies.arms("optimizers-50m"),
    "leads": studies.leads,
    "headline": lambda: studies.headline("optimizers-50m"),
    "optimizers-50m-times": lambda: studies.durations("optimizers-50m"),
    "correction-50m": lambda: studies.arms("correction-50m"),
    "correction-50m-times": lambda: studies.durations("correction-50m"),
    "correction-50m-rates": lambda: studies.moved("correction-50m"),
    "correction-50m-variance": lambda: studies.variances("correction-50m"),
    "batch-50m": lambda: studies.every_run("batch-50m", "512k"),
    "clip-50m": lambda: studies.arms("clip-50m"),
    "clip-50m-adamw": lambda: studies.to_adamw("clip-50m", "optimizers-50m"),
    "gpt-50m-rates": lambda: races.every_rate(races.race("gpt-50m")),
    "gpt-tiny": lambda: races.grid(ROOT / "src/mars/lab/recipes/rates/gpt-tiny.json"),
    "conversion-h200": lambda: races.conversion("convert_rates_h200.json"),
    "conversion-cpu": lambda: races.conversion("convert_rates_cpu.json"),
    "step-cost": speed.step_cost,
    "step-cost-short": speed.short_step_cost,
    "lean-state": speed.lean_state,
    "train-speed": speed.train_speed,
    "cost": speed.cost,
    "cpu-cost": speed.on_cpu,
    "cifar10": lambda: races.accuracies(
        "cifar10-resnet18-short", "cifar10-resnet18-30", "cifar10-resnet18-bare"
    ),
    "cifar10-200": lambda: races.whole_schedule("cifar10-resnet18-200", "cifar10-resnet18-short"),
    "cifar10-decay": lambda: races.decays("cifar10-resnet18-decay"),
    "cifar10-rates": lambda: races.accuracy_rates("cifar10-resnet18-grid"),
    "simulated": studies.simulated,
    "tiny-optimizers": lambda: studies.arms("tiny-optimizers"),
    "tiny-correction": lambda: studies.arms("tiny-correction"),
    "tiny-clip": lambda: studies.arms("tiny-clip"),
    "search-50m": lambda: studies.arms("search-50m"),
    "baseline-50m": lambda: studies.arms("baseline-50m"),
    "tiny-search": lambda: studies.arms("tiny-search"),
    "tiny-length": lambda: studies.arms("tiny-length"),
    "tiny-tokens": lambda: studies.arms("tiny-tokens"),
    "tiny-code": lambda: studies.arms("tiny-code"),
    "tiny-momentum": lambda: studies.arms("tiny-momentum"),
    "tiny-decay": lambda: studies.by_decay("tiny-decay"),
    "tiny-baseline": lambda: studies.arms("tiny-baseline"),
    "tiny-scale": lambda: studies.arms("tiny-scale"),
    "gpt2-small": lambda: studies.scored("gpt2-small"),
    "gpt2-small-times": lambda: studies.durations("gpt2-small"),
    "gpt2-small-rates": lambda: studies.every_rung("gpt2-small-rates"),
    "settings": studies.measured,
    "rates": studies.rates,
}


def pages() -> list[Path]:
    """Every page that may hold a table."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rewritten(text: str) -> str:
    """The page with all its tables made anew."""
    return BLOCK.sub(lambda found: found["head"] + TABLES[found["name"]]() + found["end"], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if behind")
    check = parser.parse_args().check
    behind = [page for page in pages() if rewritten(page.read_text()) != page.read_text()]
    for page in behind:
        print(f"{'behind its results' if check else 'rewritten'}: {page.relative_to(ROOT)}")
        if not check:
            page.write_text(rewritten(page.read_text()))
    return int(check and bool(behind))


if __name__ == "__main__":
    sys.exit(main())
