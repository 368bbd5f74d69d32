"""Hugging Face folders: ours load in transformers with equal logits, theirs load here."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from miniature import run
from random_gpt import random_gpt

from mars.lab.cli import main
from mars.lab.config import read_config
from mars.lab.converting import ConvertArgs, convert_command
from mars.lab.errors import LabError
from mars.lab.huggingface import Folder, is_folder, writing
from mars.lab.huggingface.command import ExportArgs, export_command
from mars.lab.loading import load
from mars.lab.log import read
from mars.lab.safefile import SafeFile, SafeFileError
from mars.lab.train import train

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def gpt2(**fields: Any) -> Any:
    """A small random GPT-2 of transformers', with biases that count."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 40, "vocab_size": 256}
    settings = {"bos_token_id": None, "eos_token_id": None, **sizes, **fields}
    model = GPT2LMHeadModel(GPT2Config(**settings)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def reloaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder as `save_pretrained` writes it."""
    gpt2().save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bias": True},
        {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
        {"vocab_size": 256},
    ],
    ids=str,
)
def test_an_exported_model_has_equal_logits(fields: dict[str, Any], tmp_path: Path) -> None:
    loaded = random_gpt("bytes", **fields)
    writing.write(tmp_path / "out", loaded, "# card\n")
    theirs = reloaded(tmp_path / "out")
    tokens = torch.randint(0, 256, (3, 96))
    with torch.no_grad():
        expected = loaded.model(tokens)[..., :256]
        found = theirs(tokens).logits
    # Logits are sums of 16 products of numbers up to about 5.
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert theirs.lm_head.weight.data_ptr() == theirs.transformer.wte.weight.data_ptr()


def test_an_exported_model_generates_the_same_text(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "out"
    assert main(["export", str(trained), "--to", "hf", "--out", str(folder)]) == 0
    model, words = reloaded(folder), AutoTokenizer.from_pretrained(folder)
    ids = words("O Rom", return_tensors="pt").input_ids
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    ours = load(trained).model
    tokens = ids
    for _ in range(8):
        tokens = torch.cat([tokens, ours(tokens)[:, -1:].argmax(-1)], 1)
    assert made.tolist() == tokens.tolist()


def test_the_card_says_what_the_model_is(trained: Path, tmp_path: Path) -> None:
    export_command(ExportArgs(run=trained, out=tmp_path / "out", checkpoint="12"))
    text = (tmp_path / "out" / "README.md").read_text()
    loss = [r["loss"] for r in read(trained) if r["kind"] == "valid" and r["step"] == 12][-1]
    for said in ("miniature", "12 of 12", "tinyshakespeare", "MARS-AdamW", f"{loss:.4f}"):
        assert said in text


@pytest.mark.parametrize("fields", [{}, {"scale_attn_by_inverse_layer_idx": True}], ids=str)
def test_a_published_model_has_equal_logits_here(fields: dict[str, Any], tmp_path: Path) -> None:
    theirs = gpt2(**fields)
    theirs.save_pretrained(tmp_path / "gpt2")
    ours = load(tmp_path / "gpt2")
    assert ours.words.name == "bytes"
    assert ours.model.config.bias
    assert ours.model.config.block_size == 40
    tokens = torch.randint(0, 256, (2, 40))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours.model(tokens) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_base_models_names_and_half_precision_are_read(tmp_path: Path) -> None:
    theirs = gpt2().half()
    theirs.transformer.save_pretrained(tmp_path / "base")  # names without "transformer."
    assert "wte.weight" in SafeFile(tmp_path / "base" / "model.safetensors").names
    ours = load(str(tmp_path / "base")).model
    assert torch.equal(ours.transformer.wte.weight, theirs.transformer.wte.weight.float())


def test_there_and_back_is_the_same_to_the_bit(tmp_path: Path) -> None:
    loaded = random_gpt("bytes")
    assert not loaded.model.config.bias
    writing.write(tmp_path / "out", loaded, "", limit=4000)
    assert len(list(tmp_path.glob("out/model-*-of-*.safetensors"))) > 3
    again = load(str(tmp_path / "out"))
    assert not again.model.config.bias
    for (name, p), q in zip(again.model.named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(p, q[:256] if "wte" in name else q), name
    with torch.no_grad():
        tokens = torch.randint(0, 256, (1, 30))
        expected = loaded.model(tokens)[..., :256]
        found = reloaded(tmp_path / "out")(tokens).logits
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_training_begins_with_given_weights(published: Path, tmp_path: Path) -> None:
    words = ["train", "gpt-tiny", "--model.init", str(published), "--keep.out", str(tmp_path / "r")]
    words += ["--loop.steps", "2", "--loop.batch_size", "2", "--loop.eval_sequences", "8"]
    assert main([*words, "--loop.device", "cpu", "--optimizer.lr", "1e-3"]) == 0
    config = read_config(tmp_path / "r" / "config.json")
    assert config.model.n_embd == 32
    assert config.model.bias
    first = next(r["loss"] for r in read(tmp_path / "r") if r["kind"] == "valid")
    second = run(tmp_path / "again").replace(
        model={**vars(config.model), "init": str(tmp_path / "r"), "dropout": 0.0},
        loop={"eval_sequences": 8},
    )
    train(second)
    records = [r for r in read(tmp_path / "again") if r["kind"] == "valid"]
    last = [r["loss"] for r in read(tmp_path / "r") if r["kind"] == "valid"][-1]
    assert records[0]["loss"] == pytest.approx(last, rel=1e-6)
    assert last != pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.n_layer", "1"], "has transformer.h.1"),
        (
            ["--model.vocab_size", "320"],
            r"wte.weight has shape \(256, 32\), the model's \(320, 32\)",
        ),
        (["--model.no-bias"], "has biases .*: give --model.bias"),
        (["--model.init", "nowhere"], "nowhere does not exist: no run, no checkpoint"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    more: list[str], message: str, published: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = ["train", "gpt-tiny", "--model.init", str(published), "--keep.out", str(tmp_path / "r")]
    assert main([*words, "--loop.device", "cpu", *more]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "r").exists()


def test_a_run_with_given_weights_goes_on_without_them(published: Path, tmp_path: Path) -> None:
    model = {**vars(Folder(published).model), "init": str(published)}
    begun = run(tmp_path / "r", steps=3).replace(model=model)
    train(begun)
    shutil.rmtree(published)
    assert train(begun.replace(loop={"steps": 6}), extend=True).step == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function = 'relu'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ({"n_inner": 96}, "n_inner = 96"),
        ({"n_head": 5}, "n_head = 5 cannot divide"),
        ({"n_layer": "two"}, "n_layer = 'two'"),
        ({"n_layer": 3}, "lacks transformer.h.2"),
        ({"n_layer": 1}, "which our GPT-2 has not"),
        ({"n_positions": 41}, "wpe.weight has shape"),
        ({"vocab_size": 300}, "has 300 tokens|wte"),
        ({"model_type": "llama"}, "is a llama: only gpt2"),
    ],
    ids=str,
)
def test_what_ours_cannot_be_is_refused_by_name(
    changes: dict[str, Any], message: str, published: Path
) -> None:
    edit(published, **changes)
    with pytest.raises(LabError, match=message):
        _ = load(str(published)).words


def test_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    theirs = gpt2(tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path / "gpt2")
    edit(tmp_path / "gpt2", tie_word_embeddings=True)
    with pytest.raises(LabError, match=r"a head \(lm_head.weight\) of its own"):
        load(tmp_path / "gpt2")


def test_pickles_other_vocabularies_and_damage_are_refused(published: Path) -> None:
    (published / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    with pytest.raises(LabError, match=r"vocab.json is not the vocabulary of bytes"):
        load(str(published))
    (published / "vocab.json").unlink()
    path = published / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(LabError, match="does not fit its shape"):
        load(str(published))
    path.rename(published / "pytorch_model.bin")
    with pytest.raises(LabError, match=r"in a pickle \(pytorch_model.bin\)"):
        load(str(published))
    (published / "pytorch_model.bin").unlink()
    with pytest.raises(LabError, match=r"has no model\.safetensors"):
        load(str(published))


def test_nothing_is_overwritten_unasked(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "mine").mkdir(parents=True)
    args = ExportArgs(run=trained, out=out)
    with pytest.raises(LabError, match="is not empty"):
        export_command(args)
    with pytest.raises(LabError, match="is not a Hugging Face folder: it is not overwritten"):
        export_command(ExportArgs(run=trained, out=out, overwrite=True))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (out / "mine").rmdir()
    export_command(args)  # an empty folder is filled
    (out / "README.md").unlink()
    export_command(ExportArgs(run=trained, out=out, overwrite=True))
    assert (out / "README.md").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(LabError, match="is a Hugging Face folder already"):
        export_command(ExportArgs(run=out, out=tmp_path / "second"))


def test_a_converted_checkpoint_is_exported(trained: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "mine"
    convert_command(ConvertArgs(load(trained).checkpoint, "sharded", elsewhere))
    out = export_command(ExportArgs(run=elsewhere))
    assert out == tmp_path / "mine-hf"
    assert "| steps | 12 of 12 |" in (out / "README.md").read_text()


def test_a_converted_checkpoint_is_converted_again(trained: Path, tmp_path: Path) -> None:
    """In its place or to another: it keeps its configuration, and nothing around it is touched."""
    elsewhere, again = tmp_path / "models" / "mine", tmp_path / "again"
    convert_command(ConvertArgs(load(trained).checkpoint, "sharded", elsewhere))
    (tmp_path / ".tmp-of-somebody").touch()
    convert_command(ConvertArgs(elsewhere, "single", again))
    convert_command(ConvertArgs(elsewhere, "single"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-of-somebody", "again", "models"]
    weights = [
        torch.cat([p.flatten() for p in load(str(path)).model.parameters()])
        for path in (trained, elsewhere, again)
    ]
    assert torch.equal(weights[1], weights[0])
    assert torch.equal(weights[2], weights[0])


def test_a_failed_export_leaves_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "_publish", full)
    with pytest.raises(LabError, match="the disk is full"):
        export_command(ExportArgs(run=trained, out=tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_the_reader_reads_what_the_formats_own_package_wrote(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {
        "a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(3),
        "d": torch.randn(2, 2).half(), "e": torch.tensor([True, False]), "f": torch.empty(0, 4),
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors", {"who": "me"})
    file = SafeFile(tmp_path / "x.safetensors")
    assert set(file.names) == set(tensors)
    assert file.metadata == {"who": "me"}
    for name, t in tensors.items():
        assert torch.equal(file.tensor(name), t)
        assert file.tensor(name).dtype == t.dtype
        assert file.shape(name) == list(t.shape)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "header is longer"),
        (b"not JSON", "is not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 3}', "describes a wrongly"),
        (b'{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}', "type F4"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "does not fit"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "does not fit"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}', "does not fit"),
        (b'{"a": {"dtype": [], "shape": [0], "data_offsets": [0, 0]}}', "describes a wrongly"),
        (
            b'{"a": {"dtype": "F32", "shape": [18446744073709551616, 0], "data_offsets": [0, 0]}}',
            "does not fit",
        ),
    ],
)
def test_the_reader_trusts_no_header(header: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(SafeFileError, match=message):
        SafeFile(path)


def test_a_run_is_no_folder_of_theirs(trained: Path, published: Path, tmp_path: Path) -> None:
    assert not is_folder(trained)
    assert is_folder(published)
    assert not is_folder(tmp_path / "nowhere")
