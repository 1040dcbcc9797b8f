"""Launch: the backward of one plan on a Hopper GPU. Everything that calls share is looked up once."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from dash_attn.backends.base import Gradients, Operands

from .alignment import Alignment, aligned
from .cache import kernels
from .config import KernelConfig
from .tables import DeviceTables
from .workspace import Workspace, converted, parts_shape

LOG2_E = 1.4426950408889634


class Extra(Protocol):
    """Additional tensors and host addresses for the kernel of a tracing or debug build."""

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def addresses(self) -> tuple[int, ...]: ...


class Launch:
    """dQ, dK, dV of softmax(scale Q K^T + mask) V.

    For a small problem the host takes longer than the GPU, so a call does as little as possible.
    """

    def __init__(self, cfg: KernelConfig, tables: DeviceTables, scale: float) -> None:
        self.cfg, self.tables, self.scale = cfg, tables, scale
        self.prepare, self.main, self.finish, self.add_parts = kernels(cfg)
        program = (tables.chains, tables.runs, tables.worker_first, tables.worker_chains, tables.contributors)
        # The kernel reads the intervals of rows only for mask "interval". Other masks pass contributors in their place.
        rows = (tables.contributors if row is None else row for row in (tables.row_lo, tables.row_hi))
        self.program, self.facts = converted((*program, *rows)), (scale, scale * LOG2_E)
        self.clears, self.special = tables.empty_q_tiles or not cfg.ordered, cfg.trace or cfg.debug
        self._takes = Alignment()
        self._streams: set[int] = set()  # streams that have used the tables

    def __call__(
        self,
        operands: Operands,
        into: Gradients,
        workspace: Workspace | None = None,
        extra: Extra | None = None,
    ) -> None:
        """Write the gradients to `into`. Tensors with an unsuitable alignment are copied."""
        if (extra is None) is self.special:
            raise ValueError("a build that traces or debugs runs through builds.trace or builds.debug, no other does")
        dout, q, k, v, out, lse = operands
        dq, dk, dv = into
        if lse.is_contiguous() and self._takes(dout, q, k, v, out, dq, dk, dv):
            self._launch(operands, into, workspace, extra)
            return
        copies = Gradients(aligned(dq), aligned(dk), aligned(dv))
        inputs = Operands(aligned(dout), aligned(q), aligned(k), aligned(v), aligned(out), lse.contiguous())
        self._launch(inputs, copies, workspace, extra)
        for given, copy in zip(into, copies, strict=True):
            if given is not copy:
                given.copy_(copy)

    def _parts(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Room for dV and dK of cut chains, if chains are cut."""
        if not self.cfg.cut:
            return ()
        shape = parts_shape(self.cfg, q.shape[0] * q.shape[2], k.shape[1])
        return (torch.empty(shape, dtype=torch.float32, device=q.device),)

    def _launch(self, operands: Operands, into: Gradients, workspace: Workspace | None, extra: Extra | None) -> None:
        dout, q, k, v, out, lse = operands
        stats: Any
        if workspace is None:
            workspace, stats = Workspace.kept(self.cfg, q, into.dq)
        else:
            stats = tuple(workspace)
        if q.is_cuda and (stream := torch._C._cuda_getCurrentRawStream(q.device.index)) not in self._streams:
            # Another stream copied the tables. Their memory must stay until this stream no longer uses it.
            self.tables.chains.record_stream(torch.cuda.current_stream(q.device))
            self._streams.add(stream)
        if self.clears:
            clear(self.cfg, self.tables, into.dq, workspace)
        self.prepare((dout, out, lse), stats)
        parts = self._parts(q, k)
        facts: tuple[float, ...] = self.facts
        if parts:
            stats = (*workspace, *parts)
        if extra is not None:
            stats, facts = (*workspace, *parts, *extra.tensors), (*facts, *extra.addresses)
        self.main((q, dout, k, v, *into), stats, self.program, facts)
        if self.finish is not None:
            self.finish(workspace.dq_sum, into.dq, self.scale)
        if self.add_parts is not None:
            self.add_parts(*parts, (into.dv, into.dk), self.scale)


def clear(cfg: KernelConfig, tables: DeviceTables, dq: Tensor, ws: Workspace) -> None:
    """Fill with zeros what the kernel reads before it has written it, and what it never writes."""
    if tables.empty_q_tiles:
        dq.zero_()
    if not cfg.ordered or (tables.empty_q_tiles and not cfg.last_finishes):
        ws.dq_sum.zero_()
