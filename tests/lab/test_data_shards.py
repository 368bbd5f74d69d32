"""Streams of tokens from every kind of source, and the corrupt ones, refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars.lab.data import Tokens, check_vocabulary, open_tokens, prepare, shards, sources, tokenizer
from mars.lab.data.shards import Shard, cut_shards, open_shard
from mars.lab.errors import LabError

RAMP = np.arange(1000, dtype=np.uint16)


def raw(path: Path, tokens: np.ndarray) -> Path:
    tokens.astype("<u2").tofile(path)
    return path


def headered(
    path: Path, tokens: np.ndarray, magic: int = 20240520, version: int = 1, count: int = 1000
) -> Path:
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, count
    path.write_bytes(head.tobytes() + tokens.astype("<u2").tobytes())
    return path


def everything(tokens: Tokens) -> list[int]:
    return tokens.read(0, len(tokens)).tolist()


def test_tinyshakespeare_has_the_usual_split() -> None:
    train, valid = open_tokens("tinyshakespeare", "train"), open_tokens("tinyshakespeare", "valid")
    assert (len(train), len(valid)) == (301_966, 36_059)
    assert (train.tokenizer, train.fingerprint) == ("gpt2", "content")
    assert train.sha256 != valid.sha256
    assert open_tokens("tinyshakespeare", "valid").sha256 == valid.sha256
    text = tokenizer("gpt2").decode(train.read(0, 20))
    assert text.startswith("First Citizen:\nBefore we proceed")
    letters = [open_tokens("tinyshakespeare", split, "bytes") for split in ("train", "valid")]
    assert [len(stream) for stream in letters] == [1_003_854, 111_540]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.data())
def test_a_stream_reads_across_its_shards(sizes: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint16)
    cuts = np.split(whole, np.cumsum(sizes)[:-1])
    tokens = Tokens([Shard(len(part), array=part) for part in cuts], "x")
    stop = data.draw(st.integers(0, len(whole)))
    start = data.draw(st.integers(0, stop))
    assert tokens.read(start, stop).tolist() == whole[start:stop].tolist()
    both = cut_shards(tokens.shards, 0, start), cut_shards(tokens.shards, start, len(whole))
    assert [t for half in both for t in everything(Tokens(half, "half"))] == whole.tolist()


def test_reading_outside_is_an_error_and_copies_are_the_callers_own(tmp_path: Path) -> None:
    tokens = Tokens([open_shard(raw(tmp_path / "a.bin", RAMP))[0]], "a")
    for start, stop in ((-1, 3), (3, 2), (0, 1001)):
        with pytest.raises(IndexError):
            tokens.read(start, stop)
    tokens.read(0, 10)[:] = 7
    assert everything(tokens) == RAMP.tolist()


def test_more_shards_than_may_be_mapped_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "OPEN_MAPS", 2)
    for i in range(5):
        raw(tmp_path / f"x_train_{i}.bin", RAMP[i * 10 : i * 10 + 10])
    raw(tmp_path / "x_val_0.bin", RAMP)
    tokens = open_tokens(str(tmp_path), "train")
    assert everything(tokens) == list(range(50))
    assert everything(tokens) == list(range(50))
    assert len(tokens._maps) == 2


def test_nanogpt_directory(tmp_path: Path) -> None:
    raw(tmp_path / "train.bin", RAMP)
    raw(tmp_path / "val.bin", RAMP[:7])
    assert everything(open_tokens(str(tmp_path), "train")) == RAMP.tolist()
    valid = open_tokens(str(tmp_path), "valid")
    assert everything(valid) == RAMP[:7].tolist()
    assert valid.tokenizer is None


@pytest.mark.parametrize("how", ["directory", "glob"])
def test_headered_shards(tmp_path: Path, how: str) -> None:
    headered(tmp_path / "fineweb_train_000002.bin", RAMP[500:], count=500)
    headered(tmp_path / "fineweb_train_000001.bin", RAMP[:500], count=500)
    headered(tmp_path / "fineweb_val_000000.bin", RAMP[::-1])
    source = str(tmp_path if how == "directory" else tmp_path / "fineweb_*.bin")
    train, valid = open_tokens(source, "train"), open_tokens(source, "valid")
    assert everything(train) == RAMP.tolist()
    assert everything(valid) == RAMP[::-1].tolist()
    assert train.tokenizer == "gpt2"
    with pytest.raises(LabError, match=r"wrong tokenizer.*'gpt2'.*'bytes'"):
        open_tokens(source, "train", "bytes")


@pytest.mark.parametrize("write", [raw, headered])
def test_a_single_file_is_split_by_position(tmp_path: Path, write: object) -> None:
    path = write(tmp_path / "books.bin", RAMP)  # type: ignore[operator]
    train, valid = (
        open_tokens(str(path), split, valid_fraction=0.25) for split in ("train", "valid")
    )
    assert everything(train) == RAMP[:750].tolist()
    assert everything(valid) == RAMP[750:].tolist()


def test_a_glob_without_names_is_split_by_position(tmp_path: Path) -> None:
    raw(tmp_path / "a.bin", RAMP[:600])
    raw(tmp_path / "b.bin", RAMP[600:])
    source = str(tmp_path / "*.bin")
    both = [
        open_tokens(source, "train", valid_fraction=0.5),
        open_tokens(source, "valid", "gpt2", 0.5),
    ]
    assert [t for stream in both for t in everything(stream)] == RAMP.tolist()


def test_two_sources_are_taken_whole(tmp_path: Path) -> None:
    """A tenth is set aside for validation only where nothing else is given for it."""
    from miniature import run

    from mars.lab.tasks.language import open_data

    raw(tmp_path / "a.bin", RAMP % 200)
    raw(tmp_path / "val.bin", RAMP[:500] % 200)
    (tmp_path / "b.txt").write_text("x" * 300)
    made = run(tmp_path / "run")
    a, val, text = (str(tmp_path / name) for name in ("a.bin", "val.bin", "b.txt"))
    other = str(tmp_path / "." / ".." / tmp_path.name / "a.bin")  # the same
    sizes = {
        (source, valid): tuple(
            len(tokens)
            for tokens in open_data(made.replace(data={"source": source, "valid": valid}))
        )
        for source, valid in ((a, val), (a, text), (text, a), (a, None), (a, a), (a, other))
    }
    assert sizes == {
        (a, val): (1000, 500), (a, text): (1000, 300), (text, a): (300, 1000),
        (a, None): (900, 100), (a, a): (900, 100), (a, other): (900, 100),
    }  # fmt: skip


def test_a_text_file_is_tokenised_and_split_by_characters(tmp_path: Path) -> None:
    text = "Zwölf Boxkämpfer jagen Viktor über den Sylter Deich.\r\n" * 20
    (tmp_path / "a.md").write_bytes(text.encode())
    train, valid = (
        open_tokens(str(tmp_path / "a.md"), split, "bytes") for split in ("train", "valid")
    )
    assert tokenizer("bytes").decode(train.read(0, len(train))) == text[: int(len(text) * 0.9)]
    assert tokenizer("bytes").decode(valid.read(0, len(valid))) == text[int(len(text) * 0.9) :]


def test_big_streams_are_fingerprinted_by_their_edges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "HASHED", 100)
    prints = set()
    for name, part in (("a", RAMP), ("b", RAMP), ("a", RAMP[:-1]), ("a", RAMP[::-1])):
        tokens = Tokens([open_shard(raw(tmp_path / f"{name}.bin", part))[0]], "x")
        assert tokens.fingerprint == "names, sizes, heads and tails"
        prints.add(tokens.sha256)
    assert len(prints) == 4


REFUSED = {
    "missing": (lambda d: d / "no.bin", r"no such file.*no\.bin"),
    "odd": (lambda d: (d / "a.bin").write_bytes(b"abc") and d / "a.bin", r"a\.bin has 3 bytes"),
    "short header": (lambda d: headered(d / "a.bin", RAMP, count=1001), r"says 1001 .* holds 1000"),
    "long header": (lambda d: headered(d / "a.bin", RAMP, count=999), r"says 999 .* holds 1000"),
    "version": (lambda d: headered(d / "a.bin", RAMP, version=2), r"a\.bin .* another kind"),
    "llama": (lambda d: headered(d / "a.bin", RAMP, magic=20240801), r"a\.bin .* another kind"),
    "no shards": (lambda d: d, r"holds no manifest\.json and no \.bin"),
    "no val": (lambda d: raw(d / "train.bin", RAMP).parent, r"must hold train\.bin and val\.bin"),
    "jsonl": (lambda d: raw(d / "a.jsonl", RAMP), r"a\.jsonl is not plain text.*mars data"),
    "not UTF-8": (lambda d: (d / "a.txt").write_bytes(b"ab\xff") and d / "a.txt", r"is not UTF-8"),
}  # fmt: skip


def test_a_mark_of_utf_8_is_no_token(tmp_path: Path) -> None:
    text = "é and more.\n" * 20
    for name, encoding in (("plain", "utf-8"), ("marked", "utf-8-sig")):
        (tmp_path / f"{name}.txt").write_text(text, encoding=encoding)
    plain, marked = (
        open_tokens(str(tmp_path / f"{name}.txt"), "train", "bytes") for name in ("plain", "marked")
    )
    assert plain.sha256 == marked.sha256
    assert marked.read(0, 2).tolist() == list("é".encode())


@pytest.mark.parametrize("case", REFUSED)
def test_bad_sources_are_refused_by_name(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(LabError, match=message):
        open_tokens(str(make(tmp_path)), "train")


def test_a_header_cut_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = headered(tmp_path / "a.bin", RAMP)
    os.truncate(path, 600)
    with pytest.raises(LabError, match="says 1000 tokens, but it holds 0"):
        open_tokens(str(path), "train")


def test_a_long_text_must_be_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TEXT_BYTES", 10)
    (tmp_path / "a.txt").write_text("long enough to be refused")
    with pytest.raises(LabError, match=r"mars data .*a\.txt"):
        open_tokens(str(tmp_path / "a.txt"), "train")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(LabError, match="split 'test'"):
        open_tokens("tinyshakespeare", "test")  # type: ignore[arg-type]
    with pytest.raises(LabError, match="valid_fraction"):
        open_tokens("tinyshakespeare", "valid", valid_fraction=1.0)
    with pytest.raises(LabError, match="tokenizer 'llama'"):
        open_tokens("tinyshakespeare", "valid", "llama")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"Document {i}. " * 20}) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    prepare(
        str(tmp_path / "a.jsonl"), out, tokenizer="bytes", valid_fraction=0.2, shard_tokens=4000
    )
    return out


def test_a_prepared_directory_is_opened_with_its_fingerprint(prepared: Path) -> None:
    train = open_tokens(str(prepared), "train", "bytes")
    assert (train.tokenizer, train.fingerprint) == ("bytes", "manifest")
    assert len(train.shards) > 1
    again = open_tokens(str(prepared), "train", "bytes")
    assert again.sha256 == train.sha256 != open_tokens(str(prepared), "valid", "bytes").sha256
    train.verify()
    with pytest.raises(LabError, match=r"wrong tokenizer: .*'bytes'.*'gpt2'"):
        open_tokens(str(prepared), "train", "gpt2")


def test_a_truncated_shard_is_refused(prepared: Path) -> None:
    os.truncate(prepared / "train_000001.bin", 7998)
    with pytest.raises(LabError, match=r"train_000001\.bin has 7998 .* says 8000"):
        open_tokens(str(prepared), "train", "bytes")
    (prepared / "train_000001.bin").unlink()
    with pytest.raises(LabError, match=r"train_000001\.bin: .* missing"):
        open_tokens(str(prepared), "train", "bytes")


def test_a_flipped_bit_is_found(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = prepared / "train_000000.bin"
    data = bytearray(path.read_bytes())
    data[4321] ^= 1
    path.write_bytes(data)
    with pytest.raises(LabError, match=r"train_000000\.bin is damaged"):
        open_tokens(str(prepared), "train", "bytes")
    monkeypatch.setattr(sources, "CHECKED_SHARD", 10)  # too big to be read on opening
    train = open_tokens(str(prepared), "train", "bytes")
    with pytest.raises(LabError, match=r"train_000000\.bin is damaged"):
        train.verify()


MANIFESTS = {
    "torn": ('{"format": "mars.d', "is not JSON"),
    "foreign": ('{"name": "x"}', "is not a manifest of `mars data`"),
    "images": ('{"format": "mars.images"}', "holds images, not tokens"),
    "newer": ('{"format": "mars.data", "version": 2}', "has version 2"),
    "short": ('{"format": "mars.data", "version": 1}', "incomplete or ill-typed"),
    "escape": (
        '{"format": "mars.data", "version": 1, "tokenizer": "gpt2", "source": "", "settings": {}, '
        '"shards": {"train": [{"file": "../x.bin", "tokens": 1, "bytes": 2, "sha256": ""}], '
        '"valid": []}}',
        r"\.\./x\.bin",
    ),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_bad_manifest_is_refused(tmp_path: Path, case: str) -> None:
    text, message = MANIFESTS[case]
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(LabError, match=message):
        open_tokens(str(tmp_path), "train")


@pytest.mark.parametrize("small", [True, False])
def test_tokens_outside_the_vocabulary_are_found(
    monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    many = np.zeros(300_000, np.uint16)
    many[123_456:] = 50_256
    tokens = Tokens([Shard(len(many), array=many)], "some.bin")
    if not small:
        monkeypatch.setattr(shards, "SMALL", 1000)
    check_vocabulary(tokens, 50_257)
    with pytest.raises(LabError, match=r"some\.bin: token 50256 \(at \d+\) is outside .* 256"):
        check_vocabulary(tokens, 256)
    if small:
        with pytest.raises(LabError, match="at 123456"):
            check_vocabulary(tokens, 256)
