"""Text from checkpoints: the right tokens, whole characters, clear refusals."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from miniature import run

from mars.lab import checkpoint
from mars.lab.data import tokenizer
from mars.lab.errors import LabError
from mars.lab.loading import find, load, settings
from mars.lab.models import GPT
from mars.lab.sample import SampleArgs, choose, decode, generate, sample_command

BYTES = tokenizer("bytes")


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "mini"))


HERE = Path()


def args(where: Path = HERE, **fields: Any) -> SampleArgs:
    return SampleArgs(run=where, **{"device": "cpu", "tokens": 40, **fields})


def text_of(capsys: pytest.CaptureFixture[str], where: Path, **fields: Any) -> str:
    sample_command(args(where, **fields))
    return capsys.readouterr().out


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def test_greedy_text_is_the_argmax_of_each_cropped_context(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run(trained).model
    model = GPT(config)
    checkpoint.load(trained / "checkpoints" / "step-00000012", model)
    model.eval()
    prompt = "O Romeo, Romeo! wherefore art thou?"
    tokens = list(prompt.encode())
    assert len(tokens) > config.block_size
    for _ in range(30):
        logits = model(torch.tensor([tokens[-config.block_size :]]))[0, -1]
        tokens.append(int(logits.argmax()))
    expected = bytes(tokens).decode("utf-8", "replace")
    found = text_of(capsys, trained, prompt=prompt, tokens=30, temperature=0.0)
    assert found == expected + "\n"


def test_the_seed_decides_and_each_sample_has_its_own(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = text_of(capsys, trained, samples=2, seed=3)
    assert text_of(capsys, trained, samples=2, seed=3) == two
    first, second = two.removesuffix("\n").split("\n---\n")
    assert first != second
    assert text_of(capsys, trained, seed=4) == second + "\n"


def test_tokens_that_only_pad_the_vocabulary_never_come() -> None:
    config = dataclasses.replace(run(Path()).model, vocab_size=320)
    model = GPT(config).eval()
    with torch.no_grad():  # the head is tied to this table: padding would win by far
        model.transformer.wte.weight[256:] *= 1e3
    logits = model(torch.tensor([[65]]))[0, -1]
    assert int(logits.abs().argmax()) >= 256
    made = list(generate(model, [65], BYTES, args(tokens=300, temperature=5.0, top_k=0), 0))
    assert len(made) == 300
    assert max(made) < 256


def test_the_end_of_a_document_ends_the_text() -> None:
    words = tokenizer("gpt2")
    config = dataclasses.replace(run(Path()).model, vocab_size=50304)
    model = GPT(config).eval()
    with torch.no_grad():
        hidden = model.transformer(torch.tensor([[1]]), None)[0, -1]
        model.transformer.wte.weight[words.eot] = 1e3 * hidden
    assert list(generate(model, [1], words, args(temperature=0.0), 0)) == []


def test_top_k_top_p_and_temperature_choose_among_the_right_tokens() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(temperature: float, top_k: int, top_p: float) -> set[int]:
        return {choose(logits, temperature, top_k, top_p, generator) for _ in range(200)}

    assert drawn(0.0, 0, 1.0) == {1}
    assert drawn(1e-30, 0, 1.0) == {1}
    assert drawn(1.0, 0, 1.0) == {0, 1, 2, 3}
    assert drawn(1.0, 2, 1.0) == {1, 3}
    assert drawn(1.0, 0, 0.65) == {1, 3}
    assert drawn(1.0, 0, 0.75) == {1, 2, 3}
    assert drawn(1.0, 9, 1e-9) == {1}


def test_choices_follow_the_probabilities() -> None:
    shares = torch.tensor([0.1, 0.4, 0.2, 0.3])
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[choose(shares.log(), 1.0, 0, 1.0, generator)] += 1
    # Five standard deviations of a share: 5·√(0.25 / 4000) = 0.04.
    assert (counts / 4000 - shares).abs().max() < 0.04


def test_a_diverged_model_is_named() -> None:
    with pytest.raises(LabError, match="its training diverged"):
        choose(torch.tensor([0.0, float("nan")]), 1.0, 0, 1.0, torch.Generator())


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_pieces_join_to_the_text_and_no_character_is_torn(name: str) -> None:
    words = tokenizer(name)
    text = "naïve → 日本語 🙂👩‍👩‍👧 Unicode \ufffd end"
    tokens = [int(t) for t in words.encode(text)]
    pieces = list(decode(words, iter(tokens)))
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == 1
    assert len(pieces) > 15  # as it comes, not all at the end


def test_any_bytes_can_be_shown() -> None:
    random.seed(0)
    for length in range(60):
        # Of few kinds: ASCII, continuations and starts of two, three and four bytes, never valid.
        tokens = random.choices([65, 0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0x9F, 0xFF], k=length)
        whole = bytes(tokens).decode("utf-8", "replace")
        assert "".join(decode(BYTES, iter(tokens))) == whole


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("samples", 0),
        ("seed", -1),
    ],
)
def test_bad_values_are_refused_by_name(trained: Path, field: str, value: float) -> None:
    with pytest.raises(LabError, match=f"--{field.replace('_', '-')} must be .*, not {value}"):
        sample_command(args(trained, **{field: value}))


def test_checkpoints_are_found(trained: Path) -> None:
    folder = trained / "checkpoints"
    last, before = folder / "step-00000012", folder / "step-00000009"
    for choice in (None, "best", "last", "12", "step 12", "step-00000012", str(last)):
        assert find(trained, choice)[1] == last
    assert find(trained, "step-9")[1] == before
    config, path = find(before)
    assert path == before
    assert config == find(trained)[0] == run(trained)


def test_without_a_best_the_newest_intact_one_is_taken(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copied / "checkpoints" / "step-00000012" / "model.safetensors")
    assert find(copied)[1].name == "step-00000009"
    assert "step-00000012: model.safetensors does not match" in capsys.readouterr().err
    with pytest.raises(LabError, match="has no best checkpoint"):
        find(copied, "best")
    with pytest.raises(LabError, match="does not match its checksum"):
        sample_command(args(copied, checkpoint="12"))


def test_a_best_that_is_not_the_newest_is_told(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It need not be the best there is: what was not validated when it was saved is none."""
    folder = copied / "checkpoints"
    (folder / "best.json").write_text(json.dumps({"step": 9, "loss": 5.0}))
    said = (
        f"! {copied}: step 9 is taken, the best of the checkpoints that were validated when they "
        "were saved; the newest is of step 12\n"
    )
    for choice in (None, "best"):
        assert load(copied, choice).checkpoint == folder / "step-00000009"
        assert capsys.readouterr().err == said
    settings(str(copied))  # for a model that begins with these weights
    assert capsys.readouterr().err == said
    for choice in ("last", "9"):
        load(copied, choice)
    load(folder / "step-00000009")
    assert capsys.readouterr().err == ""


def test_what_is_not_there_is_one_clear_line(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="nowhere does not exist: no run, no checkpoint"):
        sample_command(args(tmp_path / "nowhere"))
    with pytest.raises(LabError, match="neither a run directory nor a checkpoint"):
        sample_command(args(tmp_path))
    with pytest.raises(LabError, match="has no 77 checkpoint; --checkpoint is best, last"):
        sample_command(args(copied, checkpoint="77"))
    with pytest.raises(LabError, match="is a checkpoint already"):
        sample_command(args(copied / "checkpoints" / "step-00000012", checkpoint="9"))
    for step in (9, 12):
        (copied / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    with pytest.raises(LabError, match="has no intact checkpoint"):
        sample_command(args(copied))
