"""Tasks from local files: JSONL, one item a line, every mistake named by file and line.

A multiple-choice item has ``query``, ``choices`` and ``label`` (the number of the right choice,
from 0); some tasks add ``passage`` or ``subject``. An item of LAMBADA has ``query`` and ``target``,
which begins with a space. The task is known by the file's name: ``arc_easy_test.jsonl``,
``piqa.jsonl``. One that is not known here is put plainly: the query, a space, a choice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mars.lab.data.documents import UTF8
from mars.lab.errors import LabError, not_utf8
from mars.lab.evaluation.prompts import (
    ALIASES,
    LAST_WORD,
    LETTERS,
    PLAIN,
    PROMPTS,
    USUAL,
    Pair,
    Prompt,
    Record,
)

# What is evaluated on, by preference; lm-eval takes the test part where its labels are known.
SPLITS = ("", "_test", "_val", "_validation", "_dev")
KINDS = {"query": str, "passage": str, "subject": str, "target": str, "choices": list, "label": int}


@dataclass(frozen=True)
class Item:
    """What is asked: pairs of context and continuation, of which one is right."""

    pairs: list[Pair]
    label: int | None
    """The right one; None where there is but one, to be guessed."""
    group: str = ""

    @property
    def lengths(self) -> list[int]:
        """Characters of each continuation without the space before it, as lm-eval counts them."""
        return [len(continuation.removeprefix(" ")) for _, continuation in self.pairs]


@dataclass(frozen=True)
class Task:
    """Items of one kind."""

    name: str
    metric: str
    items: list[Item]
    source: str

    @property
    def chance(self) -> float | None:
        """What guessing would get."""
        if any(item.label is None for item in self.items):
            return None
        return sum(1 / len(item.pairs) for item in self.items) / len(self.items)


def canonical(name: str) -> str:
    """The name that lm-eval has for a task.

    >>> canonical("obqa"), canonical("piqa")
    ('openbookqa', 'piqa')
    """
    return ALIASES.get(name, name)


def names_of(text: str) -> list[str]:
    """Task names from a list with commas."""
    names = [canonical(name.strip()) for name in text.split(",") if name.strip()]
    if not names:
        raise LabError("--tasks is empty: name some, as in --tasks hellaswag,lambada")
    return list(dict.fromkeys(names))


def open_tasks(paths: Sequence[Path], names: list[str] | None, limit: int | None) -> list[Task]:
    """The tasks of these files and folders; without names, all of the usual ones that are there.

    Args:
        paths: folders of JSONL files, or such files.
        names: tasks, as lm-eval calls them.
        limit: how many items of a task (of MMLU: of each subject) to take, the first ones.
    """
    files = [file for path in paths for file in _files(path)]
    found: dict[str, Path] = {}
    for split in SPLITS:
        for file in files:
            if file.stem.endswith(split):
                found.setdefault(canonical(file.stem.removesuffix(split)), file)
    where = ", ".join(map(str, paths))
    if names is None:
        single = [path for path in paths if path.is_file()]
        names = [name for name, file in found.items() if file in single and _shortest(name, found)]
        names = names or [name for name in USUAL if name in found]
        if not names:
            raise LabError(f"{where} has no known task: name one with --tasks")
    for name in names:
        if name not in found:
            raise LabError(
                f"{where} has no {name}.jsonl (or {name}_test.jsonl, _val, _dev); it has "
                f"{', '.join(sorted(f.stem for f in files)) or 'no JSONL at all'}"
            )
    return [read_task(name, found[name], limit) for name in names]


def _shortest(name: str, found: dict[str, Path]) -> bool:
    """Whether no other name of the same file is better: `piqa` rather than `piqa_val`."""
    same = [other for other, file in found.items() if file == found[name]]
    return name == min(same, key=lambda other: (other not in PROMPTS, len(other)))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise LabError(f"--data {path} does not exist")
    return sorted(path.glob("*.jsonl"))


def read_task(name: str, path: Path, limit: int | None = None) -> Task:
    """The items of a file."""
    items: list[Item] = []
    counts: Counter[str] = Counter()
    prompt = PROMPTS.get(name)
    try:
        lines = path.read_text(encoding=UTF8).split("\n")
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise LabError(not_utf8(path, error)) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        record = _record(line, where)
        if prompt is None:
            prompt = LAST_WORD if "target" in record else PLAIN
        _check(record, prompt, name, where)
        group = str(record[prompt.group]) if prompt.group else ""
        counts[group] += 1
        if limit is None or counts[group] <= limit:
            label = record["label"] if "label" in prompt.fields else None
            items.append(Item(prompt.pairs(record), label, group))
    if prompt is None or not items:
        raise LabError(f"{path} has no items")
    return Task(name, prompt.metric, items, str(path))


def _record(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LabError(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise LabError(f"{where}: an item must be an object")
    return record


def _check(r: Record, prompt: Prompt, name: str, where: str) -> None:
    for field in prompt.fields:
        if field not in r:
            needed = ", ".join(prompt.fields)
            raise LabError(f"{where}: it has no {field!r}; an item of {name} has {needed}")
        if type(r[field]) is not KINDS[field]:
            raise LabError(f"{where}: {field} must be a {KINDS[field].__name__}, not {r[field]!r}")
    if "target" in prompt.fields:
        if not r["target"].strip():
            raise LabError(f"{where}: target is empty")
        return
    choices = r["choices"]
    if len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise LabError(f"{where}: choices must be two or more texts, not {choices!r}")
    if len(choices) > len(LETTERS):
        raise LabError(f"{where}: {len(choices)} choices are more than there are letters")
    if not 0 <= r["label"] < len(choices):
        raise LabError(f"{where}: label is {r['label']}, but there are {len(choices)} choices")
    if name == "winogrande" and "_" not in r["query"]:
        raise LabError(f"{where}: the query of winogrande has a blank (_)")
