"""Workspace: the fp32 side buffers of the backward, their sizes, and when a later call reuses them."""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import KernelConfig
from .cta import TILE_N

Size = tuple[Any, ...]

KEPT_FLOATS = 1 << 22  # elements of the largest dQ whose workspace is kept (about 17 MB)


class Workspace(NamedTuple):
    """The side buffers. Their size is linear in the tokens.

    Their content on entry does not matter, except that unordered sums start from zeros. If a separate pass writes dQ at
    the end, all buffers except the sums may lie in the memory of dQ.
    """

    lse2: Tensor
    delta: Tensor
    dq_sum: Tensor
    counters: Tensor

    @staticmethod
    def of(cfg: KernelConfig, q: Tensor, dq: Tensor | None = None) -> Workspace:
        """A new workspace. If `dq` is given and is large enough, all buffers except the sums lie in it."""
        batch, seqlen, heads, _ = q.shape
        planes, n_q = batch * heads, -(-seqlen // cfg.tile_m)
        sizes = Workspace.floats(cfg, planes, seqlen)
        if dq is not None and dq.is_contiguous() and lends(cfg, planes, seqlen):
            room = dq.view(-1).view(torch.float32)[: sum(sizes[:3])]
        else:
            room = torch.empty(sum(sizes[:3]), device=q.device, dtype=torch.float32)
        lse2, delta, words = torch.split(room, list(sizes[:3]))
        counters = words.view(torch.int32)
        if cfg.last_finishes:  # q tiles of one head are polled at the same time, so their counters lie far apart
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
        """Bytes that a call allocates beside contiguous gradients."""
        *small, sums = Workspace.floats(cfg, planes, seqlen)
        in_dq = lends(cfg, planes, seqlen) and not keeps(cfg, planes, seqlen)
        return 4 * (sums if in_dq else sums + sum(small))


class Keeper:
    """Gives a launch its workspace. All calls of a launch have tensors of one shape, on one device.

    A small workspace on the default stream is kept, and the thread's next call of the same size reuses it. That call
    runs after this one, and saves a third of its host time. CUDA graphs are never captured on the default stream.
    """

    def __init__(self, cfg: KernelConfig) -> None:
        self.cfg = cfg
        self._size: Size | None = None  # known from the first call; empty if the workspace is too large to be kept

    def __call__(self, q: Tensor, dq: Tensor, stream: int) -> tuple[Workspace, Any]:
        """A workspace, and the same tensors converted for the compiled kernels. `stream` is 0 for the default one."""
        size = self._size
        if size is None:
            size = self._size = self._size_of(q)
        if stream or not size:
            ws = Workspace.of(self.cfg, q, dq)
            return ws, tuple(ws)
        kept = _kept.on.get(size[0])
        if kept is None or kept[0] != size:
            ws = Workspace.of(self.cfg, q)
            kept = _kept.on[size[0]] = size, (ws, converted(tuple(ws)))
        return kept[1]

    def _size_of(self, q: Tensor) -> Size:
        """The device, and all that the shapes of a workspace follow from."""
        batch, seqlen, heads, _ = q.shape
        if not keeps(self.cfg, batch * heads, seqlen):
            return ()
        return q.device.index, self.cfg.tile_m, self.cfg.columns, self.cfg.counters, batch * heads, seqlen


def parts_shape(cfg: KernelConfig, planes: int, len_k: int) -> tuple[int, int, int, int]:
    """fp32 dV and dK of cut chains: a part for each q head."""
    return planes, -(-len_k // TILE_N), cfg.chain_entries, 2 * cfg.half_floats


def keeps(cfg: KernelConfig, planes: int, seqlen: int) -> bool:
    return planes * seqlen * cfg.dim <= KEPT_FLOATS


def lends(cfg: KernelConfig, planes: int, seqlen: int) -> bool:
    """Whether the small buffers fit into dQ, and dQ is written only after their last use."""
    return (
        not cfg.last_finishes
        and 4 * sum(Workspace.floats(cfg, planes, seqlen)[:3]) <= planes * seqlen * cfg.columns * 2
    )


class _Kept(threading.local):
    """The last workspace on each device. Each thread has its own, because launches of two threads may alternate."""

    def __init__(self) -> None:
        self.on: dict[int, tuple[Size, tuple[Workspace, Any]]] = {}


_kept = _Kept()


def converted(tensors: tuple[Tensor, ...]) -> Any:
    """The tensors, converted for the compiled kernels. Doing this once saves the conversion at every call."""
    import tvm_ffi

    return tvm_ffi.convert(tensors)
