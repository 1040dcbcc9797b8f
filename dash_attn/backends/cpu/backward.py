"""backward: replay a Program on worker threads, with turnstiles."""

from __future__ import annotations

from itertools import pairwise
from queue import SimpleQueue
from threading import Lock, Semaphore

import torch

from dash_attn.backends.base import Gradients, Operands
from dash_attn.backends.cpu.buffers import Buffers
from dash_attn.backends.cpu.turnstile import Turnstiles
from dash_attn.backends.cpu.worker import Job, Scratch, Worker
from dash_attn.problem import Problem
from dash_attn.program import Program, Sequences

# "program": contributions in turn. "any": as they come, which is what atomics do; the control of every experiment.
ORDERS = ("program", "any")

_starting = Lock()


@torch.no_grad()
def backward(
    problem: Problem,
    program: Program,
    placement: Sequences,
    operands: Operands,
    into: Gradients | None = None,
    *,
    threads: int | None = None,
    order: str = "program",
    jitter: float = 0.0,
) -> Gradients:
    """dQ, dK, dV. Every worker of the (verified) placement is a thread; at most `threads` of them compute at once.

    `threads` is torch's number if not given and, like the placement, never matters to the bits. `jitter` makes each
    contribution up to so many seconds late, at random.
    """
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    g = program.geometry
    grads = into or Gradients(*(torch.empty_like(x) for x in (operands.q, operands.k, operands.v)))
    for q_tile in (program.contributors == 0).nonzero()[0].tolist():
        grads.dq[:, q_tile * g.tile_m : (q_tile + 1) * g.tile_m] = 0
    permits: SimpleQueue[Scratch] = SimpleQueue()
    for _ in range(threads):
        permits.put(Scratch(g))
    turnstiles = Turnstiles(g.num_targets, ordered=order == "program")
    job = Job(program, problem.softmax_scale, Buffers.of(problem, g, operands, grads), turnstiles, permits, jitter)
    chains, ready = placement.chains.tolist(), Semaphore(0)
    workers = [Worker(job, chains[a:b], ready) for a, b in pairwise(placement.first.tolist()) if a < b]
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
    return grads


def _start(workers: list[Worker], ready: Semaphore) -> None:
    """torch keeps a number of threads per thread, and one for threads to come: workers set both to 1, here the
    latter is put back as soon as all run. The lock keeps two callers from putting back each other's 1."""
    with _starting:
        threads = torch.get_num_threads()
        try:
            for worker in workers:
                worker.start()
            for _ in workers:
                ready.acquire()
        finally:
            torch.set_num_threads(threads)


def workspace_bytes(problem: Problem, program: Program, workers: int, threads: int) -> int:
    """What `backward` allocates beside the gradients, but for small change: linear in the tokens."""
    g, dim = program.geometry, problem.dim
    rows_q, rows_k = problem.batch * problem.heads_q * problem.len_q, problem.batch * problem.heads_kv * problem.len_k
    planes = rows_q * (4 * dim + 1) + rows_k * 2 * dim
    return 4 * (planes + threads * 3 * g.tile_m * g.tile_n + workers * (2 * g.tile_n + g.tile_m) * dim)
