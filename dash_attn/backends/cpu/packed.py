"""Packed sequences and panels: forward and backward run part by part, each as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from dash_attn.backends.base import Gradients, KeySums, Operands, Partials
from dash_attn.backends.cpu.backward import CpuConfig, backward, workspace_bytes
from dash_attn.backends.cpu.forward import fill
from dash_attn.backends.cpu.threads import Job, run_jobs
from dash_attn.pack import Pack
from dash_attn.problem import Panel


@torch.no_grad()
def forward_pack(pack: Pack, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, as in `forward`. The bits of a row depend on its panel alone."""
    batch, len_q, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device="cpu")
    lse = torch.empty((batch, heads, len_q), dtype=torch.float32, device="cpu")
    for panel in pack.panels:
        rows = Rows.of_panel(panel, q, k)
        if panel.len_q and panel.len_k:
            operands = rows.of_q(q), rows.of_k(k), rows.of_k(v)
            fill(pack.problems[panel.kind], operands, (rows.of_q(out), rows.of_lse(lse)))
        elif panel.len_q:
            rows.of_q(out).zero_()
            rows.of_lse(lse).fill_(-math.inf)
    return out, lse


@torch.no_grad()
def backward_pack(pack: Pack, config: CpuConfig, operands: Operands, into: Gradients | None = None) -> Gradients:
    """Write dQ, dK and dV. Each panel follows its own plan, and dK and dV are summed over the panels of a sequence."""
    into = Gradients.room(operands) if into is None else into
    for _, group in groupby(pack.panels, attrgetter("sequence")):
        panels = list(group)
        rows = Rows.of_panel(panels[-1], operands.q, operands.k)  # the last panel sees every key
        grads = KeySums(rows.of_k(into.dk), rows.of_k(into.dv))
        if len(panels) > 1:
            last_first = (key_sums(pack, config, panel, operands, into.dq) for panel in reversed(panels))
            fold(last_first, grads, config.thread_count())
        elif panels[0].len_q and panels[0].len_k:
            backward(pack.plan_of(panels[0]), config, rows.of(operands), Gradients(rows.of_q(into.dq), *grads))
        else:
            for grad in (rows.of_q(into.dq), *grads):
                grad.zero_()
    return into


def key_sums(pack: Pack, config: CpuConfig, panel: Panel, operands: Operands, dq: Tensor) -> KeySums:
    """dK and dV of one panel in fp32. Its rows of dQ are written to `dq`."""
    rows = Rows.of_panel(panel, operands.q, operands.k)
    shape = (1, panel.len_k, *operands.k.shape[2:])
    sums = KeySums(*(torch.empty(shape, dtype=torch.float32, device="cpu") for _ in range(2)))
    if panel.len_q and panel.len_k:
        backward(pack.plan_of(panel), config, rows.of(operands), Gradients(rows.of_q(dq), *sums))
    else:
        for x in (rows.of_q(dq), *sums):
            x.zero_()
    return sums


def fold(sums: Iterable[KeySums], into: KeySums, threads: int) -> None:
    """Add the sums of the panels of one sequence in the given order, and round the total once. See Held.fold.

    The additions run in the threads of `run_jobs`, where denormal numbers are kept whatever the caller's setting is.
    """
    total: KeySums | None = None
    for each in sums:
        if total is None:
            total = each
        else:
            run_jobs(_by_head(total, each, _add), threads)
    if total is not None:
        run_jobs(_by_head(into, total, _round), threads)


def _by_head(some: KeySums, others: KeySums, job: Callable[[Tensor, Tensor], None]) -> Iterator[Job]:
    for x, y in zip(some, others, strict=True):
        yield from (partial(job, x[:, :, head], y[:, :, head]) for head in range(x.shape[2]))


def _add(total: Tensor, part: Tensor) -> None:
    total[:, : part.shape[1]].add_(part)


def _round(grad: Tensor, total: Tensor) -> None:
    grad.copy_(total)


@dataclass(frozen=True, eq=False)
class CpuHeld:
    """Some panels of a problem, on the CPU."""

    pack: Pack
    config: CpuConfig

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return forward_pack(self.pack, q, k, v)

    @torch.no_grad()
    def backward(self, operands: Operands) -> Partials:
        dq = torch.empty_like(operands.q, memory_format=torch.contiguous_format)
        return Partials(dq, tuple(key_sums(self.pack, self.config, panel, operands, dq) for panel in self.pack.panels))

    @torch.no_grad()
    def fold(self, sums: Iterable[KeySums], into: KeySums) -> None:
        fold(sums, into, self.config.thread_count())


def pack_workspace_bytes(pack: Pack, config: CpuConfig) -> int:
    """Bytes of the panel that needs most, because panels run one after the other.

    A sequence of several panels also has fp32 dK and dV: of all its panels together, and of the panel that runs.
    """
    row = 2 * 4 * pack.problem.heads_kv * pack.problem.dim
    most = max(workspace_bytes(each, config) for each in pack.plans.values())
    cut = [panels for _, group in groupby(pack.panels, attrgetter("sequence")) if len(panels := list(group)) > 1]
    return most + 2 * row * max((panel.len_k for panels in cut for panel in panels), default=0)


@dataclass(frozen=True)
class Rows:
    """Views of the rows of one panel, in tensors (batch, seqlen, ...). They have batch 1."""

    q: tuple[slice, slice]
    k: tuple[slice, slice]

    @staticmethod
    def of_panel(panel: Panel, q: Tensor, k: Tensor) -> Rows:
        return Rows(_place(panel.q_row, panel.len_q, q.shape[1]), _place(panel.k_row, panel.len_k, k.shape[1]))

    def of(self, operands: Operands) -> Operands:
        dout, q, k, v, out, lse = operands
        return Operands(self.of_q(dout), self.of_q(q), self.of_k(k), self.of_k(v), self.of_q(out), self.of_lse(lse))

    def of_q(self, x: Tensor) -> Tensor:
        return x[self.q]

    def of_k(self, x: Tensor) -> Tensor:
        return x[self.k]

    def of_lse(self, lse: Tensor) -> Tensor:
        batch, rows = self.q
        return lse[batch, :, rows]


def _place(row: int, count: int, length: int) -> tuple[slice, slice]:
    """Batch entry and rows in it. An empty sequence at the end of the last batch entry has no batch entry."""
    batch, first = divmod(row, length) if length else (0, 0)
    return slice(batch, batch + 1), slice(first, first + count)
