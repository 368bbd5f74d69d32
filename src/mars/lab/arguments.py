"""From the words of a command line to typed data: recipes, overrides, one-line errors."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mars.lab import loading, recipes, tasks
from mars.lab.config import (
    AnyRun,
    ImageData,
    ImageModel,
    Run,
    check,
    from_json,
    to_json,
)
from mars.lab.errors import LabError, UsageError, meant
from mars.lab.rundir import HOLDS, reason

T = TypeVar("T")


def parse(kind: type[T], words: list[str], prog: str, about: str, base: Run | None = None) -> T:
    """Words to a dataclass by tyro, whose boxes of errors become one line.

    A dataclass that is a run has the fields of ``base`` as defaults.
    """
    try:
        import tyro
    except ImportError as error:
        raise LabError('the command line needs tyro: pip install ".[lab]"') from error
    errors, help_ = io.StringIO(), io.StringIO()
    plain = "NO_COLOR" in os.environ  # what is no terminal gets no colours
    # Of a dict that is not empty tyro makes a field for each name, and takes no others.
    kept = {} if base is None else dict(base.optimizer.options)
    default = base and with_defaults(kind, base.replace(optimizer={"options": {}}))
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with (
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(help_) if plain else contextlib.nullcontext(),
        ):
            parsed: T = tyro.cli(
                kind,
                args=words,
                prog=prog,
                description=about,
                # A recipe is for text or for images: its own fields, no choice between the two.
                config=(tyro.conf.PositionalRequiredArgs, tyro.conf.AvoidSubcommands),
                **options,
            )
    except SystemExit as stop:
        if stop.code in (0, None):  # --help has been printed
            sys.stdout.write(help_.getvalue())
            raise
        said = _explained(_one_line(errors.getvalue()), words, kind, default)
        raise UsageError(f"{said}; see {prog} --help") from None
    if isinstance(parsed, Run):
        if {"--loop.steps", "--loop.epochs"} <= set(words) and parsed.loop.epochs is not None:
            raise UsageError("give --loop.steps or --loop.epochs, not both")
        for name in parsed.optimizer.options if parsed.optimizer.name.startswith("mars-") else ():
            if getattr(parsed.optimizer, name, None) is not None:
                raise UsageError(f"--optimizer.options {name}: say --optimizer.{name}")
        if kept:
            parsed = parsed.replace(optimizer={"options": {**kept, **parsed.optimizer.options}})
    return parsed


# What tyro and Python say of a word that is wrong, and what it means.
SAID = (
    (r"no type matching \{None\}\|FLOAT could be instantiated from \[('[^']*')\]$",
     r"\1 is not a number"),
    (r"no type matching \{None\}\|INT could be instantiated from \[('[^']*')\]$",
     r"\1 is not a whole number"),
    (r"no type matching (.+) could be instantiated from \['?(.*?)'?\]$",
     lambda m: f"it cannot be '{m[2]}', but {m[1].removeprefix('{None}|').strip('{}')} "
     "(values are separated by spaces)"),
    (r"Failed to parse key-value pairs!", "it takes NAME VALUE or NAME=VALUE"),
    (r"invalid literal for int\(\) with base 10: ('.*')", r"\1 is not a whole number"),
    (r"could not convert string to float: ('.*')", r"\1 is not a number"),
    (r"^Error parsing (?=--)", ""),
    (r"^(?i:missing from) (mars \w+): (?:STR|PATH) (\w)(.*?)[;(.] .*",
     lambda m: f"{m[1]} needs, as its first word, {m[2].lower()}{m[3].rstrip()}"),
)  # fmt: skip


def _one_line(box: str) -> str:
    """The message in a box of tyro's, with the option it thinks was meant."""
    plain = re.sub("\x1b\\[[0-9;]*m", "", box)
    lines = [line.strip("│| \t") for line in plain.splitlines()]
    lines = [line for line in lines if line and line[0] not in "╭╰"]
    parts: list[list[str]] = [[]]
    for line in lines:
        if set(line) <= set("─-"):
            parts.append([])
        else:
            parts[-1].append(line)
    parts = [part for part in parts if part]
    if "╭" not in plain:  # in ASCII the title is no part of the frame
        parts = parts[1:]
    if not parts:
        return "the command line cannot be read"
    message = " ".join(parts[0]).split(" Got errors:")[0].rstrip(".")
    for theirs, ours in SAID:
        message = re.sub(theirs, ours, message)
    for part in parts[1:]:
        if part[0].startswith("Perhaps you meant") and len(part) > 1:
            message += f" (perhaps {part[1].split()[0]}?)"
    return message[0].lower() + message[1:]


def _explained(said: str, words: list[str], kind: type, default: Any) -> str:
    """What tyro says of an option, with what that takes or which one was meant, if it is plain."""
    if lacking := re.match(r"missing value for argument '(--\S+)'", said):
        *most, last = _values(_type_of(lacking[1], kind, default))
        choices = f"{', '.join(most)} or {last}" if most else last
        return f"{lacking[1]} needs a value: {choices}"
    if several := re.match(r"(--\S+): Could not find valid parse for arguments: \[(.*)\]", said):
        one = _values(_type_of(several[1], kind, default))[0]
        return f"{several[1]} cannot be {several[2]}: it takes {one}, or several after spaces"
    if wrong := re.match(r"invalid choice '(.*?)' for argument '(--\S+?)[' ]", said):
        known = [value for value in _values(_type_of(wrong[2], kind, default)) if value != "None"]
        hint = meant(wrong[1], known) or f"it can be {', '.join(known)}"
        return f"{wrong[2]} {wrong[1]}: {hint}"
    unknown = re.match(r"unrecognized options: (.+?)(?=, | \(perhaps |$)", said)
    if unknown is None:
        return said
    for option, value in pairwise(part for word in words for part in word.split("=", 1)):
        on = re.sub(r"^(--(?:.*\.)?)no-", r"\1", option)
        off = re.sub(r"^(--(?:.*\.)?)", r"\1no-", on)
        if value == unknown[1] and on[:2] == "--" and _type_of(on, kind, default) is bool:
            return f"{on} is a switch, it takes no value; {off} turns it off"
    if not re.search(r"[ ,]-", said.split(" (perhaps ")[0]):
        return f"{unknown[1]!r} is a word too many: quote a text that has spaces, and a glob"
    near = _short(unknown[1], default)
    return f"{said.split(' (perhaps ')[0]} (perhaps {near}?)" if near else said


def _short(word: str, default: Any) -> str | None:
    """The option without a part, which tyro does not know, that a word is near to."""
    if "." in word or not isinstance(default, Run):
        return None
    several = {"optimizer": "optimizers"} if hasattr(default, "optimizers") else {}  # a race
    names = [f"--{several.get(name, name)}" for name in SHORT]
    return next(iter(difflib.get_close_matches(word, names, 1, 0.75)), None)


def _type_of(option: str, kind: type, default: Any) -> Any:
    """The type of the field that an option sets; None if it sets none."""
    *parts, name = option.removeprefix("--").replace("-", "_").split(".")
    for part in parts:
        default = getattr(default, part, None)
        kind = type(default)
    return get_type_hints(kind).get(name)


def _values(hint: Any) -> list[str]:
    """What an option of this type can be, in words."""
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return [str(choice) for choice in inner]
    if inner:
        return [value for choice in inner if choice is not ... for value in _values(choice)]
    if hint is bool:
        return ["True", "False"]
    named = {int: "a whole number", float: "a number", Path: "a path", type(None): "None"}
    return [named.get(hint, "a word")]


# Options that may be said in one word, and their fields.
SHORT = {"optimizer": "optimizer.name", "out": "keep.out"}


def shorthands(words: list[str]) -> list[str]:
    """What may be said in fewer words: ``--optimizer NAME``, ``--out DIR``, options NAME=VALUE."""
    for short, field in SHORT.items():
        words = [re.sub(rf"^--{short}(?==|$)", f"--{field}", word) for word in words]
    found: list[str] = []
    option = ""
    for word in words:
        option = word if word.startswith("--") else option
        pair = word.startswith("--") or option == "--optimizer.options"
        found += word.split("=", 1) if pair and "=" in word else [word]
    return found


def recipe_of(
    words: list[str], default: str | None, prog: str, about: str = ""
) -> tuple[str, list[str]]:
    """The recipe's name (the first word, unless it is an option), and the other words in full."""
    if words and not words[0].startswith("-"):
        return words[0], shorthands(words[1:])
    if default is None:
        width = max(map(len, recipes.RECIPES))
        known = "".join(f"\n  {name:{width}}  {r.about}" for name, r in recipes.RECIPES.items())
        if any(word in ("-h", "--help") for word in words):
            sys.stdout.write(
                f"usage: {prog} RECIPE [options]\n\n{about}\n\n"
                "RECIPE is one of those below, a JSON file with fields to override "
                "(as `mars tune` writes it),\npackage.module:function of yours that returns a "
                "mars.lab.config.Run, or the directory of\na run to go on with. "
                f"`{prog} RECIPE --help` explains every option.\n{known}\n"
            )
            raise SystemExit(0)
        known = ", ".join(recipes.RECIPES)
        raise UsageError(f"{prog} needs a recipe, as its first word: {known}")
    return default, shorthands(words)


def base_run(name: str, words: list[str]) -> Run:
    """The configuration that the words will override."""
    given = dict(pairwise(words))
    optimizer, init = given.get("--optimizer.name"), given.get("--model.init")
    run = _named_run(name, optimizer)
    if init is None or init == run.gpt.init:
        return run
    model, tokenizer = loading.settings(init)
    return dataclasses.replace(run, model=model).replace(data={"tokenizer": tokenizer})


def _named_run(name: str, optimizer: str | None) -> Run:
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise LabError(f"{path} holds {_held(path)}")
        run = overridden(_read(path / "config.json"), optimizer)
        return run.replace(keep={"out": name})
    if path.suffix == ".json":
        values = _read(path)
        if not {"recipe", "model"} & set(values):
            raise LabError(
                f'{path} names no recipe for its fields to override: add "recipe": "gpt-tiny", or '
                'a "model" of its own'
            )
        try:
            run = overridden(values, optimizer)
        except LabError as error:
            raise LabError(f"{path}: {error}") from error
        # Not the directory of the recipe's own runs, which have other settings.
        out = run.keep.out or f"runs/{path.resolve().parent.name}-{path.stem}"
        return run.replace(keep={"out": out})
    if path.is_file() and name not in recipes.RECIPES:
        raise LabError(f"{path} holds {_as_data(path)}")
    return recipes.make(name, optimizer)


def _held(path: Path) -> str:
    """What a directory without a run holds, and what that is good for."""
    if (path / "manifest.json").exists() and not (path / "training.pt").exists():
        return _as_data(path)  # what else has a manifest is a checkpoint
    here = (held for file, held in HOLDS.items() if held.use and (path / file).exists())
    return next((f"{held.what}: {held.use}" for held in here), "no run")


def _as_data(path: Path) -> str:
    return f"no recipe: data are given as --data.source {path}, after one (gpt-tiny, say)"


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))  # editors may put a mark first
    except OSError as error:
        raise LabError(f"{path} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise LabError(f"{path} is not a configuration: {error}") from error
    if not isinstance(values, dict):
        raise LabError(f"{path} is not a configuration: it does not hold a JSON object")
    return values


def written(name: str, part: str) -> dict[str, Any]:
    """The fields of a part that a recipe in a JSON file sets itself; of any other recipe none."""
    path = Path(name)
    own = _read(path).get(part) if path.suffix == ".json" and not path.is_dir() else None
    return own if isinstance(own, dict) else {}


def overridden(values: dict[str, Any], optimizer: str | None = None) -> Run:
    """A recipe with the fields of a JSON object laid over it."""
    own = values.get("optimizer", {})
    named = own.get("name") if isinstance(own, dict) else None
    for what, text in (("recipe", values.get("recipe", "")), ("optimizer.name", named or "")):
        if not isinstance(text, str):
            raise LabError(f"{what} cannot be {json.dumps(text)}: it is a name")
    if optimizer and named and optimizer != named:
        raise LabError(f"the configuration is for {named}: it says nothing about {optimizer}")
    name = values.get("recipe", "custom")
    own_model = name not in recipes.RECIPES and "model" in values
    base = _plain(values) if own_model else recipes.make(name, optimizer or named)
    merged = to_json(base)
    for part, fields in values.items():
        if isinstance(fields, dict) and isinstance(merged.get(part), dict):
            merged[part] = {**merged[part], **fields}
        else:
            merged[part] = fields
    if not own_model:
        merged["recipe"] = base.recipe  # of a function: what its runs are called
    made: Run = from_json(merged)
    schedule = values.get("schedule")
    if isinstance(schedule, dict) and "warmup_steps" in schedule:
        return check(made)
    return check(fitted(made, base))


def _plain(values: dict[str, Any]) -> Run:
    """Defaults for a configuration without a recipe: a model with an ``arch`` is for images."""
    model = values.get("model")
    images = isinstance(model, dict) and "arch" in model
    return Run(model=ImageModel(), data=ImageData()) if images else Run()


def counted(args: AnyRun, base: Run) -> AnyRun:
    """With steps for epochs. Where steps were changed and epochs were not, steps are meant."""
    if args.loop.steps != base.loop.steps and args.loop.epochs == base.loop.epochs:
        return args.replace(loop={"epochs": None})
    try:
        return tasks.with_steps(args)
    except LabError:  # data that are not there, which is told when the run begins
        return args


def fitted(args: AnyRun, base: Run) -> AnyRun:
    """With warm-up in proportion, where the number of steps was changed and the warm-up was not."""
    args = counted(args, base)
    steps, before = args.loop.steps, base.loop.steps
    if steps == before or args.schedule.warmup_steps != base.schedule.warmup_steps or steps < 1:
        return args
    warmup = base.schedule.warmup_steps * steps // before
    schedule = dataclasses.replace(args.schedule, warmup_steps=warmup)
    return dataclasses.replace(args, schedule=schedule)


def as_run(args: Run) -> Run:
    """The run alone, without a command's own options."""
    return check(Run(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Run)}))


def with_defaults(kind: type[T], run: Run, **more: Any) -> T:
    """A command's options with a run's fields as defaults."""
    return kind(**{f.name: getattr(run, f.name) for f in dataclasses.fields(Run)}, **more)


def asked(words: list[str], args: Run) -> dict[str, dict[str, Any]]:
    """The fields that the words name, with their values: also those that equal a default."""
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        part, dot, name = word.removeprefix("--").partition(".")
        name = name.replace("-", "_")
        own = getattr(args, part, None) if dot and word.startswith("--") else None
        for field in (name, name.removeprefix("no_")):
            if own is not None and hasattr(own, field):
                found.setdefault(part, {})[field] = getattr(own, field)
                break
    return found


def changes(before: Run, after: Run) -> dict[str, dict[str, Any]]:
    """The fields that differ, by part: what somebody asked for on the command line."""
    old, new = to_json(before), to_json(after)
    found: dict[str, dict[str, Any]] = {}
    for part, fields in new.items():
        if isinstance(fields, dict):
            differing = {n for n, v in fields.items() if old[part].get(n) != v}
            if differing:
                found[part] = {n: getattr(getattr(after, part), n) for n in differing}
    return found
