"""How far many processes end from one: strategies x world sizes x types, as a table of docs.

    python bench/same_on_any_ranks.py [--out FILE.json]

The cases are those of tests/test_distributed.py: five steps of a small model, in every mode, with
every clip, compared with MARS in one process; max |x - x1| / max |x1 - x0|, the worst of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from ranks import Ranks

TYPES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
MODES = ("approximate", "closure", "protocol")
STRATEGIES = {
    "FSDP2": "fsdp",
    "HSDP": "hsdp",
    "DDP": "ddp",
    "DDP, bucket views": "ddp-view",
    "DDP, static graph": "ddp-static",
    "DDP, no_sync": "ddp-no-sync",
    'DDP, ranks="replicate"': "ddp-shared",
    'ZeRO, ranks="partition"': "zero",
}
PRECISIONS = {"float64": "float64", "float32, Newton–Schulz in bfloat16": "float32"}


def worst(ranks: Ranks, strategy: str, kind: str, precision: str) -> float:
    ns = "float64" if precision == "float64" else "bfloat16"
    cases = [
        (strategy, {"mars_type": kind, "clip": clip, "ns_dtype": ns}, mode, precision)
        for mode, clip in product(
            ("approximate", "closure", "protocol"), ("tensor", "global", None)
        )
        if (strategy, mode) != ("zero", "closure")
    ]
    return float(torch.tensor(ranks.run("distributed_cases", "compare_many", cases)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for size in (2, 3, 4):
        ranks = Ranks(size, seconds=300)
        for (words, precision), (name, strategy) in product(PRECISIONS.items(), STRATEGIES.items()):
            if strategy == "hsdp" and size != 4:
                continue
            if precision == "float32" and strategy not in ("fsdp", "ddp", "ddp-shared", "zero"):
                continue
            row = {kind: worst(ranks, strategy, kind, precision) for kind in TYPES}
            rows.append({"precision": words, "ranks": size, "strategy": name, **row})
            print(rows[-1], flush=True)
        ranks.stop()
    for words in PRECISIONS:
        print(f"\n{words}\n\n| strategy | ranks | {' | '.join(TYPES)} |\n|---|---|---|---|---|---|")
        for name, size in product(STRATEGIES, (2, 3, 4)):
            for row in rows:
                if (row["precision"], row["strategy"], row["ranks"]) == (words, name, size):
                    cells = " | ".join(f"{row[kind]:.0e}" for kind in TYPES)
                    print(f"| {name} | {size} | {cells} |")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
