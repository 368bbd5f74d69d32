"""What a run runs on, and in which precision; and what its log says of that."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mars.lab.config import Run
from mars.lab.errors import LabError, first_line
from mars.lab.optimizers import REGISTRY, find

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Tokens in a forward pass, unless said otherwise: more do not make it faster.
GPU_TOKENS, CPU_TOKENS = 32 * 1024, 8 * 1024
USUAL_MEMORY = 80 * 2**30  # of a GPU that is planned for, but not here
ACTIVATION_SHARE = 0.4  # of a GPU's memory, at most


def choose_device(
    name: str, local_rank: int | None = None, *, option: str = "loop.device"
) -> torch.device:
    """The device of a name; ``auto`` is the first GPU, or the CPU.

    Of several processes on a machine, each takes the GPU of its ``local_rank``. Errors name the
    ``option`` that has asked for it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if local_rank is not None and name.startswith("cuda:"):
        raise LabError(f"{option} is {name}: under torchrun each process takes its own GPU")
    if local_rank is not None and name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LabError(f"{option} {name!r} is unknown: auto, cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise LabError(f"{option} {name!r} is unknown: auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LabError(f"{option} is {name}, but torch {torch.__version__} sees no GPU here")
    if device.type == "cuda" and local_rank is not None:
        _check_enough(torch.cuda.device_count())
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LabError(f"{option} is {name}, but there are {torch.cuda.device_count()} GPUs")
    return device


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within it, kernels give the same bits every time, if that is wanted."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch insists on it
    own: Any = torch.utils.deterministic
    filled, own.fill_uninitialized_memory = own.fill_uninitialized_memory, False  # slow
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        text = first_line(error).partition(", but you set")[0]
        raise LabError(f"loop.deterministic: {text}") from error
    finally:
        torch.use_deterministic_algorithms(False)
        own.fill_uninitialized_memory = filled


def _check_enough(gpus: int) -> None:
    """For all processes of this machine alike: one that is not the first would not be heard."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > gpus:
        raise LabError(
            f"torchrun has started {processes} processes on this machine, which has {gpus} GPUs: "
            f"give --nproc_per_node={gpus}, or --loop.device cpu"
        )


def planned_device(name: str) -> torch.device:
    """The device of a name, which need not be here: for plans."""
    return torch.device("cuda") if name.startswith("cuda") else choose_device(name)


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """The dtype of forward and backward passes."""
    if name != "auto":
        return DTYPES[name]
    here = torch.cuda.is_available()
    has_bf16 = device.type == "cuda" and (not here or torch.cuda.is_bf16_supported())
    return torch.bfloat16 if has_bf16 else torch.float32


def check_fp8(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    """Refuse an 8-bit head that could not be multiplied; ``tokens`` are those of a forward pass."""
    gpu = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    reason = why_not_fp8(gpu, dtype, tokens)
    if reason:
        raise LabError(f"loop.fp8_head: {reason}")


def why_not_fp8(
    gpu: tuple[str, tuple[int, int]] | None, dtype: torch.dtype, tokens: int
) -> str | None:
    """In words; None if nothing stands in the way. A GPU is its name and compute capability.

    >>> why_not_fp8(("NVIDIA A100", (8, 0)), torch.bfloat16, 1024)
    'NVIDIA A100 has no 8-bit products (compute capability 8.0, they came with 8.9)'
    """
    if tokens % 16:
        sizes = "loop.micro_batch_size times model.block_size"
        return f"the tokens of a micro-batch ({sizes}, {tokens}) must be a multiple of 16"
    if gpu is None:  # a CPU emulates it, in any precision
        return None
    name, (major, minor) = gpu
    if (major, minor) < (8, 9):
        capability = f"compute capability {major}.{minor}"
        return f"{name} has no 8-bit products ({capability}, they came with 8.9)"
    if dtype != torch.bfloat16:
        return f"loop.precision must be bf16 on a GPU, it is {str(dtype)[6:]}"
    return None


def activation_bytes(run: Run, dtype: torch.dtype) -> float:
    """What the forward pass keeps of a token, roughly: 17 numbers a block and unit of width."""
    m = run.gpt
    return float((17 * m.n_layer + 2) * m.n_embd * torch.empty((), dtype=dtype).element_size())


def activation_room(device: torch.device) -> float:
    """Bytes of a GPU's memory that activations may take; of a CPU's, as many as there are."""
    if device.type != "cuda":
        return math.inf
    here = torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(device).total_memory if here else USUAL_MEMORY
    return ACTIVATION_SHARE * memory


def hardware(device: torch.device) -> dict[str, Any]:
    """What the log says of the machine."""
    from mars.lab.models import peak_flops

    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "peak_flops": peak_flops(device),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    """The model of the CPU, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), "") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("mars-optim", "numpy", "triton", "pytorch_optimizer"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def code_hash() -> str:
    """sha256 over the sources of the package: runs of different code do not compare."""
    root = Path(__file__).parents[1]
    return hash_of(sorted(root.rglob("*.py")), root)


def hash_of(paths: Iterable[Path], root: Path) -> str:
    """sha256 over files, with their names below a directory."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@functools.cache  # it is imported once, too
def own_code(name: str) -> str | None:
    """sha256 of the module that an optimizer of the user's is in; None if that cannot be told.

    A registered optimizer has none: its code is in `code_hash`, or a package's with a version.
    """
    if name in REGISTRY:
        return None
    try:
        find(name)  # imports it, from where it is run too
        module, _, attribute = name.partition(":")
        defined = getattr(sys.modules[module], attribute).__module__  # it may be imported there
        path = Path(inspect.getsourcefile(sys.modules[defined]) or "")
        return hash_of([path], path.parent)
    except (LabError, KeyError, TypeError, OSError):  # not here, typed at a prompt, or compiled
        return None
