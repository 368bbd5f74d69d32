"""Our scores are lm-eval's: its own tasks, by its evaluator, with our model and with transformers'.

The tasks are lm-eval's own YAML files with local data in place of the hub's. The same items, as
JSONL, go through our own prompts, scorer and metrics.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_gpt import random_gpt

from mars.lab.data import tokenizer
from mars.lab.errors import LabError
from mars.lab.evaluation import harness
from mars.lab.evaluation.command import local
from mars.lab.evaluation.metrics import Result, standard_error
from mars.lab.evaluation.scoring import Scorer
from mars.lab.evaluation.tasks import open_tasks
from mars.lab.huggingface import writing
from mars.lab.loading import Loaded

if importlib.util.find_spec("lm_eval") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("needs lm-eval and transformers", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # theirs, of many kinds, while they are imported
    pytest.mark.slow,
]

# Passage, question, choices, label; what is odd about some is what could be scored wrongly.
ITEMS: list[tuple[str, str, list[str], int]] = [
    (
        "Water boils when it is hot.",
        "What happens to hot water",
        ["It boils", "It freezes", "It sings", "It sleeps soundly"],
        0,
    ),
    (
        "  A passage that begins with spaces.",
        "Où est le café",
        ["à côté", "日本語", "nowhere at all", "🙂 here"],
        3,
    ),
    ("Cats sleep. Dogs bark.", "Who barks ", ["cats", "dogs", "the cat ", "the dog"], 1),
    (
        "A long passage. " * 30,
        "Is it too long for the context",
        ["no", "yes", "perhaps", "never"],
        2,
    ),
    ("Ice melts.", "What melts", ["ice", "icy", "stone", "snow in the sun"], 3),
    ("Birds fly.", "What flies", ["birds", "fish", "stones", "trees"], 1),
    ("Fire burns.", "What burns", ["fire", "rain", "paper", "ash"], 2),
    # As WikiHow's part of HellaSwag has it.
    (
        "Salt.",
        "How to [salt] it [title] Begin",
        ["at [home] once", "[step] now", "no  [x]", "y"],
        0,
    ),
]
# Choices of many lengths, in characters and in bytes: `acc_norm` must divide by the right one.
ANSWERS = [
    "a",
    "né",
    "🙂🙂",
    "日本語です",
    "an answer",
    "längere Wörter",
    "no",
    "a much longer answer",
]
for seed in range(24):
    order = np.random.default_rng(seed).permutation(len(ANSWERS))
    ITEMS.append((f"Fact {seed}.", f"Which {seed}", [ANSWERS[i] for i in order[:4]], seed % 4))
ORIGINAL = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "sciq": "sciq/sciq.yaml",
    "social_iqa": "siqa/siqa.yaml",
    "commonsense_qa": "commonsense_qa/default.yaml",
    "mmlu": "mmlu/default/_default_template_yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
}


def theirs(task: str, passage: str, query: str, choices: list[str], label: int) -> dict[str, Any]:
    """An item with the fields of the original data set."""
    others = [choice for choice in choices if choice != choices[label]]
    text = f"{passage.strip()} {query.strip()} {choices[label].split()[-1]}"
    lettered = {"label": list("ABCD"), "text": choices}
    two = {"sol1": choices[0], "sol2": choices[1], "label": label % 2}
    arc = {"question": query, "choices": lettered, "answerKey": "ABCD"[label]}
    return {
        "arc_easy": arc,
        "arc_challenge": arc,
        "hellaswag": {
            "activity_label": "Doing things", "ctx_a": f"{query} is asked.", "ctx_b": "he then",
            "endings": choices, "label": str(label),
        },
        "boolq": {"passage": passage, "question": query, "label": label % 2},
        "openbookqa": {"question_stem": query, "choices": lettered, "answerKey": "ABCD"[label]},
        "piqa": {"goal": query, **two},
        "winogrande": {
            "sentence": f"{query} when _ is there, too.", "option1": choices[0],
            "option2": choices[1], "answer": str(label % 2 + 1),
        },
        "sciq": {
            "support": passage, "question": query, "correct_answer": choices[label],
            **{f"distractor{i + 1}": other for i, other in enumerate(others)},
        },
        "social_iqa": {
            "context": passage, "question": query, "answerA": choices[0], "answerB": choices[1],
            "answerC": choices[2], "label": str(label % 3 + 1),
        },
        "commonsense_qa": {
            "question": query, "answerKey": "ABCDE"[label],
            "choices": {"label": list("ABCDE"), "text": [*choices, "none"]},
        },
        "mmlu": {"question": query, "choices": choices, "answer": label},
        "lambada_openai": {"text": text},
    }[task]  # fmt: skip


def ours(task: str, passage: str, query: str, choices: list[str], label: int) -> dict[str, Any]:
    """The same item as our JSONL has it."""
    item: dict[str, Any] = {"query": query, "choices": choices, "label": label}
    if task == "hellaswag":
        item["query"] = f"Doing things: {query} is asked. he then"
    elif task == "boolq":
        item |= {"passage": passage, "choices": ["no", "yes"], "label": label % 2}
    elif task == "piqa":
        item |= {"choices": choices[:2], "label": label % 2}
    elif task == "winogrande":
        item = {
            "query": f"{query} when _ is there, too.", "choices": choices[:2], "label": label % 2,
        }  # fmt: skip
    elif task == "sciq":
        others = [c for c in choices if c != choices[label]]
        item |= {"passage": passage, "choices": [*others, choices[label]], "label": 3}
    elif task == "social_iqa":
        item |= {"passage": passage, "choices": choices[:3], "label": label % 3}
    elif task == "commonsense_qa":
        item["choices"] = [*choices, "none"]
    elif task == "mmlu":
        item["subject"] = "abstract_algebra"
    elif task == "lambada_openai":
        word = choices[label].split()[-1]
        item = {"query": f"{passage.strip()} {query.strip()}", "target": f" {word}"}
    return item


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return random_gpt()


@pytest.fixture(scope="module")
def exported(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "model"
    writing.write(folder, loaded, "# random\n")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our JSONL of every task."""
    folder = tmp_path_factory.mktemp("jsonl")
    for task in ORIGINAL:
        lines = [json.dumps(ours(task, *item), ensure_ascii=False) for item in ITEMS]
        (folder / f"{task}_test.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm-eval's own tasks, on local files with the fields of the original data, and a group."""
    import datasets
    import lm_eval.tasks

    datasets.disable_progress_bars()
    root = Path(lm_eval.tasks.__file__).parent
    folder = tmp_path_factory.mktemp("tasks")
    for task, original in ORIGINAL.items():
        data = folder / f"{task}.json"
        data.write_text("\n".join(json.dumps(theirs(task, *item)) for item in ITEMS))
        files = {split: str(data) for split in ("train", "validation", "test", "dev")}
        settings = {
            "include": str(root / original), "task": f"local_{task}", "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        }  # fmt: skip
        if task == "mmlu":
            settings["description"] = (
                "The following are multiple choice questions (with answers) about abstract "
                "algebra.\n\n"
            )
        (folder / f"local_{task}.yaml").write_text(json.dumps(settings))
    pair = {"group": "local_pair", "task": ["local_arc_easy", "local_piqa"]}
    (folder / "local_pair.yaml").write_text(json.dumps(pair))
    return lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def their_tasks(manager: Any) -> dict[str, Any]:
    found: dict[str, Any] = manager.load([f"local_{task}" for task in ORIGINAL])["tasks"]
    return found


@pytest.fixture(scope="module")
def by_transformers(exported: Path, their_tasks: dict[str, Any]) -> dict[str, Any]:
    """What lm-eval says of the exported model, tokenizer included, without a line of ours."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISABLE_MULTIPROC", "1")  # of the bootstrap
        found = simple_evaluate(
            model=model,
            tasks=list(their_tasks.values()),
            bootstrap_iters=10,
            log_samples=True,
            task_manager=harness.task_manager(),
        )
    assert found is not None
    return found


@pytest.fixture(scope="module")
def by_us(loaded: Loaded, files: Path) -> dict[str, Result]:
    tasks = open_tasks([files], list(ORIGINAL), None)
    scorer = Scorer(loaded.model, loaded.words, batch_tokens=200)
    return {r.task: r for r in local(scorer, tasks, lambda done, of: None)}


def test_prompts_and_log_likelihoods_are_those_of_lm_eval(
    loaded: Loaded, files: Path, by_transformers: dict[str, Any]
) -> None:
    """Every request of every task, to 1e-4: float32 sums in another order."""
    scorer = Scorer(loaded.model, loaded.words, batch_tokens=300)
    for task in open_tasks([files], list(ORIGINAL), None):
        samples = by_transformers["samples"][f"local_{task.name}"]
        samples = sorted(samples, key=lambda sample: sample["doc_id"])
        for item, sample in zip(task.items, samples, strict=True):
            asked = [tuple(a) for a in _arguments(sample)]
            assert item.pairs == asked, task.name
            scores = scorer.text(item.pairs, lambda done, of: None)
            said = [response[0] for response in sample["resps"]]
            assert [s.loglikelihood for s in scores] == pytest.approx(
                [float(a) for a, _ in said], abs=1e-4, rel=1e-5
            )
            assert [str(s.greedy) for s in scores] == [str(b) for _, b in said]


def _arguments(sample: dict[str, Any]) -> list[tuple[str, str]]:
    return [argument[:2] for argument in sample["arguments"]]


@pytest.mark.parametrize("task", ORIGINAL)
def test_numbers_and_standard_errors_are_those_of_lm_eval(
    task: str, by_us: dict[str, Result], by_transformers: dict[str, Any]
) -> None:
    found, result = by_transformers["results"][f"local_{task}"], by_us[task]
    for metric in ("acc", "acc_norm"):
        if f"{metric},none" in found:
            assert result.mean(metric) == pytest.approx(found[f"{metric},none"], abs=1e-12)
            error = found[f"{metric}_stderr,none"]
            assert result.error(metric) == pytest.approx(error, abs=1e-12)
    assert (result.metric == "acc_norm") == ("acc_norm,none" in found)
    if task == "lambada_openai":
        assert result.perplexity is not None
        assert result.perplexity[0] == pytest.approx(found["perplexity,none"], rel=1e-4)


def test_the_items_tell_metrics_apart(by_us: dict[str, Result]) -> None:
    """Else the comparison above would say little."""
    accuracies = {round(r.mean("acc"), 4) for r in by_us.values()}
    assert len(accuracies) > 2
    assert any(
        (r.values["acc"] != r.values["acc_norm"]).any()
        for r in by_us.values()
        if r.metric == "acc_norm"
    )


def test_lm_evals_evaluator_with_our_model_gives_our_numbers(
    loaded: Loaded, by_us: dict[str, Result], their_tasks: dict[str, Any]
) -> None:
    scorer = Scorer(loaded.model, loaded.words)
    for r in harness.evaluate(scorer, list(their_tasks.values()), None):
        own = by_us[r.task.removeprefix("local_")]
        for metric in r.values:
            np.testing.assert_allclose(r.values[metric], own.values[metric], rtol=1e-5, atol=1e-4)
            assert r.error(metric) == pytest.approx(own.error(metric), rel=1e-4)
        assert r.chance == pytest.approx(own.chance)


def test_a_group_has_the_items_of_its_tasks_and_little_is_said(
    loaded: Loaded,
    by_us: dict[str, Result],
    manager: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """MMLU has 57 of them: 57 bars for each checkpoint, and git's complaint, hid the table."""
    monkeypatch.chdir(tmp_path)  # which is no git repository
    monkeypatch.setattr(harness, "task_manager", lambda: manager)
    (found,) = harness.evaluate(Scorer(loaded.model, loaded.words), ["local_pair"], None)
    parts = [by_us["arc_easy"].values["acc"], by_us["piqa"].values["acc"]]
    np.testing.assert_array_equal(found.values["acc"], np.concatenate(parts))
    assert set(found.groups) == {"local_arc_easy", "local_piqa"}
    assert capfd.readouterr().err == "lm-eval looks for its tasks and their data\n"


def test_what_is_not_the_networks_fault_is_not_put_down_to_it(
    loaded: Loaded, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.evaluator

    monkeypatch.setattr(harness, "task_manager", lambda: manager)
    scorer = Scorer(loaded.model, loaded.words)
    for error, words in (
        (ConnectionError("Couldn't reach x on the Hub"), "needs a network once"),
        (ValueError("Couldn't find cache for x"), "needs a network once"),
        (ValueError("a wrong value"), r"lm-eval refuses local_piqa: a wrong value"),
    ):

        def refuse(raised: Exception = error, **_: Any) -> None:
            raise raised

        monkeypatch.setattr(lm_eval.evaluator, "simple_evaluate", refuse)
        with pytest.raises(LabError, match=words):
            harness.evaluate(scorer, ["local_piqa"], None)


def test_rolling_and_generation_are_those_of_transformers(loaded: Loaded, exported: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    texts = ["Short.", "A text that is longer than the context. " * 30, "naïve 日本語 🙂"]
    rolling = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    until = {"until": ["\n\n"], "max_gen_toks": 12}
    asked = [Instance("generate_until", {}, (text, until), i) for i, text in enumerate(texts[::2])]
    model = harness.language_model(Scorer(loaded.model, loaded.words))
    reference = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=2)
    expected = reference.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert model.loglikelihood_rolling(rolling) == pytest.approx(expected, rel=1e-5)
    made = model.generate_until(asked)
    assert made == reference.generate_until(asked, disable_tqdm=True)
    assert all(made)


def test_pooled_errors_are_those_of_a_group_of_lm_eval() -> None:
    from lm_eval.api.metrics import mean_stderr, pooled_sample_stderr

    parts = [np.array([0.0, 1, 1, 0, 1]), np.array([0.0, 0, 1]), np.array([1.0, 1, 1, 0])]
    groups = [str(i) for i, part in enumerate(parts) for _ in part]
    expected = pooled_sample_stderr([mean_stderr(p) for p in parts], [len(p) for p in parts])
    assert standard_error(np.concatenate(parts), groups) == pytest.approx(expected, abs=1e-15)


def test_the_error_of_a_perplexity_is_near_the_bootstraps(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.metrics import bootstrap_stderr, perplexity

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    logs = np.random.default_rng(0).normal(-3.0, 1.0, 400)
    result = Result("x", "acc", {"loglikelihood": logs}, [""] * 400, None)
    assert result.perplexity is not None
    value, error = result.perplexity
    assert value == pytest.approx(perplexity(list(logs)))
    # Of 1000 draws the bootstrap's own error is 2 %; the delta method drops higher terms.
    assert error == pytest.approx(bootstrap_stderr(perplexity, list(logs), 1000), rel=0.1)


def test_the_exported_tokenizers_are_ours(loaded: Loaded, exported: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    writing.write(tmp_path / "bytes", random_gpt("bytes"), "# bytes\n")
    text = "It's naïve:  日本語\n\n\t🙂 1234  don't  \u00a0 end "
    for name, folder in (("gpt2", exported), ("bytes", tmp_path / "bytes")):
        theirs = AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer(name).encode(text).tolist()
        assert theirs.encode(text) == tokens
        assert theirs.decode(tokens) == text
        assert theirs.eos_token_id == tokenizer(name).eot


def test_unknown_tasks_and_no_network_are_one_line(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets.config
    import huggingface_hub.constants

    scorer = Scorer(loaded.model, loaded.words)
    with pytest.raises(LabError, match=r"lm-eval knows no task 'hellaswagg'"):
        harness.evaluate(scorer, ["hellaswagg"], 2)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(LabError, match=r"cannot get the data of sciq .* give --data FOLDER"):
        harness.evaluate(scorer, ["sciq"], 2)
