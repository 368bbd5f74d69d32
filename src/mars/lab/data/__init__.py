"""Tokens for training: corpora, shards, batches, and how shards are made."""

from mars.lab.data.batches import Batches, Validation
from mars.lab.data.command import DataArgs, data_command
from mars.lab.data.manifest import verify
from mars.lab.data.preparation import prepare
from mars.lab.data.shards import Tokens, check_vocabulary
from mars.lab.data.sources import open_tokens
from mars.lab.data.tokenizers import Tokenizer, tokenizer

__all__ = [
    "Batches",
    "DataArgs",
    "Tokenizer",
    "Tokens",
    "Validation",
    "check_vocabulary",
    "data_command",
    "open_tokens",
    "prepare",
    "tokenizer",
    "verify",
]
