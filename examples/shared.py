"""What the examples share: real text as rows of bytes, a small GPT, arguments, a digest."""

from __future__ import annotations

import argparse
import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mars.lab.config import Model
from mars.lab.data.embedded import embedded
from mars.lab.models import GPT

CONTEXT = 64
BATCH = 8


def rows() -> Tensor:
    """Shakespeare cut into rows of CONTEXT + 1 bytes, shuffled once: row i is always the same."""
    text = torch.frombuffer(bytearray(embedded("tinyshakespeare.txt"), "utf-8"), dtype=torch.uint8)
    cut = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    return cut[torch.randperm(len(cut), generator=torch.Generator().manual_seed(0))].long()


def gpt(dropout: float = 0.1) -> GPT:
    """A GPT of bytes; `model(inputs, targets)` is the loss. It has dropout to resume, too."""
    size = Model(
        n_layer=2, n_head=2, n_embd=64, block_size=CONTEXT, vocab_size=256, dropout=dropout
    )
    return GPT(size)


def warmup_cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    """A tenth of the steps up, the rest down to 0. It moves `lr_1d` too: MARS ties it to `lr`."""
    up = max(1, steps // 10)
    return LambdaLR(
        optimizer, lambda t: min((t + 1) / up, 0.5 * (1 + math.cos(math.pi * t / steps)))
    )


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every example."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of the whole run")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--resume", type=_existing, help="checkpoint to resume from; same --steps")
    return parser


def _existing(path: str) -> Path:
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(f"there is no checkpoint at {path}")
    return Path(path)


def digest(model: nn.Module, optimizer: Optimizer) -> str:
    """A hash of all parameters and of all optimizer state: equal if they are equal to the bit."""
    state = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    tensors = [value for _, value in sorted(model.state_dict().items())]
    tensors += [value for own in state for _, value in sorted(own.items())]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]
