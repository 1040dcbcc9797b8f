"""torch tensors + Program tables -> dQ, dK, dV on a Hopper GPU."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dash_attn.program import Program, Sequences

from .cache import kernels
from .config import MOST_TURNS, REPORT, STAMPS, KernelConfig
from .cta import WRITERS

LOG2_E = 1.4426950408889634
KEPT_FLOATS = 1 << 22  # of dQ: workspaces up to about 17 MB are kept
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Inputs(NamedTuple):
    """Tensors (batch, seqlen, heads, dim); lse (batch, heads, seqlen), fp32, natural logarithm."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Grads(NamedTuple):
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """A verified and placed Program on the device: int32, contiguous."""

    chains: torch.Tensor  # [C, 5] columns CHAIN
    runs: torch.Tensor  # [R, 8] columns RUN and one of zeros
    worker_first: torch.Tensor  # [W + 1]
    worker_chains: torch.Tensor  # [C]
    contributors: torch.Tensor  # [n_q]
    empty_q_tiles: bool = False  # some q tile has no contributor: its dQ is zeroed here
    row_lo: torch.Tensor | None = None  # [Sq] for mask "interval"
    row_hi: torch.Tensor | None = None

    @property
    def workers(self) -> int:
        return self.worker_first.numel() - 1

    @staticmethod
    def of(program: Program, placement: Sequences, rows: tuple[np.ndarray, ...], device: torch.device) -> DeviceTables:
        """One copy to the device; `rows` are the intervals of the mask's rows, or nothing where it needs none."""
        if program.contributors.max(initial=0) > MOST_TURNS:
            raise ValueError(f"{program.contributors.max()} kv tiles meet one q tile: counters hold {MOST_TURNS} turns")
        used = np.flatnonzero(np.diff(placement.first))  # a worker without chains would only take up an SM
        first = np.append(placement.first[:-1][used], placement.first[-1])
        runs = np.zeros((max(1, len(program.runs)), 8), np.int32)
        runs[: len(program.runs), :7] = program.runs
        parts = [program.chains, runs, first, placement.chains, program.contributors, *rows]  # all of them int32
        flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(device)
        views = [view.view(part.shape) for view, part in zip(flat.split([p.size for p in parts]), parts, strict=True)]
        return DeviceTables(*views[:5], bool((program.contributors == 0).any()), *views[5:])


class Workspace(NamedTuple):
    """fp32 side buffers, linear in tokens. Their content on entry does not matter, but for unordered sums.

    All but the sums may lie in dQ itself, if a pass of its own writes that at the very end.
    """

    lse2: torch.Tensor
    delta: torch.Tensor
    dq_sum: torch.Tensor
    counters: torch.Tensor

    @staticmethod
    def of(cfg: KernelConfig, q: torch.Tensor, dq: torch.Tensor | None = None) -> Workspace:
        """In `dq` as far as it goes, if given."""
        batch, seqlen, heads, _ = q.shape
        planes, n_q = batch * heads, -(-seqlen // cfg.tile_m)
        sizes = Workspace.floats(cfg, planes, seqlen)
        if dq is not None and dq.is_contiguous() and lends(cfg, planes, seqlen):
            room = dq.view(-1).view(torch.float32)[: sum(sizes[:3])]
        else:
            room = torch.empty(sum(sizes[:3]), device=q.device, dtype=torch.float32)
        lse2, delta, words = room.split(sizes[:3])
        counters = words.view(torch.int32)
        if cfg.last_finishes:  # q tiles of one head, which are polled at the same time, lie far apart
            counters = counters.view(n_q, planes, *cfg.counters).transpose(0, 1)
        dq_sum = torch.empty(sizes[3], device=q.device, dtype=torch.float32)
        return Workspace(
            lse2.view(planes, -1),
            delta.view(planes, -1),
            dq_sum.view(planes, n_q, sum(cfg.sum_parts)),
            counters.view(planes, n_q, *cfg.counters),
        )

    @staticmethod
    def floats(cfg: KernelConfig, planes: int, seqlen: int) -> tuple[int, int, int, int]:
        """Words of lse2, delta, counters and dq_sum."""
        tiles, rows = planes * -(-seqlen // cfg.tile_m), cfg.tile_m
        return tiles * rows, tiles * rows, tiles * math.prod(cfg.counters), tiles * sum(cfg.sum_parts)

    @staticmethod
    def nbytes(cfg: KernelConfig, planes: int, seqlen: int) -> int:
        """What a call takes beside contiguous gradients."""
        *small, sums = Workspace.floats(cfg, planes, seqlen)
        in_dq = lends(cfg, planes, seqlen) and not keeps(cfg, planes, seqlen)
        return 4 * (sums if in_dq else sums + sum(small))

    @staticmethod
    def kept(cfg: KernelConfig, q: torch.Tensor, dq: torch.Tensor) -> tuple[Workspace, Any]:
        """One, and the same as the kernels take it. A small one is used again by the thread's next call of this size on
        the default stream, which runs after this one: allocations and conversions are a third of what such a call
        costs the host. Graphs are not captured there."""
        batch, seqlen, heads, _ = q.shape
        device = q.device.index
        if not keeps(cfg, batch * heads, seqlen) or not on_default_stream(device):
            ws = Workspace.of(cfg, q, dq)
            return ws, tuple(ws)
        size = cfg.tile_m, cfg.columns, cfg.counters, batch * heads, seqlen
        found = _kept.on.get(device)
        if found is None or found[0] != size:
            ws = Workspace.of(cfg, q)
            found = _kept.on[device] = size, (ws, converted(tuple(ws)))
        return found[1]


def keeps(cfg: KernelConfig, planes: int, seqlen: int) -> bool:
    return planes * seqlen * cfg.dim <= KEPT_FLOATS


def lends(cfg: KernelConfig, planes: int, seqlen: int) -> bool:
    """dQ has room for the small ones, and is not written before they are done with."""
    return (
        not cfg.last_finishes
        and 4 * sum(Workspace.floats(cfg, planes, seqlen)[:3]) <= planes * seqlen * cfg.columns * 2
    )


def on_default_stream(device: int) -> bool:
    return torch._C._cuda_getCurrentRawStream(device) == 0


class _Kept(threading.local):
    """Per thread, because launches of two threads may mix on a stream: the last workspace on each device."""

    def __init__(self) -> None:
        self.on: dict[int, tuple[tuple[Any, ...], tuple[Workspace, Any]]] = {}


_kept = _Kept()


@dataclass(frozen=True, eq=False)
class DebugBuffers:
    contributions: torch.Tensor  # [planes, n_q, turns, floats of a tile] fp32, parts in fragment order
    reports: torch.Tensor  # [workers, writers, len(REPORT)] int32 in pinned host memory, which the device writes as is

    @staticmethod
    def of(tables: DeviceTables, ws: Workspace) -> DebugBuffers:
        planes, n_q, *part = ws.dq_sum.shape
        turns = max(1, int(tables.contributors.max()))
        reports = torch.zeros(tables.workers, WRITERS, len(REPORT), dtype=torch.int32, pin_memory=True)
        return DebugBuffers(ws.dq_sum.new_full((planes, n_q, turns, *part), float("nan")), reports)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.contributions,)

    @property
    def addresses(self) -> tuple[int, ...]:
        return (self.reports.data_ptr(),)

    def stuck(self) -> list[dict[str, int]]:
        rows = self.reports.flatten(0, 1).tolist()
        return [dict(zip(REPORT, row, strict=True)) for row in rows if row[0]]


@dataclass(frozen=True, eq=False)
class TraceBuffers:
    events: torch.Tensor  # [workers, 1 + entries, len(STAMPS)] int64; row 0 of a worker: HEAD

    addresses = ()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.events,)

    @staticmethod
    def of(tables: DeviceTables) -> TraceBuffers:
        """As many rows as the longest worker has entries: its tasks, and one for every chain."""
        runs, chains = tables.runs[:, 3].cpu().numpy(), tables.chains.cpu().numpy()
        until = np.append(0, np.cumsum(runs, dtype=np.int64))
        tasks = until[chains[:, 3] + chains[:, 4]] - until[chains[:, 3]]
        entries = np.append(0, np.cumsum(1 + tasks[tables.worker_chains.cpu().numpy()]))
        rows = 1 + int(np.diff(entries[tables.worker_first.cpu().numpy()]).max(initial=0))
        shape = (tables.workers, rows, len(STAMPS))
        return TraceBuffers(torch.zeros(shape, dtype=torch.int64, device=tables.chains.device))


Tensors = tuple[torch.Tensor, ...]
Extra = DebugBuffers | TraceBuffers


class Debugged(NamedTuple):
    grads: Grads
    contributions: torch.Tensor  # as in DebugBuffers; NaN past the contributors of a tile
    dq_sum: torch.Tensor  # [planes, n_q, floats of a tile]: what the kernel made of them


@functools.lru_cache(None)
def resident_workers(device: torch.device) -> int:
    """One CTA fills an SM's shared memory, so as many workers run together as there are SMs."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def check(cfg: KernelConfig, tables: DeviceTables, q: torch.Tensor, k: torch.Tensor, build: str = "") -> None:
    if build != ("debug" if cfg.debug else "trace" if cfg.trace else ""):
        raise ValueError("a debug config runs through debug_backward, one that traces through trace_backward, only so")
    want = TORCH_DTYPES[cfg.dtype]
    if q.dtype != want or q.shape[-1] != cfg.columns:
        raise ValueError(f"kernel built for {want}, head dim {cfg.columns}; got {q.dtype}, {q.shape[-1]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} q heads are not a multiple of {k.shape[2]} kv heads")
    available = resident_workers(q.device)
    if tables.workers > available:
        raise ValueError(f"the placement needs {tables.workers} resident workers, this GPU has {available}")
    if cfg.mask == "interval" and tables.row_lo is None:
        raise ValueError("mask 'interval' needs row_lo and row_hi in the tables")


class Launch:
    """A kernel with all that its calls share looked up: a small problem takes the host longer than the GPU."""

    def __init__(self, cfg: KernelConfig, tables: DeviceTables, scale: float):
        self.cfg, self.tables, self.scale = cfg, tables, scale
        self.prepare, self.main, self.finish = kernels(cfg)
        program = (tables.chains, tables.runs, tables.worker_first, tables.worker_chains, tables.contributors)
        # Contributors stand for the rows' intervals, which are not read unless the mask is interval.
        rows = (tables.contributors if row is None else row for row in (tables.row_lo, tables.row_hi))
        self.program, self.facts = converted((*program, *rows)), (scale, scale * LOG2_E)
        self.clears = tables.empty_q_tiles or not cfg.ordered

    def __call__(
        self, inputs: Tensors, grads: Tensors, ws: Workspace | None = None, extra: Extra | None = None
    ) -> None:
        """`inputs` as Inputs has them; `grads` are dq, dk, dv."""
        dout, q, k, v, out, lse = inputs
        ws, stats = Workspace.kept(self.cfg, q, grads[0]) if ws is None else (ws, tuple(ws))
        if self.clears:
            clear(self.cfg, self.tables, grads[0], ws)
        self.prepare((dout, out, lse), stats)
        if extra is None:
            self.main((q, dout, k, v, *grads), stats, self.program, self.facts)
        else:
            more = (*ws, *extra.tensors), self.program, (*self.facts, *extra.addresses)
            self.main((q, dout, k, v, *grads), *more)
        if self.finish is not None:
            self.finish(ws.dq_sum, grads[0], self.scale)


def converted(tensors: tuple[torch.Tensor, ...]) -> Any:
    """As the compiled functions take them, once instead of at every call."""
    import tvm_ffi

    return tvm_ffi.convert(tensors)


def clear(cfg: KernelConfig, tables: DeviceTables, dq: torch.Tensor, ws: Workspace) -> None:
    """Zeros where the kernel adds to what it has not stored, or stores nothing."""
    if tables.empty_q_tiles:
        dq.zero_()
    if not cfg.ordered or (tables.empty_q_tiles and not cfg.last_finishes):
        ws.dq_sum.zero_()


def backward(
    cfg: KernelConfig,
    tables: DeviceTables,
    inputs: Inputs,
    *,
    scale: float,
    into: Grads | None = None,
    workspace: Workspace | None = None,
) -> Grads:
    """dQ, dK, dV of softmax(scale Q K^T + mask) V."""
    q, k, v = inputs.q, inputs.k, inputs.v
    check(cfg, tables, q, k)
    grads = Grads(*(torch.empty_like(t) for t in (q, k, v))) if into is None else into
    if q.numel() == 0 or k.numel() == 0:
        return Grads(*(t.zero_() for t in grads))
    Launch(cfg, tables, scale)(inputs, grads, workspace)
    return grads


def trace_backward(
    cfg: KernelConfig, tables: DeviceTables, inputs: Inputs, *, scale: float, warm_up: int = 3
) -> tuple[Grads, np.ndarray]:
    """One backward of a tracing config (see config.with_trace) behind some to warm up, and the events it left."""
    q, k, v = inputs.q, inputs.k, inputs.v
    check(cfg, tables, q, k, "trace")
    if q.numel() == 0 or k.numel() == 0:
        raise ValueError("nothing to trace: the problem has no tasks")
    ws, grads, buffers = Workspace.of(cfg, q), Grads(*(torch.empty_like(t) for t in (q, k, v))), TraceBuffers.of(tables)
    launch = Launch(cfg, tables, scale)
    for _ in range(warm_up + 1):
        launch(inputs, grads, ws, buffers)
    return grads, buffers.events.cpu().numpy()


def debug_backward(cfg: KernelConfig, tables: DeviceTables, inputs: Inputs, *, scale: float) -> Debugged:
    """One backward of a debug config (see config.with_debug), waited for.

    A turn that does not come within seconds is a RuntimeError naming who waits for what. The process has lost its CUDA
    context then: nothing but ending it helps.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    check(cfg, tables, q, k, "debug")
    ws, grads = Workspace.of(cfg, q), Grads(*(torch.zeros_like(t) for t in (q, k, v)))
    ws.dq_sum.zero_()
    buffers = DebugBuffers.of(tables, ws)
    try:
        Launch(cfg, tables, scale)(inputs, grads, ws, buffers)
        torch.cuda.synchronize(q.device)
    except RuntimeError as error:
        stuck = buffers.stuck()
        if not stuck:
            raise
        lines = [
            "worker {worker}, writer {writer}, entry {entry}: q tile {q_tile} of plane {plane} at turn {seen}, "
            "waits for {wanted}".format(**row)
            for row in stuck
        ]
        raise RuntimeError("turns that did not come:\n  " + "\n  ".join(lines)) from error
    return Debugged(grads, buffers.contributions, ws.dq_sum)
