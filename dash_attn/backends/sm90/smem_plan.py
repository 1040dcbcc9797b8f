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
    """int32 words of a task in the task ring."""

    FLAGS = 0
    Q_TILE = 1
    PLANE = 2
    TURN = 3


class GradEntry(IntEnum):
    """int32 words of the end of a chain in the task ring. They say where dV goes."""

    FLAGS = 0
    KV_TILE = 1
    KV_HEAD = 2
    BATCH = 3


class Info(IntEnum):
    """int32 words of `info`, which describes a chain."""

    NUM_RUNS = 0
    KV_TILE = 1
    KV_HEAD = 2
    BATCH = 3


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
        ("ring", 4 * len(TaskEntry) * RING, 16),
        ("info", 4 * len(Info) * CHAINS_IN_FLIGHT, 16),
        ("lse", 4 * cfg.tile_m * STAGES, 128),
        ("delta", 4 * cfg.tile_m * STAGES, 128),
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
