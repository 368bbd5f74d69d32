"""What ships inside the package: a small text, small images, GPT-2's merges (corpus/ORIGIN.md)."""

from __future__ import annotations

import bz2
import hashlib
from importlib.resources import files

from mars.lab.errors import LabError

# File in corpus/ (without .bz2) and the sha256 of what it unpacks to.
EMBEDDED = {
    "tinyshakespeare.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    "gpt2.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "digits.bin": "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826",
}


def embedded(name: str) -> str:
    """The text of an embedded file, checked."""
    return embedded_bytes(name).decode("utf-8")


def embedded_bytes(name: str) -> bytes:
    """The content of an embedded file, checked."""
    try:
        packed = (files("mars.lab.data") / "corpus" / f"{name}.bz2").read_bytes()
        data = bz2.decompress(packed)
    except (OSError, ValueError, EOFError) as error:
        raise LabError(
            f"the embedded {name} cannot be read ({error}): install mars again"
        ) from error
    if hashlib.sha256(data).hexdigest() != EMBEDDED[name]:
        raise LabError(f"the embedded {name} is damaged (its sha256 is wrong): install mars again")
    return data
