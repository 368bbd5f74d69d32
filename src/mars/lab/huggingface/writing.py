"""Write a model as a Hugging Face folder: all of it or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mars.lab import tensorfile
from mars.lab.errors import LabError
from mars.lab.huggingface import tokenizer_files, weights
from mars.lab.huggingface.folder import INDEX, WEIGHTS, is_folder
from mars.lab.loading import Loaded
from mars.lab.rundir import reason, sync_directory, temporary_name, write_atomically

FILE_BYTES = 5_000_000_000  # of weights in one file, as the ecosystem does


def write(
    folder: Path, loaded: Loaded, card: str, *, overwrite: bool = False, limit: int = FILE_BYTES
) -> None:
    """Write config, weights, tokenizer and card; ``folder`` appears when all of it is on disk.

    Args:
        folder: not there, or empty; with ``overwrite`` also a folder of this kind.
        loaded: the model and its tokenizer.
        card: README.md
        limit: bytes of weights in a file.
    """
    check(folder, overwrite)
    words, own = loaded.words, loaded.run.gpt if loaded.run else None
    if own is None:
        raise LabError(f"{loaded.name} is a Hugging Face folder already")
    count = min(words.vocab_size, own.vocab_size)
    ends = {} if words.eot is None else {"bos_token_id": words.eot, "eos_token_id": words.eot}
    files: dict[str, bytes] = {
        "config.json": _json(weights.to_config(own, count, words.eot)),
        "generation_config.json": _json({**ends, "do_sample": True}),
        "README.md": card.encode(),
        **tokenizer_files.files(words.name, own.block_size),
    }
    folder = folder.resolve()
    temporary = temporary_name(folder)
    try:
        temporary.mkdir(parents=True)
        _write_weights(temporary, weights.to_theirs(loaded.model, count), limit)
        for name, data in files.items():
            write_atomically(temporary / name, data)
        _publish(temporary, folder)
    except OSError as error:
        raise LabError(f"cannot write {folder}: {reason(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check(folder: Path, overwrite: bool) -> None:
    """Refuse a place where something would be lost."""
    if folder.is_dir() and any(folder.iterdir()):
        if not overwrite:
            raise LabError(f"{folder} is not empty: choose another --out, or give --overwrite")
        if not is_folder(folder):
            raise LabError(f"{folder} is not a Hugging Face folder: it is not overwritten")
    elif folder.exists() and not folder.is_dir():
        raise LabError(f"{folder} is a file: choose another --out")


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _write_weights(folder: Path, tensors: dict[str, Tensor], limit: int) -> None:
    parts = list(_parts(tensors, limit))
    if len(parts) == 1:
        write_atomically(folder / WEIGHTS, lambda f: tensorfile.write_tensors(f, tensors))
        return
    index: dict[str, str] = {}
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        with open(folder / name, "xb") as file:
            tensorfile.write_tensors(file, part)
        index |= dict.fromkeys(part, name)
    total = sum(t.nbytes for t in tensors.values())
    said = {"metadata": {"total_size": total}, "weight_map": index}
    write_atomically(folder / INDEX, _json(said))


def _parts(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, t in tensors.items():
        if part and size + t.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = t
        size += t.nbytes
    yield part


def _publish(temporary: Path, folder: Path) -> None:
    """Give it its name; what was there is gone only then."""
    old = temporary_name(folder)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_directory(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
