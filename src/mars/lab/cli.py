"""The command `mars`: a table of names and functions."""

from __future__ import annotations

import errno
import io
import os
import shlex
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from mars.lab.errors import INTERRUPTED, Elsewhere, LabError, meant, unexpected

USAGE = """usage: mars COMMAND [options]

MARS: optimizers that correct each gradient by the last one, and a laboratory for them.

  race      several optimizers on the same model and batches; ends in a table and a report
  train     one model by one optimizer: GPT-2 as published, your own text, CIFAR
  data      text to tokens, images to arrays: OpenWebText, CIFAR-10, your files
  report    a self-contained HTML page from the logs of runs
  sample    text from a checkpoint
  eval      HellaSwag, ARC, MMLU, LAMBADA …: checkpoints side by side, scored as lm-eval does
  export    a folder that Hugging Face transformers loads
  tune      search learning rate, decay and γ
  study     a question, a prediction, the runs that are worth their time, and a verdict
  plan      memory, traffic and time of a step on GPUs you do not have
  convert   a checkpoint in one file to shards, or back
  doctor    versions, device, which engine would be used and why

To begin:  mars race                    (no data, no GPU needed)
           mars train gpt-tiny          mars train gpt2-small --dry-run
           mars COMMAND --help
"""


def _race(words: list[str]) -> int:
    from mars.lab.race import race_command

    return race_command(words)


def _train(words: list[str]) -> int:
    from mars.lab import arguments, moved
    from mars.lab.describe import describe
    from mars.lab.parallel import own_rank
    from mars.lab.progress import Progress
    from mars.lab.recipes import RECIPES
    from mars.lab.report import fit, units
    from mars.lab.train import train

    command = shlex.join(["mars", "train", *words])
    what = "Train one model by one optimizer; if interrupted, run the same command to resume."
    recipe, words = arguments.recipe_of(words, None, "mars train", what)
    words = arguments.shorthands(words)
    base = arguments.base_run(recipe, words)
    default = arguments.with_defaults(arguments.TrainArgs, base)
    about = (
        f"Train: {recipe}. Every field can be overridden. --optimizer NAME is short for "
        "--optimizer.name NAME, and brings the recipe's settings for it."
    )
    args = arguments.parse(arguments.TrainArgs, words, f"mars train {recipe}", about, default)
    # A run directory keeps its schedule; a recipe's warm-up shrinks with its steps.
    if Path(recipe).is_dir():
        args = arguments.counted(args, base)
        if args.directory == base.directory:
            arguments.not_fewer(args, base)
    else:
        args = arguments.fitted(args, base)
    run = arguments.as_run(args)
    if recipe in RECIPES and not any("warmup" in word for word in words):
        run = arguments.extending(run)
    own = arguments.asked(words, args).get("optimizer", {})
    if "lr" in own and "lr_1d" not in own and run.optimizer.lr_1d is not None and own_rank() == 0:
        sys.stderr.write(
            "! optimizer.lr is for matrices: optimizer.lr_1d, for all else, stays "
            f"{run.optimizer.lr_1d:g}\n"
        )
    if args.dry_run:
        text = fit.fold(describe(run), fit.room(), "    ")
        sys.stdout.write(text + "\n" if own_rank() == 0 else "")
        return 0
    if own_rank() > 0:
        train(run, command=command, extend=True)
        return 0
    moved.follow(run)
    begun = (Path(run.directory) / "log.jsonl").exists()
    with Progress(run.loop.steps, begun) as progress:
        try:
            outcome = train(run, command=command, watch=progress, extend=True)
        except (LabError, OSError):
            raise
        except Exception as error:
            raise LabError(unexpected(error, Path(run.directory))) from error
    last = "last " * (outcome.status == "stopped")  # it was measured some steps ago
    loss = "" if outcome.valid is None else f", {last}validation loss {units.loss(outcome.valid)}"
    right = "" if outcome.accuracy is None else f", accuracy {units.accuracy(outcome.accuracy)}"
    sys.stdout.write(f"{outcome.status} at step {outcome.step}{loss}{right}: {outcome.directory}\n")
    if outcome.status == "stopped":
        saved = run.keep.save_every is not None
        where = "resumes from there" if saved else "starts again: keep.save_every is None"
        sys.stdout.write(f"the same command {where}\n")
        # torchrun would take another status than 0 for a failure, and start all again.
        return 0 if "TORCHELASTIC_RUN_ID" in os.environ else INTERRUPTED
    return 0


def _tune(words: list[str]) -> int:
    from mars.lab.tune import tune_command

    return tune_command(words)


def _study(words: list[str]) -> int:
    from mars.lab.study.command import study_command

    return study_command(words)


def _plan(words: list[str]) -> int:
    from mars.lab.arguments import UsageError, parse
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


def _of(module: str, name: str, about: str) -> Callable[[list[str]], int]:
    """A command whose module has NameArgs and name_command; it is imported when it is asked for."""

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
    "race": _race,
    "train": _train,
    "tune": _tune,
    "study": _study,
    "plan": _plan,
    **{name: _of(module, name, about) for module, name, about in PLAIN},
    "doctor": _doctor,
}


def main(words: list[str] | None = None) -> int:
    """Run a command; errors that a user can mend are one line on standard error."""
    words = sys.argv[1:] if words is None else words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII terminal gets ? for what it cannot show
            stream.reconfigure(errors="replace")
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0
    if words[0] in ("-V", "--version"):
        import mars

        sys.stdout.write(f"mars {mars.__version__}\n")
        return 0
    try:
        if words[0] != "train" and "TORCHELASTIC_RUN_ID" in os.environ:
            raise LabError(f"mars {words[0]} is one process: torchrun is for mars train")
        if words[0] not in COMMANDS:
            hint = meant(words[0], COMMANDS) or f"known: {', '.join(COMMANDS)}"
            raise LabError(f"unknown command {words[0]!r}: {hint}")
        code = COMMANDS[words[0]](words[1:])
        sys.stdout.flush()
        return code
    except LabError as error:
        if _reported_elsewhere(error):
            time.sleep(1.0)  # torchrun ends the others when one has ended: who speaks goes first
        else:
            sys.stderr.write(f"mars: error: {error}\n")
        return 2 if type(error).__name__ == "UsageError" else 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mars"):
            raise
        sys.stderr.write(
            f"mars: error: mars {words[0]} needs {error.name}, which is not installed (pip install "
            '".[lab]", where the sources are, brings all that is ours)\n'
        )
        return 1
    except BrokenPipeError:  # the reader of our output has gone, as in `mars --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            if error.filename is None:
                raise
            from mars.lab.rundir import reason

            sys.stderr.write(f"mars: error: {error.filename!s:.200}: {reason(error)}\n")
            return 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"mars: error: the disk is full ({error.filename or 'standard output'})\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("mars: interrupted\n")
        return INTERRUPTED


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
