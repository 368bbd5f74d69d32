"""The snippets of the README run, links lead somewhere, and figures are those of the results."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)


def surroundings() -> dict:
    """What a reader has before the snippet: a model, data, a loop."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7))
    batches = list(torch.randint(0, 7, (4, 5)))
    names: dict = {"model": model, "loader": batches, "pairwise": pairwise}
    names["directory"] = tempfile.mkdtemp()

    def loss_of(model, batch):
        return nn.functional.cross_entropy(model(batch), batch)

    def closure():
        names["optimizer"].zero_grad()
        loss = loss_of(model, batches[0])
        loss.backward()
        return loss

    def train_step():
        names["optimizer"].step(closure)

    names |= {"loss_of": loss_of, "closure": closure, "train_step": train_step}
    names["adamw"] = torch.optim.AdamW(model.parameters())
    names["loss"] = loss_of(model, batches[0])
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = surroundings()
    for block in blocks(page):
        if page.name != "README.md":  # which is read from top to bottom and says its imports
            names = surroundings()
            exec("import mars\nfrom mars import MARS\noptimizer = MARS(model.parameters())", names)
        exec(block, names)
        assert names["optimizer"].param_groups


def test_committed_verdicts_are_what_the_results_say() -> None:
    from mars.lab.study.questions import STUDIES, find
    from mars.lab.study.results import Results
    from mars.lab.study.verdict import markdown, verdict

    kept = [path.parent for path in sorted((ROOT / "docs/results").glob("*/results.jsonl"))]
    assert kept
    for folder in kept:
        assert folder.name in STUDIES
        found = verdict(find(folder.name), Results(folder).read())
        assert (folder / "verdict.md").read_text() == markdown(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    """Every `mars train` and `mars race` of a page: its recipe exists, its options are options."""
    from mars.lab import arguments
    from mars.lab.race import RaceArgs

    kinds = {"train": arguments.TrainArgs, "race": RaceArgs}
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S):
        for line in block.splitlines():
            for part in line.split("#")[0].split("&&"):
                words = shlex.split(part)
                if len(words) < 2 or words[0] != "mars" or words[1] not in kinds:
                    continue
                recipe, rest = arguments.recipe_of(words[2:], "gpt-tiny", "mars")
                rest = arguments.shorthands(rest)
                name = recipe if not recipe.startswith("runs/") else "gpt-tiny"
                base = arguments.with_defaults(kinds[words[1]], arguments.base_run(name, rest))
                assert arguments.parse(kinds[words[1]], rest, "mars", "", base)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    points = json.loads((ROOT / "docs/results/convert_rates_h200.json").read_text())["points"]
    best = {name: min(p["mean"] for p in rows) for name, rows in points.items()}
    text = (ROOT / "README.md").read_text()
    for name in ("adamw", "mars-adamw", "mars-adamw, AdamW's betas", "muon", "mars-m"):
        assert f"({best[name]:.3f})" in text, (name, best[name])


def test_costs_of_the_readme_are_those_of_the_benchmark() -> None:
    rows = json.loads((ROOT / "docs/results/bench_xl_h200.json").read_text())["rows"]
    found = {row["name"]: row for row in rows}
    text = (ROOT / "README.md").read_text().split("## What a step costs")[1].split("\n## ")[0]
    for name in (
        "torch AdamW fused", "torch AdamW foreach", "torch AdamW fused + clip_grad_norm_",
        "mars-adamw fused", "mars-lion fused", "plain-adamw fused",
        *(f"mars-adamw fused, {v}" for v in ("consume_grads", "max_grad_norm", "bfloat16 state")),
    ):  # fmt: skip
        row = found[name]
        assert f"{row['ms']:.1f}" in text, (name, row["ms"])
        for ratio in (row["ratio"], row["gpu_ratio"]):
            assert f"{ratio:.2f}".removesuffix(".00") in text, (name, ratio)
    for name in ("mars-m fused", "mars-shampoo fused"):
        assert f"{found[name]['ms']:.0f}" in text, name
        assert f"{found[name]['ms'] / found['torch Muon']['ms']:.2f}" in text, name
