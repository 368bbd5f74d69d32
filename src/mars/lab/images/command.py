"""`mars data` for images: what a person sees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mars.lab.images.preparation import prepare_images
from mars.lab.images.prepared import ImageManifest, verify

if TYPE_CHECKING:
    from rich.console import Console


def images_command(source: str, out: Path, only_verify: bool) -> None:
    """Prepare a source, or verify a prepared directory, with a progress bar."""
    from rich.console import Console

    console = Console(highlight=False)
    if only_verify:
        with console.status("verifying") as status:
            manifest = verify(Path(source).expanduser(), status.update)
        console.print(f"{source}: {_summary(manifest)}; every sha256 is right", soft_wrap=True)
        return
    manifest = _with_progress(source, out, console)
    console.print(f"{out}: {_summary(manifest)}", soft_wrap=True)


def _with_progress(source: str, out: Path, console: Console) -> ImageManifest:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    fetching = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    decoding = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(),
        TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn(),
    )  # fmt: skip
    bars: dict[str, tuple[Progress, TaskID]] = {}

    def show(what: str, done: int, total: int | None) -> None:
        if what not in bars:
            for bar, _ in bars.values():
                bar.stop()  # one is shown at a time
            columns = fetching if what == "download" else decoding
            bar = Progress(*columns, console=console, disable=not console.is_terminal)
            bars[what] = bar, bar.add_task(f"{what} {source}", total=total)
            bar.start()
        bar, task = bars[what]
        bar.update(task, completed=done, total=total)

    try:
        return prepare_images(source, out, show)
    finally:
        for bar, _ in bars.values():
            bar.stop()


def _summary(manifest: ImageManifest) -> str:
    sizes = manifest.sizes
    return (
        f"{sizes.train:,} + {sizes.valid:,} images of {sizes.size}×{sizes.size}, "
        f"{sizes.classes} classes"
    )
