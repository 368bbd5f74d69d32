"""MARS in other people's loops: the real Trainer, Accelerate and Lightning, on tiny models.

The examples are what is trained here, so that a reader's copy has been tested. All on the CPU.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mars
from mars import MARS
from shared import BATCH, digest, gpt, rows

ROOT = Path(__file__).parents[1]

pytestmark = [
    # Lightning 2.6 still asks torch's pytree in the old way.
    pytest.mark.filterwarnings(
        r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning:lightning"
    ),
    # What a test resumes, it writes elsewhere; Lightning then forgets which checkpoint was best.
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning:lightning"),
]

# An example, the package it is about, what to add to its command, its checkpoint of step n.
CASES = {
    "plain": ("plain_loop", "torch", "", "step-{}.pt"),
    "accelerate": ("accelerate_loop", "accelerate", "", "step-{}"),
    "trainer, optimizers": ("hf_trainer", "transformers", "--way optimizers", "checkpoint-{}"),
    "trainer, class": ("hf_trainer", "transformers", "--way class", "checkpoint-{}"),
    "trainer, override": ("hf_trainer", "transformers", "--way override", "checkpoint-{}"),
    "lightning": ("lightning_module", "lightning", "", "step={}.ckpt"),
    "lightning, bf16-mixed": (
        "lightning_module", "lightning", "--precision bf16-mixed", "step={}.ckpt",
    ),
    "lightning, exact": ("lightning_module", "lightning", "--exact", "step={}.ckpt"),
}  # fmt: skip
WAYS = [name for name in CASES if name.startswith("trainer")]
FIRST_OF_EACH = ["plain", "accelerate", "trainer, class", "lightning"]


@pytest.fixture(autouse=True)
def _quiet_and_apart() -> Iterator[None]:
    """Accelerate, which the Trainer uses too, keeps its settings for the whole process."""
    # Their handlers would write to the stream that pytest had given them on import.
    for name in ("lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def example(case: str) -> ModuleType:
    module, package, *_ = CASES[case]
    pytest.importorskip(package)
    return importlib.import_module(module)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """The digest of six steps of an example without a stop, and its checkpoint of the third."""

    @cache
    def run(case: str) -> tuple[str, Path]:
        out = tmp_path_factory.mktemp("whole")
        words = f"--steps 6 --save-every 3 {CASES[case][2]}".split()
        found = example(case).main([*words, "--out", str(out)])
        return found, out / CASES[case][3].format(3)

    return run


def losses(text: str) -> list[str]:
    return re.findall(r"loss'?:? *'?([\d.]+)", text)


@pytest.mark.parametrize("case", CASES)
def test_resumed_training_is_the_uninterrupted_one_to_the_bit(
    case: str, whole_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters and every tensor of optimizer state, dropout included."""
    found, checkpoint = whole_run(case)
    capsys.readouterr()
    words = f"--steps 6 --save-every 3 {CASES[case][2]}".split()
    again = example(case).main([*words, "--out", str(tmp_path), "--resume", str(checkpoint)])
    assert again == found
    assert 3 <= len(losses(capsys.readouterr().out)) <= 4  # the Trainer adds one for the mean


@pytest.mark.parametrize("case", FIRST_OF_EACH)
def test_a_fresh_process_resumes_by_the_command_of_the_example(
    case: str, whole_run: Any, tmp_path: Path
) -> None:
    found, checkpoint = whole_run(case)
    commands = re.findall(r"^    python (.*)", example(case).__doc__ or "", flags=re.M)
    assert len(commands) == 2
    words = shlex.split(commands[1])
    words[words.index("--out") + 1] = str(tmp_path)
    words[words.index("--resume") + 1] = str(checkpoint)
    command = [sys.executable, *words, "--steps", "6", "--save-every", "3"]
    source = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"digest {found}" in done.stdout
    assert "saved" in done.stdout


def test_the_commands_of_the_page_are_those_of_the_examples() -> None:
    page = (ROOT / "docs/trainers.md").read_text()
    found = re.findall(r"^python (examples/(\S+) .*)", page, flags=re.M)
    assert len({script for _, script in found}) == len(FIRST_OF_EACH)
    for command, script in found:
        assert f"    python {command}\n" in (ROOT / "examples" / script).read_text()


def test_the_digest_sees_one_bit_of_the_state() -> None:
    model = nn.Linear(3, 2)
    optimizer = MARS(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = digest(model, optimizer)
    last_grad = optimizer.state[model.weight]["last_grad"]
    last_grad[0, 0] = last_grad[0, 0].nextafter(torch.tensor(9.0))
    assert digest(model, optimizer) != before


def test_a_checkpoint_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example("plain").main(["--out", "nowhere", "--resume", "nowhere/step-20.pt"])
    assert "there is no checkpoint at nowhere/step-20.pt" in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_the_three_ways_of_the_trainer_are_one_training(whole_run: Any) -> None:
    assert len({whole_run(way)[0] for way in WAYS}) == 1


# The same batches, options and schedule in a plain loop and in somebody else's.


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def no_dropout() -> nn.Module:
    model = gpt()
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    return model


def batches(count: int) -> list[Tensor]:
    return list(rows()[: count * BATCH].split(BATCH))


def plain(
    model: nn.Module, data: list[Tensor], loss_of: Callable[[nn.Module, Tensor], Tensor],
    max_norm: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Train by a loop as in torch's manual, with a linear schedule; the parameters at the end."""
    optimizer = MARS(model.parameters(), lr=3e-3, weight_decay=0.1, **options)
    scheduler = linear(optimizer, len(data))
    for batch in data:

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            return loss

        optimizer.step(closure)
        scheduler.step()
    return flat(model)


def linear(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / steps)


def loss_of_gpt(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch[:, :-1], batch[:, 1:])


def by_accelerate(data: list[Tensor], micro: int = 1, **options: Any) -> Tensor:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=micro, step_scheduler_with_optimizer=False
    )
    model = no_dropout()
    optimizer = MARS(model.parameters(), lr=3e-3, weight_decay=0.1, **options)
    scheduler = linear(optimizer, len(data))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for batch in data:
        for part in batch.chunk(micro):

            def closure(part: Tensor = part) -> Tensor:
                if micro == 1:
                    optimizer.zero_grad()
                loss = loss_of_gpt(model, part)
                accelerator.backward(loss)
                return loss

            with accelerator.accumulate(model):
                if micro == 1:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
                    optimizer.zero_grad()
        scheduler.step()
    return flat(model)


def lightning_module(steps: int, **options: Any) -> Any:
    """A Lightning module with the same training; `seen` are the batches it evaluated."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.seen = no_dropout(), []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            self.seen.append(index)
            return loss_of_gpt(self.model, batch)

        def configure_optimizers(self) -> Any:
            optimizer = MARS(self.parameters(), lr=3e-3, weight_decay=0.1, **options)
            schedule = {"scheduler": linear(optimizer, steps), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Module()


def by_lightning(data: list[Tensor], accumulate: int = 1, **options: Any) -> Any:
    module = lightning_module(len(data), **options)
    trainer = sys.modules["lightning"].Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(module, example("lightning").Loader(torch.cat(data), len(data)))
    return module


def test_accelerate_follows_the_plain_loop() -> None:
    data = batches(5)
    expected = plain(no_dropout(), data, loss_of_gpt)
    assert torch.equal(by_accelerate(data), expected)
    # Two micro-batches are summed in another order: rounding of float32, through Adam's division.
    torch.testing.assert_close(by_accelerate(data, micro=2), expected, rtol=0, atol=3e-5)


def test_accelerate_runs_exact_mode() -> None:
    data = batches(5)
    expected = plain(no_dropout(), data, loss_of_gpt, is_approx=False)
    assert torch.equal(by_accelerate(data, is_approx=False), expected)
    assert not torch.equal(by_accelerate(data), expected)


def test_lightning_follows_the_plain_loop() -> None:
    data = batches(5)
    expected = plain(no_dropout(), data, loss_of_gpt, max_norm=0.5)
    assert torch.equal(flat(by_lightning(data)), expected)


def test_lightning_runs_exact_mode_and_clips_both_gradients() -> None:
    data = batches(5)
    expected = plain(no_dropout(), data, loss_of_gpt, max_norm=0.5, is_approx=False)
    module = by_lightning(data, is_approx=False)
    assert torch.equal(flat(module), expected)
    assert module.seen == [0, 1, 1, 2, 2, 3, 3, 4, 4]  # there and here, but for the first


# The traps of docs/trainers.md.


def tiny_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, n_positions=64, vocab_size=256, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def trainer(model: nn.Module, out: Path, options: dict[str, Any], **settings: Any) -> Any:
    """A Trainer with (MARS, options) for 5 steps; `seen` are its batches."""
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(
        str(out), max_steps=5, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", **settings,
    )  # fmt: skip
    seen: list[Tensor] = []

    def collate(features: list[Tensor]) -> dict[str, Tensor]:
        seen.append(torch.stack(features))
        return {"input_ids": seen[-1], "labels": seen[-1]}

    made = transformers.Trainer(
        model, args, train_dataset=list(rows()[:20, :-1]), data_collator=collate,
        optimizer_cls_and_kwargs=(MARS, options),
    )  # fmt: skip
    made.seen = seen
    return made


def decays(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["weight_decay"] for group in optimizer.param_groups]


def test_the_trainer_overrides_weight_decay_of_the_class_and_mars_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = trainer(tiny_gpt2(), tmp_path, {"weight_decay": 0.1}).create_optimizer()
    assert decays(bare) == [0.0, 0.0]
    assert "weight_decay=0.1 is used nowhere" in caplog.text
    told = trainer(tiny_gpt2(), tmp_path, {}, weight_decay=0.01).create_optimizer()
    assert decays(told) == [0.01, 0.0]
    assert [g["weight_decay_1d"] for g in told.param_groups] == [0.1, 0.0]  # MARS's own default


def test_the_trainer_does_not_tell_the_class_its_learning_rate(tmp_path: Path) -> None:
    bare = trainer(tiny_gpt2(), tmp_path, {}, learning_rate=1e-2).create_optimizer()
    assert [group["lr"] for group in bare.param_groups] == [3e-3, 3e-3]


def test_the_bare_class_trains_embeddings_as_matrices(tmp_path: Path) -> None:
    """The state shows the rule: MARS-M has one moment, AdamW two."""
    bare = trainer(tiny_gpt2(), tmp_path, {"mars_type": "mars-m"})
    bare.train()
    assert "exp_avg_sq" not in bare.optimizer.state[bare.model.transformer.wte.weight]
    model = tiny_gpt2()
    groups = mars.param_groups(model, mars_type="mars-m")
    routed = trainer(model, tmp_path, {"params": groups, "weight_decay": 0.1})
    routed.train()
    assert "exp_avg_sq" in routed.optimizer.state[model.transformer.wte.weight]
    assert decays(routed.optimizer)[0] == 0.1


def test_the_trainers_own_adamw_is_converted(tmp_path: Path) -> None:
    made = trainer(tiny_gpt2(), tmp_path, {}, weight_decay=0.1, learning_rate=1e-3)
    made.optimizer_cls_and_kwargs = None
    adamw = made.create_optimizer()
    optimizer = made.optimizer = MARS.from_adamw(adamw, verbose=False)
    made.train()
    assert made.optimizer.optimizer is optimizer
    products = [g["initial_lr"] * g["weight_decay"] for g in optimizer.param_groups]
    assert products == pytest.approx([1e-3 * 0.1, 0.0])


def test_the_trainer_follows_the_plain_loop_and_clips_by_itself(tmp_path: Path) -> None:
    """max_grad_norm is 1.0 unless told otherwise; that of MARS does the same in its step."""
    settings = {"lr_scheduler_type": "linear", "weight_decay": 0.1}
    everything = {"lr": 3e-3, "weight_decay": 0.1}
    model = tiny_gpt2()
    its = trainer(model, tmp_path, {**everything, "params": list(model.parameters())}, **settings)
    its.train()

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(input_ids=batch, labels=batch).loss

    expected = plain(tiny_gpt2(), its.seen[:5], loss_of, max_norm=1.0)
    # The Trainer divides the sum of the loss by the number of targets: another rounding.
    torch.testing.assert_close(flat(model), expected, rtol=0, atol=3e-5)
    inside = tiny_gpt2()
    options = {**everything, "params": list(inside.parameters()), "max_grad_norm": 1.0}
    trainer(inside, tmp_path, options, max_grad_norm=0.0, **settings).train()
    torch.testing.assert_close(flat(inside), flat(model), rtol=0, atol=3e-5)
    unclipped = plain(tiny_gpt2(), its.seen[:5], loss_of)
    assert (unclipped - flat(model)).abs().max() > 1e-4


def test_exact_mode_is_refused_under_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"is_approx=False needs .* optimizer\.step\(closure\)"):
        trainer(tiny_gpt2(), tmp_path, {"is_approx": False}).train()


def test_lightnings_closure_is_of_the_last_micro_batch_only() -> None:
    """So exact mode and accumulate_grad_batches do not go together."""
    module = by_lightning(batches(4), accumulate=2, is_approx=False)
    assert module.seen == [0, 1, 2, 3, 3]  # 2 at the previous parameters is missing


def test_accelerate_drops_closures_until_the_last_micro_batch() -> None:
    """So an exact closure goes through its micro-batches itself."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = no_dropout()
    optimizer = accelerator.prepare(MARS(model.parameters(), is_approx=False))
    called = []
    for i in range(4):
        with accelerator.accumulate(model):
            optimizer.step(lambda i=i: called.append(i))
    assert called == [1, 3]


def test_accelerate_saves_a_schedule_of_gamma_if_asked(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = MARS(no_dropout().parameters())
    gamma = mars.GammaScheduler(optimizer, mars.schedules.linear(0.1, 0.0, steps=10))
    accelerator.register_for_checkpointing(gamma)
    values = []
    for _ in range(2):
        gamma.step()
        values += gamma.get_last_gamma()
        accelerator.save_state(str(tmp_path / f"{gamma.last_step}"))
    assert all(a > b for a, b in pairwise(values))
    accelerator.load_state(str(tmp_path / "1"))
    assert gamma.get_last_gamma() == values[:1]


def prepared(optimizer: MARS) -> Any:
    """As accelerator.prepare returns it."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def of_lightning(optimizer: MARS) -> Any:
    """As self.optimizers() of a module returns it."""
    wrapper = pytest.importorskip("lightning.pytorch.core.optimizer")
    return wrapper.LightningOptimizer(optimizer)


@pytest.mark.parametrize("wrap", [prepared, of_lightning])
def test_wrapped_optimizers_are_explained_and_diagnosed(wrap: Callable[[MARS], Any]) -> None:
    w = nn.Parameter(torch.ones(2, 2))
    optimizer = MARS([w])
    wrapped = wrap(optimizer)
    assert mars.explain(wrapped) == mars.explain(optimizer)
    with mars.diagnose(wrapped) as d:
        for _ in range(3):
            w.grad = torch.full_like(w, 0.1)
            optimizer.step()
    assert d.readings[0].steps == 3
    assert optimizer._observer is None


def test_shards_are_resumed_by_another_number_of_processes(tmp_path: Path) -> None:
    """examples/fsdp2.py, two processes and then one."""
    words = ["--steps", "6", "--save-every", "3", "--out", str(tmp_path)]
    told = []
    for processes, more in ((2, []), (1, ["--resume", str(tmp_path / "step-3")])):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc_per_node={processes}", "examples/fsdp2.py", *words, *more],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told.append(dict(re.findall(r"^step (\d+)  loss (\S+)$", done.stdout, flags=re.M)))
    whole, rest = told
    assert list(rest) == ["4", "5", "6"]
    for step, loss in rest.items():
        assert float(loss) == pytest.approx(float(whole[step]), abs=2e-3)  # bfloat16 iterations
