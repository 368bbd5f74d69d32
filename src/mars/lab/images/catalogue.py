"""Data sets that `mars data` downloads, from those who made them, and their checksums."""

from __future__ import annotations

from dataclasses import dataclass

from mars.lab.images.dataset import Sizes


@dataclass(frozen=True)
class Official:
    """One archive: where it is, what it must be, what is in it."""

    url: str
    md5: str  # as its makers publish it
    sizes: Sizes

    @property
    def file(self) -> str:
        """The archive's own name."""
        return self.url.rsplit("/", 1)[1]


# Of CIFAR the binary version: the same images as the Python one, and no pickles.
CATALOGUE = {
    "cifar10": Official(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        Sizes(50_000, 10_000, 10, 3, 32),
    ),
    "cifar100": Official(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        Sizes(50_000, 10_000, 100, 3, 32),
    ),
    "tiny-imagenet": Official(
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "90528d7ca1a48142e341f4ef8d21d0de",
        Sizes(100_000, 10_000, 200, 3, 64),
    ),
}
