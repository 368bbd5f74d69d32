"""Small data sets in the formats of the large ones."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

PER_BATCH = 3


@dataclass
class Cifar:
    """Random images of a CIFAR: five batches and a test batch, or train and test."""

    classes: int = 10
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        count = 6 * PER_BATCH
        self.pixels = self.rng.integers(0, 256, (count, 3072), np.uint8)
        self.labels = self.rng.integers(0, self.classes, count).tolist()
        self.names = [f"class {i}".encode() for i in range(self.classes)]

    def batches(self) -> dict[str, slice]:
        if self.classes == 100:
            return {"train": slice(0, 15), "test": slice(15, 18)}
        found = {f"data_batch_{i + 1}": slice(3 * i, 3 * i + 3) for i in range(5)}
        return {**found, "test_batch": slice(15, 18)}

    def python(self) -> dict[str, bytes]:
        """The files of the Python version, as Python 2 pickled them."""
        hundred = self.classes == 100
        top = "cifar-100-python" if hundred else "cifar-10-batches-py"
        files = {}
        for name, rows in self.batches().items():
            labels = self.labels[rows]
            batch = {
                b"filenames": [b"image_%d.png" % i for i in range(len(labels))],
                b"batch_label": b"one of several, " * 20,
                b"data": self.pixels[rows],
            }
            if hundred:
                batch |= {b"fine_labels": labels, b"coarse_labels": [i // 5 for i in labels]}
            else:
                batch[b"labels"] = labels
            files[f"{top}/{name}"] = python2(batch)
        key = b"fine_label_names" if hundred else b"label_names"
        meta = {b"num_vis": 3072, key: self.names}
        files[f"{top}/{'meta' if hundred else 'batches.meta'}"] = python2(meta)
        files[f"{top}/readme.html"] = b"<html>"
        return files

    def binary(self) -> dict[str, bytes]:
        """The files of the binary version: a label (or a coarse and a fine one), then an image."""
        hundred = self.classes == 100
        top = "cifar-100-binary" if hundred else "cifar-10-batches-bin"
        files = {}
        for name, rows in self.batches().items():
            records = b""
            for label, image in zip(self.labels[rows], self.pixels[rows], strict=True):
                records += bytes([label // 5, label] if hundred else [label]) + image.tobytes()
            files[f"{top}/{name}.bin"] = records
        names = b"\n".join(self.names) + b"\n\n"
        files[f"{top}/{'fine_label_names' if hundred else 'batches.meta'}.txt"] = names
        files[f"{top}/readme.html"] = b"<html>"
        return files


class Python2(pickle._Pickler):
    """Writes what Python 2's cPickle wrote: byte strings, numpy's old names, 0 for False."""

    dispatch: ClassVar[dict] = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value: bytes) -> None:
        size = len(value)
        head = b"U" + bytes([size]) if size < 256 else b"T" + struct.pack("<i", size)
        self.write(head + value)
        self.memoize(value)

    dispatch[bytes] = save_bytes

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.dtype):
            return np.dtype, (b"u1", 0, 1), (3, b"|", None, None, None, -1, -1, 0)
        return NotImplemented

    def save_global(self, value: Any, name: str | None = None) -> None:
        if getattr(value, "__name__", "") == "_reconstruct":
            self.write(b"cnumpy.core.multiarray\n_reconstruct\n")
            self.memoize(value)
        else:
            super().save_global(value, name)


def python2(value: Any) -> bytes:
    file = io.BytesIO()
    Python2(file, protocol=2).dump(value)
    return file.getvalue()


def tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return path


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return path


def unpacked(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def picture(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """(H, W) or (H, W, 3) as a file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()
