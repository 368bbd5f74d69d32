"""`mars study`: list the studies, go on with one, say what it has shown."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
import textwrap
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars.lab import arguments, tasks
from mars.lab.errors import INTERRUPTED, LabError, UsageError
from mars.lab.optimizers import build
from mars.lab.report import fit
from mars.lab.rundir import RunDirectory, write_atomically, write_json
from mars.lab.study import fingerprint, page, times
from mars.lab.study.definition import Study
from mars.lab.study.questions import STUDIES, find
from mars.lab.study.results import NAME, Results, failures
from mars.lab.study.stretch import Stretch
from mars.lab.study.verdict import markdown, terminal, verdict

KEPT = Path("docs/results")  # of a checkout
ABOUT = (
    "Resume a study: the next most informative runs, until all is known or the time is up; "
    "then the verdict. NAME is one that `mars study` lists, or package.module:function of yours."
)


@dataclass(frozen=True, kw_only=True)
class StudyArgs:
    """Resume a study."""

    seconds: float | None = None
    """End within so many seconds: what cannot be finished is not begun, or saved to be resumed."""
    out: Path | None = None
    """Where results.jsonl, verdict.md and report.html are; by default runs/study-NAME."""
    arms: tuple[str, ...] = ()
    """Run only these arms this time; the verdict is about all."""
    jobs: int | None = None
    """Runs at the same time; by default one a core on a CPU, and as many as pay on a GPU."""
    seeds: int | None = None
    """More seeds than the study's own, for comparisons that are not resolved."""
    data: str | None = None
    """Where the tokens are here, instead of the study's place: they are known by their sha256."""
    valid: str | None = None
    """Where the validation tokens are, if not with the others."""
    take: tuple[Path, ...] = ()
    """Directories of other studies: runs that are the same here and there are not run again."""
    device: str | None = None
    """cpu, cuda or cuda:1; by default a GPU if there is one."""
    times: bool = False
    """Run nothing: time the steps of all arms, in turns, alone on the device. Needed for ratios of
    time if runs go side by side."""
    verdict_only: bool = False
    """Run nothing: the verdict from the results file, with what --take adds to it."""


def study_command(words: list[str]) -> int:
    """The command line."""
    named = bool(words) and not words[0].startswith("-")
    if not named and not words:
        sys.stdout.write(listing() + "\n")
        return 0
    name, options = (words[0], words[1:]) if named else ("NAME", words)
    if name == "variance":
        from mars.lab.study.variance_command import VarianceArgs, variance_command

        about = "Measure how far averages of gradients are from the gradient, on a tiny model."
        return variance_command(
            arguments.parse(VarianceArgs, options, "mars study variance", about)
        )
    args = arguments.parse(StudyArgs, options, f"mars study {name}", ABOUT)
    if not named:
        raise UsageError(f"mars study needs a name: {', '.join(STUDIES)}, variance")
    return go_on(name, args, shlex.join(["mars", "study", *words]))


def go_on(name: str, args: StudyArgs, command: str) -> int:
    """Run what fits, then tell."""
    _check(args)
    study = _here(find(name), args)
    directory = Path(args.out or f"runs/study-{study.name.replace(':', '.')}").expanduser()
    failed: dict[str, str] | None = {}
    if args.verdict_only:
        _only_judge(study, directory, args.take)
    else:
        failed = _run(study, directory, args, command)
    tell(study, directory, name, args.seeds)
    if failed is None:
        sys.stdout.write("stopped; the same command resumes from here\n")
        return INTERRUPTED
    for what, text in failed.items():
        sys.stderr.write(f"mars: error: {what}: {text}\n")
    return 1 if failed else 0


def _only_judge(study: Study, directory: Path, take: tuple[Path, ...]) -> None:
    """Check that there are results that a verdict can be made from."""
    file = Results(directory)
    if not file.path.exists() and not take:
        raise LabError(f"{file.path} does not exist: nothing has been run yet, or give --out")
    with RunDirectory(directory, NAME).lock() if take else nullcontext():
        _take(study, file, take)
    results = file.read()
    if results and not {r.arm for r in results} & {arm.label for arm in study.arms}:
        raise LabError(f"{directory} holds runs of another study, none of {study.name}")
    fingerprint.check(study, results, directory, fingerprint.of_results(study, results))


def _run(study: Study, directory: Path, args: StudyArgs, command: str) -> dict[str, str] | None:
    """Run what fits, or time the arms: what failed and why, or None if somebody stopped it."""
    file = Results(directory)
    study.common()
    others = _others(study, args.arms)
    without = _cannot(study, others)
    here = fingerprint.of_study(study)
    fingerprint.check(study, file.read(), directory, here)
    left_out = {*without, *others}
    with RunDirectory(directory, NAME).lock():
        _take(study, file, args.take, here)
        if args.times:
            times.measure(study, directory, here, command, left_out)
            return without
        failed = Stretch(
            study, directory, here, seconds=args.seconds, jobs=args.jobs, seeds=args.seeds,
            command=command, without=left_out,
        ).go()  # fmt: skip
    return None if failed is None else {**failed, **without}


def _take(
    study: Study, file: Results, others: tuple[Path, ...], here: dict[str, str] | None = None
) -> None:
    """Add what other studies have of this one; without ``here``, of what is as the first result."""
    studies = [make() for make in STUDIES.values()] if others else []
    directory = file.path.parent
    for other in others:
        known = {result.key for result in file.read()}
        theirs = Results(other).read()
        here = here or fingerprint.of_results(study, [*file.read(), *theirs])
        ours, more = (fingerprint.equivalents(path) for path in (directory, other))
        declared = [*ours, *(entry for entry in more if entry not in ours)]
        own = fingerprint.shared(study, studies, theirs, declared, here)
        new = [result for result in own if result.key not in known]
        if new and declared != ours:  # what makes theirs the same must be known here, too
            write_json(directory / fingerprint.EQUIVALENTS, declared, indent=1, ascii=False)
        file.add(new)
        sys.stderr.write(f"{other}: {len(new)} of its runs are runs of {study.name} too\n")


def _others(study: Study, chosen: Sequence[str]) -> set[str]:
    """The arms that are not to be run this time."""
    labels = [arm.label for arm in study.arms]
    for label in chosen:
        if label not in labels:
            raise LabError(f"study {study.name} has no arm {label!r}: {'; '.join(labels)}")
    return set(labels).difference(chosen or labels)


def _cannot(study: Study, others: Collection[str] = ()) -> dict[str, str]:
    """Arms that cannot be trained here (a package is missing, say), and why; not all of them."""
    found = {}
    arms = [arm for arm in study.arms if arm.label not in others]
    for arm in arms:
        run = study.run(arm)
        try:
            build(tasks.of(run).miniature(), run.optimizer)
        except LabError as error:
            found[arm.label] = str(error)
    if len(found) == len(arms):
        raise LabError(next(iter(found.values())))
    return found


def _check(args: StudyArgs) -> None:
    for name, least in (("seconds", 5.0), ("jobs", 1), ("seeds", 3)):
        value = getattr(args, name)
        if value is not None and not least <= value < math.inf:
            raise LabError(f"--{name} must be {least:g} or more, not {value:g}")
    for other in args.take:
        if not Results(other).path.exists():
            raise LabError(f"--take: {Results(other).path} does not exist")
    if args.verdict_only and (args.arms or args.jobs or args.seconds or args.device):
        raise LabError("--verdict-only runs nothing: it goes with --out, --take and --seeds")
    if args.times and (args.verdict_only or args.take or args.seeds or args.jobs or args.seconds):
        raise LabError("--times goes with --arms, --out, --data, --valid and --device alone")


def _here(study: Study, args: StudyArgs) -> Study:
    """The study with what this machine has."""
    data = {"source": args.data, "valid": args.valid}
    changes: dict[str, dict[str, Any]] = {
        "data": {key: value for key, value in data.items() if value is not None},
        "loop": {} if args.device is None else {"device": args.device},
    }
    for part, fields in study.overrides.items():
        changes[part] = {**fields, **changes.get(part, {})}
    return dataclasses.replace(study, overrides={p: f for p, f in changes.items() if f})


def tell(study: Study, directory: Path, address: str, seeds: int | None = None) -> None:
    """Print the verdict, write it and the report."""
    results = Results(directory).read()
    failed = failures(directory, {arm.label: arm.folder for arm in study.arms})
    found = verdict(study, results, times.read(study, directory, results), seeds, failed)
    sys.stdout.write(terminal(found, fit.room()) + "\n\n")
    written = [directory / "verdict.md"]
    write_atomically(written[0], markdown(found).encode())
    written += page.write(found, directory, address)
    sys.stdout.write("".join(f"{path}\n" for path in written))


def listing() -> str:
    """The studies, what each asks, and how far it is here."""
    lines = [
        "usage: mars study NAME [--seconds N] [--out DIR] [--verdict-only]   (--help: all)",
        "",
    ]
    for name in STUDIES:
        study = find(name)
        far = f"nothing yet; {len(study.arms)} arms"
        for place in (KEPT / name, Path(f"runs/study-{name}")):  # your own count
            if results := Results(place).read():
                far = f"{place}: {verdict(study, results).count}"
        lines += [name, *textwrap.wrap(study.question, 96, initial_indent="  ",
                                       subsequent_indent="  "), f"  [{far}]", ""]  # fmt: skip
    lines += [
        "variance",
        "  How far are averages of gradients from the gradient, where that can be had?",
        "  [a few minutes on a CPU]",
    ]
    return "\n".join(lines)
