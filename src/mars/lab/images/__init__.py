"""Labelled images for training: sources, splits, crops and flips."""

from mars.lab.images.augment import draws, transform
from mars.lab.images.dataset import Images, Sizes, Split
from mars.lab.images.sources import open_images, sizes

__all__ = ["Images", "Sizes", "Split", "draws", "open_images", "sizes", "transform"]
