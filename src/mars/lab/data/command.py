"""`mars data SOURCE --out DIR`: tokenise text or decode images once, train often."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mars.lab.data.documents import local_files
from mars.lab.data.hub import dataset_of
from mars.lab.data.manifest import Manifest, verify
from mars.lab.data.preparation import prepare
from mars.lab.errors import LabError

if TYPE_CHECKING:
    from rich.console import Console

FAR = 3.0  # times the share that was asked for, or a third of it: worth a warning


@dataclass(frozen=True)
class DataArgs:
    """Prepare text or images for training; the same command resumes after an interruption."""

    source: str
    """A file, directory or glob of .txt, .md, .jsonl, .parquet (also .gz, .zst); openwebtext;
    fineweb-edu; or hf:org/name[@revision][:config[:split]]. Images: cifar10, cifar100,
    tiny-imagenet (downloaded); an archive of CIFAR; a folder or zip with train/CLASS/*.png or .jpg
    and valid, val or test. With --verify: a prepared directory."""

    out: Path | None = None
    """Where the result goes; by default data/ and the name of the source."""

    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    """GPT-2's byte-pair encoding, or plain bytes."""

    valid_fraction: float | None = None
    """Part for validation (0.0005 of openwebtext, 0.001 of other datasets of the hub, 0.1 of a
    single text file, 0.01 of other files): whole documents that are drawn, or, of files that hold
    fewer than 1 / this (or than 10) documents, the end of each."""

    valid_documents: int | None = None
    """Take the first so many documents for validation instead."""

    documents: int | None = None
    """Stop after so many documents."""

    shard_tokens: int = 100_000_000
    """Tokens of one shard."""

    text_field: str = "text"
    """Where a record has its text."""

    verify: bool = False
    """Prepare nothing: check the sha256 of every file of a prepared directory."""


def data_command(args: DataArgs) -> None:
    """Do what `mars data` was asked, with a progress bar."""
    from rich.console import Console

    from mars.lab.images.command import images_command
    from mars.lab.images.sources import recognised

    if recognised(args.source):
        _refuse_words_of_text(args)
        out = args.out or Path("data") / default_name(args.source)
        images_command(args.source, out, args.verify)
        return
    console = Console(highlight=False)
    if args.verify:
        with console.status("verifying") as status:
            manifest = verify(Path(args.source).expanduser(), lambda file: status.update(file))
        console.print(f"{args.source}: {_summary(manifest)}; every sha256 is right", soft_wrap=True)
        return
    if dataset_of(args.source) is None:
        local_files(args.source)  # what is not there is told before a name for it is missed
    out = args.out or Path("data") / default_name(args.source)
    manifest, new = _with_progress(args, out, console)
    there = "" if new else "prepared before, "
    console.print(f"{out}: {there}{_summary(manifest)}", soft_wrap=True)
    sys.stderr.write(far_off(manifest))


def _refuse_words_of_text(args: DataArgs) -> None:
    for field in fields(args):
        known = field.name in ("source", "out", "verify")
        if not known and getattr(args, field.name) != field.default:
            option = field.name.replace("_", "-")
            raise LabError(f"--{option} is for text, and {args.source} holds images")


def default_name(source: str) -> str:
    """The name of a source's directory.

    >>> default_name("hf:HuggingFaceFW/fineweb:sample-10BT"), default_name("texts/*.jsonl.gz")
    ('fineweb-sample-10BT', 'texts')
    """
    parts = [p for p in source.removeprefix("hf:").split("/") if p and "*" not in p]
    name = re.sub(r"[^\w-]+", "-", parts[-1].split(".")[0]).strip("-") if parts else ""
    if not name:
        raise LabError(f"{source!r} suggests no name for a directory: give --out")
    return name


def _with_progress(args: DataArgs, out: Path, console: Console) -> tuple[Manifest, bool]:
    """The manifest, and whether anything was left to do."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[documents]:,} documents  {task.completed:,.0f} tokens"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    # Where nothing is done, nothing is shown: transient until there is something.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(str(out), total=None, documents=0, rate="", visible=False)

        def show(documents: int, tokens: int) -> None:
            speed = bar.tasks[0].speed
            rate = f"{speed / 1e6:.2f}M tokens/s" if speed else ""
            bar.update(task, completed=tokens, documents=documents, rate=rate, visible=True)
            bar.live.transient = False

        made = prepare(
            args.source,
            out,
            tokenizer=args.tokenizer,
            valid_fraction=args.valid_fraction,
            valid_documents=args.valid_documents,
            documents=args.documents,
            shard_tokens=args.shard_tokens,
            text_field=args.text_field,
            progress=show,
        )
        return made, bar.tasks[0].visible


def _summary(manifest: Manifest) -> str:
    parts = [
        f"{manifest.tokens(split):,} {split} tokens in {len(own)} shard" + "s" * (len(own) != 1)
        for split, own in manifest.shards.items()
    ]
    documents = f"{manifest.documents:,} document" + "s" * (manifest.documents != 1)
    share = f"{_percent(valid_share(manifest))} for validation"
    return f"{documents}, {', '.join(parts)} ({share}), tokenizer {manifest.tokenizer}"


def valid_share(manifest: Manifest) -> float:
    """The part of all tokens that is for validation."""
    every = sum(manifest.tokens(split) for split in manifest.shards)
    return manifest.tokens("valid") / every if every else 0.0


def far_off(manifest: Manifest) -> str:
    """A line to warn with if validation got quite another share than was asked for, else none."""
    asked, share = manifest.settings.get("valid_fraction"), valid_share(manifest)
    if not asked or asked / FAR <= share <= asked * FAR:
        return ""
    return (
        f"! {_percent(share)} of the tokens are for validation, {_percent(asked)} was asked for: "
        "documents are too few, too short or too unequal; try another --valid-fraction and --out\n"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
