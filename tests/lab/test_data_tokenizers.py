"""Text to tokens: the real GPT-2 encoding, whole and in chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mars.lab.data import embedded, tokenizer, tokenizers
from mars.lab.data.tokenizers import SPACES, chunks_of, last_border
from mars.lab.errors import LabError

# Words, signs, contractions, spaces of all kinds, and the controls that only Python calls spaces.
HARD = st.text(
    st.sampled_from([*"aé's!1 \n\t\r日😀", *SPACES, *"\x1c\x1d\x1e\x1f\u200b"]), max_size=80
)


def whole(text: str) -> list[int]:
    """tiktoken itself on the whole text."""
    return tokenizer("gpt2")._encoding.encode_ordinary(text)


def test_gpt2_gives_the_published_tokens() -> None:
    gpt2 = tokenizer("gpt2")
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("  It's 2024!\n\n\nEnd").tolist() == whole("  It's 2024!\n\n\nEnd")
    assert (gpt2.vocab_size, gpt2.eot, gpt2.name) == (50257, 50256, "gpt2")
    assert gpt2._encoding.n_vocab == 50257


def test_the_embedded_corpus_goes_round_and_chunks_change_nothing() -> None:
    text = embedded.embedded("tinyshakespeare.txt")
    gpt2 = tokenizer("gpt2")
    tokens = gpt2.encode(text)
    assert tokens.dtype == np.uint16
    assert len(list(chunks_of(text))) > 2
    assert tokens.tolist() == whole(text)
    assert gpt2.decode(tokens) == text


@given(HARD, st.integers(1, 20))
@settings(max_examples=300, deadline=None)
@example("a\n\n b", 1)
@example("x\x1c y", 1)
def test_a_cut_between_chunks_changes_no_token(text: str, size: int) -> None:
    chunks = list(chunks_of(text, size))
    assert "".join(chunks) == text
    assert [token for chunk in chunks for token in whole(chunk)] == whole(text)
    cut = last_border(text)
    assert whole(text[:cut]) + whole(text[cut:]) == whole(text)


@given(HARD, st.integers(0, 4), HARD)
@settings(max_examples=100, deadline=None)
def test_a_long_run_of_spaces_is_cut_without_a_trace(left: str, kind: int, right: str) -> None:
    text = left + " \n\t\xa0\u3000"[kind] * 5000 + right
    assert tokenizer("gpt2").encode(text).tolist() == whole(text)


def test_a_million_spaces_do_not_overflow() -> None:
    tokens = tokenizer("gpt2").encode("a" + " " * 1_000_000 + "b")
    assert tokenizer("gpt2").decode(tokens) == "a" + " " * 1_000_000 + "b"
    with pytest.raises(BaseException, match="StackOverflow"):
        whole("a" + " " * 1_000_000 + "b")  # when this passes, the chunk of spaces can go


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
@given(text=st.text(max_size=50))
@settings(max_examples=50, deadline=None)
def test_decode_undoes_encode(name: str, text: str) -> None:
    by = tokenizer(name)
    assert by.decode(by.encode(text)) == text
    assert [a.tolist() for a in by.encode_batch([text, "", "x"])] == [
        by.encode(text).tolist(), [], by.encode("x").tolist(),
    ]  # fmt: skip


def test_special_text_and_lone_surrogates_are_ordinary() -> None:
    for name in ("gpt2", "bytes"):
        by = tokenizer(name)
        assert by.decode(by.encode("a<|endoftext|>b")) == "a<|endoftext|>b"
        assert by.decode(by.encode("a\ud800b")) == "a\ufffdb"
    assert 50256 not in tokenizer("gpt2").encode("<|endoftext|>")


def test_wrong_names_and_tokens_are_refused_by_name() -> None:
    with pytest.raises(LabError, match=r"'gpt3'.*'gpt2' or 'bytes'"):
        tokenizer("gpt3")
    with pytest.raises(LabError, match=r"token 50257 .*'gpt2'"):
        tokenizer("gpt2").decode([1, 50257])
    with pytest.raises(LabError, match=r"token 256 .*'bytes'"):
        tokenizer("bytes").decode([256])


def test_a_damaged_embedded_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(embedded.EMBEDDED, "gpt2.bpe", "0" * 64)
    with pytest.raises(LabError, match=r"gpt2\.bpe is damaged"):
        tokenizers.GPT2().encode("x")
