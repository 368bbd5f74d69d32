"""Configurations: what is refused, and that they survive JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from miniature import run

from mars.lab import recipes
from mars.lab.config import Run, check, from_json, to_json
from mars.lab.differences import first_difference
from mars.lab.errors import LabError


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_recipes_are_valid_and_survive_json(name: str) -> None:
    made = recipes.make(name)
    assert check(made) is made
    assert from_json(json.loads(json.dumps(to_json(made)))) == made
    assert made.recipe == name


@pytest.mark.parametrize(
    ("part", "field", "value", "words"),
    [
        ("loop", "steps", 0, "loop.steps must be above 0, not 0"),
        ("loop", "micro_batch_size", 3, "loop.batch_size (4) must be a multiple of"),
        ("optimizer", "lr", -1.0, "optimizer.lr must be above 0, not -1.0"),
        ("optimizer", "max_grad_norm", 0.0, "optimizer.max_grad_norm must be above 0"),
        ("model", "n_head", 3, "model.n_embd (16) must be a multiple of model.n_head (3)"),
        ("model", "dropout", 1.0, "model.dropout must be below 1"),
        ("schedule", "min_lr", 2.0, "schedule.min_lr is a share of the peak"),
    ],
)
def test_wrong_fields_are_named(
    tmp_path: Path, part: str, field: str, value: float, words: str
) -> None:
    with pytest.raises(LabError) as error:
        check(run(tmp_path).replace(**{part: {field: value}}))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loop": {"step": 3}}, "unknown field loop.step"),
        ({"colour": 1}, "unknown field colour"),
        ({"loop": {"steps": "many"}}, 'loop.steps cannot be "many"'),
        ({"loop": {"steps": True}}, "loop.steps cannot be true"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas cannot be [0.9]"),
        ({"schedule": {"shape": "square"}}, 'schedule.shape cannot be "square"'),
        ({"model": 3}, "model must be an object"),
    ],
)
def test_ill_typed_json_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(LabError) as error:
        from_json(change)
    assert words in str(error.value)


def test_integers_are_floats_where_floats_are_meant() -> None:
    made = from_json({"optimizer": {"lr": 1, "betas": [0, 0.5]}})
    assert made.optimizer.lr == 1.0
    assert isinstance(made.optimizer.lr, float)
    assert made.optimizer.betas == (0.0, 0.5)


def test_every_field_is_documented() -> None:
    """`--help` shows the text under a field."""
    import ast

    import mars.lab.config as module

    tree = ast.parse(Path(module.__file__).read_text())
    parts = {f.name for f in dataclasses.fields(Run)}
    for cls in [n for n in tree.body if isinstance(n, ast.ClassDef)]:
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert told or field.target.id in parts, f"{cls.name}.{field.target.id}"


def test_what_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    old = to_json(run(tmp_path))
    assert first_difference(old, to_json(run(tmp_path, log_every=1))) is None
    assert first_difference(old, to_json(run(tmp_path).replace(keep={"last": 7}))) is None
    other = to_json(run(tmp_path).replace(optimizer={"lr": 0.5}))
    assert first_difference(old, other) == ("optimizer.lr", 0.01, 0.5)
    other = to_json(run(tmp_path, seed=1))
    assert first_difference(old, other) == ("loop.seed", 0, 1)
