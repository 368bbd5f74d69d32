"""What the loop asks of a task: a model, rows by number, what is measured, what is counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mars.lab import hardware
from mars.lab.config import Run
from mars.lab.errors import LabError

Batch = tuple[Tensor, Tensor]  # inputs and targets, on the device


@dataclass(frozen=True)
class Source:
    """What the log says of a part of the data."""

    source: str
    count: int  # tokens, images
    sha256: str


class Task(ABC):
    """A kind of training. Made from a configuration alone; `open` brings the data.

    A *row* is what a batch has so many of: a sequence, an image. Rows are read by their number in a
    step's batch and are a pure function of (seed, step, number), so that neither micro-batches nor
    processes nor resuming can change them.
    """

    unit: ClassVar[str]  # what progress is counted in: tokens, images
    measures: ClassVar[tuple[str, ...]] = ("loss",)  # of a validation, loss first

    def __init__(self, run: Run) -> None:
        self.run = run
        self.device, self.dtype = torch.device("cpu"), torch.float32

    # From the configuration alone.

    per_row: int  # units in a row

    @property
    def per_step(self) -> int:
        """Units of an optimizer step."""
        return self.run.loop.batch_size * self.per_row

    @property
    def batch_text(self) -> str:
        """The batch in words."""
        return str(self.run.loop.batch_size)

    @abstractmethod
    def model(self, seed: int | None) -> nn.Module:
        """The model with the initial weights of a seed; None: without values, for its shapes."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """To train on one unit, forward and backward."""

    @property
    def parameters(self) -> int:
        """Numbers in the model, which is not made for that."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.model(None).parameters())

    @abstractmethod
    def miniature(self) -> nn.Module:
        """A model with the same kinds of tensors, of no size to speak of."""

    @abstractmethod
    def kept_bytes(self, dtype: torch.dtype) -> float:
        """What the forward pass keeps of a row, roughly."""

    @abstractmethod
    def most_rows(self, device: torch.device, room: float) -> int:
        """Rows in a forward pass, unless said otherwise; ``room`` is memory for activations."""

    def micro_batch(self, device: torch.device, ranks: int = 1) -> int:
        """Rows in one forward pass: a divisor of a process's batch that the memory holds well."""
        loop = self.run.loop
        own = loop.batch_size // ranks
        if loop.micro_batch_size:
            if own % loop.micro_batch_size:
                raise LabError(
                    f"loop.micro_batch_size ({loop.micro_batch_size}) must divide the {own} rows "
                    f"that each of {ranks} processes has of loop.batch_size ({loop.batch_size})"
                )
            return loop.micro_batch_size
        limit = max(1, self.most_rows(device, hardware.activation_room(device)))
        return max(n for n in range(1, limit + 1) if own % n == 0)

    # With the data.

    train: Source
    valid: Source
    epoch_rows: int  # rows in an epoch
    held_out: int  # rows of a validation

    @abstractmethod
    def open(self) -> Task:
        """Bring the data, checked against the model; returns the task itself."""

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Give rows on this device; ``dtype`` is that of the forward pass."""
        self.device, self.dtype = device, dtype

    def send(self, t: Tensor) -> Tensor:
        """A small tensor of the host's, to the device, without waiting."""
        if self.device.type == "cuda":
            return t.pin_memory().to(self.device, non_blocking=True)
        return t

    @abstractmethod
    def rows(self, step: int, first: int, last: int) -> Batch:
        """The rows first … last of a step's batch."""

    @abstractmethod
    def held_out_rows(self, first: int, last: int) -> Batch:
        """The rows first … last of the validation."""

    def validation_rows(self, micro: int) -> int:
        """Rows in one forward pass of a validation."""
        return self._even(micro)

    def _even(self, most: int) -> int:
        """Parts of one size, if there is a good one: every size is compiled for itself."""
        even = max(n for n in range(1, most + 1) if self.held_out % n == 0)
        return even if 4 * even > most else most

    def measure(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        """The means of ``measures`` over a batch, of one or more rows."""
        return model(*batch)

    def progress(self, step: int) -> dict[str, float]:
        """How far a run is after so many steps."""
        return {self.unit: step * self.per_step}

    @property
    def header(self) -> dict[str, object]:
        """What the log's header says of the task."""
        return {
            "unit": self.unit,
            f"{self.unit}_per_step": self.per_step,
            f"flops_per_{self.unit.removesuffix('s')}": self.flops,
            "data": {
                name: {"source": s.source, self.unit: s.count, "sha256": s.sha256}
                for name, s in (("train", self.train), ("valid", self.valid))
            },
        }
