"""backward: threads replay a Program, with turnstiles."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock, Semaphore

import torch

from dash_attn.backends.base import Gradients, Operands
from dash_attn.backends.cpu.buffers import Buffers
from dash_attn.backends.cpu.turnstile import Turnstiles
from dash_attn.backends.cpu.worker import Job, Scratch, Worker
from dash_attn.plan import Plan, placement

ORDERS = ("program", "any")

_starting = Lock()


@dataclass(frozen=True)
class CpuConfig:
    """How the CPU replays a program. Only `order="any"` can change bits.

    threads  workers that compute at the same time; None means torch's number of threads
    workers  workers that hold chains; None means enough for the threads and for the order
    order    "program" adds contributions in turn. "any" adds them as they come, like atomics; it is the control of
             experiments
    jitter   each contribution is delayed by a random time, up to this number of seconds
    """

    threads: int | None = None
    workers: int | None = None
    order: str = "program"
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")

    def thread_count(self) -> int:
        return torch.get_num_threads() if self.threads is None else self.threads

    def worker_count(self, plan: Plan) -> int:
        return max(self.thread_count(), plan.co_resident) if self.workers is None else self.workers


@torch.no_grad()
def backward(plan: Plan, config: CpuConfig, operands: Operands, into: Gradients) -> None:
    """Write dQ, dK and dV. Each worker of the placement is one thread."""
    program, placed = plan.program, placement(plan, config.worker_count(plan))
    g = program.geometry
    for q_tile in (program.contributors == 0).nonzero()[0].tolist():
        into.dq[:, q_tile * g.tile_m : (q_tile + 1) * g.tile_m] = 0
    permits: SimpleQueue[Scratch] = SimpleQueue()
    for _ in range(config.thread_count()):
        permits.put(Scratch(g))
    turnstiles = Turnstiles(g.num_targets, ordered=config.order == "program")
    buffers = Buffers.of(plan.problem, g, operands, into)
    job = Job(program, plan.problem.softmax_scale, buffers, turnstiles, permits, config.jitter)
    chains, ready = placed.chains.tolist(), Semaphore(0)
    workers = [Worker(job, chains[a:b], ready) for a, b in pairwise(placed.first.tolist()) if a < b]
    try:
        _start(workers, ready)
        for worker in workers:
            worker.join()
    except BaseException as error:  # an interrupt must not leave threads behind
        turnstiles.stop(error)
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        raise
    if turnstiles.error is not None:
        raise turnstiles.error
    if buffers.parts is not None:
        for grad, parts in zip((into.dk, into.dv), buffers.parts, strict=True):
            batch, panels, keys, dim = parts.shape
            first, *others = parts.view(batch, panels // g.share, g.share, keys, dim).unbind(2)
            for other in others:  # in the order of the q heads
                first.add_(other)
            grad.transpose(1, 2).copy_(first)


def _start(workers: list[Worker], ready: Semaphore) -> None:
    """Start the workers, and keep torch's number of threads for the caller.

    torch has one number of threads for each thread and one default for new threads. A worker sets both to 1. This
    function restores the default once all workers run. The lock stops two callers from restoring each other's 1.
    """
    with _starting:
        threads = torch.get_num_threads()
        try:
            for worker in workers:
                worker.start()
            for _ in workers:
                ready.acquire()
        finally:
            torch.set_num_threads(threads)


def workspace_bytes(plan: Plan, config: CpuConfig) -> int:
    """Bytes that `backward` allocates beside the gradients, without small objects. They are linear in the tokens."""
    problem, g = plan.problem, plan.program.geometry
    rows_q, rows_k = problem.batch * problem.heads_q * problem.len_q, problem.batch * problem.heads_kv * problem.len_k
    planes = rows_q * (4 * problem.dim + 1) + rows_k * 2 * problem.dim
    scores = config.thread_count() * 3 * g.tile_m * g.tile_n
    return 4 * (planes + scores + config.worker_count(plan) * (2 * g.tile_n + g.tile_m) * problem.dim)
