"""Models with random weights that have opinions: large enough weights for unequal scores."""

from __future__ import annotations

from typing import Any

import torch

from mars.lab.config import Data, Model, Run
from mars.lab.data import tokenizer
from mars.lab.loading import Loaded
from mars.lab.models import GPT


def random_gpt(words: str = "gpt2", **fields: Any) -> Loaded:
    """A small GPT whose embedding is padded, as loaded from a run."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 96, **fields}
    sizes.setdefault("vocab_size", tokenizer(words).vocab_size + 47)
    config = Model(**sizes)
    model = GPT(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator)
    run = Run(recipe="random", model=config, data=Data(tokenizer=words))
    return Loaded("random", model, tokenizer(words), run, None)
