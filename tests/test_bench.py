"""`python -m mars.bench`: its files, its table, its bytes; never its seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from mars import MARS
from mars.bench import rows
from mars.bench.candidates import Candidate, candidates
from mars.bench.cli import main
from mars.bench.measure import Measured, Run, Tensors, measure
from mars.bench.report import table
from mars.bench.rows import Row, Settings, rows_of, selected
from mars.bench.shapes import PARAMETER_SETS, Shape, gpt

CPU = torch.device("cpu")
# Without the fused engine, which other tests run in Triton's interpreter: that takes minutes.
ONLY = ("torch", "foreach", "reference", "timm")


@pytest.fixture(autouse=True, scope="module")
def _toy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PARAMETER_SETS, "toy", lambda: gpt(1, 16, vocabulary=32, context=8))
        patch.setitem(PARAMETER_SETS, "vectors", lambda: [Shape((16,)), Shape((4, 2, 3, 3))])
        yield


@pytest.fixture(scope="module")
def out(_toy: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "made"
    command = ["--device", "cpu", "--params", "toy", "vectors", "--repeat", "2", "--only", *ONLY]
    main([*command, "--out", str(folder)])
    return folder


@pytest.fixture
def tensors() -> Tensors:
    """Matrices alone, so that all of them are trained by the rule that is asked for."""
    return Tensors([Shape((8, 4)), Shape((3, 5), hidden=True)], torch.float32, CPU, 0.1)


def test_the_file_says_what_was_measured_and_where(out: Path) -> None:
    made = json.loads((out / "bench.json").read_text())
    assert made["machine"]["torch"] == torch.__version__
    assert made["machine"]["command"].startswith("python -m mars.bench --device cpu --params toy")
    assert {"device", "triton", "driver", "date", "python"} <= set(made["machine"])
    assert made["settings"]["dtype"] == "float32"
    assert made["settings"]["repeat"] == 2
    names = [c.name for c in selected(False, ONLY)]
    assert [row["name"] for row in made["rows"]] == names * 2
    for row in made["rows"]:
        timed = row["skipped"] is None
        assert (row["ms"] is not None) == timed
        assert not timed or min(row["ms"], row["ratio"], row["of_copy"], row["state"]) > 0
        assert row["gpu_ms"] is None


def test_ratios_are_to_adamw_on_the_same_parameters(out: Path) -> None:
    made = json.loads((out / "bench.json").read_text())["rows"]
    rows = {(row["parameters"], row["name"]): row for row in made}
    for name, on in (("torch AdamW", "all"), ("torch AdamW, hidden", "hidden")):
        base = rows["toy", name]
        assert base["ratio"] == 1.0
        for row in rows.values():
            if row["parameters"] == "toy" and row["on"] == on and row["skipped"] is None:
                assert row["ratio"] == pytest.approx(row["ms"] / row["beside_ms"])
    assert rows["toy", "mars-m foreach"]["on"] == "hidden"
    assert rows["toy", "mars-adamw foreach"]["on"] == "all"
    assert rows["vectors", "mars-m foreach"]["skipped"] == "no hidden matrices here"


def test_a_machine_that_grows_slower_does_not_change_the_ratios(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each timing takes 1 ms more than the one before: half way between two of AdamW's is fair."""
    ms = iter(range(1, 99))
    fake = Measured(0.0, 0.0, None, state=8.0, floor=28.0, extra=None)
    monkeypatch.setattr(rows, "measure", lambda *_: fake._replace(ms=float(next(ms))))
    chosen = [Candidate(name, torch.optim.SGD) for name in ("base", "one", "two", "three")]
    found = list(rows_of("toy", chosen, Settings(CPU, torch.float32, 2, 0.1, 1e9)))
    assert [row.ms for row in found] == [1, 2, 4, 6]
    assert [row.beside_ms for row in found] == [1, 2, 4, 6]
    assert [row.ratio for row in found] == [1, 1, 1, 1]


def test_the_picture_is_not_blank(out: Path) -> None:
    image = pytest.importorskip("matplotlib.image").imread(out / "bench.png")
    assert image.shape[0] > 300
    assert image.shape[1] > 500
    assert 0.02 < (image[..., :3].min(-1) < 0.9).mean() < 0.9


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--params", "toy", "vectors", "--repeat", "1"]
    main([*command, "--only", "LION foreach", "muon"])
    printed = capsys.readouterr()
    lines = [line.split("  ")[0] for line in printed.out.splitlines()]
    wanted = ["torch AdamW", "mars-lion foreach", "torch AdamW, hidden", "torch Muon"]
    assert [line for line in lines if line in wanted] == [*wanted, *wanted[:2]]
    assert "hidden matrices only: skipped: no hidden matrices here" in lines
    assert 'matrix_rule="2d"' in printed.out  # the convolution's footnote
    assert "toy  mars-lion foreach: " in printed.err


def test_the_table_fits_a_narrow_terminal() -> None:
    """All columns, as on a GPU; nothing is lost, and a long reason is told once, below."""
    reason = "`fused=True` is not possible for a parameter: on cpu: it needs a CUDA device"
    times = {"ms": 12.967, "ratio": 1.0, "gpu_ms": 11.8, "gpu_ratio": 1.25}
    sizes = {"state": 8.0, "floor": 28.0, "bandwidth": 2.5e12, "of_copy": 0.87, "extra": 3 << 20}
    rows = [
        Row("toy", "torch AdamW fused + clip_grad_norm_", "all", **times, **sizes),
        Row("toy", "one", "all", skipped=reason),
        Row("toy", "other", "all", skipped=reason),
        Row("toy", "third", "all", skipped="it is not installed"),
    ]
    settings = Settings(CPU, torch.float32, 2, 0.1, 1e9)
    wide, narrow = (table(rows, settings, room) for room in (None, 80))
    lines = narrow.splitlines()
    assert max(map(len, lines)) <= 80
    assert set(wide.split()) - set(narrow.split()) == set()
    assert [" ".join(line.split()) for line in lines if line.startswith("all parameters ")] == [
        "all parameters ms/step ratio GPU ms GPU ratio state",
        "all parameters floor GB/s of copy extra MiB",
    ]
    for name, said in (("one", "[1]"), ("other", "[1]"), ("third", "it is not installed")):
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert line.endswith(said)
    assert narrow.count("needs a CUDA device") == 1


def test_what_fails_is_a_row_and_stops_nobody() -> None:
    def fail(error: Exception, params: object) -> torch.optim.Optimizer:
        raise error

    class FailsLater(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise ValueError("in the step\nand more")

    chosen = [
        Candidate("base", torch.optim.SGD),
        Candidate("made of nothing", partial(fail, RuntimeError("no kernel\nfor you"))),
        Candidate("nameless", partial(fail, KeyError())),
        Candidate("large", partial(fail, torch.OutOfMemoryError("tried to allocate"))),
        Candidate("later", FailsLater),
        Candidate("good", partial(torch.optim.SGD, momentum=0.9)),
    ]
    rows = list(rows_of("toy", chosen, Settings(CPU, torch.float32, 2, 0.1, 1e9)))
    reasons = [row.skipped for row in rows]
    assert reasons == [None, "no kernel", "KeyError", "out of memory", "in the step", None]
    assert rows[0].ratio == 1.0
    assert rows[-1].ratio is not None
    assert [row.ratio for row in rows[1:-1]] == [None] * 4


def test_parameters_that_do_not_fit_skip_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARAMETER_SETS, "vast", lambda: [Shape((2**46,))])
    rows = list(
        rows_of("vast", selected(False, ["fused"]), Settings(CPU, torch.float32, 2, 0.1, 1))
    )
    assert {row.skipped for row in rows} == {"out of memory"}


@pytest.mark.parametrize(
    ("make", "state", "floor"),
    [
        (torch.optim.AdamW, 8, 28),
        (partial(MARS, mars_type="mars-adamw"), 12, 36),
        (partial(MARS, mars_type="mars-adamw", consume_grads=True), 12, 32),
        (partial(MARS, mars_type="mars-lion"), 8, 28),
        (partial(MARS, mars_type="mars-lion", clip=None), 4, 20),
        (partial(MARS, mars_type="plain-adamw"), 8, 28),
    ],
)
def test_bytes_are_those_of_the_buffers(tensors: Tensors, make, state: int, floor: int) -> None:
    found = measure(Candidate("one", make), tensors, 3)
    assert (found.state, found.floor) == (state, floor)
    twice = measure(Candidate("two", make, norm_of_all=True), tensors, 2)
    assert twice.floor == floor + 4


def test_bytes_of_bfloat16() -> None:
    tensors = Tensors([Shape((8, 4))], torch.bfloat16, CPU, 0.1)
    found = measure(Candidate("one", MARS), tensors, 2)
    # State: 4 + 4 + h 2 + low half 2. Moved: g 2, x 4, state twice.
    assert (found.state, found.floor) == (12, 30)


def test_gradients_take_turns_and_start_anew(tensors: Tensors) -> None:
    """Also with consume_grads, which keeps the gradient that it was given."""
    run = Run(Candidate("one", partial(MARS, consume_grads=True)), tensors)
    tensors.reset()
    start = [[g.clone() for g in each] for each in tensors.gradients]
    for turn in range(5):
        run.prepare()
        p = run.params[0]
        assert p.grad is tensors.gradients[turn % 2][0]
        held = run.optimizer.state[p].get("last_grad")
        assert held is None or held.data_ptr() != p.grad.data_ptr()
        run.step()
        assert p.grad is None
    assert all(torch.equal(a, b) for a, b in zip(start[0], tensors.gradients[0], strict=True))
    assert tensors.gradients[0][0].norm() == pytest.approx(0.1, rel=0.5)
    tensors.gradients[0][0].zero_()
    tensors.reset()
    assert torch.equal(start[0][0], tensors.gradients[0][0])


def test_an_optimizer_that_binds_memory_is_written_to_and_undone(tensors: Tensors) -> None:
    """As heavyball's slabs do: parameters and gradients are moved, and must stay where they are."""

    def bind(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        for p in params:
            p.data = p.data.clone()
            p.grad = torch.zeros_like(p)
        return torch.optim.SGD(params)

    tensors.reset()  # what was never written to may be NaN, which equals nothing
    run = Run(Candidate("one", bind), tensors)
    bound = [p.grad for p in run.params]
    run.prepare()
    assert all(p.grad is g for p, g in zip(run.params, bound, strict=True))
    assert torch.equal(bound[0], tensors.gradients[0][0])
    tensors.reset()
    assert run.params[0].grad is None
    assert run.params[0].data_ptr() == tensors.values[0].data_ptr()
    assert measure(Candidate("one", bind), tensors, 2).state is None  # it holds none that one sees


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-small", 124_373_760),
        ("gpt2-xl", 1_556_840_000),
        ("llama-1b", 1_235_814_400),  # as published
        ("resnet18", 11_173_962),  # the well-known CIFAR-10 one
        ("vit-b", 86_567_656),  # torchvision.models.vit_b_16
        ("tiny-10k", 10_000_000),
    ],
)
def test_parameter_sets_have_the_size_of_the_models(name: str, count: int) -> None:
    shapes = PARAMETER_SETS[name]()
    assert sum(shape.numel for shape in shapes) == count
    assert all(len(shape.size) == 2 for shape in shapes if shape.hidden)


def test_names_are_distinct_and_only_selects_by_them() -> None:
    for on_gpu in (False, True):
        names = [c.name for c in candidates(on_gpu)]
        assert len(set(names)) == len(names)
        assert [c.name for c in selected(on_gpu, [])] == names
        base = "torch AdamW fused" if on_gpu else "torch AdamW"
        assert [c.name for c in selected(on_gpu, ["8-BIT"])] == [
            base,
            f"mars-adamw {'fused' if on_gpu else 'cpu'}, 8-bit state",
        ]
        assert [c.name for c in selected(on_gpu, ["Muon"])] == [f"{base}, hidden", "torch Muon"]
        assert selected(on_gpu, ["nobody"]) == []


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--params", "toy", "--out", str(tmp_path / "file")])
    printed = capsys.readouterr()
    assert "file: cannot be written: File exists" in printed.err
    assert not printed.out


def test_a_wrong_choice_is_told_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--only", "nobody"])
    assert "mars-adamw cpu, consume_grads" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.count("    python -m mars.bench") >= 2


@pytest.mark.parametrize(
    ("script", "options", "line"),
    [
        ("distributed_ns.py", "--ranks 2 --width 16 --layers 1 --repetitions 1", "replicated: own"),
        ("shards.py", "--model gpt-tiny --rounds 1 --steps 1", "MARS-AdamW, no clip, raw"),
    ],
)
def test_scripts_for_many_ranks(script: str, options: str, line: str, tmp_path: Path) -> None:
    bench = Path(__file__).parents[1] / "bench" / script
    command = [sys.executable, str(bench), *options.split(), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert line in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["ranks"] >= 2
