"""`mars data`: what it writes, and what it refuses."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow
import pytest
from data_files import TEXTS, content, documents, jsonl, stream, table

from mars.lab.data import (
    DataArgs,
    data_command,
    hub,
    open_tokens,
    prepare,
    verify,
)
from mars.lab.data.command import default_name, valid_share
from mars.lab.data.documents import ENDS
from mars.lab.data.hub import Dataset, HubDocuments, dataset_of
from mars.lab.errors import LabError


def test_every_document_is_written_once_with_the_end_of_text_first(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    manifest = prepare(
        str(jsonl(tmp_path / "a.jsonl")), tmp_path / "out", valid_fraction=0.1, shard_tokens=1000,
        progress=lambda *both: seen.append(both),
    )  # fmt: skip
    train, valid = (documents(stream(tmp_path / "out", split)) for split in ("train", "valid"))
    assert sorted(train + valid) == sorted(TEXTS)
    assert [t for t in TEXTS if t in set(train)] == train  # in order
    assert 15 < len(valid) < 50
    assert valid[0] == TEXTS[0]
    assert manifest.documents == 300
    assert seen[-1] == (300, manifest.tokens("train") + manifest.tokens("valid"))
    sizes = [entry.tokens for entry in manifest.shards["train"]]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {1000}
    assert verify(tmp_path / "out").complete
    names = {entry.file for split in manifest.shards.values() for entry in split}
    assert set(content(tmp_path / "out")) == names | {"manifest.json"}


def test_the_choice_of_validation_depends_on_the_number_alone(tmp_path: Path) -> None:
    prepare(str(jsonl(tmp_path / "a.jsonl")), tmp_path / "a", valid_fraction=0.1)
    prepare(str(jsonl(tmp_path / "b.jsonl", TEXTS[:150])), tmp_path / "b", valid_fraction=0.1)
    long, short = (documents(stream(tmp_path / name, "valid")) for name in "ab")
    assert long[: len(short)] == short


def test_the_first_documents_for_validation_and_a_limit(tmp_path: Path) -> None:
    source = str(jsonl(tmp_path / "a.jsonl"))
    prepare(source, tmp_path / "out", valid_documents=7, documents=20)
    assert documents(stream(tmp_path / "out", "valid")) == TEXTS[:7]
    assert documents(stream(tmp_path / "out", "train")) == TEXTS[7:20]


def test_all_kinds_of_files_give_the_same_shards(tmp_path: Path) -> None:
    plain = jsonl(tmp_path / "a.jsonl")
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(plain.read_bytes())
    with pyarrow.output_stream(str(tmp_path / "c.jsonl.zst"), compression="zstd") as file:
        file.write(plain.read_bytes())
    table(tmp_path / "d.parquet")
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i:04}.txt").write_text(text)
    hashes = set()
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "texts", "texts/*.txt"):
        out = tmp_path / f"out-{default_name(name)}-{len(hashes)}-{name[0]}{name[-1]}"
        manifest = prepare(str(tmp_path / name), out, shard_tokens=2000)
        hashes.add(tuple(entry.sha256 for split in manifest.shards.values() for entry in split))
    assert len(hashes) == 1


def test_one_text_file_is_split_like_the_usual_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars.lab.data.documents.BLOCK", 10_000)  # a long file, many pieces
    text = "".join(f"Scene {i}.\n\n\n" + "Étude of a  line; " * (i % 30) for i in range(1000))
    (tmp_path / "play.txt").write_text(text)
    manifest = prepare(str(tmp_path / "play.txt"), tmp_path / "out")
    assert manifest.documents == 1
    for split in ("train", "valid"):
        direct = open_tokens(str(tmp_path / "play.txt"), split)  # type: ignore[arg-type]
        assert stream(tmp_path / "out", split).tolist() == [50256, *direct.read(0, len(direct))]


@pytest.mark.parametrize("kind", ["files", "records"])
def test_each_of_few_documents_is_split_by_its_end(tmp_path: Path, kind: str) -> None:
    """Whole documents would not do: the first, which is long, would be most of validation."""
    texts = [f"{name} again, " * count for name, count in (("a", 9000), ("b", 300), ("c", 100))]
    (tmp_path / "in").mkdir()
    for name, text in zip("abc", texts, strict=True):
        if kind == "files":
            (tmp_path / "in" / f"{name}.md").write_text(text)
    if kind == "records":
        jsonl(tmp_path / "in" / "all.jsonl", ["", *texts])
    manifest = prepare(str(tmp_path / "in"), tmp_path / "out")
    assert manifest.documents == 3
    assert valid_share(manifest) == pytest.approx(0.01, rel=0.05)
    train, valid = (documents(stream(tmp_path / "out", split)) for split in ("train", "valid"))
    assert [a + b for a, b in zip(train, valid, strict=True)] == texts
    whole = prepare(str(tmp_path / "in"), tmp_path / "whole", valid_documents=1)
    assert documents(stream(tmp_path / "whole", "valid")) == texts[:1]
    assert whole.documents == 3


def test_few_documents_that_an_older_version_prepared_are_left_alone(tmp_path: Path) -> None:
    source = str(jsonl(tmp_path / "a.jsonl", TEXTS[:20]))
    manifest = prepare(source, tmp_path / "out")
    del manifest.settings[ENDS]
    manifest.save(tmp_path / "out")
    before = content(tmp_path / "out")
    assert prepare(source, tmp_path / "out") == manifest
    assert content(tmp_path / "out") == before
    manifest.complete, manifest.position = False, {"source": None, "split": None, "open": {}}
    manifest.save(tmp_path / "out")
    with pytest.raises(LabError, match=r"begun with other settings \(valid_ends: None, now True\)"):
        prepare(source, tmp_path / "out")


def test_bytes_are_separated_by_newlines_and_empty_documents_left_out(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", ["", "v", "", "a", "b", ""])
    manifest = prepare(
        str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer="bytes", valid_documents=1
    )
    assert stream(tmp_path / "out", "train", "bytes").tobytes() == b"\n\0a\0\n\0b\0"
    assert manifest.documents == 3


def test_the_hub_s_documents_are_streamed_and_resumed(tmp_path: Path) -> None:
    halves = [
        table(tmp_path / "0.parquet", TEXTS[:130]),
        table(tmp_path / "1.parquet", TEXTS[130:]),
    ]
    dataset = Dataset("parquet", data_files=tuple(map(str, halves)))
    assert [piece.text for piece in HubDocuments(dataset, "text").pieces(None)] == TEXTS
    for stop in (1, 64, 129, 130, 131, 299, 300):
        first = HubDocuments(dataset, "text")
        taken = first.pieces(None)
        for text in TEXTS[:stop]:
            assert next(taken).text == text
        position = json.loads(json.dumps(first.position()))
        rest = HubDocuments(dataset, "text").pieces(position)
        assert [piece.text for piece in rest] == TEXTS[stop:]
        taken.close()  # type: ignore[attr-defined]
    with pytest.raises(LabError, match=r"'body' \(there are: text, n\)"):
        HubDocuments(dataset, "body")


def test_a_dataset_of_the_hub_is_prepared_like_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl")
    local = Dataset("json", data_files=(str(source),))
    monkeypatch.setitem(hub.NAMED, "openwebtext", (local, 0.1))
    streamed = prepare("openwebtext", tmp_path / "hub", shard_tokens=1500)
    files = prepare(str(source), tmp_path / "files", shard_tokens=1500, valid_fraction=0.1)
    assert streamed.shards == files.shards
    assert streamed.complete
    assert prepare("openwebtext", tmp_path / "hub", shard_tokens=1500) == streamed  # nothing to do


def test_names_of_datasets() -> None:
    assert str(dataset_of("openwebtext")) == "hf:Skylion007/openwebtext::train"
    assert str(dataset_of("fineweb-edu")) == "hf:HuggingFaceFW/fineweb-edu:sample-10BT:train"
    assert dataset_of("hf:a/b@refs/convert/parquet:c") == Dataset(
        "a/b", "c", "train", "refs/convert/parquet"
    )
    assert dataset_of(str(dataset_of("hf:a/b::test"))) == Dataset("a/b", None, "test")
    for typed in ("hf:a/b", "hf:a/b@c", "hf:a/b:c", "hf:a/b::test", "hf:a/b@c:d:test"):
        found = dataset_of(typed)
        assert found is not None
        assert found.short == typed
    assert dataset_of("texts.jsonl") is None
    with pytest.raises(LabError, match="hf:a:b:c:d"):
        dataset_of("hf:a:b:c:d")


def test_the_hubs_retries_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets  # type: ignore[import-untyped,unused-ignore]

    def retries(*_: object, **__: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("nobody there")

    monkeypatch.setattr(datasets, "load_dataset", retries)
    level = logging.getLogger("huggingface_hub").level
    with pytest.raises(LabError, match=r"^cannot open hf:nosuch/nosuch \(ConnectionError: nobody"):
        HubDocuments(Dataset("nosuch/nosuch"), "text")
    assert caplog.text == ""
    assert logging.getLogger("huggingface_hub").level == level


def test_offline_says_so_and_writes_nothing(tmp_path: Path) -> None:
    code = """
        import sys
        from mars.lab.data import prepare
        from mars.lab.errors import LabError
        try:
            prepare("openwebtext", sys.argv[1])
        except LabError as error:
            print(error)
        """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "out"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert "cannot open hf:Skylion007/openwebtext" in run.stdout, run.stderr
    assert "needs a network" in run.stdout
    assert not (tmp_path / "out").exists()


BAD = {
    "missing": ("no.jsonl", None, r"no such file: .*no\.jsonl.*openwebtext"),
    "kind": ("a.pdf", "x", r"a\.pdf is not \.txt"),
    "json": ("a.jsonl", '{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
    "field": ("a.jsonl", '{"body": "a"}\n', r"line 1: no field 'text' \(there are: body\)"),
    "type": ("a.jsonl", '{"text": 3}\n', r"line 1: the field 'text' holds 3, not text"),
    "list": ("a.jsonl", '["a"]\n', r"line 1: a list, not an object with a field 'text'"),
    "latin": ("a.txt", b"caf\xe9", r"is not UTF-8 text .*: convert it"),
    "utf-16": ("a.txt", "café\n".encode("utf-16"), r"is UTF-16 text.*\(iconv -f UTF-16 -t UTF-8\)"),
    "utf-16-be": ("a.txt", b"\xfe\xff" + "caf".encode("utf-16-be"), r"iconv -f UTF-16"),
    "utf-16 lines": ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), r"l, line 1 is UTF-16 text"),
    "latin lines": ("a.jsonl", b'{"text": "caf\xe9"}\n', r"line 1 is not UTF-8 text .*-f LATIN1"),
    "gzip": ("a.jsonl.gz", "not gzip", r"a\.jsonl\.gz cannot be read"),
    "nested": ("a.jsonl", "[" * 100_000, r"a\.jsonl, line 1: not JSON"),
    "zstd": ("a.txt.zst", "not zstd", r"a\.txt\.zst cannot be read"),
    "parquet": ("a.parquet", "not parquet", r"a\.parquet is not a whole parquet"),
    "one document": ("a.jsonl", '{"text": "a"}\n', r"1 documents, and none was left for train"),
    "nothing": ("a.jsonl", "", r"a\.jsonl is empty"),
    "empty text": ("a.txt", "", r"a\.txt is empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_sources_are_refused_by_name_and_leave_no_trace(tmp_path: Path, case: str) -> None:
    name, text, message = BAD[case]
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LabError, match=message):
        prepare(str(tmp_path / name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_a_mark_of_utf_8_is_not_trained_on(tmp_path: Path, name: str) -> None:
    """Windows editors begin a file with it; longer than a piece, so that it is read by several."""
    text = (
        "é and more.\n" * 200_000
        if name != "a.jsonl"
        else "".join(json.dumps({"text": t}) + "\n" for t in TEXTS)
    )
    read = {}
    for mark in (b"", b"\xef\xbb\xbf"):
        data = mark + text.encode()
        path = tmp_path / str(len(mark)) / name
        path.parent.mkdir()
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        out = path.parent / "out"
        prepare(str(path), out, tokenizer="bytes")
        read[mark] = [stream(out, split, "bytes").tobytes() for split in ("train", "valid")]
    assert len(set(map(tuple, read.values()))) == 1


def test_a_damaged_archive_is_refused_by_name(tmp_path: Path) -> None:
    text = "".join(f"{i} words of a text\n" for i in range(20_000)).encode()
    packed = bytearray(gzip.compress(text))
    packed[len(packed) // 2 : len(packed) // 2 + 200] = bytes(200)
    (tmp_path / "a.txt.gz").write_bytes(packed)
    with pytest.raises(LabError, match=r"a\.txt\.gz (is damaged|cannot be read)"):
        prepare(str(tmp_path / "a.txt.gz"), tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out").exists()


def test_another_preparation_is_not_overwritten(tmp_path: Path) -> None:
    source = str(jsonl(tmp_path / "a.jsonl"))
    prepare(source, tmp_path / "out")
    before = content(tmp_path / "out")
    with pytest.raises(LabError, match=r"other settings \(tokenizer: 'gpt2', now 'bytes'\)"):
        prepare(source, tmp_path / "out", tokenizer="bytes")
    assert content(tmp_path / "out") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(LabError, match="mine is not empty"):
        prepare(source, tmp_path / "mine")
    assert content(tmp_path / "mine") == {"thesis.txt": b"dear"}
    with pytest.raises(LabError, match=r"a\.jsonl.* cannot be made: a part of the path is a file"):
        prepare(source, tmp_path / "a.jsonl" / "out")


def test_two_preparations_cannot_share_a_directory(tmp_path: Path) -> None:
    source = str(jsonl(tmp_path / "a.jsonl"))

    def intrude(*_: int) -> None:
        with pytest.raises(LabError, match="in use by another"):
            prepare(source, tmp_path / "out")

    assert prepare(source, tmp_path / "out", progress=intrude).complete


def test_wrong_numbers_are_refused(tmp_path: Path) -> None:
    source = str(jsonl(tmp_path / "a.jsonl"))
    wrong: list[dict[str, float]] = [
        {"valid_fraction": 0.0}, {"valid_fraction": 1.0}, {"valid_documents": 0}, {"documents": 0},
        {"shard_tokens": 0}, {"valid_fraction": 0.1, "valid_documents": 3},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(LabError, match=next(iter(options)).replace("_", "-")):
            prepare(source, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [5_000, 3_000_000])
def test_a_file_that_was_edited_in_its_place_is_not_prepared_before(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its size is what it was; a large file is known by pieces of it."""
    monkeypatch.setattr("mars.lab.data.documents.SAMPLE", 1 << 10)
    source = tmp_path / "a.txt"
    source.write_text("word " * (size // 5))
    prepare(str(source), tmp_path / "out", tokenizer="bytes")
    prepare(str(source), tmp_path / "out", tokenizer="bytes")
    text = source.read_text()
    source.write_text(f"{text[: size // 2]}sword{text[size // 2 + 5 :]}")
    with pytest.raises(LabError, match=r"the files have changed since .*out was made of them"):
        prepare(str(source), tmp_path / "out", tokenizer="bytes")


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tyro

    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl")
    line = ["a.jsonl", "--valid-documents", "5", "--tokenizer", "bytes"]
    args = tyro.cli(DataArgs, args=line, config=(tyro.conf.PositionalRequiredArgs,))
    data_command(args)
    assert "data/a: 300 documents" in capsys.readouterr().out
    data_command(DataArgs("data/a", verify=True))
    assert "every sha256 is right" in capsys.readouterr().out
    shard = tmp_path / "data" / "a" / "train_000000.bin"
    shard.write_bytes(shard.read_bytes()[::-1])
    with pytest.raises(LabError, match=r"train_000000\.bin is damaged"):
        data_command(DataArgs("data/a", verify=True))
    with pytest.raises(LabError, match=r"no such file: nosuch\*\.txt"):
        data_command(DataArgs("nosuch*.txt"))
    assert default_name("some/dir/") == "dir"
    with pytest.raises(LabError, match="give --out"):
        default_name("*.txt")


def test_the_share_of_validation_is_told_and_one_that_is_far_off_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(texts: list[str], name: str) -> tuple[str, str]:
        source = jsonl(tmp_path / f"{name}.jsonl", texts)
        data_command(DataArgs(str(source), out=tmp_path / name, tokenizer="bytes"))
        said = capsys.readouterr()
        return said.out, said.err

    out, err = told(["one text " * 1000], "one")
    assert "one: 1 document, " in out
    assert "(1.01 % for validation)" in out
    assert not err
    out, err = told(["first " * 9000, *TEXTS], "first")  # is always for validation
    share = out.split("(")[1].split(" for validation")[0]
    assert err.startswith(f"! {share} of the tokens are for validation, 1 % was asked for: ")
    assert err.count("\n") == 1


def test_a_dataset_that_is_a_program_is_asked_for_as_parquet(tmp_path: Path) -> None:
    """`datasets` runs no programs any more (Skylion007/openwebtext was one): the hub's copy is."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "old.py").write_text("raise SystemExit('never run')")
    with pytest.raises(LabError, match=r"cannot open hf:.*old@refs/convert/parquet"):
        HubDocuments(Dataset(str(tmp_path / "old")), "text")
