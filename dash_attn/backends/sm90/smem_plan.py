"""The shared memory of one CTA: the offset of every buffer, and the words of the small tables. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from .barriers import MBARRIER_COUNT
from .cta import CHAINS_IN_FLIGHT, CONSUMER_WARPGROUPS, DQ_SLOTS, RING, STAGES, TILE_N

if TYPE_CHECKING:
    from .config import KernelConfig


class TaskEntry(IntEnum):
    """int32 words of a task in the task ring. The last three are for packed sequences."""

    FLAGS = 0
    Q_TILE = 1  # counted from the first query of the sequence
    PLANE = 2
    TURN = 3
    SUM_TILE = 4  # the q tile, counted over all sequences
    ROW = 5  # where TMA finds the tile's rows (device/rows.py)
    SHIFT = 6


class GradEntry(IntEnum):
    """int32 words of the end of a chain in the task ring. They say where dV goes, and dK of a cut chain."""

    FLAGS = 0
    KV_TILE = 1  # of a cut chain in a pack: counted over all sequences
    KV_HEAD = 2  # of a cut chain: the q head
    BATCH = 3  # in a pack, at parity 0: the ticket that this worker's bundle awaits
    ROW = 4
    SHIFT = 5


class Info(IntEnum):
    """int32 words of `info`, which describes a chain. The last four are for packed sequences."""

    NUM_RUNS = 0  # below 0: no chain follows
    KV_TILE = 1
    KV_HEAD = 2  # of a cut chain: the q head
    BATCH = 3  # in a pack, at parity 0: the ticket that this worker's bundle awaits
    LEN_Q = 4
    LEN_K = 5
    ROW = 6
    SHIFT = 7


ENTRY_WORDS = 8
MINUS_BYTES = 128  # the constant operand of the step that subtracts delta: 8 rows of 8 columns in bf16
DELTA_BYTES = 2048  # the other one, delta in parts: 128 rows of 8 columns


def dk_piece(cfg: KernelConfig, wg: int) -> int:
    """Which piece of 64 rows of the dS buffers holds the dK of a warpgroup. The pieces of both lie 16 KB apart."""
    return wg * (128 // cfg.dim)


def delta_offset(cfg: KernelConfig, wg: int, stage: int) -> int:
    """Where the parts of delta for a warpgroup lie in the dS buffers: in the last 16 of its 128 rows.

    The warpgroup writes its dS there when the product has read them. dK takes up the first 64 rows at most.
    """
    own = cfg.tile_m * TILE_N  # bytes of dS that a warpgroup writes in a stage
    return (stage * CONSUMER_WARPGROUPS + wg + 1) * own - DELTA_BYTES


@dataclass(frozen=True)
class Buffer:
    name: str
    bytes: int
    align: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes


@dataclass(frozen=True)
class SmemPlan:
    buffers: tuple[Buffer, ...]

    @property
    def total(self) -> int:
        return self.buffers[-1].end

    def __getitem__(self, name: str) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)


def plan(cfg: KernelConfig) -> SmemPlan:
    """The buffers in the order of the kernel's struct. Swizzled tiles begin at multiples of 1024 bytes."""
    q_tile, kv_tile, ds_tile = (2 * size for size in (cfg.tile_m * cfg.dim, TILE_N * cfg.dim, cfg.tile_m * TILE_N))
    sizes = [
        ("mbars", 8 * MBARRIER_COUNT, 8),
        ("ring", 4 * ENTRY_WORDS * RING, 16),
        ("info", 4 * len(Info) * CHAINS_IN_FLIGHT, 16),
        ("lse", 4 * cfg.tile_m * STAGES, 128),
        ("delta", 4 * cfg.tile_m * STAGES, 128),
        *([("minus", MINUS_BYTES, 128)] if cfg.delta_in_product else []),
        ("q", q_tile * STAGES, 1024),
        ("do", q_tile * STAGES, 1024),
        ("k", kv_tile, 1024),
        ("v", kv_tile, 1024),
        ("ds", ds_tile * STAGES, 1024),
        ("dq", 4 * cfg.half_floats * CONSUMER_WARPGROUPS * DQ_SLOTS, 1024),
    ]
    used, buffers = 0, []
    for name, size, align in sizes:
        offset = -(-used // align) * align
        buffers.append(Buffer(name, size, align, offset))
        used = offset + size
    return SmemPlan(tuple(buffers))
