"""Where else the numbers of a log go: TensorBoard, Weights & Biases. Only when asked."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mars.lab.errors import LabError
from mars.lab.rundir import write_atomically

# Shown under their own names: they belong to the run, not to one kind of record.
COMMON = {"lr", "gamma", "tokens", "images", "epoch", "seconds"}


class Sink(Protocol):
    """A place that takes records of a log."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take the numbers of a record."""

    def rewind(self, step: int) -> None:
        """Forget this step and what follows; it happens again."""

    def close(self) -> None:
        """Write out what is held back."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record: train/loss, valid/loss, lr, diagnostics/cosine/matrices, …"""
    kind = record["kind"]
    if kind not in ("train", "valid", "diagnostics"):
        return {}
    found = {
        name if name in COMMON else f"{kind}/{name}": value
        for name, value in record.items()
        if name != "step"
    }
    for group in record.get("groups", ()):
        for name, value in group.items():
            found[f"{kind}/{name}/{group.get('name')}"] = value
    return {name: float(value) for name, value in found.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class TensorBoard:
    """Scalars as TensorBoard's events."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise LabError("TensorBoard is not installed: pip install tensorboard") from error
        self._make = SummaryWriter
        self._directory = directory / "tensorboard"
        self._writer: Any = None
        self._purge: int | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """One event a number."""
        numbers = scalars(record)
        if numbers and self._writer is None:
            self._writer = self._make(self._directory, purge_step=self._purge, flush_secs=10)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, record["step"])

    def rewind(self, step: int) -> None:
        """Events cannot be removed; the next file tells the reader to."""
        self.close()
        self._purge = step

    def close(self) -> None:
        """Write out what is held back."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """Scalars to a project of Weights & Biases; WANDB_MODE=offline keeps them on this machine."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise LabError("Weights & Biases is not installed: pip install wandb") from error
        # The run's identity there, kept here: a resumed run goes on in the same curves.
        identity = directory / "wandb-id"
        if not identity.exists():
            write_atomically(identity, secrets.token_hex(4).encode())
        try:
            self._run: Any = wandb.init(
                project=project, name=directory.name, dir=str(directory), config=dict(config),
                id=identity.read_text(), resume="allow",
            )  # fmt: skip
        except wandb.Error as error:
            raise LabError(f"Weights & Biases: {error} (or set WANDB_MODE=offline)") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """All numbers of a step are one point."""
        numbers = scalars(record)
        if numbers:
            self._run.log(numbers, step=record["step"])

    def rewind(self, step: int) -> None:
        """Nothing: W&B takes no step twice, and a resumed run repeats the same numbers."""

    def close(self) -> None:
        """Send what is held back."""
        self._run.finish()
