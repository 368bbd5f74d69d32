"""The engine of `mars data` for images: fetched if need be, decoded once, written and sealed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mars.lab.data.manifest import FILE
from mars.lab.data.preparation import locked
from mars.lab.errors import LabError
from mars.lab.images import prepared
from mars.lab.images.catalogue import CATALOGUE, Official
from mars.lab.images.dataset import SPLITS, Raw, fingerprint
from mars.lab.images.digits import digits
from mars.lab.images.download import download
from mars.lab.images.sources import missing, read
from mars.lab.rundir import TEMPORARY

Progress = Callable[[str, int, int | None], None]


def prepare_images(
    source: str, out: str | Path, progress: Progress | None = None
) -> prepared.ImageManifest:
    """Write both splits of a source to a directory, or leave it if it has them already.

    Args:
        source: the name of a data set of the catalogue, an archive, a folder, or ``"digits"``.
        out: the directory, new or of the same source.
        progress: called with what is done ("download" or "decode"), how far, and of how much.

    A download that was interrupted goes on; its archive is removed when the images are written.
    """
    if source not in CATALOGUE and source != "digits" and not Path(source).expanduser().exists():
        raise missing(source)
    directory = Path(out).expanduser()
    made = not directory.exists()
    with locked(directory):
        try:
            return _prepare(source, directory, progress)
        finally:
            if made and not any(directory.iterdir()):
                directory.rmdir()


def _prepare(source: str, directory: Path, progress: Progress | None) -> prepared.ImageManifest:
    def decoded(done: int, total: int) -> None:
        if progress is not None:
            progress("decode", done, total)

    official = CATALOGUE.get(source)
    old = _existing(directory, official)
    if old is not None and old.source == source and official is not None:
        return prepared.verify(directory, lambda _: None)
    if old is not None and (old.source in CATALOGUE or official is not None):
        raise LabError(f"{directory} holds {old.source} already: take another --out")
    if official is not None:
        return _downloaded(source, official, directory, progress, decoded)
    raw = digits() if source == "digits" else read(source, decoded)
    if old is None:
        return prepared.write(raw, source, directory)
    if any(old.splits[s].sha256 != fingerprint(raw.pixels[s], raw.labels[s]) for s in SPLITS):
        raise LabError(f"{directory} holds other images, of {old.source}: take another --out")
    return prepared.verify(directory, lambda _: None)


def _downloaded(
    source: str,
    official: Official,
    directory: Path,
    progress: Progress | None,
    decoded: Callable[[int, int], None],
) -> prepared.ImageManifest:
    def fetched(done: int, total: int | None) -> None:
        if progress is not None:
            progress("download", done, total)

    archive = directory / official.file
    download(official.url, archive, official.md5, fetched)
    raw = _complete(read(str(archive), decoded), official, source)
    manifest = prepared.write(raw, source, directory)
    archive.unlink()
    return manifest


def _complete(raw: Raw, official: Official, source: str) -> Raw:
    """A last look at what a checksum has vouched for."""
    found = (len(raw.labels["train"]), len(raw.labels["valid"]), len(raw.classes))
    wanted = (official.sizes.train, official.sizes.valid, official.sizes.classes)
    if found != wanted:
        raise LabError(f"{source} has {found} images and classes instead of {wanted}")
    return raw


def _existing(directory: Path, official: Official | None) -> prepared.ImageManifest | None:
    """The manifest of a prepared directory; None if one can be made there."""
    if (directory / FILE).exists():
        return prepared.load(directory)
    ours = {f"{split}.bin" for split in SPLITS}
    if official is not None:
        ours |= {official.file, official.file + ".part"}
    for path in directory.iterdir():
        if path.name.startswith(TEMPORARY):
            path.unlink()  # of a writer that was killed
        elif path.name not in ours:
            raise LabError(
                f"{directory} is not empty ({path.name}) and has no {FILE}: take another --out"
            )
    return None
