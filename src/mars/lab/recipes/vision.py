"""Images: CIFAR as published and by a short schedule, tiny ImageNet, and digits for any machine.

Published (arXiv 2411.10438 and MARS/train_CV.py of AGI-Arena/MARS): ResNet-18, 200 epochs of
batches of 128, rates divided by 10 after half and three quarters, crops with 4 pixels of border and
flips, weight decay 5e-4, AdamW with betas (0.9, 0.999), MARS with its defaults (betas (0.95, 0.99),
γ 0.025; what is no matrix by AdamW with lr_1d 3e-3, betas (0.9, 0.95), decay 0.1), in which only
`fc` is a matrix, for their Muon too (the rest by AdamW at a rate of 0.1). Results on CIFAR-10:
AdamW 94.81, Muon 95.08, MARS-AdamW 95.29.

Ours: learning rates (theirs come from a grid that is not published), no gradient clip, decay of
matrices and convolutions alone, and the short schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mars.lab.config import Arch, ImageData, ImageModel, Keep, Loop, Optimizer, Run, Schedule
from mars.lab.recipes.small import tuned, untuned

# Training images, classes and size of a data set.
SETS = {
    "cifar10": (50_000, 10, 32),
    "cifar100": (50_000, 100, 32),
    "tiny-imagenet": (100_000, 200, 64),
}
NETWORKS: tuple[tuple[str, Arch, str], ...] = (
    ("cifar10", "resnet18", "ResNet-18 on CIFAR-10"),
    ("cifar100", "resnet18", "ResNet-18 on CIFAR-100"),
    ("cifar10", "vit", "a small ViT on CIFAR-10"),
    ("tiny-imagenet", "resnet18", "ResNet-18 on tiny ImageNet (64×64, 200 classes)"),
)
BATCH, EPOCHS, SHORT_EPOCHS = 128, 200, 40

FLATTEN = {"matrix_rule": "flatten"}  # convolutions are matrices, too
# Rates where nothing has been measured: where a grid should begin (`mars race RECIPE --rates …`).
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999)},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 5e-3},
    "muon": {"lr": 1e-2, "lr_1d": 1e-3, "betas_1d": (0.9, 0.999)},
    "soap": {"lr": 1e-3, "betas": (0.95, 0.95)},
    "mars-adamw": {"lr": 3e-3, "options": FLATTEN},
    "mars-adamw-2d": {"lr": 3e-3, "lr_1d": 3e-3, "betas_1d": (0.9, 0.95), "weight_decay_1d": 0.1},
    "mars-lion": {"lr": 1e-4, "weight_decay": 5e-3, "options": FLATTEN},
    "mars-shampoo": {"lr": 1e-2, "lr_1d": 1e-3, "options": FLATTEN},
    "mars-m": {"lr": 1e-2, "lr_1d": 1e-3, "options": FLATTEN},
}
# What was best in a short schedule of ResNet-18 on CIFAR-10 with smoothed labels
# (docs/results-images.md); MARS-M by analogy with Muon. Blank squares, three eighths of an image
# wide: not tuned, but without them 30 epochs were enough to fit all training images.
SMOOTHING, CUTOUT = 0.1, 3 / 8
SHORT: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 2e-3, "weight_decay": 0.2},
    "muon": {"lr": 5e-3, "weight_decay": 0.1},
    "mars-adamw": {"lr": 6e-3, "weight_decay": 0.07},
    "mars-m": {"lr": 5e-3, "weight_decay": 0.1},
}


def maker(data: str, arch: Arch, *, short: bool = False) -> Callable[[str], Run]:
    """The recipe of a data set and a network."""

    def make(optimizer: str) -> Run:
        images, classes, size = SETS[data]
        epochs = SHORT_EPOCHS if short else EPOCHS
        every = images // BATCH  # an epoch
        settings = {"weight_decay": 5e-4, **SETTINGS.get(optimizer, {"lr": 1e-3})}
        settings |= SHORT.get(optimizer, {}) if short else {}
        return tuned(Run(
            recipe=f"{data}-{arch}{'-short' if short else ''}",
            model=ImageModel(
                arch=arch, classes=classes, size=size, patch=size // 8,
                label_smoothing=SMOOTHING if short else 0.0,
            ),
            data=ImageData(source=f"data/{data}", cutout=int(CUTOUT * size) if short else 0),
            optimizer=Optimizer(name=optimizer, max_grad_norm=None, **settings),
            schedule=Schedule(shape="onecycle" if short else "multistep", warmup_steps=0),
            loop=Loop(
                epochs=epochs, steps=epochs * images // BATCH, batch_size=BATCH,
                eval_every=every, log_every=every // 10,
            ),
            keep=Keep(save_every=10 * every),
        ))  # fmt: skip

    return make


def digits_cnn(optimizer: str) -> Run:
    """Seconds on one core: for races on any machine."""
    flat = optimizer.startswith("mars-") and optimizer != "mars-adamw-2d"
    more = {"options": FLATTEN} if flat else {}
    return tuned(Run(
        recipe="digits-cnn",
        model=ImageModel(arch="cnn", classes=10, channels=1, size=8),
        data=ImageData(source="digits", pad=1, flip=False),
        optimizer=untuned("digits-cnn", optimizer, **more),
        schedule=Schedule(shape="onecycle", warmup_steps=0),
        loop=Loop(epochs=20, steps=450, batch_size=64, eval_every=45, log_every=9),
        keep=Keep(save_every=180),
    ))  # fmt: skip
