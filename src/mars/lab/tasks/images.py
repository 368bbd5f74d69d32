"""Images: a network tells which class each belongs to.

On a GPU all images lie in its memory, as bytes; batches are gathered, cropped, mirrored and
normalised there, those of many steps at once. The host draws which images, and by how much.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mars.lab.config import ImageData, ImageModel, Run
from mars.lab.data.batches import shuffled
from mars.lab.errors import LabError
from mars.lab.images import Images, draws, open_images, transform
from mars.lab.models.vision import ARCHITECTURES, Classifier, flops_per_image
from mars.lab.tasks.base import Batch, Source, Task

VALIDATED = 2000  # images in a forward pass of a validation, at most
ON_CPU = 500  # there: a pass is not interrupted, and more are no faster
AHEAD = 1 << 24  # numbers in the batches that a GPU makes at once: 42 of CIFAR's


class Vision(Task):
    """Rows are images. An epoch is a random order of all; batches go on from one to the next."""

    unit = "images"
    measures = ("loss", "accuracy")
    per_row = 1

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        assert isinstance(run.model, ImageModel)
        assert isinstance(run.data, ImageData)
        self.config, self.data = run.model, run.data
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self._made: dict[tuple[int, int], dict[int, Batch]] = {}  # by rows, then by step

    def model(self, seed: int | None) -> Classifier:
        """Batches are channels-last, which decides how convolutions are computed. Weights are not:

        they are cast at every pass anyhow, and optimizers read them as they lie, fused MARS too.
        """
        return ARCHITECTURES[self.config.arch](self.config, seed=seed)

    @cached_property
    def _shadow(self) -> Classifier:
        """The model without memory."""
        with torch.device("meta"):
            return self.model(None).eval()

    def miniature(self) -> nn.Module:
        with torch.device("meta"):
            model = self.model(None)
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                small = torch.zeros([min(8, size) for size in p.shape])
                setattr(module, name, nn.Parameter(small))
        return model

    @cached_property
    def flops(self) -> int:
        return flops_per_image(self._shadow, self.config.channels, self.config.size)

    def kept_bytes(self, dtype: torch.dtype) -> float:
        """The outputs of all layers: a norm keeps that of its convolution, which keeps its own."""
        numbers = 0

        def count(module: nn.Module, _: Any, out: Tensor) -> None:
            nonlocal numbers
            numbers += out.numel()

        layers = [m for m in self._shadow.modules() if not list(m.children())]
        hooks = [layer.register_forward_hook(count) for layer in layers]
        side = self.config.size
        self._shadow(torch.empty(1, self.config.channels, side, side, device="meta"))
        for hook in hooks:
            hook.remove()
        return float(numbers * torch.empty((), dtype=dtype).element_size())

    def most_rows(self, device: torch.device, room: float) -> int:
        """All of a batch: BatchNorm's statistics are those of a forward pass."""
        return self.run.loop.batch_size

    def open(self) -> Vision:
        train = open_images(self.data.source, "train")
        valid = open_images(self.data.valid or self.data.source, "valid")
        for images in (train, valid):
            self._check(images)
        for held, seen in zip(valid.classes, train.classes, strict=True):  # labels are numbers
            if held != seen:
                raise LabError(
                    f"{valid.source} has other classes than {train.source}, or in another order: "
                    f"{held!r} where that has {seen!r}"
                )
        self.epoch_rows, self.held_out = len(train.labels), len(valid.labels)
        self.train, self.valid = (
            Source(images.source, len(images.labels), images.sha256) for images in (train, valid)
        )
        self._parts = {"train": train, "valid": valid}
        self._mean, self._std = torch.tensor(train.mean), torch.tensor(train.std)
        self._place()
        return self

    def _check(self, images: Images) -> None:
        """Refuse images that the model was not made for."""
        c = self.config
        channels, height, width = images.pixels.shape[1:]
        found = {"classes": len(images.classes), "channels": channels, "size": height}
        if height != width:
            raise LabError(f"{images.source} has images of {height} × {width}: they must be square")
        wrong = {name: value for name, value in found.items() if value != getattr(c, name)}
        if wrong:
            has = ", ".join(f"model.{name} is {getattr(c, name)}" for name in wrong)
            options = " ".join(f"--model.{name} {value}" for name, value in wrong.items())
            raise LabError(
                f"{images.source} has {channels} × {height} × {width} images of "
                f"{len(images.classes)} classes, but {has}: give {options}"
            )

    def _place(self) -> None:
        """All of the data to the device; on a CPU they stay where they are."""
        self._mean, self._std = self._mean.to(self.device), self._std.to(self.device)
        self._pixels = {k: v.pixels.to(self.device) for k, v in self._parts.items()}
        self._labels = {k: v.labels.to(self.device) for k, v in self._parts.items()}

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        super().to(device, dtype)
        self._made.clear()
        self._place()

    def rows(self, step: int, first: int, last: int) -> Batch:
        if step not in self._made.get((first, last), {}):
            steps = range(step, min(step + self.ahead(), max(step + 1, self.run.loop.steps)))
            self._made[first, last] = self._make(steps, first, last)
        return self._made[first, last][step]

    def ahead(self) -> int:
        """Steps whose batches are made at once.

        The 20 kernels that make a batch of CIFAR take the host longer to start than the GPU to
        run; those of many steps are as few. A CPU has nothing to gain.
        """
        if self.device.type == "cpu":
            return 1
        numbers = self.run.loop.batch_size * self.config.channels * self.config.size**2
        return max(1, AHEAD // numbers)

    def _make(self, steps: range, first: int, last: int) -> dict[int, Batch]:
        """The rows first … last of each of these steps' batches."""
        loop, data = self.run.loop, self.data
        starts = [step * loop.batch_size for step in steps]
        numbers = np.concatenate([self.numbers(at + first, at + last) for at in starts])
        images = self.send(torch.from_numpy(numbers))
        how = None
        if data.pad or data.flip or data.cutout:
            size = self.config.size if data.cutout else 0
            rows = (first, last, data.pad, data.flip, size)
            how = self.send(torch.cat([draws(loop.seed, step, *rows) for step in steps]))
        pixels, labels = self._pixels["train"][images], self._labels["train"][images]
        x = transform(pixels, how, data.pad, self._mean, self._std, self.dtype, data.cutout)
        parts = zip(x.split(last - first), labels.split(last - first), strict=True)
        return dict(zip(steps, parts, strict=True))

    def numbers(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Which images the rows first … last are, counted from the start of the run."""
        epochs, places = np.divmod(np.arange(first, last), self.epoch_rows)
        found = np.empty(last - first, np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            found[epochs == epoch] = self._order(epoch)[places[epochs == epoch]]
        return found

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The last two are kept, for batches across the border."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = shuffled(self.run.loop.seed, epoch, self.epoch_rows)
        return self._orders[epoch]

    def held_out_rows(self, first: int, last: int) -> Batch:
        pixels = self._pixels["valid"][first:last]
        x = transform(pixels, None, 0, self._mean, self._std, self.dtype)
        return x, self._labels["valid"][first:last]

    def validation_rows(self, micro: int) -> int:
        """More than in training, where they are few."""
        return self._even(ON_CPU if self.device.type == "cpu" else VALIDATED)

    def measure(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        x, labels = batch
        logits = model(x).float()
        right = (logits.argmax(1) == labels).float().mean()
        return torch.stack([F.cross_entropy(logits, labels), right])

    def progress(self, step: int) -> dict[str, float]:
        images = step * self.per_step
        return {"images": images, "epoch": round(images / self.epoch_rows, 6)}

    @property
    def header(self) -> dict[str, object]:
        return {**super().header, "images_per_epoch": self.epoch_rows}
