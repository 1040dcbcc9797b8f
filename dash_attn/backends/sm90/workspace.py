"""Workspace: the fp32 side buffers of the backward, their sizes, and when a later call reuses them."""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import KV_COUNTERS, KernelConfig

Size = tuple[Any, ...]

KEPT_FLOATS = 1 << 22  # elements of the largest dQ whose workspace is kept (about 17 MB)


class Workspace(NamedTuple):
    """The side buffers. Their size is linear in the tokens.

    Their content on entry does not matter: launch.clear fills what must begin as zeros. If a separate pass writes dQ at
    the end, all buffers except the sums may lie in the memory of dQ.
    """

    lse2: Tensor
    delta: Tensor
    dq_sum: Tensor
    counters: Tensor

    @staticmethod
    def of(cfg: KernelConfig, q: Tensor, dq: Tensor | None = None, n_q: int | None = None) -> Workspace:
        """A new workspace. If `dq` is given and is large enough, all buffers except the sums lie in it.

        A plane has `n_q` q tiles in a pack. Otherwise their number follows from the length of q.
        """
        batch, seqlen, heads = sizes_of(q)
        planes, n_q = batch * heads, -(-seqlen // cfg.tile_m) if n_q is None else n_q
        sizes = Workspace.floats(cfg, planes, n_q * cfg.tile_m)
        if dq is not None and dq.is_contiguous() and lends(cfg, sum(sizes[:3]), dq.numel()):
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
        in_dq = lends(cfg, sum(small), planes * seqlen * cfg.columns) and not keeps(cfg, planes, seqlen)
        return 4 * (sums if in_dq else sums + sum(small))


class Keeper:
    """Gives a launch its workspace. All calls of a launch have tensors of one shape, on one device.

    A small workspace on the default stream is kept, and the thread's next call of the same size reuses it. That call
    runs after this one, and saves a third of its host time. CUDA graphs are never captured on the default stream.
    """

    def __init__(self, cfg: KernelConfig, n_q: int | None = None, n_kv: int | None = None) -> None:
        self.cfg, self.n_q, self.n_kv = cfg, n_q, n_kv  # tiles of a pack
        self._size: Size | None = None  # known from the first call; empty if the workspace is too large to be kept

    def __call__(self, q: Tensor, k: Tensor, dq: Tensor, stream: int) -> Room:
        """`stream` is 0 for the default one."""
        size = self._size
        if size is None:
            size = self._size = self._size_of(q, k)
        if stream or not size:
            return self.room(Workspace.of(self.cfg, q, dq, self.n_q), k)
        kept = _kept.on.get(size[0])
        if kept is None or kept[0] != size:
            room = self.room(Workspace.of(self.cfg, q, n_q=self.n_q), k)
            kept = _kept.on[size[0]] = size, room._replace(stats=converted(room.stats), all=converted(room.all))
        return kept[1]

    def room(self, ws: Workspace, k: Tensor) -> Room:
        """A workspace, with sums of dV and dK if chains are cut."""
        sums = kv_sums(self.cfg, k, self.n_kv)
        return Room(ws, sums, tuple(ws), (*ws, *sums.tensors))

    def _size_of(self, q: Tensor, k: Tensor) -> Size:
        """The device, and all that the shapes of a workspace follow from."""
        cfg, (batch, seqlen, heads) = self.cfg, sizes_of(q)
        if not keeps(cfg, batch * heads, seqlen):
            return ()
        tiles = (cfg.tile_m, cfg.columns, cfg.counters, cfg.cut, cfg.packed, self.n_q, self.n_kv)
        return q.device.index, *tiles, batch * heads, seqlen, k.shape if cfg.cut else ()


class ChainSums(NamedTuple):
    """Buffers of packs and of cut chains. None stands for a buffer that the kernels do not take.

    words   the ticket counter of a pack, and the turnstiles of cut chains
    kv_sum  the sums of dV and dK. Only cut chains have them
    """

    words: Tensor | None = None
    kv_sum: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in self if x is not None)


class Room(NamedTuple):
    """All buffers of a call. `stats` are those of the kernel before the main one, `all` those of the main kernel."""

    ws: Workspace
    sums: ChainSums
    stats: Any
    all: Any


def kv_sums(cfg: KernelConfig, k: Tensor, n_kv: int | None = None) -> ChainSums:
    """New buffers, as the config needs them."""
    if not cfg.cut and not cfg.packed:
        return ChainSums()
    batch, seqlen, heads = sizes_of(k)
    planes, tiles = batch * heads, -(-seqlen // cfg.tile_n) if n_kv is None else n_kv
    count = KV_COUNTERS + (2 * planes * tiles * cfg.chain_entries if cfg.cut else 0)
    words = torch.empty(count, dtype=torch.int32, device=k.device)
    if not cfg.cut:
        return ChainSums(words)
    return ChainSums(words, torch.empty(kv_sum_shape(cfg, planes, tiles), dtype=torch.float32, device=k.device))


def kv_sum_shape(cfg: KernelConfig, planes: int, n_kv: int) -> tuple[int, int, int, int]:
    """fp32 sums of dV and dK over the q heads of a group."""
    return planes, n_kv, cfg.chain_entries, 2 * cfg.half_floats


def sizes_of(x: Tensor) -> tuple[int, ...]:
    """Batch, sequence length and heads. A pack has the shape (rows, heads, dim)."""
    return x.shape[:3] if x.dim() == 4 else (1, *x.shape[:2])


def keeps(cfg: KernelConfig, planes: int, seqlen: int) -> bool:
    return planes * seqlen * cfg.dim <= KEPT_FLOATS


def lends(cfg: KernelConfig, floats: int, elements: int) -> bool:
    """Whether small buffers fit into a dQ of 16-bit elements, and dQ is written only after their last use."""
    return not cfg.last_finishes and 2 * floats <= elements


class _Kept(threading.local):
    """The last workspace on each device. Each thread has its own, because launches of two threads may alternate."""

    def __init__(self) -> None:
        self.on: dict[int, tuple[Size, Room]] = {}


_kept = _Kept()


def converted(tensors: tuple[Tensor, ...]) -> Any:
    """The tensors, converted for the compiled kernels. Doing this once saves the conversion at every call."""
    import tvm_ffi

    return tvm_ffi.convert(tensors)
