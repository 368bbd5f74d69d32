"""Our model as lm-eval's ``LM``, and its tasks by its own evaluator.

lm-eval is imported only here, and only when it is asked for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from mars.lab.errors import LabError, first_line
from mars.lab.evaluation.metrics import Result
from mars.lab.evaluation.prompts import PROMPTS
from mars.lab.evaluation.scoring import Scorer, Tokens, Watch

ABSENT = (
    'lm-eval is not installed: pip install ".[eval]", or evaluate local files with --data '
    "FOLDER (docs/evaluation.md says what is in them)"
)
OFFLINE = (
    "lm-eval cannot get the data of {tasks} ({error}): it needs a network once; without one give "
    "--data FOLDER with JSONL files (docs/evaluation.md)"
)


def language_model(scorer: Scorer, watch: Watch = lambda done, of: None) -> Any:
    """An ``lm_eval.api.model.LM`` that answers with this scorer."""
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise LabError(ABSENT) from error

    class Ours(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            pairs = [request.args for request in requests]
            return [(score.loglikelihood, score.greedy) for score in scorer.text(pairs, watch)]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            texts = scorer.words.encode_batch([request.args[0] for request in requests])
            pairs = [([scorer.prefix], text.tolist()) for text in texts]
            return [score.loglikelihood for score in scorer.score(pairs, watch)]

        def generate_until(self, requests: list[Any]) -> list[str]:
            return [generate(scorer, *request.args) for request in requests]

    return Ours()


@torch.no_grad()
def generate(scorer: Scorer, context: str, settings: dict[str, Any]) -> str:
    """The likeliest text, token by token, up to one of the stop texts."""
    if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
        raise LabError("generate_until is greedy here: the task asks for sampling (do_sample)")
    until = settings.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    words, model = scorer.words, scorer.model
    tokens: Tokens = words.encode(context).tolist() or [scorer.prefix]
    start, text = len(tokens), ""
    for _ in range(int(settings.get("max_gen_toks", 256))):
        recent = torch.tensor([tokens[-scorer.context :]], device=scorer.device)
        token = int(model(recent, last_only=True)[0, -1, : scorer.vocabulary].argmax())
        if token == words.eot:
            break
        tokens.append(token)
        text = words.decode(tokens[start:])
        found = [text.index(stop) for stop in stops if stop and stop in text]
        if found:
            return text[: min(found)]
    return text


@cache
def task_manager() -> Any:
    """What finds lm-eval's tasks; it reads thousands of files, some seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def evaluate(
    scorer: Scorer, tasks: Sequence[Any], limit: int | None, watch: Watch = lambda done, of: None
) -> list[Result]:
    """Results of lm-eval's own tasks (names, or its task objects), item by item."""
    model = language_model(scorer, watch)
    from lm_eval.evaluator import simple_evaluate

    for chatty in ("lm_eval", "huggingface_hub", "datasets"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    sys.stderr.write("lm-eval looks for its tasks and their data\n")
    manager = task_manager()
    known = set(manager.all_tasks)
    for task in tasks:
        if isinstance(task, str) and task not in known:
            raise LabError(f"lm-eval knows no task {task!r}: `lm_eval ls tasks` lists them")
    try:
        with _quiet():
            found = simple_evaluate(
                model=model, tasks=list(tasks), limit=limit, bootstrap_iters=0, log_samples=True,
                task_manager=manager,
            )  # fmt: skip
    except (OSError, ValueError) as error:
        said = ", ".join(str(task) for task in tasks)
        first = first_line(error)[:120]
        # datasets has many ways to say that there is no network, some of them ValueErrors.
        if isinstance(error, OSError) or "couldn't" in first.lower():
            raise LabError(OFFLINE.format(tasks=said, error=first)) from error
        raise LabError(f"lm-eval refuses {said}: {first}") from error
    assert found is not None
    groups = found.get("group_subtasks", {})
    names = [task if isinstance(task, str) else task.config.task for task in tasks]
    return [_result(name, _leaves(name, groups), found["samples"]) for name in names]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a bar for every part of a task, for we have one; and without what git may say."""
    import datasets
    from lm_eval import evaluator
    from lm_eval.api import task

    datasets.disable_progress_bars()
    theirs: list[tuple[Any, str, Any]] = [
        (task, "tqdm", lambda items, **_: items),
        (evaluator, "get_git_commit_hash", lambda: None),  # of the directory we are in
    ]
    theirs = [row for row in theirs if hasattr(row[0], row[1])]  # in this version of lm-eval
    kept = [getattr(module, name) for module, name, _ in theirs]
    for module, name, ours in theirs:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for (module, name, _), value in zip(theirs, kept, strict=True):
            setattr(module, name, value)


def _leaves(name: str, groups: dict[str, list[str]]) -> list[str]:
    """The tasks of a group, or the task itself."""
    if not groups.get(name):
        return [name]
    return [leaf for part in groups[name] for leaf in _leaves(part, groups)]


def _result(name: str, leaves: list[str], samples: dict[str, Any]) -> Result:
    items = [(leaf, item) for leaf in leaves for item in samples[leaf]]
    metrics = [m for m in ("acc", "acc_norm", "perplexity") if m in items[0][1]]
    if "acc" not in metrics:
        raise LabError(
            f"lm-eval's {name} has no accuracy: only tasks that have one are tabled here"
        )
    values = {
        "loglikelihood" if m == "perplexity" else m: np.array([float(i[m]) for _, i in items])
        for m in metrics
    }
    chance = None
    if "perplexity" not in metrics:
        chance = sum(1 / len(item["arguments"]) for _, item in items) / len(items)
    usual = PROMPTS[name].metric if name in PROMPTS else metrics[-1]
    metric = "acc" if "perplexity" in metrics else usual
    return Result(name, metric, values, [leaf for leaf, _ in items], chance)
