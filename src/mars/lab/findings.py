"""What a search found: tune.json with all trials, best.json as a recipe, and a table."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mars.lab import arguments, recipes, search
from mars.lab.config import Run, from_json, read_config, to_json
from mars.lab.differences import first_difference, is_free
from mars.lab.errors import LabError
from mars.lab.hardware import own_code
from mars.lab.optimizers import label
from mars.lab.report import fit, units
from mars.lab.rundir import write_json

if TYPE_CHECKING:
    import optuna

CODE = "optimizer_code"  # the sha256 of a user's own optimizer, as in a run's log
STRICT = ("eval_every",)  # by validations trials are pruned
SHOWN = 5  # trials in the table


def ranked(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Trials that got to their end, the best first."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(trials, key=lambda trial: (trial.value, trial.number))


def best(study: optuna.Study) -> int | None:
    """The number of the best trial so far."""
    trials = ranked(study)
    return trials[0].number if trials else None


def folders(number: int, run: Run, seeds: int) -> list[str]:
    """The run directories of a trial, one a seed."""
    first = run.loop.seed
    name = f"trial-{number:04d}"
    return [name] if seeds == 1 else [f"{name}-s{s}" for s in range(first, first + seeds)]


class Findings:
    """The files and the words of a search."""

    def __init__(
        self, directory: Path, run: Run, ranges: Mapping[str, search.Range], seeds: int,
        command: str,
    ) -> None:  # fmt: skip
        self.directory, self.run, self.ranges = directory, run, ranges
        self.seeds, self.command = seeds, command

    def begun(self) -> list[Path]:
        """The directories of trials that have begun, in their order."""
        return sorted(path.parent for path in self.directory.glob("trial-*/config.json"))

    def compare(self) -> None:
        """Refuse the directory of another search, by the first thing in which it differs."""
        path = self.directory / "tune.json"
        if not path.exists():
            return
        try:
            old = json.loads(path.read_text())
            ranges, seeds, config = old["search"], old["seeds"], from_json(old["config"])
            ended = any(trial["state"] not in ("running", "waiting") for trial in old["trials"])
            code = old.get(CODE)  # searches had it not from the beginning
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{path} cannot be read: {error!r}; choose another --out") from error
        begun = self.begun()
        if not begun and not ended:  # killed before anything was read: the data may be anywhere
            place = {"source": self.run.data.source, "valid": self.run.data.valid}
            config = config.replace(data=place)
        for trial in begun[:1]:  # it knows where the data are now, if they were moved
            with suppress(LabError):  # damaged: the trial itself will tell, if it is to go on
                config = dataclasses.replace(config, data=read_config(trial / "config.json").data)
        self._compare_code(code)
        holds = f"{self.directory} holds a search with"
        difference = first_difference(to_json(config), to_json(self.run), STRICT)
        if difference is not None:
            field, was, value = difference
            raise LabError(f"{holds} {field} = {was!r}, not {value!r}: choose another --out")
        if seeds != self.seeds or ranges != self._about()["search"]:
            words = f"--seeds {seeds} --search {' '.join(ranges)}"
            raise LabError(f"{holds} {words}: choose another --out")

    def _compare_code(self, was: str | None) -> None:
        """Refuse trials of a user's own optimizer beside those of what it was."""
        own = self.run.optimizer.name
        code = own_code(own)
        if was and code and was != code:
            raise LabError(
                f"the module of {own} has changed since the search in {self.directory} began (its "
                f"sha256 was {was[:12]}, now {code[:12]}): restore it or choose another --out"
            )

    def _about(self) -> dict[str, Any]:
        return {
            "recipe": self.run.recipe,
            "optimizer": self.run.optimizer.name,
            "search": {name: dataclasses.asdict(found) for name, found in self.ranges.items()},
            "seeds": self.seeds,
            "command": self.command,
            "config": to_json(self.run),
            CODE: own_code(self.run.optimizer.name),
        }

    def write(self, study: optuna.Study) -> None:
        """Both files, as far as the search has got."""
        trials = [
            {
                "number": t.number,
                "state": t.user_attrs.get("state", t.state.name.lower()),
                "loss": t.user_attrs.get("loss"),
                "seconds": t.user_attrs.get("seconds"),
                "values": t.params,
                "runs": folders(t.number, self.run, self.seeds),
                "validation": {str(s): v for s, v in t.intermediate_values.items()},
            }
            for t in study.get_trials(deepcopy=False)
        ]
        about = {**self._about(), "best": best(study), "trials": trials}
        write_json(self.directory / "tune.json", about)
        if about["best"] is not None:
            write_json(self.directory / "best.json", self.settings(ranked(study)[0].params))

    def settings(self, values: Mapping[str, float]) -> dict[str, Any]:
        """A recipe with these values: all of the optimizer, and else what its recipe lacks."""
        run = search.at(self.run, self.ranges, values)
        known = run.recipe in recipes.RECIPES
        own = recipes.make(run.recipe, run.optimizer.name) if known else Run()
        everything = to_json(run)
        parts = {
            part: {name: everything[part][name] for name in sorted(names)}
            for part, names in arguments.changes(own, run).items()
        }
        parts.pop("keep", None)
        if not known:
            parts.setdefault("model", {})  # or its label would be taken for the name of a recipe
        loop = {
            name: value
            for name, value in parts.pop("loop", {}).items()
            if name in STRICT or not (name == "seed" or is_free(everything, "loop", name))
        }
        optimizer = {
            name: value
            for name, value in everything["optimizer"].items()
            if name in parts.get("optimizer", {}) or value not in (None, {})
        }
        more = {"loop": loop} if loop else {}
        return {**parts, **more, "recipe": run.recipe, "optimizer": optimizer}

    def tell(self, study: optuna.Study) -> str:
        """The best trials, what mattered, and what to do next."""
        trials = ranked(study)
        if not trials:
            ended = study.get_trials(deepcopy=False)
            lost = sum(t.state.is_finished() for t in ended)
            why = f": {lost} of {len(ended)} diverged or failed; lower optimizer.lr" * bool(lost)
            return f"no trial is complete yet{why}: {self.directory}"
        values = {name: found.own for name, found in self.ranges.items()}
        own = [t for t in trials[SHOWN:] if t.params == values]
        rows = [("trial", search.judged_by(self.run), *self.ranges, "")]
        rows += [
            (
                str(t.number),
                units.loss(t.value),
                *(units.rate(t.params[name]) for name in self.ranges),
                "the recipe's own" if t.params == values else "",
            )
            for t in trials[:SHOWN] + own
        ]
        many = f"{len(trials)} complete trials" if len(trials) > 1 else "one complete trial"
        path = shlex.quote(str(self.directory / "best.json"))
        return "\n".join([
            f"\n{label(self.run.optimizer.name)} on {self.run.recipe}, {many}:",
            fit.aligned(rows),
            *self._remarks(study, trials[0]),
            f"\nto use it: mars train {path}",
        ])  # fmt: skip

    def _remarks(self, study: optuna.Study, first: optuna.trial.FrozenTrial) -> list[str]:
        lines = []
        if len(ranked(study)) >= 2 * search.STARTUP and len(self.ranges) > 1:
            import optuna

            with suppress(ValueError, RuntimeError):  # of trials that are all alike
                shares = optuna.importance.get_param_importances(study)
                said = ", ".join(f"{name} {units.share(v)}" for name, v in shares.items())
                lines.append(f"what mattered: {said}")
        for name, found in self.ranges.items():
            value = first.params[name]
            end = search.at_edge(found, value)
            if end is not None:
                limits = f"{units.rate(found.low)} to {units.rate(found.high)}"
                option = f"{search.option(name)} {value:.4g}"
                lines.append(
                    f"warning: the best {name}, {units.rate(value)}, is at the {end} end of its "
                    f"range, {limits}: search around it with {option} and another --out"
                )
        return lines
