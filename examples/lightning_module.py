"""MARS in Lightning: configure_optimizers, bf16-mixed, exact mode, and exact resumption.

    python examples/lightning_module.py --out runs/lightning
    python examples/lightning_module.py --out runs/lightning --resume runs/lightning/step=20.ckpt

Both end with the same digest: parameters and optimizer state are equal to the bit. `--exact` is the
exact mode of MARS: Lightning steps by a closure, which is all that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import mars
from shared import BATCH, arguments, digest, gpt, rows, warmup_cosine


class Loader:
    """Batches in a fixed order that knows where it is: Lightning saves and restores its state."""

    def __init__(self, data: Tensor, steps: int) -> None:
        self.data, self.steps, self.position = data, steps, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < self.steps:
            self.position += 1
            yield self.data[(self.position - 1) * BATCH : self.position * BATCH]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Module(L.LightningModule):
    """A small GPT, trained by MARS."""

    def __init__(self, steps: int, exact: bool) -> None:
        super().__init__()
        self.model, self.steps, self.exact = gpt(), steps, exact

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(batch[:, :-1], batch[:, 1:])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        print(f"step {self.global_step}  loss {outputs['loss'].item():.4f}")

    def configure_optimizers(self) -> Any:
        groups = mars.param_groups(self.model, mars_type="mars-shampoo")
        optimizer = mars.MARS(
            groups, lr=0.032, lr_1d=0.016, weight_decay=0.1, is_approx=not self.exact
        )
        scheduler = warmup_cosine(optimizer, self.steps)
        # "step", or Lightning would move the schedule once an epoch.
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    # Lightning does not keep the random numbers of dropout.
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.set_rng_state(checkpoint["rng"])


def main(argv: list[str] | None = None) -> str:
    """Train; returns the digest of parameters and optimizer state at the end."""
    parser = arguments(__doc__)
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    parser.add_argument("--exact", action="store_true", help="two gradients a step")
    args = parser.parse_args(argv)
    L.seed_everything(0, verbose=False)
    keep = ModelCheckpoint(args.out, "{step}", every_n_train_steps=args.save_every, save_top_k=-1)
    trainer = L.Trainer(
        max_steps=args.steps, max_epochs=-1, precision=args.precision, callbacks=[keep],
        gradient_clip_val=1.0,  # of both gradients in exact mode, so Lightning's and not MARS's
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Module(args.steps, args.exact)
    trainer.fit(module, Loader(rows(), args.steps), ckpt_path=args.resume, weights_only=True)
    print(f"saved {keep.best_model_path or keep.dirpath}")
    print(f"digest {(found := digest(module, trainer.optimizers[0]))}")
    return found


if __name__ == "__main__":
    main()
