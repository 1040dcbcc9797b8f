"""The worker: what one thread does. It runs its chains and adds its contributions in turn."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from dash_attn.backends.cpu import forks
from dash_attn.backends.cpu.buffers import Buffers, KeyTile, QueryTile
from dash_attn.backends.cpu.softmax import keep
from dash_attn.backends.cpu.turnstile import Stopped, Turnstiles
from dash_attn.problem import Problem
from dash_attn.program import Geometry, Program

# score - lse is clamped before exp. Below LEAST the result is too small to matter, and exp is much slower where it
# underflows. Only masked pairs have values above 0. They must stay finite, because they are multiplied by 0.
LEAST, MOST = -80.0, 80.0


class Scratch:
    """Memory for the scores of one tile. It is also the permit to compute: there is one for each computing thread."""

    def __init__(self, geometry: Geometry, buffers: int) -> None:
        self._buffers = torch.empty((buffers, geometry.tile_m * geometry.tile_n), dtype=torch.float32, device="cpu")
        self._views: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def views(self, rows: int, columns: int) -> tuple[Tensor, ...]:
        """P, P^T, dS, dS^T, memory for a mask, and what only a FeaturedWorker has."""
        if (rows, columns) not in self._views:
            p, ds, *others = (buffer[: rows * columns].view(rows, columns) for buffer in self._buffers)
            self._views[rows, columns] = p, p.t(), ds, ds.t(), *others
        return self._views[rows, columns]


@dataclass(frozen=True, eq=False)
class Job:
    """What all workers of one backward share."""

    program: Program
    problem: Problem
    buffers: Buffers
    turnstiles: Turnstiles
    permits: SimpleQueue[Scratch]
    jitter: float


class Worker:
    """Runs chains one after the other. It sums dK and dV of a chain in visit order, in its own buffers."""

    buffers = 3  # of its scratch

    def __init__(self, job: Job, chains: list[int]) -> None:
        g, problem = job.program.geometry, job.problem
        self._job, self._chains = job, chains
        self._scratch: Scratch | None = None
        shapes = (g.tile_n, problem.dim), (g.tile_n, problem.dim_v), (g.tile_m, problem.dim)
        self._scale = problem.softmax_scale
        self._dk, self._dv, self._dq = (torch.empty(x, dtype=torch.float32, device="cpu") for x in shapes)

    def run(self) -> None:
        try:
            for chain in self._chains:
                self._job.turnstiles.check()
                self._run_chain(*self._job.program.chains[chain].tolist())
        except Stopped:
            pass
        finally:
            self._give_up_permit()

    def _run_chain(self, batch: int, kv_head: int, kv_tile: int, first: int, count: int) -> None:
        job, g = self._job, self._job.program.geometry
        keys = job.buffers.keys[(batch * g.heads_kv + kv_head) * g.num_kv + kv_tile]
        dk, dv = self._dk[: len(keys.k)].zero_(), self._dv[: len(keys.k)].zero_()
        for head, q_tile, step, length, turn, turn_step, partial in job.program.runs[first : first + count].tolist():
            target = ((batch * g.heads_kv + kv_head) * g.group + head) * g.num_q + q_tile
            for i in range(length):
                self._permit()  # not inside: a fork would wait for a worker that waits for a permit
                with forks.apart:
                    dq = self._compute(job.buffers.queries[target + i * step], keys, dk, dv, partial != 0)
                self._add(dq, target + i * step, turn + i * turn_step)
        keys.dk.copy_(dk)
        keys.dv.copy_(dv)

    def _compute(self, rows: QueryTile, keys: KeyTile, dk: Tensor, dv: Tensor, partial: bool) -> Tensor:
        """The five products of one tile. They add to dK and dV, and the result is the dQ contribution."""
        p, p_t, ds, ds_t, allowed = self._permit().views(len(rows.q), len(keys.k))
        torch.mm(rows.q, keys.k_t, out=p).sub_(rows.lse).clamp_(LEAST, MOST).exp_()
        if partial:
            p.mul_(torch.ge(keys.index, rows.first, out=allowed))
            p.mul_(torch.lt(keys.index, rows.end, out=allowed))
        dv.addmm_(p_t, rows.dout)
        torch.mm(rows.dout, keys.v_t, out=ds).sub_(rows.delta).mul_(p)
        dk.addmm_(ds_t, rows.q)
        return torch.mm(ds, keys.k, out=self._dq[: len(rows.q)])

    def _add(self, dq: Tensor, target: int, turn: int) -> None:
        """Add a contribution in its turn. The first one is stored, and the last one also writes the result."""
        job = self._job
        rows = job.buffers.queries[target]
        if job.jitter:
            time.sleep(random.random() * job.jitter)
        place = job.turnstiles.enter(target, turn, self._give_up_permit)
        if place == 0:
            rows.total.copy_(dq)
        else:
            rows.total.add_(dq)
        if place + 1 == job.program.contributors[target % job.program.geometry.num_q]:
            rows.dq.copy_(rows.total.mul_(self._scale))
        job.turnstiles.leave(target)

    def _permit(self) -> Scratch:
        if self._scratch is None:
            self._scratch = self._job.permits.get()
        return self._scratch

    def _give_up_permit(self) -> None:
        if self._scratch is not None:
            self._job.permits.put(self._scratch)
            self._scratch = None


class FeaturedWorker(Worker):
    """A worker for capped scores and dropout."""

    buffers = 5

    def _compute(self, rows: QueryTile, keys: KeyTile, dk: Tensor, dv: Tensor, partial: bool) -> Tensor:
        p, _, ds, ds_t, allowed, slope, kept = self._permit().views(len(rows.q), len(keys.k))
        softcap, dropout = self._job.problem.features.softcap, self._job.problem.features.dropout
        torch.mm(rows.q, keys.k_t, out=p)
        if softcap:
            p.mul_(1 / softcap).tanh_()
            torch.mul(p, p, out=slope).neg_().add_(1.0)
            p.mul_(softcap)
        p.sub_(rows.lse).clamp_(LEAST, MOST).exp_()
        if partial:
            p.mul_(torch.ge(keys.index, rows.first, out=allowed))
            p.mul_(torch.lt(keys.index, rows.end, out=allowed))
        torch.mm(rows.dout, keys.v_t, out=ds)
        if rows.words is None:
            dv.addmm_(p.t(), rows.dout)
        else:
            keep(rows.words, keys.places, dropout, kept).mul_(1 / (1 - dropout))
            dv.addmm_(torch.mul(p, kept, out=allowed).t(), rows.dout)
            ds.mul_(kept)
        ds.sub_(rows.delta).mul_(p)
        if softcap:
            ds.mul_(slope)
        dk.addmm_(ds_t, rows.q)
        return torch.mm(ds, keys.k, out=self._dq[: len(rows.q)])
