"""How long a step of each arm takes, in turns on a device that nothing else uses.

Runs of a study go side by side, each beside whatever is next in the plan: that changes no loss, but
a step beside Muon takes another time than one beside AdamW. So times are measured apart, once.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mars.lab import hardware
from mars.lab.errors import LabError
from mars.lab.loop import Training
from mars.lab.report import units
from mars.lab.rundir import reason, write_json
from mars.lab.study import fingerprint
from mars.lab.study.definition import Arm, Study
from mars.lab.study.results import Result

NAME = "times.json"
FORMAT = 1
WARM = 5  # steps in which all is compiled, captured and allocated
STEPS, ROUNDS = 10, 5  # a round is a multiple of what SOAP does every ten steps


@dataclass(frozen=True)
class Time:
    """Seconds of an arm's step, and of the optimizer's part in it: medians over rounds."""

    step: float
    optimizer: float


def measure(
    study: Study, directory: Path, here: dict[str, str], command: str, without: Collection[str]
) -> None:
    """Time the arms in turns, and write the file."""
    arms = [arm for arm in study.arms if arm.label not in without]
    rounds: dict[str, list[Time]] = {arm.label: [] for arm in arms}
    with hardware.deterministic(study.run(arms[0]).loop.deterministic):
        try:
            trainings = {arm.label: _ready(study, arm) for arm in arms}
            for _ in range(ROUNDS):
                for label, training in trainings.items():
                    rounds[label].append(_round(training))
        except torch.cuda.OutOfMemoryError as error:
            text = f"{len(arms)} arms do not fit the GPU's memory together: name some with --arms"
            raise LabError(text) from error
    found = {label: middle(own) for label, own in rounds.items()}
    for label, time in found.items():
        said = f"{units.seconds(time.step)} a step, optimizer {units.seconds(time.optimizer)}"
        sys.stderr.write(f"{label}: {said}\n")
    own = {
        arm.label: {**fingerprint.made_of(study, arm), **asdict(found[arm.label]),
                    "rounds": [time.step for time in rounds[arm.label]]}
        for arm in arms
    }  # fmt: skip
    before = _written(directory)
    if before.get("fingerprint") == here:  # of other arms, measured before
        own = {**before["arms"], **own}
    record = {
        "format": FORMAT, "command": command, "fingerprint": here, "arms": own,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip
    write_json(directory / NAME, record, indent=1)


def _written(directory: Path) -> dict[str, Any]:
    """The file that is there; nothing, if none is or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads((directory / NAME).read_text())
        if isinstance(record, dict) and isinstance(record.get("arms"), dict):
            return record
    return {}


def _ready(study: Study, arm: Arm) -> Training:
    """An arm that has taken its first steps."""
    from mars.lab.train import prepare

    sys.stderr.write(f"{arm.label}: warming up\n")
    training = prepare(study.run(arm))
    training.connect()
    for _ in range(WARM):
        training.advance()
    return training


def _round(training: Training) -> Time:
    training.clock.start()
    for _ in range(STEPS):
        training.advance()
    training.clock.stop()
    return Time(*training.clock.lap())


def middle(rounds: Sequence[Time]) -> Time:
    """The medians."""
    return Time(median(time.step for time in rounds), median(time.optimizer for time in rounds))


def read(study: Study, directory: Path, results: Sequence[Result]) -> dict[str, Time]:
    """The times that were measured, of arms as they are now; {} if none were."""
    path = directory / NAME
    declared = fingerprint.equivalents(directory)
    try:
        record: Any = json.loads(path.read_text())
        if record["format"] != FORMAT:
            raise LabError(f"{path} has another format: measure again with --times")
        found = {
            arm.label: Time(float(own["step"]), float(own["optimizer"]))
            for arm in study.arms
            if (own := record["arms"].get(arm.label)) is not None
            and own["arm"] == fingerprint.of_arm(study, arm)
            and len(fingerprint.sources(study, arm, [own], declared)) < 2
        }
        made = {part: str(record["fingerprint"][part]) for part in fingerprint.PARTS}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise LabError(f"cannot read {path}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LabError(f"{path} is damaged: remove it, and measure again with --times") from None
    part = fingerprint.first_difference(results, made, directory)
    if part is not None:
        raise LabError(
            f"{path} and the runs there cannot go together, their {part} differ: measure again "
            "with --times"
        )
    return found
