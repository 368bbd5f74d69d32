"""From what the user names (a corpus, a directory, a file, a glob) to a stream of tokens."""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path
from typing import Literal, get_args

from mars.lab.data.documents import UTF8
from mars.lab.data.embedded import embedded
from mars.lab.data.manifest import FILE, Entry, check_shard, load_manifest
from mars.lab.data.shards import Shard, Tokens, cut_shards, open_shard
from mars.lab.data.tokenizers import tokenizer as tokenizer_of
from mars.lab.errors import LabError, not_utf8

Split = Literal["train", "valid"]

TEXT_BYTES = 50_000_000  # a longer text is worth preparing once
CHECKED_SHARD = 256_000_000  # bytes; bigger shards are hashed by verify() alone
CHECKED_SPLIT = 2_000_000_000  # so that a run over a terabyte need not read it first
NOT_TEXT = (".jsonl", ".json", ".parquet", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".npy")


def open_tokens(
    source: str, split: Split, tokenizer: str = "gpt2", valid_fraction: float = 0.1,
    *, whole: bool = False,
) -> Tokens:  # fmt: skip
    """Open one split of a source as a stream of tokens.

    Args:
        source: ``"tinyshakespeare"`` (embedded); a directory made by ``mars data``; a directory
            with nanoGPT's train.bin and val.bin, or with ``*_train_*.bin`` and ``*_val_*.bin``;
            a .bin file or a glob of them; a text file of less than 50 MB.
        split: ``"train"`` or ``"valid"``.
        tokenizer: what the text is, or must have been, tokenised with.
        valid_fraction: the part at the end that is kept for validation, for sources that are not
            split already: of the characters of a text, of the tokens of shards.
        whole: the other split comes from elsewhere: a source that is not split already is all of
            this one.
    """
    name = tokenizer_of(tokenizer).name
    if split not in get_args(Split):
        raise LabError(f"unknown split {split!r}: it must be 'train' or 'valid'")
    if not 0 < valid_fraction < 1:
        raise LabError(f"valid_fraction must be between 0 and 1, not {valid_fraction!r}")
    if whole:
        valid_fraction = 0.0 if split == "train" else 1.0
    if source == "tinyshakespeare":
        text = embedded("tinyshakespeare.txt")
        return _from_text(text, source, split, name, valid_fraction)
    path = Path(source).expanduser()
    if path.is_dir() and (path / FILE).exists():
        return _from_manifest(path, split, name)
    if path.is_dir() or not path.exists():
        return _from_shards(source, _matching(path, source), path, split, name, valid_fraction)
    if path.suffix == ".bin":
        return _from_shards(source, [path], path, split, name, valid_fraction)
    return _from_text(_read_text(path), source, split, name, valid_fraction)


def _from_text(text: str, source: str, split: Split, tokenizer: str, fraction: float) -> Tokens:
    cut = int(len(text) * (1 - fraction))
    array = tokenizer_of(tokenizer).encode(text[:cut] if split == "train" else text[cut:])
    return Tokens([Shard(len(array), array=array)], f"{source} ({split})", tokenizer=tokenizer)


def _read_text(path: Path) -> str:
    prepare = f"run `mars data {path} --out DIR` and use DIR"
    if path.name.endswith(NOT_TEXT):
        raise LabError(f"{path} is not plain text: {prepare}")
    try:
        size = path.stat().st_size
        if size >= TEXT_BYTES:
            raise LabError(
                f"{path} has {size / 1e6:.0f} MB, too much to tokenise each time: {prepare}"
            )
        return path.read_bytes().decode(UTF8)
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LabError(not_utf8(path, error)) from error


def _from_manifest(directory: Path, split: Split, tokenizer: str) -> Tokens:
    manifest = load_manifest(directory)
    if not manifest.complete:
        raise LabError(f"{directory} is not finished: run the same `mars data` command again")
    _check_tokenizer(directory, manifest.tokenizer, tokenizer)
    entries = manifest.shards[split]
    all_bytes = sum(entry.bytes for entry in entries)
    for entry in entries:
        small = entry.bytes < CHECKED_SHARD and all_bytes < CHECKED_SPLIT
        check_shard(directory, entry, content=small)
    return Tokens(
        [Shard(entry.tokens, directory / entry.file) for entry in entries],
        f"{directory} ({split})",
        sha256=hashlib.sha256("".join(entry.sha256 for entry in entries).encode()).hexdigest(),
        tokenizer=manifest.tokenizer,
        check=lambda: _check_all(directory, entries),
    )


def _check_all(directory: Path, entries: list[Entry]) -> None:
    for entry in entries:
        check_shard(directory, entry, content=True)


def _check_tokenizer(where: object, made_by: str, asked: str) -> None:
    if made_by != asked:
        raise LabError(
            f"wrong tokenizer: {where} was made by {made_by!r}, but the run asks for {asked!r}: "
            f"set data.tokenizer to {made_by} (and model.vocab_size: 50304 for gpt2, 256 for "
            f"bytes), or prepare it again with --tokenizer {asked}"
        )


def _matching(path: Path, source: str) -> list[Path]:
    """The .bin files of a directory or a glob, sorted."""
    if path.is_dir():
        files = sorted(path.glob("*.bin"))
        if not files:
            raise LabError(f"{source} holds no {FILE} and no .bin files: make it with `mars data`")
        return files
    files = [Path(name) for name in sorted(glob.glob(str(path)))]
    if not files:
        raise LabError(
            f"no such file or directory: {source}; the embedded corpus is 'tinyshakespeare', and "
            "datasets are prepared first: `mars data NAME --out DIR`"
        )
    for file in files:
        if file.suffix != ".bin":
            raise LabError(f"{source} matches {file.name}, which is no .bin file: use `mars data`")
    return files


def _kind(path: Path) -> str:
    words = path.stem.replace("-", "_").split("_")
    if "val" in words or "valid" in words or "validation" in words:
        return "valid"
    return "train" if "train" in words else ""


def _from_shards(
    source: str, files: list[Path], path: Path, split: Split, tokenizer: str, fraction: float
) -> Tokens:
    """Split by the files' names if they tell, otherwise by position."""
    named = {kind: [file for file in files if _kind(file) == kind] for kind in ("train", "valid")}
    by_name = len(files) > 1 and bool(named["valid"])
    if path.is_dir() and not (named["train"] and named["valid"]):
        raise LabError(
            f"{source} must hold train.bin and val.bin, or *_train_*.bin and *_val_*.bin; "
            f"to split shards by position give a glob: '{source}/*.bin'"
        )
    if by_name and not named[split]:
        raise LabError(f"{source} matches no shards for {split} (train or val in their names)")
    opened = [open_shard(file) for file in (named[split] if by_name else files)]
    told = {name for _, name in opened if name}
    for name in told:
        _check_tokenizer(source, name, tokenizer)
    shards = [shard for shard, _ in opened]
    if not by_name:
        count = sum(shard.tokens for shard in shards)
        cut = int(count * (1 - fraction))
        shards = cut_shards(shards, 0, cut) if split == "train" else cut_shards(shards, cut, count)
    return Tokens(shards, f"{source} ({split})", tokenizer=next(iter(told), None))
