"""A folder that ``save_pretrained`` of transformers wrote: read without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mars.lab.config import Model
from mars.lab.data import Tokenizer, tokenizer
from mars.lab.errors import LabError
from mars.lab.huggingface import weights
from mars.lab.huggingface.tokenizer_files import END, vocabulary
from mars.lab.models import GPT
from mars.lab.rundir import reason
from mars.lab.safefile import SafeFile, SafeFileError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def is_folder(path: Path) -> bool:
    """Whether it is a model of Hugging Face's kind (a run has a config.json, too)."""
    try:
        return "model_type" in json.loads((path / CONFIG).read_text())
    except (OSError, ValueError, TypeError):
        return False


class Folder:
    """What a folder holds; every mistake in it is one line that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = self._find()

    @cached_property
    def model(self) -> Model:
        """The configuration, with the biases that the weights have."""
        theirs = weights.from_config(_read(self.path / CONFIG), str(self.path / CONFIG))
        biased = any(
            name.endswith(".bias") and bool(value.any())
            for name, value in self._tensors()
            if weights.plain_name(name) is not None
        )
        return theirs if biased else replace(theirs, bias=False)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Ours, if it is that of the folder."""
        count = self.model.vocab_size
        words = tokenizer("bytes" if count == 256 else "gpt2")
        if not words.vocab_size <= count < words.vocab_size + 1024:
            raise LabError(
                f"{self.path} has {count} tokens: only the tokenizers of GPT-2 (50257) and of "
                "bytes (256) are known here"
            )
        own = vocabulary(words.name)
        for name in ("vocab.json", "tokenizer.json"):
            if (self.path / name).is_file():
                stored = _read(self.path / name)
                theirs = stored if name == "vocab.json" else stored.get("model", {}).get("vocab")
                if not isinstance(theirs, dict) or not _same(theirs, own):
                    raise LabError(
                        f"{self.path / name} is not the vocabulary of {words.name}, the only one "
                        "known here"
                    )
        return words

    def load(self) -> GPT:
        """The model, on the CPU."""
        model = GPT(self.model, seed=None)
        self.fill(model)
        return model

    def fill(self, model: nn.Module) -> None:
        """Put the weights into a model that was made for them."""
        weights.fill(model, self._tensors(), str(self.path))

    def _find(self) -> list[Path]:
        if (self.path / WEIGHTS).is_file():
            return [self.path / WEIGHTS]
        if (self.path / INDEX).is_file():
            named = _read(self.path / INDEX).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(f, str) for f in named.values()):
                raise LabError(f"{self.path / INDEX} has no weight_map of names and files")
            return [self.path / Path(name).name for name in sorted(set(named.values()))]
        if list(self.path.glob("pytorch_model*.bin")):
            raise LabError(
                f"{self.path} has its weights in a pickle (pytorch_model.bin), which could run "
                "code and is not read: save it with safetensors, save_pretrained(folder)"
            )
        raise LabError(f"{self.path} has no {WEIGHTS}")

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for path in self._files:
            try:
                file = SafeFile(path)
            except SafeFileError as error:
                raise LabError(f"{path} is not a safetensors file: {error}") from None
            except OSError as error:
                raise LabError(f"{path} cannot be read: {reason(error)}") from error
            for name in file.names:
                yield name, file.tensor(name)


def _same(theirs: dict[str, Any], own: dict[str, int]) -> bool:
    """Whether all tokens of ours have the same numbers there; the end of text may be elsewhere."""
    return all(theirs.get(token, i if token == END else None) == i for token, i in own.items())


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise LabError(f"{path} does not hold a JSON object")
    return values
