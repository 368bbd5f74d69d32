"""Time one optimizer step, beside torch's own optimizers and other people's MARS, in one run.

    python -m mars.bench
        everything, on GPT-2 small on a GPU, on a small GPT on a CPU
    python -m mars.bench --params llama-1b resnet18 --dtype bfloat16 --only mars-adamw --out runs/b
        only what has mars-adamw in its name (and what it is compared with), on two models with
        bfloat16 parameters; writes runs/b/bench.json and runs/b/bench.png

Only shapes matter, so parameters and gradients are random. Two sets of gradients alternate, so that
no cache helps. Each step is timed from an idle device to an idle device, and on a GPU also in a
queue. AdamW is timed again after each of the others, and their ratios are to its times before and
after. Muon, MARS-M and MARS-Shampoo are timed on the hidden matrices, which they are for, against
AdamW on the same. What fails, or is not installed, is a row that says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from mars.bench.candidates import candidates
from mars.bench.measure import WARM_UP, copy_bandwidth, release
from mars.bench.picture import draw
from mars.bench.report import device_name, machine, progress, say, table
from mars.bench.rows import Row, Settings, rows_of, selected
from mars.bench.shapes import PARAMETER_SETS
from mars.table import room

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _positive(kind: type) -> Any:
    def convert(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
        return value

    convert.__name__ = kind.__name__
    return convert


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mars.bench", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--params", nargs="+", metavar="NAME", choices=list(PARAMETER_SETS),
        help=f"parameter sets: {', '.join(PARAMETER_SETS)} (default: gpt2-small on a GPU, "
        "gpt-tiny on a CPU)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of x and g")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"),
        default="cuda" if torch.cuda.is_available() else "cpu", help="default: a GPU if there is",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="SUBSTRING",
        help="time only candidates of these names, or with one of these in their names, and their "
        "baselines",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=_positive(int), default=20,
        help=f"steps that are timed, after {WARM_UP} to warm up (default: 20)",
    )  # fmt: skip
    parser.add_argument(
        "--grad-norm", type=_positive(float), default=0.1,
        help="norm of each gradient; above about 0.5 the clip of MARS acts, and takes its time "
        "(default: 0.1)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="write bench.json and bench.png")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    args = parser.parse_args(given)
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    chosen = selected(on_gpu, args.only)
    if not chosen:
        names = "\n  ".join(c.name for c in candidates(on_gpu))
        parser.error(f"--only {' '.join(args.only)}: matches none of\n  {names}")
    if args.out is not None:
        try:  # now, not when all is timed
            args.out.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=args.out).close()
        except OSError as error:
            parser.error(f"--out {args.out}: cannot be written: {error.strerror}")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    copy = copy_bandwidth(device)
    release(device)
    settings = Settings(device, DTYPES[args.dtype], args.repeat, args.grad_norm, copy)
    facts = machine(device, given)
    rows: list[Row] = []
    for name in args.params or ["gpt2-small" if on_gpu else "gpt-tiny"]:
        here = []
        for row in rows_of(name, chosen, settings):
            say(progress(row), error=True)
            here.append(row)
        rows += here
        say("\n" + table(here, settings, room()) + "\n")
        if args.out is not None:  # after each set: the next one may take the process down
            _write(args.out, facts, settings, rows)


def _write(folder: Path, facts: dict[str, Any], settings: Settings, rows: Sequence[Row]) -> None:
    dtype = str(settings.dtype).removeprefix("torch.")
    how = {
        "dtype": dtype, "repeat": settings.repeat, "warm_up": WARM_UP,
        "grad_norm": settings.grad_norm, "copy_bandwidth": settings.copy,
    }  # fmt: skip
    content = {"machine": facts, "settings": how, "rows": [asdict(row) for row in rows]}
    (folder / "bench.json").write_text(json.dumps(content, indent=1) + "\n")
    say(f"wrote {folder / 'bench.json'}", error=True)
    title = f"{device_name(settings.device)}, torch {facts['torch']}, {dtype}"
    try:
        draw(rows, title, folder / "bench.png")
        say(f"wrote {folder / 'bench.png'}", error=True)
    except RuntimeError as reason:
        say(str(reason), error=True)
