"""Processes that stand for ranks: started once, given one job after the other."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

# Processes come from a server that has loaded the package but computed nothing: a fork of a process that has computed
# would copy the state of threads that it does not have.
PRELOADED = ["tests.distributed.jobs", "torch._dynamo", "transformers.models.llama.modeling_llama"]
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)

Job = Callable[..., Any]  # gets the groups of this process by their size, then the arguments
Groups = dict[int, dist.ProcessGroup]


@dataclass(frozen=True)
class Failure:
    """An error in a process."""

    kind: str
    message: str
    trace: str


class Pool:
    """`size` processes with a gloo group of the first 1, 2, 4, ... of them, and of all."""

    def __init__(self, size: int, limit: float = 60.0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        pairs = [CONTEXT.Pipe() for _ in range(size)]
        self.pipes: list[Connection] = [mine for mine, _ in pairs]
        store = f"{self._folder.name}/store"
        self.processes: list[BaseProcess] = [
            CONTEXT.Process(target=_serve, args=(theirs, store, (rank, size), limit), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()

    def start(self, job: Job, *arguments: object) -> None:
        for pipe in self.pipes:
            pipe.send((job, arguments))

    def results(self, limit: float = 240.0) -> list[Any]:
        """What the job returned in each process, or a Failure. None for a process that is gone."""
        gathered: dict[int, Any] = {}
        end = time.monotonic() + limit
        while len(gathered) < len(self.pipes):
            waiting = {self.pipes[rank]: rank for rank in range(len(self.pipes)) if rank not in gathered}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} have not answered in {limit} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    gathered[waiting[pipe]] = pipe.recv()
                except EOFError:
                    gathered[waiting[pipe]] = None
        return [gathered[rank] for rank in range(len(self.pipes))]

    def run(self, job: Job, *arguments: object) -> list[Any]:
        """Run a job in all processes. An error in one of them is an error here."""
        self.start(job, *arguments)
        results = self.results()
        for rank, result in enumerate(results):
            if isinstance(result, Failure):
                raise AssertionError(f"rank {rank}: {result.kind}: {result.message}\n{result.trace}")
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # a process that reads from it ends
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _serve(pipe: Connection, store: str, place: tuple[int, int], limit: float) -> None:
    rank, size = place
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=limit)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    groups: Groups = {}
    count = 1
    while count < size:
        group = dist.new_group(list(range(count)), timeout=timeout)
        if rank < count:
            groups[count] = group
        count *= 2
    assert dist.group.WORLD is not None
    groups[size] = dist.group.WORLD
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # without a farewell to ranks that may be gone
        try:
            result = job(groups, *arguments)
        except Exception as error:
            result = Failure(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(result)
