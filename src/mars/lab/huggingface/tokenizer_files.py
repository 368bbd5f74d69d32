"""Our tokenizers as files that ``transformers.AutoTokenizer`` loads, made from what ships here."""

from __future__ import annotations

import json
from typing import Any

from mars.lab.data.tokenizers import merges, spelling, tokenizer

END = "<|endoftext|>"


def vocabulary(name: str) -> dict[str, int]:
    """Tokens and their numbers, bytes spelled as in GPT-2's vocab.json."""
    if name == "bytes":
        return {character: b for b, character in spelling().items()}
    known = {character: i for i, character in enumerate(spelling().values())}
    for left, right in merges():
        known[left + right] = len(known)
    return {**known, END: len(known)}


def files(name: str, context: int) -> dict[str, bytes]:
    """The files of a tokenizer, by name."""
    eot = tokenizer(name).eot
    special: list[dict[str, Any]] = []
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    if eot is not None:
        settings |= {"bos_token": END, "eos_token": END, "unk_token": END}
        special.append(
            {
                "id": eot, "content": END, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
        )  # fmt: skip
    pairs = [] if name == "bytes" else merges()
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
        "use_regex": name != "bytes",
    }  # fmt: skip
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": vocabulary(name),
            "merges": [list(pair) for pair in pairs],
        },
    }  # fmt: skip
    made = {
        "tokenizer.json": json.dumps(content, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode() + b"\n",
    }
    if name == "gpt2":  # what tools older than tokenizer.json read
        lines = "\n".join(["#version: 0.2", *(f"{a} {b}" for a, b in pairs), ""])
        made["vocab.json"] = json.dumps(vocabulary(name), ensure_ascii=False).encode()
        made["merges.txt"] = lines.encode()
    return made
