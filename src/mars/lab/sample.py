"""`mars sample`: text from a checkpoint, token by token."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mars.lab import hardware
from mars.lab.data import Tokenizer
from mars.lab.errors import LabError
from mars.lab.loading import load
from mars.lab.models import GPT

# What a terminal would obey rather than show.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")


@dataclass(frozen=True, kw_only=True)
class SampleArgs:
    """Continue a text with a trained model."""

    run: Path
    """A run directory, a checkpoint in it, or a Hugging Face GPT-2 folder."""
    prompt: str | None = None
    """The text to continue; by default a new document."""
    tokens: int = 200
    """Tokens to make at most."""
    temperature: float = 0.8
    """Below 1 is more careful, above 1 wilder; 0 takes the likeliest token each time."""
    top_k: int = 50
    """Choose among this many likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    seed: int = 0
    """The same seed makes the same text."""
    samples: int = 1
    """Texts to make."""
    checkpoint: str | None = None
    """best, last, a step or a path; by default the best, or the newest where none is known."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1"""


def sample_command(args: SampleArgs) -> None:
    """Print what the model makes of the prompt, as it makes it."""
    _check(args)
    device = hardware.choose_device(args.device, option="--device")
    loaded = load(args.run, args.checkpoint, device)
    model, words = loaded.model, loaded.words
    prompt = start(words, args.prompt)
    if max(prompt) >= model.config.vocab_size:
        raise LabError(
            f"the prompt has token {max(prompt)}: the model knows {model.config.vocab_size}"
        )
    for number in range(args.samples):
        if number:
            sys.stdout.write("\n---\n")
        _show(args.prompt or "")
        for text in decode(words, generate(model, prompt, words, args, args.seed + number)):
            _show(text)
    sys.stdout.write("\n")


def _check(args: SampleArgs) -> None:
    wrong = {
        "tokens must be 1 or more": args.tokens < 1,
        "temperature must be 0 or above": not 0 <= args.temperature < math.inf,
        "top-k must be 0 (all) or above": args.top_k < 0,
        "top-p must be above 0 and at most 1": not 0 < args.top_p <= 1,
        "samples must be 1 or more": args.samples < 1,
        "seed must be 0 or above": not 0 <= args.seed < 2**62,
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            value = getattr(args, text.split()[0].replace("-", "_"))
            raise LabError(f"--{text}, not {value}")


def _show(text: str) -> None:
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def start(words: Tokenizer, prompt: str | None) -> list[int]:
    """The tokens to continue: those of the prompt, or what comes before any document."""
    if prompt:
        return [int(t) for t in words.encode(prompt)]
    return [words.eot] if words.eot is not None else start(words, "\n")


@torch.no_grad()
def generate(
    model: GPT, prompt: list[int], words: Tokenizer, args: SampleArgs, seed: int
) -> Iterator[int]:
    """Tokens, until there are enough or the document ends; never one that the tokenizer lacks."""
    device = next(model.parameters()).device
    dtype = hardware.choose_precision("auto", device)
    low = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: one text on every device
    tokens = list(prompt)
    for _ in range(args.tokens):
        context = tokens[-model.config.block_size :]
        with low:
            logits = model(torch.tensor([context], device=device), last_only=True)
        logits = logits[0, -1, : words.vocab_size].float().cpu()
        token = choose(logits, args.temperature, args.top_k, args.top_p, generator)
        if token == words.eot:
            return
        tokens.append(token)
        yield token


def choose(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """One token.

    >>> choose(torch.tensor([0.0, 2.0, 1.0]), 0.0, 0, 1.0, torch.Generator())
    1
    """
    if not logits.isfinite().all():
        raise LabError("the model's output is not finite: its training diverged")
    if temperature == 0:
        return int(logits.argmax())
    values, tokens = logits.sort(descending=True, stable=True)
    if top_k:
        values, tokens = values[:top_k], tokens[:top_k]
    # The largest is subtracted first, so that a tiny temperature does not overflow.
    shares = ((values - values[0]) / temperature).softmax(0)
    before = shares.cumsum(0) - shares
    shares = shares.where(before < top_p, torch.zeros(()))
    return int(tokens[torch.multinomial(shares, 1, generator=generator)])


def decode(words: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Text as it comes; a character is held back until all of its bytes are there.

    >>> from mars.lab.data import tokenizer
    >>> list(decode(tokenizer("bytes"), iter("né".encode())))
    ['n', 'é']
    """
    pending: list[int] = []
    shown = 0  # characters of the pending tokens
    text = ""
    for token in tokens:
        pending.append(token)
        text = words.decode(pending)
        # Only the last character can change with the next token, and only if it is incomplete.
        stable = text.removesuffix("\ufffd")
        if len(stable) > shown:
            yield stable[shown:]
        shown = len(stable)
        if stable == text:
            pending, shown, text = [], 0, ""
    if text[shown:]:
        yield text[shown:]
