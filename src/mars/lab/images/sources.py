"""From what the user names (digits, a prepared directory, an archive, a folder) to images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

from mars.lab.data.manifest import FILE
from mars.lab.errors import LabError
from mars.lab.images import cifar, pictures, prepared
from mars.lab.images.catalogue import CATALOGUE
from mars.lab.images.dataset import Images, Raw, Sizes, Split, images_of
from mars.lab.images.digits import SIZES, digits
from mars.lab.images.tree import Tree, is_archive, open_tree

Progress = Callable[[int, int], None]
# What a set of files can be, and who reads it; the first that fits counts.
READERS: tuple[
    tuple[Callable[[frozenset[str]], object], Callable[[Tree, Progress | None], Raw]], ...
] = (
    (cifar.layout_of, cifar.read_cifar),
    (pictures.is_mosaic, pictures.read_mosaic),
    (pictures.is_folder, pictures.read_folder),
)


def open_images(source: str, split: Split) -> Images:
    """Open one split of a source.

    Args:
        source: ``"digits"`` (embedded); a directory made by ``mars data``; an archive of CIFAR-10
            or CIFAR-100 (Python or binary version), or its unpacked folder; a folder or zip with
            train/CLASS/… and valid, val or test, or with tiny-imagenet-200's layout; a zip of
            mosaics. All but the first two are decoded each time: ``mars data`` does it once.
        split: ``"train"`` or ``"valid"``.
    """
    if split not in get_args(Split):
        raise LabError(f"unknown split {split!r}: it must be 'train' or 'valid'")
    if source == "digits":
        return images_of(digits(), source, split)
    path = Path(source).expanduser()
    if path.is_dir() and (path / FILE).exists():
        return prepared.read(path, split, source)
    return images_of(read(source), source, split)


def read(source: str, progress: Progress | None = None) -> Raw:
    """Both splits of an archive or a folder."""
    path = Path(source).expanduser()
    if not path.exists():
        raise missing(source)
    with open_tree(path) as tree:
        for fits, reader in READERS:
            if fits(tree.names):
                return reader(tree, progress)
    raise LabError(
        f"{source} holds no images that mars knows: a CIFAR archive, its unpacked folder, or "
        "pictures in train/CLASS/ and valid/CLASS/"
    )


def missing(source: str) -> LabError:
    """What to say of a source that is not there: the command that makes it."""
    name = Path(source).name
    if source in CATALOGUE:
        return LabError(
            f"{source} is not here yet: run `mars data {source}`, then name data/{source}"
        )
    if name in CATALOGUE:
        return LabError(f"{source} is not here yet: run `mars data {name} --out {source}`")
    return LabError(
        f"no such file or directory: {source}; images are 'digits' (embedded), an archive, a "
        f"folder, or a directory made by `mars data NAME --out DIR` (NAME: {', '.join(CATALOGUE)})"
    )


def recognised(source: str) -> bool:
    """Whether `mars data SOURCE` is about images, and not about text."""
    path = Path(source).expanduser()
    if source in CATALOGUE or source == "digits":
        return True
    if not path.is_dir():
        return is_archive(path)
    if (path / FILE).exists():
        return prepared.is_prepared(path)
    with open_tree(path) as tree:
        return any(fits(tree.names) for fits, _ in READERS)


def sizes(source: str) -> Sizes | None:
    """What a source has, as far as that is known without reading pixels.

    Of a directory that is not made yet, what `mars data` would put there if its name is that of
    a data set; None if nothing is known.
    """
    if source == "digits":
        return SIZES
    path = Path(source).expanduser()
    if prepared.is_prepared(path):
        return prepared.load(path).sizes
    official = CATALOGUE.get(path.name)
    return official.sizes if official is not None and not path.exists() else None
