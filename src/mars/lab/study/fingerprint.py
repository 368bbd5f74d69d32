"""What two runs must share to be compared: data, configuration, training code, torch, device."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mars.lab import hardware, tasks
from mars.lab.config import Data
from mars.lab.differences import LATER
from mars.lab.errors import LabError
from mars.lab.report import units
from mars.lab.study.definition import Arm, Study
from mars.lab.study.results import Result

EQUIVALENTS = "equivalents.json"
SOURCE = "source"  # of an arm's optimizer, if that is the user's own
SHORT = 12  # digits of a hash that are kept and shown
PARTS = {"data": "data", "config": "model or schedule", "code": "training code",
         "torch": "torch", "device": "device"}  # fmt: skip

# Sources that can change what a run computes: the optimizer, the model and its loss, which tokens
# are in a batch, the step, the schedule. Not what is logged, saved, told or planned.
TRAINING = (
    "rule/*.py", "engines/*.py", "engines/fused/*.py", "optimizer.py", "options.py", "state.py",
    "loading.py", "exact.py", "collect.py", "clipping.py", "dispatch.py", "plan.py", "groups.py",
    "roles.py", "sharding.py", "exchange.py",
    "lab/models/*.py", "lab/data/batches.py", "lab/data/shards.py", "lab/data/sources.py",
    "lab/data/tokenizers.py", "lab/images/augment.py", "lab/tasks/*.py", "lab/loop.py",
    "lab/graphs.py", "lab/muon.py", "lab/schedule.py", "lab/optimizers.py", "lab/wrapping.py",
    "lab/hardware.py", "lab/train.py", "lab/checkpoint.py", "lab/optimizer_state.py",
)  # fmt: skip


@functools.cache
def training_code() -> str:
    """sha256 over the sources that can change numbers."""
    root = Path(hardware.__file__).parents[1]
    paths = chain(*(sorted(root.glob(pattern)) for pattern in TRAINING))
    return hardware.hash_of(paths, root)[:SHORT]


def _hash(value: Any) -> str:
    if isinstance(value, dict):  # a field that is not set may be one that came later
        value = {k: v for k, v in value.items() if v is not None and v != LATER.get(k)}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:SHORT]


def of_study(study: Study) -> dict[str, str]:
    """The fingerprint of runs made here and now. Opens the data."""
    run = study.run(study.arms[0])
    if not isinstance(run.data, Data):
        raise LabError(f"study {study.name} is of images: studies are of text; mars race has both")
    task = tasks.of(run).open()
    device = hardware.choose_device(run.loop.device)
    return {
        "data": _hash([task.train.sha256, task.valid.sha256]),
        "config": _hash(study.common()),
        "code": training_code(),
        "torch": torch.__version__,
        "device": str(hardware.hardware(device)["name"]),
    }


def of_results(study: Study, results: Sequence[Result]) -> dict[str, str]:
    """The fingerprint of runs of this study, had they been made where the first of these was."""
    made = results[0].fingerprint if results else {}
    own = {part: made.get(part, "unknown") for part in PARTS}
    return {**own, "config": _hash(study.common())}


def of_arm(study: Study, arm: Arm) -> str:
    """What the results of an arm belong to, whatever its label."""
    return _hash(study.own(arm))


def made_of(study: Study, arm: Arm) -> dict[str, str]:
    """What is kept with what an arm gives: its settings, and the source of an own optimizer."""
    source = hardware.own_code(study.run(arm).optimizer.name)
    own = {} if source is None else {SOURCE: source[:SHORT]}
    return {"arm": of_arm(study, arm), **own}


def equivalents(directory: Path) -> list[dict[str, Any]]:
    """What somebody has declared to be the same, and why."""
    path = directory / EQUIVALENTS
    return _declared(path) if path.exists() else []


def _declared(path: Path) -> list[dict[str, Any]]:
    """The entries of a file, and of those that it names beside them: studies may share one."""
    found: list[dict[str, Any]] = []
    try:
        for entry in json.loads(path.read_text()):
            if isinstance(entry, str):
                if not (path.parent / entry).exists():
                    raise LabError(f"{path} names {entry}, which is not there: copy it, too")
                found += _declared(path.parent / entry)
                continue
            known = entry["part"] in (*PARTS, SOURCE)
            good = known and all(isinstance(v, str) for v in entry["same"])
            if not good or not str(entry["reason"]).strip():
                raise ValueError
            found.append(entry)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise LabError(
            f'{path}: it must be a list of {{"part": "code", "same": ["…", "…"], "reason": "…"}}, '
            f"or of names of such files; parts are {', '.join((*PARTS, SOURCE))}"
        ) from None
    return found


def _canonical(part: str, value: str, declared: Sequence[dict[str, Any]]) -> str:
    """The first of the values that this one is declared to be the same as, in one entry or more."""
    groups: list[list[str]] = []
    for entry in declared:
        own = [v for v in entry["same"] if v] if entry["part"] == part else []
        near = [g for g in groups if any(_alike(a, b) for a in g for b in own)]
        groups = [g for g in groups if g not in near] + [[*chain(*near), *own]]
    found = (g[0] for g in groups if any(value.startswith(v) for v in g))
    return next(found, value)


def _alike(a: str, b: str) -> bool:
    """Whether one is the beginning of the other: hashes may be given in part."""
    return a.startswith(b) or b.startswith(a)


def check(
    study: Study, results: Sequence[Result], directory: Path, here: dict[str, str] | None = None
) -> None:
    """Refuse, in one line, results that differ in what they must share (with ``here`` too)."""
    declared = equivalents(directory)
    arms = {arm.label: of_arm(study, arm) for arm in study.arms}
    for result in results:
        if result.arm in arms and result.fingerprint.get("arm") != arms[result.arm]:
            raise LabError(
                f"{result.arm!r} in {directory} was run with other settings than study "
                f"{study.name} has for it now: rename the arm, or choose another --out"
            )
    _check_sources(study, results, directory, declared)
    for part, name in PARTS.items():
        values = Counter(result.fingerprint.get(part, "unknown") for result in results)
        groups: dict[str, list[str]] = {}
        for value in [*values, *([here[part]] if here else [])]:
            own = groups.setdefault(_canonical(part, value, declared), [])
            own += [] if value in own else [value]
        if len(groups) > 1:
            said = "; ".join(
                f"{value}: {units.count(values[value], 'run')}"
                + (", and this machine now" * _is(here, part, value))
                for own in groups.values()
                for value in own
            )
            said += f"; the study has {study.run(study.arms[0]).data.source}" * (part == "data")
            raise LabError(
                f"the runs in {directory} cannot be compared, their {name} differ ({said}): choose "
                f"another --out, or declare the values the same in {EQUIVALENTS}, with a reason"
            )


def _check_sources(
    study: Study, results: Sequence[Result], directory: Path, declared: Sequence[dict[str, Any]]
) -> None:
    """Refuse results of an own optimizer whose source is not the same for all, and now."""
    for arm in study.arms:
        made = [result.fingerprint for result in results if result.arm == arm.label]
        values = sources(study, arm, made, declared)
        if len(values) > 1:
            raise LabError(
                f"the module of {study.run(arm).optimizer.name} has changed since runs of "
                f"{arm.label!r} in {directory} were made (its sha256: {', '.join(values)}): "
                f"restore it, choose another --out, or declare the values the same ({SOURCE!r}) "
                f"in {EQUIVALENTS}, with a reason"
            )


def first_difference(
    results: Sequence[Result], made: dict[str, str], directory: Path
) -> str | None:
    """In what some result differs from what was made elsewhere; None if in nothing."""
    declared = equivalents(directory)
    for part, name in PARTS.items():
        values = {made[part], *(result.fingerprint.get(part, "unknown") for result in results)}
        if len({_canonical(part, value, declared) for value in values}) > 1:
            return name
    return None


def shared(
    study: Study, known: Sequence[Study], others: Sequence[Result],
    declared: Sequence[dict[str, Any]], here: dict[str, str],
) -> list[Result]:  # fmt: skip
    """Of another study's results, those that are runs of this one too, under this one's labels.

    What one study varies may be the same for all in the other: if theirs is among ``known``, whole
    configurations are compared. ``declared`` are `equivalents`, of theirs and ours.
    """
    ours = {_hash(study.whole(arm)): arm for arm in study.arms}
    theirs = {
        (_canonical("config", _hash(other.common()), declared), of_arm(other, arm)): ours.get(
            _hash(other.whole(arm))
        )
        for other in (*known, study)
        for arm in other.arms
    }

    def same(made: dict[str, str]) -> bool:
        return all(
            _canonical(part, made.get(part, "unknown"), declared)
            == _canonical(part, here[part], declared)
            for part in PARTS
        )

    found = []
    for result in others:
        made = result.fingerprint
        config = _canonical("config", made.get("config", ""), declared)
        arm = theirs.get((config, made.get("arm", "")))
        if arm is None or len(sources(study, arm, [made], declared)) > 1:
            continue
        if same({**made, "config": here["config"]}):
            own = {**made, "config": here["config"], "arm": of_arm(study, arm)}
            found.append(dataclasses.replace(result, arm=arm.label, fingerprint=own))
    return found


def sources(
    study: Study, arm: Arm, made: Sequence[Mapping[str, Any]],
    declared: Sequence[dict[str, Any]] = (),
) -> list[str]:  # fmt: skip
    """The sources of an arm's optimizer, then and now, that are not the same, if it is one's own.

    One that was not noted, or is not here, is left out.
    """
    found = [str(own[SOURCE]) for own in (*made, made_of(study, arm)) if SOURCE in own]
    return list(dict.fromkeys(_canonical(SOURCE, source, declared) for source in found))


def _is(here: dict[str, str] | None, part: str, value: str) -> bool:
    return here is not None and here[part] == value
