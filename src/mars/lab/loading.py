"""Models from disk: of a run, of a checkpoint in it, or of a Hugging Face GPT-2 folder."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from mars.lab import checkpoint, retention
from mars.lab.config import Model, Run, read_config
from mars.lab.data import Tokenizer, tokenizer
from mars.lab.errors import LabError
from mars.lab.huggingface import Folder, is_folder
from mars.lab.models import GPT
from mars.lab.parallel import own_rank
from mars.lab.sealed import MANIFEST


@dataclass(frozen=True)
class Loaded:
    """A model with all that is needed to feed it text."""

    name: str
    model: GPT
    words: Tokenizer
    run: Run | None
    """Of which it is, unless it came from elsewhere."""
    checkpoint: Path | None


def load(
    where: str | Path, choice: str | None = None, device: torch.device | str = "cpu"
) -> Loaded:
    """The model, ready to be asked.

    Args:
        where: a run directory, a checkpoint, or a Hugging Face GPT-2 folder.
        choice: of a run's checkpoints: best, last, a step or a path.
        device: to put it on.
    """
    path = Path(where)
    if is_folder(path):
        _no_choice(path, choice, "a Hugging Face folder")
        folder = Folder(path)
        return Loaded(path.name, folder.load().to(device).eval(), folder.tokenizer, None, None)
    run, found = find(path, choice)
    _tell_older(path, choice, found)
    model = GPT(run.gpt, seed=None)
    checkpoint.load(found, model)
    words = tokenizer(run.text.tokenizer)
    name = found.resolve().parents[1].name
    return Loaded(name, model.to(device).eval(), words, run, found)


def settings(where: str) -> tuple[Model, str]:
    """Sizes of the model that is there, and its tokenizer."""
    path = Path(where)
    if is_folder(path):
        folder = Folder(path)
        return folder.model, folder.tokenizer.name
    run, found = find(path)
    if own_rank() == 0:
        _tell_older(path, None, found)
    return replace(run.gpt, init=None), run.text.tokenizer


def initialise(model: nn.Module, where: str) -> None:
    """Put the weights that are there into a model, as where its training starts from."""
    path = Path(where)
    if is_folder(path):
        Folder(path).fill(model)
    else:
        checkpoint.load(find(path)[1], model)


def find(path: Path, choice: str | None = None) -> tuple[Run, Path]:
    """The configuration of a run, and the checkpoint to take."""
    if (path / MANIFEST).is_file():
        _no_choice(path, choice, "a checkpoint")
        own = path / "config.json"  # of one that `mars convert` has put elsewhere
        return read_config(own if own.is_file() else path.parent.parent / "config.json"), path
    if not path.exists():
        raise LabError(f"{path} does not exist: no run, no checkpoint, no Hugging Face folder")
    if not (path / "config.json").is_file():
        raise LabError(
            f"{path} is neither a run directory nor a checkpoint, nor a Hugging Face folder"
        )
    run = read_config(path / "config.json")
    found = _choose(path, choice)
    if found is None:
        known = "" if choice is None else "; --checkpoint is best, last, or a step that was kept"
        what = "intact checkpoint" if any(path.glob("checkpoints/step-*")) else "checkpoint yet"
        raise LabError(f"{path} has no {choice + ' checkpoint' if choice else what}{known}")
    return run, found


def _no_choice(path: Path, choice: str | None, what: str) -> None:
    if choice is not None:
        raise LabError(f"{path} is {what} already: give the run to choose --checkpoint")


def _choose(run: Path, choice: str | None) -> Path | None:
    if choice in (None, "best"):
        found = checkpoint.best(run)
        if found is not None or choice == "best":
            return found
    if choice in (None, "last"):
        return checkpoint.newest(run, _warn)
    step = re.fullmatch(r"(?:step[- ]?)?(\d+)", choice)
    path = run / "checkpoints" / f"step-{int(step[1]):08d}" if step else Path(choice)
    return path if path.is_dir() else None


def _tell_older(run: Path, choice: str | None, found: Path) -> None:
    """Say that a run has a newer checkpoint than its best: only those just validated can be it."""
    folder = run / "checkpoints"
    noted = retention.noted_best(folder)
    if choice not in (None, "best") or noted is None or found != folder / f"step-{noted[0]:08d}":
        return
    there = (step for step, path in retention.in_order(folder) if retention.looks_valid(path))
    newest = next(there, noted[0])
    if newest > noted[0]:
        sys.stderr.write(
            f"! {run}: step {noted[0]} is taken, the best of the checkpoints that were validated "
            f"when they were saved; the newest is of step {newest}\n"
        )


def _warn(text: str) -> None:
    sys.stderr.write(f"mars: warning: {text}\n")
