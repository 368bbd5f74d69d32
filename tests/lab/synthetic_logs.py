"""Synthetic logs for tests of the report: made-up curves in the format of real runs.

Nothing here was trained. Losses are a power law plus small noise from a seeded generator, so
that every call with the same arguments writes the same bytes.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# (label, tuned rate, final loss, optimizer's seconds in a step)
OPTIMIZERS = {
    "adamw": ("AdamW", 3e-3, 4.81, 0.004),
    "mars-adamw": ("MARS-AdamW", 4e-3, 4.76, 0.005),
    "muon": ("Muon", 2e-2, 4.51, 0.021),
    "mars-m": ("MARS-M", 2e-2, 4.507, 0.018),
    "lion": ("Lion", 3e-4, 4.93, 0.003),
    "mars-lion": ("MARS-Lion", 4e-4, 4.90, 0.004),
    "mars-shampoo": ("MARS-Shampoo", 1e-2, 4.62, 0.017),
}
PER_STEP = 8192


def header(optimizer: str, lr: float | None = None, seed: int = 0, **changes: Any) -> dict:
    label, tuned, _, _ = OPTIMIZERS.get(optimizer, (optimizer, 1e-3, 5.0, 0.004))
    lr = tuned if lr is None else lr
    steps = changes.get("steps", 400)
    head = {
        "kind": "header", "format": 1, "time": "2026-05-04T10:00:00+00:00", "name": "gpt-tiny",
        "label": label, "optimizer": optimizer, "lr": lr, "seed": seed,
        "config": {
            "recipe": "gpt-tiny",
            "model": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256},
            "data": {"source": "tinyshakespeare", "tokenizer": "gpt2"},
            "optimizer": {"name": optimizer, "lr": lr, "weight_decay": 0.1, "betas": None},
            "schedule": {"shape": "cosine", "warmup_steps": 40},
            "loop": {"steps": steps, "batch_size": 32, "seed": seed, "eval_sequences": 100},
            "keep": {"out": f"runs/{optimizer}-s{seed}"},
        },
        "parameters": {"total": 30_019_968, "matrix": 10_616_832, "other": 19_403_136},
        "tokens_per_step": PER_STEP, "steps": steps, "flops_per_token": 1.9e8,
        "data": {
            "train": {"source": "tinyshakespeare", "tokens": 301_966, "sha256": "a1" * 32},
            "valid": {"source": "tinyshakespeare", "tokens": 36_059, "sha256": "b2" * 32},
        },
        "versions": {"mars": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"},
        "hardware": {"device": "cpu", "name": "x86_64", "cpus": 2, "threads": 1,
                     "peak_flops": None, "platform": "Linux"},
        "command": f"mars train gpt-tiny --optimizer.name {optimizer} --loop.seed {seed}",
        "code": "c3" * 32, "engine": "foreach",
    }  # fmt: skip
    return {**head, **changes}


def curve(share: float, final: float) -> float:
    """A loss that starts at 10.8 and ends at `final`."""
    return final + (10.8 - final) * ((1 - share) ** 2) / (1 + 30 * share)


def at(step: int, second: float = 0.1, per_step: int = PER_STEP) -> dict[str, float]:
    return {"step": step, "tokens": step * per_step, "seconds": round(step * second, 6)}


def records(
    head: dict[str, Any],
    *,
    upto: int | None = None,
    log_every: int = 5,
    eval_every: int = 25,
    excess: float = 0.0,
    diverge: int | None = None,
    accuracy: bool = False,
    valid: bool = True,
) -> list[dict[str, Any]]:
    """Records after the header of a run that got to step `upto` (no end record)."""
    steps, seed = head["steps"], head["seed"]
    noise = random.Random(f"{head['optimizer']} {head['lr']} {seed}")
    _, tuned, final, own = OPTIMIZERS.get(head["optimizer"], ("", head["lr"], 5.0, 0.004))
    final += 0.25 * math.log(head["lr"] / tuned) ** 2 + excess
    final += noise.gauss(0, 0.008) + 0.02 * math.sin(seed)
    second = 0.1 + own
    found: list[dict[str, Any]] = []
    for step in range(0, (steps if upto is None else upto) + 1):
        share = step / steps
        dead = diverge is not None and step >= diverge
        if step and step % log_every == 0:
            loss = curve(share, final) + noise.gauss(0, 0.05)
            found.append({
                "kind": "train", **at(step, second), "loss": None if dead else round(loss, 5),
                "lr": head["lr"] * min(1, step / 40) * (1 + math.cos(math.pi * share)) / 2,
                "grad_norm": None if dead else round(0.4 + noise.expovariate(8), 4),
                "tokens_per_second": round(PER_STEP / (second + noise.uniform(0, 0.01)), 1),
                "step_seconds": round(second, 5), "optimizer_seconds": own, "mfu": None,
                "memory": 1_500_000_000,
            })  # fmt: skip
        if dead and step % log_every == 0:
            break
        if valid and (step % eval_every == 0 or step == steps):
            found.append(
                {"kind": "valid", **at(step, second), "loss": round(curve(share, final), 5)}
            )
            if accuracy:
                found[-1]["accuracy"] = round(0.9 - 0.8 * math.exp(-4 * share), 4)
        if step and step % 50 == 0 and head["optimizer"].startswith("mars"):
            found.append(
                {"kind": "diagnostics", **at(step, second), "groups": groups(share, noise)}
            )
    return found


def groups(share: float, noise: random.Random) -> list[dict[str, Any]]:
    matrices = {
        "name": "matrices", "tensors": 24, "clipped": round(0.9 - 0.6 * share, 3),
        "c_norm": round(2.4 - share + noise.gauss(0, 0.1), 3),
        "cosine": round(0.3 - 0.25 * share + noise.gauss(0, 0.02), 3),
        "update_rms": 0.01, "variance_ratio": round(2.1 + noise.gauss(0, 0.1), 3),
        "independent": 2.4025,
    }  # fmt: skip
    vectors = {name: None for name in matrices} | {
        "name": "vectors",
        "tensors": 0,
        "update_rms": 0.003,
    }
    return [matrices, vectors]


def end(records: list[dict[str, Any]], status: str = "done", text: str | None = None) -> dict:
    """The record that closes these."""
    losses = [record["loss"] for record in records if record["kind"] == "valid"]
    last = records[-1]
    closing = {"kind": "end", **{k: last[k] for k in ("step", "tokens", "seconds")}}
    closing |= {"status": status, "valid": losses[-1] if losses and status == "done" else None}
    return closing | ({"text": text} if text else {})


def write(path: Path, lines: Iterable[dict[str, Any]], tail: str = "") -> Path:
    """A run directory with these records in its log; `tail` is what a kill left."""
    path.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "log.jsonl").write_text(text + tail)
    return path


def run(path: Path, optimizer: str, lr: float | None = None, seed: int = 0, **how: Any) -> Path:
    """A whole run; `head` changes its header, `status` and `text` its end (None: no end)."""
    head = header(optimizer, lr, seed, **how.pop("head", {}))
    status, text = how.pop("status", "done"), how.pop("text", None)
    body = records(head, **how)
    closing = [end(body, status, text)] if status and body else []
    return write(path, [head, *body, *closing])


def race(path: Path, seeds: int = 2, names: Iterable[str] = OPTIMIZERS, **how: Any) -> Path:
    """A race of optimizers at their tuned rates."""
    for name in names:
        for seed in range(seeds):
            run(path / f"{name}-s{seed}", name, seed=seed, **dict(how))
    settings = {"name": path.name, "recipe": "gpt-tiny", "optimizers": list(names)}
    settings |= {"seeds": list(range(seeds)), "command": "mars race gpt-tiny", "baseline": "adamw"}
    (path / "race.json").write_text(json.dumps(settings))
    return path


def grid(path: Path, factors: Iterable[float] = (0.25, 0.5, 1, 2, 4)) -> Path:
    """Every optimizer at five rates; Lion's two highest do not survive."""
    for name, (_, tuned, _, _) in OPTIMIZERS.items():
        for factor in factors:
            lr = float(f"{tuned * factor:.4g}")
            dies = name == "lion" and factor > 1
            how = {"diverge": 120, "status": "failed", "text": "the loss is not finite"}
            run(path / f"{name}-{lr:g}", name, lr, **(how if dies else {}))
    return path


def vision(path: Path, seeds: int = 3, names: Iterable[str] = OPTIMIZERS) -> Path:
    """A race on images: the same curves, counted in images and epochs, with accuracies."""
    for place, name in enumerate(names):
        for seed in range(seeds):
            run(path / f"{name}-s{seed}", name, seed=seed, accuracy=True)
            log = path / f"{name}-s{seed}" / "log.jsonl"
            lines = [
                _of_images(json.loads(line), 0.01 * place + 0.002 * seed)
                for line in log.read_text().splitlines()
            ]
            lines[-1]["accuracy"] = [r["accuracy"] for r in lines if r["kind"] == "valid"][-1]
            write(log.parent, lines)
    settings = {"name": "cifar10 race", "recipe": "cifar10-resnet18", "baseline": "adamw"}
    (path / "race.json").write_text(json.dumps(settings))
    return path


def _of_images(record: dict[str, Any], less: float) -> dict[str, Any]:
    """A record of a run on 32 images a step, of 1,280 in an epoch."""
    record = {k: v for k, v in record.items() if "token" not in k}
    if record["kind"] == "header":
        data = {"source": "data/cifar10", "images": 1280, "sha256": "d4" * 32}
        held = {**data, "images": 10_000}
        record |= {"unit": "images", "images_per_step": 32, "images_per_epoch": 1280}
        record |= {"name": "cifar10-resnet18", "data": {"train": data, "valid": held}}
        record["config"] = {
            **record["config"],
            "model": {"arch": "resnet18", "classes": 10},
            "data": {"source": "data/cifar10", "pad": 4, "flip": True},
        }
        return record
    record |= {"images": record["step"] * 32, "epoch": record["step"] / 40}
    if record["kind"] == "train":
        record["images_per_second"] = 32 / record["step_seconds"]
    if "accuracy" in record:
        record["accuracy"] = round(record["accuracy"] - less, 4)
    return record
