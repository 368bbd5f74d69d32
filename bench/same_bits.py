"""Do two versions of the code take the same steps, to the bit? What a declaration rests on.

    git worktree add /tmp/old COMMIT
    PYTHONPATH=/tmp/old/src python bench/same_bits.py old.json
    PYTHONPATH=src python bench/same_bits.py new.json --than old.json

Each engine that runs here steps every type, dtype, mode and set of options, and the laboratory
trains a small GPT by every optimizer it has; the file has a digest of what came of each setting.
`--than` names what differs and fails. With TRITON_INTERPRET=1 a CPU has the fused engine, too.
Runs of two versions that agree may be compared by a study: docs/studies.md, equivalents.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from choice import choose
from mars import MARS
from mars.engines import available
from mars.lab import recipes
from mars.lab.optimizers import REGISTRY
from mars.lab.train import train
from mars.rule import KINDS

SHAPES = ((33,), (48, 32), (48, 32), (16, 64), (64, 8), (4, 3, 3, 3))
DTYPES = ("float32", "bfloat16", "float64")
MODES = ("approximate", "closure", "protocol")
OPTIONS = {
    "default": {},
    "decay": {"weight_decay": 0.1, "weight_decay_1d": 0.02},
    "no clip": {"clip": None},
    "global clip": {"clip": "global"},
    "raw": {"second_moment": "raw"},
    "no clip, raw": {"clip": None, "second_moment": "raw"},
    "max_grad_norm": {"max_grad_norm": 1.0},
    "no clip, raw, max_grad_norm": {"clip": None, "second_moment": "raw", "max_grad_norm": 1.0},
    "bfloat16 state": {"state_dtype": "bfloat16"},
    "8-bit state": {"state_dtype": "8bit"},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "1d": {"optimize_1d": True},
    "flatten": {"matrix_rule": "flatten"},
    "stack": {"matrix_rule": "stack"},
    "polar express": {"ns_coefficients": "polar-express"},
    "capturable": {"capturable": True},
    "consume": {"consume_grads": True},
}
STEPS = 4


def digest(tensors: Iterable[torch.Tensor]) -> str:
    made = hashlib.sha256()
    for t in tensors:
        made.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


def stepped(engine: str, kind: str, dtype: str, mode: str, options: dict, device: str) -> str:
    """Parameters after some steps on a quadratic with noise; or why there are none."""
    random = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, generator=random, dtype=torch.float64)
        return drawn.to(device, getattr(torch, dtype))

    xs = [torch.nn.Parameter(draw(shape)) for shape in SHAPES]
    try:
        optimizer = MARS(
            xs, mars_type=kind, is_approx=mode == "approximate", **choose(engine), **options
        )
        for step in range(STEPS):
            targets = [draw(tuple(x.shape)) * 10.0 ** (step % 3 - 1) for x in xs]

            def evaluate(targets: list[torch.Tensor] = targets) -> torch.Tensor:
                optimizer.zero_grad()
                for x, target in zip(xs, targets, strict=True):
                    x.grad = (x.detach() - target) * 0.1
                return sum(x.detach().float().square().sum() for x in xs)

            if mode == "closure":
                optimizer.step(evaluate)
                continue
            if mode == "protocol" and step:
                optimizer.update_previous_grad()
                evaluate()
                optimizer.update_last_grad()
            evaluate()
            optimizer.step()
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as refusal:
        return f"refused: {type(refusal).__name__}"
    return digest(xs)


def trained(name: str, folder: str) -> str:
    """Losses of a small GPT, to the last digit."""
    run = recipes.make("gpt-tiny", name)
    run = run.replace(
        model={"n_layer": 1, "n_embd": 32},
        loop={"steps": 6, "batch_size": 4, "eval_every": 3, "device": "cpu", "threads": 1},
        schedule={"warmup_steps": 2},
        keep={"out": f"{folder}/{name}"},
    )
    assert train(run, command="").status == "done"
    lines = [json.loads(line) for line in Path(folder, name, "log.jsonl").read_text().splitlines()]
    return " ".join(repr(line["loss"]) for line in lines if "loss" in line)


def everything(device: str) -> dict[str, str]:
    found = {}
    for engine, kind, dtype, mode, name in product(available(), KINDS, DTYPES, MODES, OPTIONS):
        if engine == "fused" and dtype == "float64":
            continue
        key = ", ".join((engine, kind, dtype, mode, name))
        found[key] = stepped(engine, kind, dtype, mode, OPTIONS[name], device)
    with tempfile.TemporaryDirectory() as folder:
        for name in REGISTRY:
            found[f"gpt-tiny by {name}"] = trained(name, folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="where digests are written")
    parser.add_argument("--than", type=Path, help="digests of the version to compare with")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("mars").setLevel(logging.ERROR)  # its advice is not for these
    found = everything(options.device)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    refused = sum(text.startswith("refused") for text in found.values())
    print(f"{len(found) - refused} settings stepped, {refused} refused")
    if options.than is None:
        return 0
    before = json.loads(options.than.read_text())
    other = [key for key in before.keys() | found.keys() if before.get(key) != found.get(key)]
    print(f"{len(other)} differ", *sorted(other), sep="\n")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
