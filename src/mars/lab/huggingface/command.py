"""`mars export`: a checkpoint as a folder for the tools of others."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mars.lab.errors import LabError
from mars.lab.huggingface import is_folder, writing
from mars.lab.loading import Loaded, load
from mars.lab.log import read
from mars.lab.optimizers import label
from mars.lab.report import units
from mars.lab.sealed import read_manifest


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Write a checkpoint as a folder that transformers.AutoModelForCausalLM loads."""

    run: Path
    """A run directory, or a checkpoint in it."""
    to: Literal["hf"] = "hf"
    """The format: a Hugging Face folder with safetensors, tokenizer and model card."""
    out: Path | None = None
    """The folder; by default the run's name with -hf behind it, beside the run."""
    checkpoint: str | None = None
    """best, last, a step or a path; by default the best, or the newest where none is known."""
    overwrite: bool = False
    """Replace a Hugging Face folder that is there."""


def export_command(args: ExportArgs) -> Path:
    """Export, and say where it is."""
    if is_folder(args.run):
        raise LabError(f"{args.run} is a Hugging Face folder already")
    if args.out is not None:
        writing.check(args.out, args.overwrite)
    loaded = load(args.run, args.checkpoint)
    assert loaded.checkpoint is not None
    own = loaded.checkpoint.resolve()
    home = own if (own / "config.json").is_file() else own.parents[1]  # one of `mars convert`
    out = args.out if args.out is not None else home.with_name(f"{home.name}-hf")
    writing.write(out, loaded, card(loaded, home), overwrite=args.overwrite)
    unused = loaded.model.config.vocab_size - loaded.words.vocab_size
    if unused > 0:
        sys.stdout.write(f"left out {unused} rows of the embedding that are not tokens\n")
    sys.stdout.write(f"{out}\n")
    return out


def card(loaded: Loaded, home: Path) -> str:
    """The README.md of the folder: what the model is and how it came about."""
    run, path = loaded.run, loaded.checkpoint
    assert run is not None
    assert path is not None
    step = read_manifest(path)["step"]
    count = sum(p.numel() for p in loaded.model.parameters())
    valid = _validation_loss(home, step)
    o = run.optimizer
    rows: list[tuple[str, Any]] = [
        ("recipe", run.recipe),
        ("parameters", f"{count:,}"),
        ("context", f"{run.gpt.block_size} tokens"),
        ("tokenizer", run.text.tokenizer),
        ("data", run.data.source),
        ("steps", f"{step} of {run.loop.steps}"),
        ("tokens seen", units.tokens(step * run.loop.batch_size * run.gpt.block_size)),
        ("optimizer", f"{label(o.name)}, learning rate {units.rate(o.lr)}"),
        ("initial weights", run.gpt.init or f"drawn, seed {run.loop.seed}"),
        ("validation loss", "not known" if valid is None else units.loss(valid)),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {home.name}

A GPT-2 trained with mars.lab, exported by `mars export`.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""


def _validation_loss(home: Path, step: int) -> float | None:
    """What the run's log says of this step, if there is a log."""
    try:
        records = read(home)
    except LabError:
        return None
    found = [r["loss"] for r in records if r.get("kind") == "valid" and r.get("step") == step]
    return float(found[-1]) if found else None
