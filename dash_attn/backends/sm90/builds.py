"""Two special builds of the kernel: one writes time stamps, one keeps every contribution. They give the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dash_attn.backends.base import Gradients, Operands

from .config import REPORT, STAMPS
from .cta import WRITERS
from .launch import Launch
from .tables import DeviceTables, PackedTables
from .workspace import Workspace

RUNS = 4  # of a trace; all but the last one warm up


@dataclass(frozen=True, eq=False)
class TraceBuffers:
    events: Tensor  # [workers, 1 + entries, cfg.stamps] int64; row 0 of a worker: HEAD

    addresses: tuple[int, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.events,)

    @staticmethod
    def of(launch: Launch, entries: int) -> TraceBuffers:
        """`entries` is the most that one worker may run: its tasks, and the entries for the ends of its chains."""
        shape = (launch.tables.workers, 1 + entries, launch.cfg.stamps)
        return TraceBuffers(torch.zeros(shape, dtype=torch.int64, device=launch.tables.runs.device))


def trace(launch: Launch, operands: Operands, into: Gradients, entries: int) -> npt.NDArray[np.int64]:
    """Run the tracing build a few times, and return the events of the last run, without unused rows at the end."""
    workspace = Workspace.of(launch.cfg, operands.q, n_q=launch.tables.n_q)
    buffers = TraceBuffers.of(launch, entries)
    for _ in range(RUNS):
        buffers.events.zero_()  # workers of a pack draw other tickets in each run
        launch(operands, into, workspace=workspace, buffers=buffers)
    used = buffers.events[..., STAMPS.index("landed")].any(0).sum()  # rows of entries are used from the first one on
    events: npt.NDArray[np.int64] = buffers.events[:, : 1 + int(used)].cpu().numpy()
    return events


@dataclass(frozen=True, eq=False)
class DebugBuffers:
    contributions: Tensor  # [planes, n_q, turns, floats of a tile] fp32, parts in fragment order
    reports: Tensor  # [workers, writers, len(REPORT)] int32 in pinned host memory, which the device writes directly

    @staticmethod
    def of(tables: DeviceTables | PackedTables, ws: Workspace) -> DebugBuffers:
        planes, n_q, *part = ws.dq_sum.shape
        turns = max(1, int(tables.contributors.max()))
        shape = (tables.workers, WRITERS, len(REPORT))
        reports = torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=True)
        return DebugBuffers(ws.dq_sum.new_full((planes, n_q, turns, *part), float("nan")), reports)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.contributions,)

    @property
    def addresses(self) -> tuple[int, ...]:
        return (self.reports.data_ptr(),)

    def stuck(self) -> list[dict[str, int]]:
        rows = self.reports.flatten(0, 1).tolist()
        return [dict(zip(REPORT, row, strict=True)) for row in rows if row[0]]


class Debugged(NamedTuple):
    contributions: Tensor  # as in DebugBuffers; NaN for turns that a tile does not have
    dq_sum: Tensor  # [planes, n_q, floats of a tile]: the sums of the kernel


def debug(launch: Launch, operands: Operands, into: Gradients) -> Debugged:
    """Run the debug build once and wait for it.

    If a turn does not come within seconds, a RuntimeError names the waiting writer and its turn. The process has then
    lost its CUDA context and must end.
    """
    workspace = Workspace.of(launch.cfg, operands.q, n_q=launch.tables.n_q)
    workspace.dq_sum.zero_()
    buffers = DebugBuffers.of(launch.tables, workspace)
    try:
        launch(operands, into, workspace=workspace, buffers=buffers)
        torch.cuda.synchronize(operands.q.device)
    except Exception as error:  # torch and the kernel compiler have errors of their own, and either may come first
        stuck = buffers.stuck()
        if not stuck:
            raise
        lines = [
            "worker {worker}, writer {writer}, entry {entry}: q tile {q_tile} of plane {plane} at turn {seen}, "
            "waits for {wanted}".format(**row)
            for row in stuck
        ]
        raise RuntimeError("turns that did not come:\n  " + "\n  ".join(lines)) from error
    return Debugged(buffers.contributions, workspace.dq_sum)
