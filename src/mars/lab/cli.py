"""The command `mars`: a table of names and functions."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import NoReturn

from mars.lab.errors import INTERRUPTED, Elsewhere, LabError, UsageError, meant

USAGE = """usage: mars COMMAND [options]

MARS: optimizers that correct each gradient by the last one, and a laboratory for them.

  race      several optimizers on the same model and batches; ends in a table and a report
  train     one model by one optimizer: GPT-2 as published, your own text, CIFAR
  data      text to tokens, images to arrays: OpenWebText, CIFAR-10, your files
  report    a self-contained HTML page from the logs of runs
  sample    text from a checkpoint
  eval      HellaSwag, ARC, MMLU, LAMBADA …: checkpoints side by side, scored as lm-eval does
  export    a folder that Hugging Face transformers loads
  tune      search learning rate, decay, γ, warm-up
  study     a question, a prediction, the runs that are worth their time, and a verdict
  plan      memory, traffic and time of a step on GPUs you do not have
  convert   a checkpoint in one file to shards, or back
  doctor    versions, device, which engine would be used and why

To begin:  mars race                    (no data, no GPU needed)
           mars train gpt-tiny          mars train gpt2-small --dry-run
           mars COMMAND --help
"""


def _plan(words: list[str]) -> int:
    from mars.lab.arguments import parse
    from mars.lab.planner.command import PlanArgs, plan_command

    named = bool(words) and not words[0].startswith("-")
    model, options = (words[0], words[1:]) if named else (None, words)
    about = (
        "Predict memory, optimizer traffic and the time of a step for every optimizer. MODEL, the "
        "first word, is a recipe, a run, gpt3-2.7b, -6.7b, -13b, or llama-1b, -7b, -8b, -13b, -70b."
    )
    try:
        args = parse(PlanArgs, options, f"mars plan {model or 'MODEL'}", about)
    except UsageError as error:
        if named:
            raise
        raise UsageError(f"{error} (MODEL is the first word)") from None
    plan_command(model, args)
    return 0


def _doctor(words: list[str]) -> int:
    from mars.lab.doctor import arguments_of, doctor_command

    doctor_command(arguments_of(words))
    return 0


def _own(module: str, name: str) -> Callable[[list[str]], int]:
    """A command whose module has name_command, which reads the words itself; imported when used."""

    def command(words: list[str]) -> int:
        found = import_module(f"mars.lab.{module}")
        code: int = getattr(found, f"{name}_command")(words)
        return code

    return command


def _of(module: str, name: str, about: str) -> Callable[[list[str]], int]:
    """A command whose module has NameArgs, and name_command of them; imported when used."""

    def command(words: list[str]) -> int:
        from mars.lab.arguments import parse

        found = import_module(f"mars.lab.{module}")
        args = parse(getattr(found, f"{name.capitalize()}Args"), words, f"mars {name}", about)
        getattr(found, f"{name}_command")(args)
        return 0

    return command


PLAIN = (
    ("data.command", "data", "Turn text into shards of tokens, or images into arrays, with a "
     "manifest of checksums; an interrupted run is resumed."),
    ("report.command", "report", "Make a self-contained HTML page from the logs of runs or races, "
     "and print the table."),
    ("sample", "sample", "Continue a text with a trained model."),
    ("evaluation.command", "eval", "Score checkpoints on multiple-choice tasks and LAMBADA: from "
     "JSONL files with --data, else through EleutherAI's lm-eval, which downloads its data."),
    ("huggingface.command", "export", "Write a checkpoint as a folder for other tools. (To read "
     "one, give it to any command.)"),
    ("converting", "convert", "A checkpoint in one file to shards, or back. Both can be trained "
     "on and sampled from."),
)  # fmt: skip
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "race": _own("race", "race"),
    "train": _own("train_command", "train"),
    "tune": _own("tune", "tune"),
    "study": _own("study.command", "study"),
    "plan": _plan,
    **{name: _of(module, name, about) for module, name, about in PLAIN},
    "doctor": _doctor,
}
MAY_BE_EMPTY = ("--prompt",)  # of `mars sample`: a new document


def main(words: list[str] | None = None) -> int:
    """Run a command; errors that a user can mend are one line on standard error."""
    words = sys.argv[1:] if words is None else words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII terminal gets ? for what it cannot show
            stream.reconfigure(errors="replace")
    name = words[0] if words else "help"
    try:
        code = _run(name, words[1:])
        sys.stdout.flush()
        return code
    except LabError as error:
        if _reported_elsewhere(error):
            time.sleep(1.0)  # torchrun ends the others when one has ended: who speaks goes first
            return error.status
        return _fail(str(error), error.status)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mars"):
            raise
        return _fail(
            f"mars {name} needs {error.name}, which is not installed "
            '(pip install ".[lab]" in the source directory installs everything mars uses)'
        )
    except BrokenPipeError:  # the reader of our output has gone, as in `mars --help | head`
        _discard_output()
        return 0
    except OSError as error:
        return _refused(error)
    except KeyboardInterrupt:
        sys.stderr.write("mars: interrupted\n")
        return INTERRUPTED


def _run(name: str, words: list[str]) -> int:
    if name in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0
    if name in ("-V", "--version"):
        import mars

        sys.stdout.write(f"mars {mars.__version__}\n")
        return 0
    if name != "train" and "TORCHELASTIC_RUN_ID" in os.environ:
        raise LabError(f"mars {name} runs as one process: torchrun is for mars train")
    if name not in COMMANDS:
        hint = meant(name, COMMANDS) or f"known: {', '.join(COMMANDS)}"
        raise LabError(f"unknown command {name!r}: {hint}")
    _refuse_empty(words)
    return COMMANDS[name](words)


def _refuse_empty(words: list[str]) -> None:
    """Refuse a word that is empty. As a path it would be the directory one happens to be in, as an
    option its default: a variable of the shell that is not set should be neither.
    """
    for before, word in pairwise(["", *words]):
        option, equals, value = word.partition("=")
        if option.startswith("--") and equals and not value:
            before, word = option, ""
        if not word and before not in MAY_BE_EMPTY:
            what = before if before.startswith("--") else "a word of the command line"
            raise UsageError(f"{what} is empty: is a variable of your shell not set?")


def _fail(text: str, status: int = 1) -> int:
    sys.stderr.write(f"mars: error: {text}\n")
    return status


def _refused(error: OSError) -> int:
    """What the operating system refuses: a file, by its name and why; of a full disk, the disk."""
    if error.errno == errno.ENOSPC:
        _discard_output()
        return _fail(f"the disk is full ({error.filename or 'standard output'})")
    if error.filename is None:
        raise error
    from mars.lab.rundir import reason

    return _fail(f"{error.filename!s:.200}: {reason(error)}")


def _discard_output() -> None:
    """Standard output takes no more: what Python still holds of it would fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reported_elsewhere(error: LabError) -> bool:
    """Under torchrun: what all find before they are connected, a machine's first alone says."""
    if isinstance(error, Elsewhere) or os.environ.get("LOCAL_RANK", "0") == "0":
        return isinstance(error, Elsewhere)
    import torch.distributed as dist

    return not dist.is_initialized()


def command() -> NoReturn:
    """The process `mars`."""
    code = main()
    if "RANK" in os.environ:
        # One process of several. Threads of its process groups may outlive the interpreter, and
        # end the process with SIGABRT when all is done: torchrun would call that a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


if __name__ == "__main__":
    command()
