"""How an item of a known task is put to the model: the prompts of lm-eval 0.4.13.

An item is a list of (context, continuation), one for each choice, and what `acc_norm` divides by.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Pair = tuple[str, str]
Record = dict[str, Any]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BRACKETS = re.compile(r"\[.*?\]")
_END_OF_SENTENCE = re.compile(r"[.!?:][\"')]*( +|$)")


@dataclass(frozen=True)
class Prompt:
    """A task's way of asking."""

    pairs: Callable[[Record], list[Pair]]
    metric: Literal["acc", "acc_norm"] = "acc"
    """What is reported, as lm-eval gives it: acc_norm where it has that."""
    fields: tuple[str, ...] = ("query", "choices", "label")
    """What a record must have."""
    group: str | None = None
    """The field that names the part of the task an item is of."""


def choices_after(context: str, choices: list[str]) -> list[Pair]:
    return [(context, f" {choice}") for choice in choices]


def plain(r: Record) -> list[Pair]:
    return choices_after(r["query"], r["choices"])


def question(r: Record) -> list[Pair]:
    return choices_after(f"Question: {r['query']}\nAnswer:", r["choices"])


def hellaswag(r: Record) -> list[Pair]:
    return choices_after(cleaned(capitalised(r["query"])), [cleaned(c) for c in r["choices"]])


def boolq(r: Record) -> list[Pair]:
    return choices_after(f"{r['passage']}\nQuestion: {r['query']}?\nAnswer:", r["choices"])


def sciq(r: Record) -> list[Pair]:
    context = f"{r['passage'].lstrip()}\nQuestion: {r['query']}\nAnswer:"
    return choices_after(context, r["choices"])


def social_iqa(r: Record) -> list[Pair]:
    return choices_after(f"Q: {r['passage']} {r['query']}\nA:", r["choices"])


def _lettered(stem: str, r: Record) -> list[Pair]:
    letters = list(LETTERS[: len(r["choices"])])
    lines = [f"{a}. {choice}" for a, choice in zip(letters, r["choices"], strict=True)]
    return choices_after("\n".join([stem, *lines, "Answer:"]), letters)


def mmlu(r: Record) -> list[Pair]:
    subject = r["subject"].replace("_", " ")
    about = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    return _lettered(about + r["query"].strip(), r)


def commonsense_qa(r: Record) -> list[Pair]:
    return _lettered(f"Question: {r['query'].strip()}", r)


def winogrande(r: Record) -> list[Pair]:
    """Each name in the blank, and how likely then is the rest of the sentence."""
    before, after = r["query"].split("_", 1)
    return [(before + choice, f" {after.strip()}") for choice in r["choices"]]


def last_word(r: Record) -> list[Pair]:
    return [(r["query"], r["target"])]


def capitalised(query: str) -> str:
    """With a capital where an unfinished last sentence begins, and none after it, as lm-eval writes
    HellaSwag.

    >>> capitalised("Roof shingle removal: A man is sitting on a roof. he")
    'Roof shingle removal: A man is sitting on a roof. He'
    >>> capitalised("Two men meet. bob greets Al")
    'Two men meet. Bob greets al'
    >>> capitalised("Finance: Press the home button. Log in.")
    'Finance: Press the home button. Log in.'
    """
    breaks = list(_END_OF_SENTENCE.finditer(query))
    start = breaks[-1].end() if breaks else 0  # the end, where the last sentence is finished
    return query[:start] + query[start:].capitalize()


def cleaned(text: str) -> str:
    """Without the marks of WikiHow and what else is in brackets, as lm-eval has HellaSwag.

    >>> cleaned("How to bake [title] Mix it [step] in a [large] bowl. ")
    'How to bake. Mix it in a bowl.'
    """
    text = _BRACKETS.sub("", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


WITH_PASSAGE = ("passage", "query", "choices", "label")
PLAIN = Prompt(plain)
LAST_WORD = Prompt(last_word, fields=("query", "target"))
PROMPTS = {
    "hellaswag": Prompt(hellaswag, "acc_norm"),
    "arc_easy": Prompt(question, "acc_norm"),
    "arc_challenge": Prompt(question, "acc_norm"),
    "boolq": Prompt(boolq, fields=WITH_PASSAGE),
    "openbookqa": Prompt(plain, "acc_norm"),
    "piqa": Prompt(question, "acc_norm"),
    "winogrande": Prompt(winogrande),
    "mmlu": Prompt(mmlu, fields=("subject", "query", "choices", "label"), group="subject"),
    "sciq": Prompt(sciq, "acc_norm", fields=WITH_PASSAGE),
    "social_iqa": Prompt(social_iqa, fields=WITH_PASSAGE),
    "commonsense_qa": Prompt(commonsense_qa),
    "lambada_openai": LAST_WORD,
}
# Short names, and those of files.
ALIASES = {
    "obqa": "openbookqa", "lambada": "lambada_openai", "siqa": "social_iqa",
    "csqa": "commonsense_qa", "wg": "winogrande", "arc_e": "arc_easy", "arc_c": "arc_challenge",
}  # fmt: skip
# Those of the authors' tables, and LAMBADA.
USUAL = [
    "hellaswag", "arc_easy", "arc_challenge", "boolq", "openbookqa", "piqa", "winogrande", "mmlu",
    "sciq", "lambada_openai",
]  # fmt: skip
