"""backward: threads replay a Program, with turnstiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import torch
from torch import Tensor

from dash_attn.backends.base import Extras, Gradients, Operands
from dash_attn.backends.cpu.buffers import Buffers
from dash_attn.backends.cpu.planes import padded
from dash_attn.backends.cpu.softmax import Softmax
from dash_attn.backends.cpu.threads import run_jobs, run_threads, without_grad
from dash_attn.backends.cpu.turnstile import Turnstiles
from dash_attn.backends.cpu.worker import FeaturedWorker, Job, Scratch, Worker
from dash_attn.backends.sinks import write_sink_gradient
from dash_attn.plan import Plan, placement

ORDERS = ("program", "any")


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


@without_grad
def backward(
    plan: Plan, config: CpuConfig, operands: Operands, into: Gradients | None = None, extras: Extras | None = None
) -> Gradients:
    """Write dQ, dK and dV. Each worker of the placement is one thread."""
    into = Gradients.room(operands) if into is None else into
    replay(plan, config, operands, into, Softmax.of(plan.problem, extras))
    write_sink_gradient(operands, extras)
    return into


def replay(plan: Plan, config: CpuConfig, operands: Operands, into: Gradients, softmax: Softmax | None) -> None:
    """The backward of a batch of sequences, or of one panel."""
    program, placed = plan.program, placement(plan, config.worker_count(plan))
    g = program.geometry
    buffers, jobs = Buffers.of(plan.problem, g, operands, into, softmax)
    unseeing = (program.contributors == 0).nonzero()[0].tolist()
    jobs += [into.dq[:, q_tile * g.tile_m : (q_tile + 1) * g.tile_m].zero_ for q_tile in unseeing]
    run_jobs(jobs, config.thread_count())

    features = plan.problem.features
    worker = FeaturedWorker if features.softcap or features.dropout else Worker
    permits: SimpleQueue[Scratch] = SimpleQueue()
    for _ in range(config.thread_count()):
        permits.put(Scratch(g, worker.buffers))
    turnstiles = Turnstiles(g.num_targets, ordered=config.order == "program")
    job = Job(program, plan.problem, buffers, turnstiles, permits, config.jitter)
    chains = placed.chains.tolist()
    workers = [worker(job, chains[a:b]) for a, b in pairwise(placed.first.tolist()) if a < b]
    run_threads([each.run for each in workers], turnstiles.stop)
    if turnstiles.error is not None:
        raise turnstiles.error
    if buffers.parts is not None:
        sums = zip((into.dk, into.dv), buffers.parts, strict=True)
        run_jobs([job for grad, parts in sums for job in _sums(grad, parts, g.share)], config.thread_count())


def _sums(grad: Tensor, parts: Tensor, share: int) -> Iterator[Callable[[], None]]:
    """Jobs that sum the parts of each kv head."""

    def add(batch: int, head: int) -> None:
        first, *others = parts[batch, head * share : (head + 1) * share]
        for other in others:  # in the order of the q heads
            first.add_(other)
        grad[batch, :, head].copy_(first)

    return (partial(add, batch, head) for batch in range(grad.shape[0]) for head in range(grad.shape[2]))


def workspace_bytes(plan: Plan, config: CpuConfig) -> int:
    """Bytes that `backward` allocates beside the gradients, without small objects. They are linear in the tokens."""
    problem, g = plan.problem, plan.program.geometry
    rows_q, rows_k = problem.batch * problem.heads_q * problem.len_q, problem.batch * problem.heads_kv * problem.len_k
    dim, dim_v, threads = padded(problem.dim), padded(problem.dim_v), config.thread_count()
    features = problem.features
    columns = 2 * dim + dim_v + (4 if features.dropout else 2)
    planes = rows_q * columns + rows_k * (dim + dim_v) + threads * problem.len_q * dim_v
    worker = FeaturedWorker if features.softcap or features.dropout else Worker
    scores = threads * worker.buffers * g.tile_m * g.tile_n
    tiles = (g.tile_n + g.tile_m) * problem.dim + g.tile_n * problem.dim_v
    return 4 * (planes + scores + config.worker_count(plan) * tiles) + kv_sum_bytes(plan)


def kv_sum_bytes(plan: Plan) -> int:
    """Bytes of the fp32 dK and dV of cut chains."""
    problem, share = plan.problem, plan.program.geometry.share
    rows = problem.batch * problem.heads_kv * problem.len_k
    return 4 * rows * share * (problem.dim + problem.dim_v) if share > 1 else 0
