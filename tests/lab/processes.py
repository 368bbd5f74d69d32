"""Several processes for a test: forked from a server that has imported torch once."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MODULES = [
    "torch",
    "torch.distributed.checkpoint",
    "mars.lab.train",
    "mars.lab.sharded",
    "processes",
]


def _main(rank: int, size: int, port: int, pipe: Connection, do: Callable[..., Any], args: Any):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in names.items()}})
    try:
        dist.init_process_group("gloo")
        pipe.send(("value", do(*args)))
    except BaseException as error:
        pipe.send(("error", type(error).__name__, str(error), traceback.format_exc()))
    os._exit(0)  # others may be gone: do not say good-bye


def launch(size: int, do: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
    """What ``do(*args)`` returns, or raises, on each of so many connected processes.

    An exception is returned as ("error", its class, its text, its trace); of a killed one, "dead".
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, pipes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(rank, size, port, theirs, do, args))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    results: list[Any] = []
    try:
        for rank, pipe in enumerate(pipes):
            assert wait([pipe], seconds), f"rank {rank} of {size} hangs"
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append(("value", "dead"))
    finally:
        for process in processes:
            if len(results) < size:
                process.kill()
            process.join(20)
    return [result[1] if result[0] == "value" else result for result in results]


def train_all(*configs: Any) -> list[tuple[str, int, float | None]]:
    """One run after the other."""
    from mars.lab.train import train

    outcomes = [train(config, extend=True) for config in configs]
    return [(o.status, o.step, o.valid) for o in outcomes]


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def unreadable(name: str, config: Any) -> Any:
    """Train where rank 1 cannot read a file of the checkpoint."""
    from mars.lab import plainfile
    from mars.lab.sealed import CheckpointError

    read = plainfile.read

    def blind(path: Path) -> Any:
        if path.name == name:
            raise CheckpointError(f"{path} cannot be read")
        return read(path)

    if os.environ["RANK"] == "1":
        plainfile.read = blind
    return train_all(config)


class At:
    """In this process, at the start of a step, do something: for what befalls one rank alone."""

    def __init__(self, step: int, do: Callable[[Any], None]) -> None:
        from mars.lab.loop import Training

        advance = Training.advance

        def disturbed(training: Training) -> None:
            if training.step == step:
                do(training)
            advance(training)

        Training.advance = disturbed  # type: ignore[method-assign]


def disturb(rank: int, step: int, do: Callable[[Any], None], *configs: Any) -> Any:
    """Train while something befalls one rank."""
    if int(os.environ["RANK"]) == rank:
        At(step, do)
    return train_all(*configs)


def without_memory(rank: int, config: Any) -> Any:
    """Train where one rank's GPU is somebody else's."""
    from mars.lab import wrapping

    def make(*_: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    if int(os.environ["RANK"]) == rank:
        wrapping.make = make
    return train_all(config)


def terminate(training: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def die(training: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def poison(training: Any) -> None:
    wrapped = training.loss_of
    factor = {True: float("nan"), False: 1.0}
    training.loss_of = lambda *pair: wrapped(*pair) * factor[training.model.training]


def small_files(training: Any) -> None:
    """As on a full disk: what is longer than a kilobyte cannot be written."""
    import resource

    first = Path(training.run.directory) / "checkpoints" / "step-00000003"
    while not first.exists():  # it may be being written
        time.sleep(0.01)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))


def count_graphs(config: Any) -> int:
    """How many graphs are compiled for a step."""
    import torch

    from mars.lab import parallel
    from mars.lab.train import prepare

    compile_, graphs = torch.compile, []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile = functools.partial(compile_, backend=backend)
    with parallel.joined(config, torch.device("cpu")) as world:
        training = prepare(config, world)
        training.connect()
        training.advance()
    return len(graphs)


def gathered_gradients(config: Any) -> list[int]:
    """Elements of gradients of whole parameters that a rank holds after each pass of a step."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    from mars.lab import parallel
    from mars.lab.train import prepare

    held: list[int] = []
    with parallel.joined(config, torch.device("cpu")) as world:
        training = prepare(config, world)
        training.connect()
        once = training._pass

        def watched(*batch: Any) -> Any:
            loss = once(*batch)
            shards = [
                own
                for module in training.model.modules()
                if isinstance(module, FSDPModule)
                for own in module._get_fsdp_state()._fsdp_param_group.fsdp_params
            ]
            whole = [own.unsharded_accumulated_grad for own in shards]
            held.append(sum(g.numel() for g in whole if g is not None))
            return loss

        training._pass = watched
        training.advance()
    return held


def fill_up(training: Any) -> None:
    """As on a GPU that has no memory left, while shards are being written."""
    import torch

    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


def slowly(*given: Any) -> Any:
    """As ``disturb``, on a slow disk."""
    from mars.lab import sharded

    write = sharded.write

    def late(*args: Any) -> Any:
        time.sleep(1.0)
        return write(*args)

    sharded.write = late
    return disturb(*given)


def save_and_change(config: Any, step: int) -> dict[str, Any]:
    """Change the weights after a save has begun and before anything is written."""
    import threading

    import torch
    import torch.distributed as dist

    from mars.lab import parallel, sharded
    from mars.lab.dtensors import whole
    from mars.lab.saver import Saver
    from mars.lab.train import prepare

    changed, write = threading.Event(), sharded.write

    def late(*args: Any) -> Any:
        assert changed.wait(20)
        return write(*args)

    sharded.write = late
    with parallel.joined(config, torch.device("cpu")) as world:
        training = prepare(config, world)
        training.connect()
        training.advance()
        before = {n: whole(p).detach().clone() for n, p in training.model.named_parameters()}
        saver = Saver(world)
        state = training.training_state()
        saver.save(Path(config.directory), step, training.model, training.optimizer, state)
        with torch.no_grad():
            for p in training.model.parameters():
                p.fill_(7.0)
            for own in training.optimizer.state.values():
                own["exp_avg"].fill_(7.0)
        dist.barrier()
        changed.set()
        saver.wait()
    return {name: t.numpy() for name, t in before.items()}
