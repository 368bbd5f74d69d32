"""The log-likelihood of a continuation after a context, for many pairs at once.

Text becomes tokens as in lm-eval: context and continuation are encoded together, and spaces at the
end of the context belong to the continuation. What is too long loses its beginning. A continuation
longer than the model's context, which lm-eval refuses, is scored in windows, each token once.

Rows are sorted by length, padded behind (a causal model does not see it) and batched by tokens.
Logits are computed only where there is something to score, some rows at a time, in float32.
Requests that make the same row share it: the letters A to D after an MMLU question are one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from mars.lab import hardware
from mars.lab.data import Tokenizer
from mars.lab.errors import LabError
from mars.lab.models import GPT

Tokens = list[int]
Watch = Callable[[int, int], object]
"""Sees how many tokens are done, and of how many."""

# Tokens of a batch unless said otherwise, and bytes of logits that exist at a time.
GPU_TOKENS, CPU_TOKENS = 1 << 16, 1 << 12
GPU_BYTES, CPU_BYTES = 1 << 30, 1 << 25


class Score(NamedTuple):
    """Of one continuation."""

    loglikelihood: float
    greedy: bool
    """Whether each of its tokens is the likeliest one."""


@dataclass
class _Row:
    """One sequence to run, and what is to be scored at its end: (request, tokens)."""

    tokens: Tokens
    targets: list[tuple[int, Tokens]] = field(default_factory=list)


class Scorer:
    """Scores with one model.

    Args:
        model: in evaluation mode, on its device.
        words: its tokenizer.
        batch_tokens: tokens in a forward pass, padding included.
        precision: of the forward pass: auto (bf16 on a GPU that has it), bf16, fp16, fp32.
    """

    def __init__(
        self, model: GPT, words: Tokenizer, *, batch_tokens: int | None = None,
        precision: str = "auto",
    ) -> None:  # fmt: skip
        self.model, self.words = model, words
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        self.batch_tokens = batch_tokens or (GPU_TOKENS if on_gpu else CPU_TOKENS)
        self.dtype = hardware.choose_precision(precision, self.device)
        self.context = model.config.block_size
        # Rows that only pad the embedding are no tokens.
        self.vocabulary = min(words.vocab_size, model.config.vocab_size)
        self.rows_at_once = max(1, (GPU_BYTES if on_gpu else CPU_BYTES) // (4 * self.vocabulary))
        self.asked = self.cut = 0  # requests so far, and those that lost some of their context

    @property
    def prefix(self) -> int:
        """What stands before a text that has no context: the end of another, or a new line."""
        return self.words.eot if self.words.eot is not None else int(self.words.encode("\n")[0])

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Tokens, Tokens]]:
        """Tokens of (context, continuation)."""
        moved = [_with_spaces_moved(*pair) for pair in pairs]
        contexts = {context: i for i, context in enumerate(dict.fromkeys(c for c, _ in moved))}
        texts = [*contexts, *(context + continuation for context, continuation in moved)]
        encoded = self.words.encode_batch(texts)
        found = []
        for (context, continuation), whole in zip(moved, encoded[len(contexts) :], strict=True):
            before = encoded[contexts[context]].tolist() or [self.prefix]
            after = whole.tolist()[len(before) if context else 0 :]
            if not after:
                raise LabError(
                    f"nothing is left to score of {continuation!r}: after {context[-40:]!r} it has "
                    "no token of its own"
                )
            if not context and len(after) > 1 and after[0] == self.prefix:
                before, after = after[:1], after[1:]
            found.append((before, after))
        return found

    def score(
        self, requests: Sequence[tuple[Tokens, Tokens]], watch: Watch = lambda done, of: None
    ) -> list[Score]:
        """The scores of (context, continuation), in their order."""
        rows = self._rows(requests)
        self.asked += len(requests)
        sums = np.zeros(len(requests))
        greedy = np.ones(len(requests), dtype=bool)
        total = sum(len(row.tokens) for row in rows)
        done = 0
        watch(done, total)
        for batch in self._batches(rows):
            for request, logs, best in self._run(batch):
                sums[request] += logs.sum()
                greedy[request] &= bool(best.all())
            done += sum(len(row.tokens) for row in batch)
            watch(done, total)
        if not np.isfinite(sums).all():
            raise LabError("the model's output is not finite: its training diverged")
        return [Score(float(a), bool(b)) for a, b in zip(sums, greedy, strict=True)]

    def text(self, pairs: Sequence[tuple[str, str]], watch: Watch) -> list[Score]:
        """The scores of (context, continuation) as text."""
        return self.score(self.encode(pairs), watch)

    def _rows(self, requests: Sequence[tuple[Tokens, Tokens]]) -> list[_Row]:
        """Every sequence once, the longest first: what does not fit in memory fails at once."""
        known = self.model.config.vocab_size
        if known < self.words.vocab_size:  # else it knows whatever the tokenizer makes
            most = max(max([*context, *continuation]) for context, continuation in requests)
            if most >= known:
                raise LabError(f"the text has token {most}: the model knows {known}")
        rows: dict[tuple[int, ...], _Row] = {}
        for i, (context, continuation) in enumerate(requests):
            self.cut += len(context) + len(continuation) > self.context + 1
            for tokens, targets in windows(context, continuation, self.context):
                row = rows.setdefault(tuple(tokens), _Row(tokens))
                row.targets.append((i, targets))
        return sorted(rows.values(), key=lambda row: -len(row.tokens))

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        first = 0
        while first < len(rows):
            count = max(1, self.batch_tokens // len(rows[first].tokens))
            yield rows[first : first + count]
            first += count

    def _run(
        self, batch: list[_Row]
    ) -> Iterator[tuple[int, npt.NDArray[np.float64], npt.NDArray[np.bool_]]]:
        """(request, log-probabilities of its tokens, whether each is the likeliest)."""
        length = len(batch[0].tokens)
        padded = np.zeros((len(batch), length), dtype=np.int64)
        places: list[npt.NDArray[np.int64]] = []
        wanted: list[Tokens] = []
        for r, row in enumerate(batch):
            end = len(row.tokens)
            padded[r, :end] = row.tokens
            for _, targets in row.targets:
                places.append(np.arange(end - len(targets), end) + r * length)
                wanted.append(targets)
        try:
            logs, best = self._log_probabilities(
                torch.from_numpy(padded).to(self.device),
                torch.from_numpy(np.concatenate(places)).to(self.device),
                torch.from_numpy(np.concatenate(wanted)).to(self.device),
            )
        except torch.cuda.OutOfMemoryError as error:
            raise LabError(
                f"the GPU's memory is full: lower --batch-tokens ({self.batch_tokens})"
            ) from error
        ends = np.cumsum([len(targets) for targets in wanted])[:-1]
        requests = [request for row in batch for request, _ in row.targets]
        yield from zip(requests, np.split(logs, ends), np.split(best, ends), strict=True)

    @torch.no_grad()
    def _log_probabilities(
        self, tokens_BT: Tensor, places_N: Tensor, wanted_N: Tensor
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        low = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype) if low else nullcontext():
            hidden_ND = self.model.hidden(tokens_BT).flatten(0, 1)[places_N].float()
        head_VD = self.model.transformer.wte.weight[: self.vocabulary].float()
        logs_N = torch.empty(len(places_N), device=self.device)
        best_N = torch.empty(len(places_N), dtype=torch.bool, device=self.device)
        for first in range(0, len(places_N), self.rows_at_once):
            part = slice(first, first + self.rows_at_once)
            logits_CV, wanted_C = F.linear(hidden_ND[part], head_VD), wanted_N[part]
            chosen_C = logits_CV.gather(1, wanted_C[:, None])[:, 0]
            logs_N[part] = chosen_C - logits_CV.logsumexp(1)
            best_N[part] = logits_CV.argmax(1) == wanted_C
        return logs_N.double().cpu().numpy(), best_N.cpu().numpy()


def windows(context: Tokens, continuation: Tokens, length: int) -> Iterator[tuple[Tokens, Tokens]]:
    """What is run and what of it is scored: (tokens, their last successors), each token once.

    >>> list(windows([1, 2, 3], [4, 5], 8))
    [([1, 2, 3, 4], [4, 5])]
    >>> list(windows([1, 2, 3], [4, 5], 3))
    [([2, 3, 4], [4, 5])]
    >>> list(windows([0], [1, 2, 3, 4, 5, 6, 7], 3))
    [([0, 1, 2], [1, 2, 3]), ([3, 4, 5], [4, 5, 6]), ([4, 5, 6], [7])]
    """
    whole, offset = context + continuation, len(context)
    for first in range(0, len(continuation), length):
        targets = continuation[first : first + length]
        end = offset + first + len(targets)
        yield whole[max(0, end - 1 - length) : end - 1], targets


def _with_spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation
