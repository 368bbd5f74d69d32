"""MARS in the Hugging Face Trainer: the three ways of passing an optimizer.

    python examples/hf_trainer.py --way class --out runs/hf
    python examples/hf_trainer.py --way class --out runs/hf --resume runs/hf/checkpoint-20

Both end with the same digest: parameters and optimizer state are equal to the bit. All three ways
train the same model to the same bits, too. What goes wrong easily: docs/trainers.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers import get_cosine_schedule_with_warmup as cosine

import mars
from shared import BATCH, CONTEXT, arguments, digest, rows


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices by MARS-Shampoo; the rest by AdamW at lr_1d, not decayed."""
    return mars.param_groups(
        model, mars_type="mars-shampoo", embeddings="no-decay", vectors="no-decay"
    )


class MarsTrainer(Trainer):
    """The way that also works where Trainer wraps the model first (FSDP)."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = groups_of(self.model if model is None else model)
            rate, decay = self.args.learning_rate, self.args.weight_decay
            self.optimizer = mars.MARS(groups, lr=rate, lr_1d=rate / 2, weight_decay=decay)
        return self.optimizer


def trainer_of(way: str, model: nn.Module, args: TrainingArguments, data: Any) -> Trainer:
    """The same training, told to Trainer in one of three ways."""
    if way == "optimizers":  # an instance: Trainer's learning_rate and weight_decay are not read
        optimizer = mars.MARS(groups_of(model), lr=0.032, lr_1d=0.016, weight_decay=0.1)
        scheduler = cosine(optimizer, args.get_warmup_steps(args.max_steps), args.max_steps)
        return Trainer(model, args, train_dataset=data, optimizers=(optimizer, scheduler))
    if way == "class":  # "params" replaces Trainer's own two groups, which would hide weight_decay
        options = {"params": groups_of(model), "lr": 0.032, "lr_1d": 0.016, "weight_decay": 0.1}
        return Trainer(
            model, args, train_dataset=data, optimizer_cls_and_kwargs=(mars.MARS, options)
        )
    return MarsTrainer(model, args, train_dataset=data)


def main(argv: list[str] | None = None) -> str:
    """Train; returns the digest of parameters and optimizer state at the end."""
    parser = arguments(__doc__)
    parser.add_argument("--way", choices=("optimizers", "class", "override"), default="class")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    size = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, n_positions=CONTEXT, vocab_size=256, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(size)
    data = [{"input_ids": row[:-1], "labels": row[:-1]} for row in rows()[: args.steps * BATCH]]
    settings = TrainingArguments(
        output_dir=str(args.out), max_steps=args.steps, save_steps=args.save_every,
        per_device_train_batch_size=BATCH, learning_rate=0.032, weight_decay=0.1,
        lr_scheduler_type="cosine", warmup_steps=max(1, args.steps // 10),
        max_grad_norm=1.0,  # Trainer's default; do not give MARS its own as well
        logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = trainer_of(args.way, model, settings, data)
    trainer.train(resume_from_checkpoint=str(args.resume) if args.resume else None)
    print(f"saved {args.out}/checkpoint-{args.steps}")
    print(f"digest {(found := digest(model, trainer.optimizer))}")
    return found


if __name__ == "__main__":
    main()
