"""Language: a GPT predicts the next token of every position."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from mars.lab import hardware
from mars.lab.config import Data, Run
from mars.lab.data import Batches, Tokens, Validation, check_vocabulary, open_tokens
from mars.lab.errors import LabError
from mars.lab.models import GPT, flops_per_token
from mars.lab.tasks.base import Batch, Source, Task


class Language(Task):
    """Rows are windows of a stream of tokens."""

    unit = "tokens"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.config = run.gpt
        self.per_row = self.config.block_size

    @property
    def batch_text(self) -> str:
        return f"{self.run.loop.batch_size} × {self.config.block_size}"

    def model(self, seed: int | None) -> nn.Module:
        return GPT(self.config, seed=seed, fp8_head=self.run.loop.fp8_head)

    @cached_property
    def flops(self) -> int:
        return flops_per_token(self.config)

    def miniature(self) -> nn.Module:
        width = 8 * self.config.n_head
        return GPT(
            dataclasses.replace(self.config, n_layer=1, n_embd=width, block_size=8, vocab_size=64)
        )

    def kept_bytes(self, dtype: torch.dtype) -> float:
        return self.per_row * hardware.activation_bytes(self.run, dtype)

    def most_rows(self, device: torch.device, room: float) -> int:
        if device.type != "cuda":
            return hardware.CPU_TOKENS // self.per_row
        dtype = hardware.choose_precision(self.run.loop.precision, device)
        kept = hardware.activation_bytes(self.run, dtype)
        return min(hardware.GPU_TOKENS, int(room / kept)) // self.per_row

    def open(self) -> Language:
        loop = self.run.loop
        train, valid = open_data(self.run)
        self.batches = Batches(train, self.per_row, loop.batch_size, loop.seed)
        self.windows = Validation(valid, self.per_row, loop.eval_sequences)
        self.epoch_rows, self.held_out = self.batches.windows, len(self.windows)
        self.train, self.valid = (Source(t.source, len(t), t.sha256) for t in (train, valid))
        return self

    def rows(self, step: int, first: int, last: int) -> Batch:
        inputs, targets = self.batches.rows(step, first, last)
        return self.send(inputs), self.send(targets)

    def held_out_rows(self, first: int, last: int) -> Batch:
        inputs, targets = self.windows.rows(first, last)
        return self.send(inputs), self.send(targets)


def same_source(a: str, b: str) -> bool:
    """Whether two names are of the same data, however their paths are written."""
    return a == b or (Path(a).expanduser().exists() and _resolved(a) == _resolved(b))


def _resolved(name: str) -> Path:
    return Path(name).expanduser().resolve()


def open_data(run: Run) -> tuple[Tokens, Tokens]:
    """Tokens to train on and to validate on; both fit the model."""
    data = run.data
    assert isinstance(data, Data)
    if data.source.startswith("data/") and not Path(data.source).exists():
        name = Path(data.source).name
        source = name if name in ("openwebtext", "fineweb-edu") else "YOUR.txt"
        raise LabError(
            f"{data.source} is not there: make it with `mars data {source} --out {data.source}`, "
            "or give --data.source (mars study: --data)"
        )
    apart = data.valid is not None and not same_source(data.valid, data.source)
    train = open_tokens(data.source, "train", data.tokenizer, whole=apart)
    valid = open_tokens(data.valid or data.source, "valid", data.tokenizer, whole=apart)
    for tokens in (train, valid):
        check_vocabulary(tokens, run.gpt.vocab_size)
    return train, valid
