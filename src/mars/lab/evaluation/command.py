"""`mars eval`: checkpoints in, a table out."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars.lab import hardware
from mars.lab.config import Precision
from mars.lab.errors import LabError, UsageError
from mars.lab.evaluation import harness, metrics
from mars.lab.evaluation.metrics import Result
from mars.lab.evaluation.prompts import USUAL
from mars.lab.evaluation.scoring import Scorer, Watch
from mars.lab.evaluation.table import as_json, table
from mars.lab.evaluation.tasks import Task, names_of, open_tasks
from mars.lab.loading import load
from mars.lab.report import fit, units
from mars.lab.rundir import write_json


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Score checkpoints on tasks, side by side."""

    runs: tuple[Path, ...]
    """Run directories, checkpoints or Hugging Face GPT-2 folders; several are compared with the
    first, item by item."""
    tasks: str | None = None
    """Names with commas: hellaswag,arc_easy,arc_challenge,boolq,obqa,piqa,winogrande,mmlu,sciq,
    lambada, or any other of lm-eval or of your own files; by default those, as far as there is
    data."""
    data: tuple[Path, ...] = ()
    """Folders of JSONL files, or such files: no network and no lm-eval needed."""
    limit: int | None = None
    """Only the first items of each task (of each subject of MMLU)."""
    checkpoint: str | None = None
    """Of a run: best, last or a step; by default the best, or the newest where none is known."""
    out: Path | None = None
    """Write the results to this JSON file, too."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1"""
    precision: Precision = "auto"
    """Of the forward pass; auto is bf16 on a GPU that has it, fp32 on a CPU."""
    batch_tokens: int | None = None
    """Tokens in a forward pass; by default 65536 on a GPU, 4096 on a CPU."""


def eval_command(args: EvalArgs) -> list[list[Result]]:
    """Evaluate, print the table, write the file."""
    _check(args)
    device = hardware.choose_device(args.device, option="--device")
    names = names_of(args.tasks) if args.tasks is not None else None
    tasks = open_tasks(args.data, names, args.limit) if args.data else None
    results, notes = [], []
    for name, where in zip(_names(args.runs), args.runs, strict=True):
        loaded = load(where, args.checkpoint, device)
        scorer = Scorer(
            loaded.model, loaded.words, batch_tokens=args.batch_tokens, precision=args.precision
        )
        began = time.perf_counter()
        with progress(name) as watch:
            if tasks is not None:
                own = local(scorer, tasks, watch)
            else:
                own = harness.evaluate(scorer, names or USUAL, args.limit, watch)
        results.append(own)
        took = time.perf_counter() - began
        notes.append(_note(name, own, scorer, took))
        del loaded, scorer
    shown = table(_names(args.runs), results, fit.room())
    sys.stdout.write(shown + "\n\n" + "\n".join(notes) + "\n")
    if args.out is not None:
        write_json(args.out, _values(args, tasks, results), indent=1)
    return results


def local(scorer: Scorer, tasks: list[Task], watch: Watch) -> list[Result]:
    """Results of tasks from files; all of them together make the fullest batches."""
    pairs = [pair for task in tasks for item in task.items for pair in item.pairs]
    scores = scorer.text(pairs, watch)
    results, place = [], 0
    for task in tasks:
        count = sum(len(item.pairs) for item in task.items)
        results.append(metrics.result(task, scores[place : place + count]))
        place += count
    return results


def _check(args: EvalArgs) -> None:
    if not args.runs:
        raise UsageError("mars eval needs a run, a checkpoint or a Hugging Face folder")
    for name in ("limit", "batch_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise LabError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise LabError(f"{args.out}: the folder {args.out.parent} does not exist")
    if args.out is not None and args.out.is_dir():
        raise LabError(f"--out {args.out} is a folder: name a file in it")


def _names(runs: tuple[Path, ...]) -> list[str]:
    """Short names, if they tell the runs apart; of a checkpoint with its run's."""
    short = []
    for path in runs:
        run = path.parent.parent if path.parent.name == "checkpoints" else path
        short.append(path.name if run == path or not run.name else f"{run.name}/{path.name}")
    return short if len(set(short)) == len(runs) and all(short) else list(map(str, runs))


def _note(name: str, own: list[Result], scorer: Scorer, seconds: float) -> str:
    items = sum(len(r.groups) for r in own)
    note = f"{name}: {items} items in {units.seconds(seconds)}"
    if scorer.cut:
        note += (
            f"; {scorer.cut} of {scorer.asked} prompts with an answer were longer than its context "
            f"of {scorer.context} tokens and lost their beginning"
        )
    return note


def _values(
    args: EvalArgs, tasks: list[Task] | None, results: list[list[Result]]
) -> dict[str, Any]:
    return {
        "scored_by": "mars (JSONL)" if tasks is not None else "lm-eval",
        "data": {task.name: task.source for task in tasks} if tasks is not None else None,
        "limit": args.limit,
        "precision": args.precision,
        "versions": hardware.versions(),
        "models": as_json(_names(args.runs), results),
    }


@contextlib.contextmanager
def progress(name: str) -> Iterator[Watch]:
    """A bar with the time left in a terminal, a line every ten seconds elsewhere."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield Lines(name)
        return
    if not sys.stderr.isatty():
        yield Lines(name)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name)
        yield lambda done, of: bar.update(task, completed=done, total=of)


class Lines:
    """How far it is, now and then."""

    def __init__(self, name: str, every: float = 10.0) -> None:
        self.name, self.every = name, every
        self.began = self.last = time.perf_counter()

    def __call__(self, done: int, of: int) -> None:
        now = time.perf_counter()
        if not done:
            self.began = self.last = now
        elif done < of and now - self.last >= self.every:
            self.last = now
            left = (now - self.began) * (of - done) / done
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{self.name}: {done / of:.0%}, {units.seconds(left)} left\n")
                sys.stderr.flush()
