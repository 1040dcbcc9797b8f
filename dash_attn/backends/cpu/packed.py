"""Packed sequences and panels: forward and backward run part by part, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from dash_attn.backends.base import Extras, Gradients, KeySums, Operands, Partials
from dash_attn.backends.cpu.backward import CpuConfig, kv_sum_bytes, replay, workspace_bytes
from dash_attn.backends.cpu.forward import Attended, fill
from dash_attn.backends.cpu.softmax import Softmax
from dash_attn.backends.cpu.threads import Job, run_jobs, without_grad
from dash_attn.backends.sinks import write_sink_gradient, write_without_keys
from dash_attn.kept import grown
from dash_attn.pack import Pack
from dash_attn.plan import Plan
from dash_attn.problem import Panel


@without_grad
def forward_pack(pack: Pack, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
    """out and lse, as in `forward`. The bits of a row depend on its panel alone."""
    batch, len_q, heads, _ = q.shape
    out = torch.empty((batch, len_q, heads, v.shape[-1]), dtype=q.dtype, device="cpu")
    lse = torch.empty((batch, heads, len_q), dtype=torch.float32, device="cpu")
    softmax = Softmax.of(pack.problem, extras)
    for panel in pack.panels:
        rows = PanelRows.of_panel(panel, q, k)
        if panel.len_q and panel.len_k:
            own = None if softmax is None else softmax.of_panel(panel, None)
            tensors = Attended(rows.of_q(q), rows.of_k(k), rows.of_k(v), rows.of_q(out), rows.of_lse(lse))
            fill(pack.problems[panel.kind], tensors, own)
        elif panel.len_q:
            write_without_keys(rows.of_q(out), rows.of_lse(lse), None if softmax is None else softmax.sinks)
    return out, lse


@without_grad
def backward_pack(
    pack: Pack, config: CpuConfig, operands: Operands, into: Gradients | None = None, extras: Extras | None = None
) -> Gradients:
    """Write dQ, dK and dV. Each panel follows its own plan, and dK and dV are summed over the panels of a sequence."""
    into = Gradients.room(operands) if into is None else into
    backward = PanelBackward(pack, config, operands, Softmax.of(pack.problem, extras))
    for _, group in groupby(pack.panels, attrgetter("sequence")):
        panels = list(group)
        rows = PanelRows.of_panel(panels[-1], operands.q, operands.k)  # the last panel sees every key
        grads = KeySums(rows.of_k(into.dk), rows.of_k(into.dv))
        if len(panels) > 1:
            fold((backward.key_sums(panel, into.dq) for panel in reversed(panels)), grads, config.thread_count())
        else:
            backward.panel(panels[0], Gradients(rows.of_q(into.dq), *grads))
    write_sink_gradient(operands, extras)
    return into


@dataclass(frozen=True, eq=False)
class PanelBackward:
    """A backward, panel by panel."""

    pack: Pack
    config: CpuConfig
    operands: Operands
    softmax: Softmax | None

    def panel(self, panel: Panel, into: Gradients) -> None:
        """Write dQ, dK and dV of one panel."""
        if not (panel.len_q and panel.len_k):
            for grad in into:
                grad.zero_()
            return
        rows, own = PanelRows.of_panel(panel, self.operands.q, self.operands.k), self.softmax
        if own is not None:
            own = own.of_panel(panel, None if own.dlse is None else rows.of_lse(own.dlse))
        replay(self.pack.plan_of(panel), self.config, rows.of(self.operands), into, own)

    def key_sums(self, panel: Panel, dq: Tensor) -> KeySums:
        """dK and dV of one panel in fp32. Its rows of dQ are written to `dq`."""
        rows = PanelRows.of_panel(panel, self.operands.q, self.operands.k)
        shapes = [(1, panel.len_k, *x.shape[2:]) for x in (self.operands.k, self.operands.v)]
        sums = KeySums(*(torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes))
        self.panel(panel, Gradients(rows.of_q(dq), *sums))
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
        del each  # the next panel takes its memory
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
        return forward_pack(self.pack, q, k, v, extras)

    @without_grad
    def backward(self, operands: Operands, extras: Extras | None = None) -> Partials:
        dq = torch.empty_like(operands.q, memory_format=torch.contiguous_format)
        backward = PanelBackward(self.pack, self.config, operands, Softmax.of(self.pack.problem, extras))
        sums = tuple(backward.key_sums(panel, dq) for panel in self.pack.panels)
        grown(self.pack)  # the first backward has made its plans
        return Partials(dq, sums)

    @without_grad
    def fold(self, sums: Iterable[KeySums], into: KeySums) -> None:
        fold(sums, into, self.config.thread_count())


def pack_workspace_bytes(pack: Pack, config: CpuConfig) -> int:
    """Bytes of the panel that needs most, because panels run one after the other, and those of the panels together."""
    most = _largest(pack, config)
    return (0 if most is None else workspace_bytes(most, config)) + _panel_sum_bytes(pack)


def pack_kv_sum_bytes(pack: Pack, config: CpuConfig) -> int:
    most = _largest(pack, config)
    return (0 if most is None else kv_sum_bytes(most)) + _panel_sum_bytes(pack)


def _largest(pack: Pack, config: CpuConfig) -> Plan | None:
    return max(pack.plans.values(), key=lambda each: workspace_bytes(each, config), default=None)


def _panel_sum_bytes(pack: Pack) -> int:
    """A sequence of several panels also has fp32 dK and dV: of all its panels together, and of the panel that runs.

    If a rank holds only some panels, these are results of its backward.
    """
    if pack.held is not None:
        return 0
    row = 4 * pack.problem.heads_kv * (pack.problem.dim + pack.problem.dim_v)
    cut = [panels for _, group in groupby(pack.panels, attrgetter("sequence")) if len(panels := list(group)) > 1]
    return 2 * row * max((panel.len_k for panels in cut for panel in panels), default=0)


@dataclass(frozen=True)
class PanelRows:
    """Views of the rows of one panel, in tensors (batch, seqlen, ...). They have batch 1."""

    q: tuple[slice, slice]
    k: tuple[slice, slice]

    @staticmethod
    def of_panel(panel: Panel, q: Tensor, k: Tensor) -> PanelRows:
        return PanelRows(_place(panel.q_row, panel.len_q, q.shape[1]), _place(panel.k_row, panel.len_k, k.shape[1]))

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
