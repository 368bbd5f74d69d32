"""Trajectories of the variance experiment that are done, kept in a file until all of them are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mars.lab import hardware
from mars.lab.errors import LabError
from mars.lab.rundir import reason, write_json
from mars.lab.study.variance import Experiment, Look, Which, keys

NAME = "unfinished.json"


class Kept:
    """The file: whole or absent, and used by nobody who would have computed other numbers."""

    def __init__(self, directory: Path, e: Experiment) -> None:
        self.path, self.e = directory / NAME, e
        self.seconds = 0.0  # that earlier processes took for what is in it
        experiment = {k: v for k, v in dataclasses.asdict(e).items() if k != "seeds"}
        about = {
            "experiment": experiment,
            "code": hardware.code_hash(),
            "torch": torch.__version__,
            "device": hardware.hardware(torch.device("cpu"))["name"],
        }
        self.about = json.loads(json.dumps(about))  # as it is read again

    def read(self) -> dict[Which, list[Look]] | None:
        """What is done; nothing without a file, None if it is of other code or another machine."""
        try:
            found = json.loads(self.path.read_text())
            if found["about"] != self.about:
                return None
            self.seconds = found["seconds"]
            return {
                (t["lr"], t["batch"], t["seed"]): [self._look(look) for look in t["looks"]]
                for t in found["trajectories"]
            }
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise LabError(f"cannot read {self.path}: {reason(error)}") from error
        except (ValueError, KeyError, TypeError):
            raise LabError(f"{self.path} is damaged: remove it to start again") from None

    def write(self, looks: Mapping[Which, list[Look]], seconds: float) -> None:
        """Keep what is done, and how long this process has taken. Floats come back to the bit."""
        done = [
            {"lr": lr, "batch": batch, "seed": seed, "looks": [_plain(look) for look in own]}
            for (lr, batch, seed), own in looks.items()
        ]
        found = {"about": self.about, "seconds": self.seconds + seconds, "trajectories": done}
        write_json(self.path, found, indent=None)

    def remove(self) -> None:
        """All is done, and written elsewhere."""
        self.path.unlink(missing_ok=True)

    def _look(self, found: dict[str, Any]) -> Look:
        named = {
            what: dict(zip(keys(self.e), found[what], strict=True)) for what in ("errors", "ratios")
        }
        return Look(**{**found, **named})


def _plain(look: Look) -> dict[str, Any]:
    """Without the names of the averages, which are those of every look."""
    values = {what: list(getattr(look, what).values()) for what in ("errors", "ratios")}
    return {**vars(look), **values}
