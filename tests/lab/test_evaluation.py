"""`mars eval` from local files: right sums, right items, one line for every mistake.

That the numbers are lm-eval's is shown in test_lm_eval.py; nothing here needs it.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_gpt import random_gpt

from mars.lab.cli import main
from mars.lab.data import tokenizer
from mars.lab.errors import LabError
from mars.lab.evaluation import prompts
from mars.lab.evaluation.command import EvalArgs, Lines, _names, eval_command
from mars.lab.evaluation.metrics import Result, average, difference, result, standard_error
from mars.lab.evaluation.scoring import Score, Scorer
from mars.lab.evaluation.table import table
from mars.lab.evaluation.tasks import Item, Task, open_tasks, read_task
from mars.lab.huggingface import writing
from mars.lab.loading import Loaded

SIZES = {"n_embd": 16, "block_size": 24}
PAIRS = [
    ("The cat sat", " on the mat"),
    ("The cat sat ", "on the mat"),
    ("Q: né 日本語", " 🙂 yes"),
    ("", "alone"),
    ("A context that is much longer than what fits", " end"),
    ("x", " a continuation that is longer than the context of the model, in windows"),
    ("The cat sat", " by the door"),
    ("The cat sat", " b"),
]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return random_gpt("bytes", **SIZES)


def plainly(loaded: Loaded, before: list[int], after: list[int]) -> Score:
    """One token at a time, all of the logits, in float64."""
    tokens, total, greedy = list(before), 0.0, True
    length = loaded.model.config.block_size
    for i, token in enumerate(after):
        # Within a window of `length` predictions the beginning stays.
        end = len(before) + min(len(after), (i // length + 1) * length) - 1
        start = max(0, end - length)
        with torch.no_grad():
            logits = loaded.model(torch.tensor([tokens[start:]]))[0, -1, :256].double()
        total += float(logits.log_softmax(0)[token])
        greedy &= int(logits.argmax()) == token
        tokens.append(token)
    return Score(total, greedy)


@pytest.mark.parametrize("batch_tokens", [1, 60, 4096])
def test_scores_are_those_of_one_token_at_a_time(loaded: Loaded, batch_tokens: int) -> None:
    scorer = Scorer(loaded.model, loaded.words, batch_tokens=batch_tokens)
    requests = scorer.encode(PAIRS)
    found = scorer.score(requests)
    for request, score in zip(requests, found, strict=True):
        expected = plainly(loaded, *request)
        assert score.loglikelihood == pytest.approx(expected.loglikelihood, rel=1e-5)
        assert score.greedy == expected.greedy
    assert found[0] == found[1]  # a space at the end of a context belongs to the continuation
    assert scorer.cut == 2


def test_few_logits_at_a_time_are_the_same(loaded: Loaded) -> None:
    scorer = Scorer(loaded.model, loaded.words)
    expected = scorer.text(PAIRS, lambda done, of: None)
    scorer.rows_at_once = 3
    for a, b in zip(scorer.text(PAIRS, lambda done, of: None), expected, strict=True):
        assert a.loglikelihood == pytest.approx(b.loglikelihood, rel=1e-6)
        assert a.greedy == b.greedy


def test_the_greedy_continuation_is_greedy(loaded: Loaded) -> None:
    scorer = Scorer(loaded.model, loaded.words)
    before = [65, 66, 67]
    tokens = list(before)
    for _ in range(5):
        tokens.append(int(loaded.model(torch.tensor([tokens]))[0, -1, :256].argmax()))
    after = tokens[3:]
    other = [*after[:-1], (after[-1] + 1) % 256]
    assert [s.greedy for s in scorer.score([(before, after), (before, other)])] == [True, False]


def test_choices_of_one_token_share_a_row(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(loaded.model, loaded.words)
    sizes: list[int] = []
    hidden = loaded.model.hidden
    monkeypatch.setattr(loaded.model, "hidden", lambda t: (sizes.append(t.numel()), hidden(t))[1])
    context = [int(t) for t in loaded.words.encode("Answer:")]
    found = scorer.score([(context, [letter]) for letter in b"ABCD"])
    assert sizes == [len(context)]
    assert len({score.loglikelihood for score in found}) == 4


def test_tokens_are_encoded_together_and_split_where_the_context_ends() -> None:
    scorer = Scorer(random_gpt(block_size=32).model, tokenizer("gpt2"))
    words = tokenizer("gpt2")
    ((before, after),) = scorer.encode([("Hello wor", "ld again")])
    whole = words.encode("Hello world again").tolist()
    assert before == words.encode("Hello wor").tolist()
    assert after == whole[len(before) :]
    ((before, after),) = scorer.encode([("", "Hello")])
    assert before == [50256]
    assert after == words.encode("Hello").tolist()
    with pytest.raises(LabError, match="no token of its own"):
        scorer.encode([("Hel", "lo")])  # one token, as the context alone
    with pytest.raises(LabError, match="nothing is left to score of ''"):
        scorer.encode([("Hello", "")])


def test_a_text_beyond_the_vocabulary_and_a_diverged_model_are_named(loaded: Loaded) -> None:
    small = random_gpt("bytes", vocab_size=100, **SIZES)
    with pytest.raises(LabError, match="token 195: the model knows 100"):
        Scorer(small.model, small.words).text([("a", "é")], lambda done, of: None)
    with torch.no_grad():
        small.model.transformer.ln_f.weight.fill_(math.nan)
    with pytest.raises(LabError, match="its training diverged"):
        Scorer(small.model, small.words).score([([65], [66])])


def test_progress_counts_to_the_end(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    Scorer(loaded.model, loaded.words, batch_tokens=30).text(PAIRS, lambda *x: seen.append(x))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]
    assert len(seen) > 3
    lines = Lines("model", every=0.0)
    lines(0, 8)
    lines(2, 8)
    assert "model: 25%, " in capsys.readouterr().err


# Metrics.


def choice(*logs: float, label: int, texts: tuple[str, ...]) -> Result:
    item = Item([("q", f" {text}") for text in texts], label)
    return result(Task("t", "acc", [item], ""), [Score(x, False) for x in logs])


def test_ties_go_to_the_first() -> None:
    assert choice(-2.0, -2.0, label=0, texts=("a", "b")).mean("acc") == 1
    assert choice(-2.0, -2.0, label=1, texts=("a", "b")).mean("acc") == 0


def test_lengths_are_characters_as_in_lm_eval_not_bytes() -> None:
    # A character: −2.0 and −1.5. A byte: −0.67 and −1.5.
    r = choice(-4.0, -3.0, label=1, texts=("日本", "ab"))
    assert r.mean("acc_norm") == 1
    r = choice(-4.0, -3.9, label=0, texts=("four", "abc"))
    assert (r.mean("acc"), r.mean("acc_norm")) == (0, 1)


def test_errors_of_means() -> None:
    x = np.array([1.0, 0, 0, 1, 1])
    assert standard_error(x) == pytest.approx(x.std(ddof=1) / math.sqrt(5))
    assert standard_error(np.array([1.0])) is None
    assert average([(0.2, 0.03), (0.4, 0.04)]) == (pytest.approx(0.3), pytest.approx(0.025))
    assert average([(0.2, None), (0.4, 0.04)])[1] is None


def test_differences_are_paired() -> None:
    rng = np.random.default_rng(0)
    a = (rng.random(500) < 0.5).astype(float)
    b = a.copy()
    b[:10] = 1.0
    one, other = (Result("t", "acc", {"acc": v}, [""] * 500, 0.25) for v in (a, b))
    mean, error = difference(one, other)
    assert mean == pytest.approx((b - a).mean())
    assert error == pytest.approx((b - a).std(ddof=1) / math.sqrt(500))
    alone = one.error("acc")
    assert alone is not None
    assert error is not None
    assert error < alone / 4


def test_the_average_leaves_out_the_last_word() -> None:
    word = Result("lambada_openai", "acc", {"acc": np.ones(4), "loglikelihood": -np.ones(4)},
                  [""] * 4, None)  # fmt: skip
    first = Result("a", "acc", {"acc": np.array([1.0, 0, 0, 0])}, [""] * 4, 0.25)
    second = Result("b", "acc", {"acc": np.array([1.0, 1, 1, 0])}, [""] * 4, 0.5)
    text = table(["m", "n"], [[first, second, word]] * 2)
    last = text.splitlines()[-1].split()
    assert last[:3] == ["average", "37.50", "50.00"]
    assert "2.718 ± 0" in text
    assert last[-3:] == ["+0.00", "±", "0.00"]


# Files.


def write(path: Path, *records: Any) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def item(**fields: Any) -> dict[str, Any]:
    return {"query": "Which?", "choices": ["this", "that"], "label": 1, **fields}


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("piqa", "{", "not JSON"),
        ("piqa", "[1]", "must be an object"),
        ("piqa", {"query": "x", "choices": ["a", "b"]}, "it has no 'label'; an item of piqa has"),
        ("piqa", item(label="1"), "label must be a int, not '1'"),
        ("piqa", item(label=True), "label must be a int, not True"),
        ("piqa", item(label=2), "label is 2, but there are 2 choices"),
        ("piqa", item(choices=["a"]), "choices must be two or more texts"),
        ("piqa", item(choices=["a", ""]), "choices must be two or more texts"),
        ("piqa", item(choices=["a", 3]), "choices must be two or more texts"),
        ("piqa", "[" * 100_000, "not JSON"),
        ("commonsense_qa", item(choices=list("abcdefghijklmnopqrstuvwxyz+")), "27 choices"),
        ("boolq", item(), "it has no 'passage'"),
        ("mmlu", item(), "it has no 'subject'"),
        ("winogrande", item(), r"has a blank \(_\)"),
        ("lambada_openai", {"query": "a"}, "it has no 'target'"),
        ("lambada_openai", {"query": "a", "target": " "}, "target is empty"),
    ],
)
def test_a_bad_item_is_named_by_file_and_line(
    name: str, record: Any, message: str, tmp_path: Path
) -> None:
    good: dict[str, Any] = {
        "boolq": item(passage="p"), "mmlu": item(subject="s"), "winogrande": item(query="a _ b"),
        "lambada_openai": {"query": "a", "target": " b"},
    }.get(name, item())  # fmt: skip
    path = write(tmp_path / f"{name}.jsonl", good, "", record)
    with pytest.raises(LabError, match=rf"{name}\.jsonl, line 3: .*{message}"):
        read_task(name, path)


def test_a_mark_of_utf_8_before_the_first_item_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "piqa.jsonl", item(), item(label=0))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [own.label for own in read_task("piqa", path).items] == [1, 0]
    path.write_bytes('{"query": "a"}'.encode("utf-16"))
    with pytest.raises(LabError, match=r"piqa\.jsonl is UTF-16 text.*iconv -f UTF-16"):
        read_task("piqa", path)


def test_a_last_word_has_no_label(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", {"query": "a", "target": " b", "label": 0})
    task = read_task("mine", path)
    assert [own.label for own in task.items] == [None]
    found = result(task, [Score(-2000.0, False)])
    assert found.perplexity is not None
    assert np.isfinite(found.perplexity[0])


def test_many_choices_have_letters(tmp_path: Path) -> None:
    path = write(tmp_path / "commonsense_qa.jsonl", item(choices=list("abcdefghijkl")))
    assert len(read_task("commonsense_qa", path).items[0].pairs) == 12


def test_files_are_found_by_task_and_split(tmp_path: Path) -> None:
    for name in ("openbookqa_dev", "openbookqa_test", "piqa_val", "mine", "other_test"):
        write(tmp_path / f"{name}.jsonl", item())
    write(tmp_path / "word.jsonl", {"query": "a", "target": " b"})
    (task,) = open_tasks([tmp_path], ["openbookqa"], None)
    assert task.source.endswith("openbookqa_test.jsonl")
    assert [t.name for t in open_tasks([tmp_path], None, None)] == ["openbookqa", "piqa"]
    (task,) = open_tasks([tmp_path / "mine.jsonl"], None, None)
    assert (task.name, task.metric) == ("mine", "acc")
    assert task.items[0].pairs == [("Which?", " this"), ("Which?", " that")]
    (task,) = open_tasks([tmp_path / "other_test.jsonl"], None, None)
    assert task.name == "other"
    (task,) = open_tasks([tmp_path], ["word"], None)
    assert (task.items[0].label, task.chance) == (None, None)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["sciq"], r"has no sciq\.jsonl .* it has empty, piqa_val"),
        (["empty"], "has no items"),
    ],
)
def test_what_is_not_there_is_said(names: list[str], message: str, tmp_path: Path) -> None:
    write(tmp_path / "piqa_val.jsonl", item())
    write(tmp_path / "empty.jsonl")
    with pytest.raises(LabError, match=message):
        open_tasks([tmp_path], names, None)
    with pytest.raises(LabError, match="nowhere does not exist"):
        open_tasks([tmp_path / "nowhere"], None, None)


def test_a_limit_is_of_each_subject(tmp_path: Path) -> None:
    records = [item(subject=s, query=str(i)) for s in ("law", "art") for i in range(5)]
    task = read_task("mmlu", write(tmp_path / "mmlu.jsonl", *records), 2)
    assert [i.group for i in task.items] == ["law", "law", "art", "art"]
    about, continuation = task.items[0].pairs[0]
    assert about.endswith("about law.\n\n0\nA. this\nB. that\nAnswer:")
    assert continuation == " A"


def test_chance_is_of_the_choices_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "arc_easy.jsonl", item(), item(choices=list("abcd")))
    assert read_task("arc_easy", path).chance == pytest.approx((1 / 2 + 1 / 4) / 2)


def test_winogrande_scores_the_rest_of_the_sentence() -> None:
    pairs = prompts.winogrande(item(query="Ann met Bea and _ smiled.", choices=["Ann", "Bea"]))
    assert pairs == [("Ann met Bea and Ann", " smiled."), ("Ann met Bea and Bea", " smiled.")]


# The command.


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and the data of three tasks."""
    folder = tmp_path_factory.mktemp("place")
    for name, layers in (("one", 1), ("two", 2)):
        writing.write(folder / name, random_gpt("bytes", n_layer=layers, **SIZES), "")
    data = folder / "data"
    data.mkdir()
    rng = np.random.default_rng(1)
    for name in ("piqa_val", "openbookqa_test"):
        words = ["red", "green", "a long one", "né", "blue"]
        chosen = [rng.permutation(words)[:3].tolist() for _ in range(20)]
        write(
            data / f"{name}.jsonl", *(item(choices=c, label=int(rng.integers(3))) for c in chosen)
        )
    records = [{"query": f"It is {i}", "target": " so"} for i in range(5)]
    write(data / "lambada_openai_test.jsonl", *records)
    return folder


def test_models_side_by_side(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "result.json"
    words = ["eval", str(place / "one"), str(place / "two"), "--data", str(place / "data")]
    words += ["--tasks", "obqa,piqa,lambada", "--device", "cpu", "--out", str(out)]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["task", "metric", "items", "chance", "one", "two"]
    assert "two − first" in lines[0]
    assert [line.split()[0] for line in lines[2:7]] == [
        "openbookqa", "piqa", "lambada_openai", "perplexity", "average",
    ]  # fmt: skip
    saved = json.loads(out.read_text())
    one, two = saved["models"]
    for name in ("openbookqa", "piqa"):
        a, b = one["tasks"][name], two["tasks"][name]
        assert a["items"] == 20
        assert a["chance"] == pytest.approx(1 / 3)
        gap = b["acc_norm"]["value"] - a["acc_norm"]["value"]
        assert b["minus_first"]["value"] == pytest.approx(gap)
    both = [two["tasks"][name]["acc_norm"]["value"] for name in ("openbookqa", "piqa")]
    assert two["average"]["value"] == pytest.approx(sum(both) / 2)
    assert one["tasks"]["lambada_openai"]["perplexity"]["value"] > 1


def test_a_model_alone_and_in_company_is_the_same(place: Path) -> None:
    def results(*names: str) -> list[list[Result]]:
        runs = tuple(place / name for name in names)
        return eval_command(EvalArgs(runs=runs, data=(place / "data",), device="cpu"))

    alone, both = results("two"), results("one", "two")
    for a, b in zip(alone[0], both[1], strict=True):
        for metric, values in a.values.items():
            np.testing.assert_array_equal(values, b.values[metric])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere does not exist: no run, no checkpoint, no Hugging Face folder"),
        (["data"], "neither a run directory nor a checkpoint, nor a Hugging Face folder"),
        (["one", "--limit", "0"], "--limit must be 1 or more, not 0"),
        (["one", "--batch-tokens", "0"], "--batch-tokens must be 1 or more"),
        (["one", "--tasks", ","], "--tasks is empty"),
        (["one", "--tasks", "sciq"], "has no sciq.jsonl"),
        (["one", "--checkpoint", "best"], "is a Hugging Face folder already"),
        (["one", "--out", "missing/x.json"], "the folder missing does not exist"),
        (["one", "--taskz", "x"], "--taskz"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, place: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    assert main(["eval", *words, "--data", "data", "--device", "cpu"]) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_without_lm_eval_and_without_data_it_says_what_to_do(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(place / "one"), "--tasks", "piqa", "--device", "cpu"]) == 1
    assert 'pip install ".[eval]", or evaluate local files' in capsys.readouterr().err


def test_a_checkpoint_is_called_by_its_run_too() -> None:
    def names(*runs: str) -> list[str]:
        return _names(tuple(map(Path, runs)))

    assert names("runs/a", "runs/b") == ["a", "b"]
    steps = ("runs/a/checkpoints/step-00000100", "b/checkpoints/step-00000060")
    assert names(*steps) == ["a/step-00000100", "b/step-00000060"]
    assert names("x/a", "y/a") == ["x/a", "y/a"]
    assert names(".") == ["."]
