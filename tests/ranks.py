"""A few processes with a gloo group that stay and run one function after another."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from interpreter import patch_once_a_launch


class Ranks:
    """``size`` processes; `run` calls a function of a module in all of them."""

    def __init__(self, size: int, seconds: float = 120.0) -> None:
        self.size, self.seconds = size, seconds
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, module: str, function: str, *arguments: Any) -> list[Any]:
        """What each rank returned; AssertionError with the traceback if one failed.

        A rank whose process died is started again, once: on a machine with five
        times more work than cores one died of "free(): invalid pointer", which is not understood.
        """
        try:
            return self._run(module, function, *arguments)
        except (EOFError, BrokenPipeError):
            sys.stderr.write(f"a rank died in {function}{arguments}: once more\n")
            self.stop()
            return self._run(module, function, *arguments)

    def _run(self, module: str, function: str, *arguments: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((module, function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self.seconds):
                self.stop()
                raise AssertionError(f"rank {rank} does not answer: {function}{arguments}")
            fine, value = pipe.recv()
            if not fine:
                self.stop()  # the others may wait for it in a collective
                raise AssertionError(f"rank {rank}: {value}")
            answers.append(value)
        return answers

    def _start(self) -> None:
        context = mp.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, str(store), theirs), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # a process that dies says where
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    warnings.simplefilter("ignore")  # torch.distributed's own notices
    torch.set_num_threads(1)
    if "TRITON_INTERPRET" in os.environ:
        patch_once_a_launch()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    while True:
        try:
            module, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(importlib.import_module(module), function)(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
