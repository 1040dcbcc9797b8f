"""Shared memory of one CTA: every buffer with its offset. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from .barriers import mbarrier_count
from .config import CONSUMER_WARPGROUPS, RING, KernelConfig

ENTRY_WORDS = 4  # int32 words of a task entry
INFO_WORDS = 4  # int32 words that describe a chain: runs, kv tile, kv head, batch


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
        return next(b for b in self.buffers if b.name == name)

    def table(self) -> str:
        rows = [f"{b.name:8} {b.offset:8} {b.bytes:8}" for b in self.buffers]
        return "\n".join([*rows, f"{'total':8} {'':8} {self.total:8}"])


def plan(cfg: KernelConfig) -> SmemPlan:
    """Buffers in the order of the kernel's struct. Swizzled tiles need 1024-byte bases."""
    m, n, d, two = cfg.tile_m, cfg.tile_n, cfg.dim, 2
    wanted = [
        ("mbars", 8 * mbarrier_count(cfg), 8),
        ("ring", 4 * ENTRY_WORDS * RING, 16),
        ("info", 4 * INFO_WORDS * 2, 16),
        ("lse", 4 * m * cfg.stages, 128),
        ("delta", 4 * m * cfg.stages, 128),
        ("q", two * m * d * cfg.stages, 1024),
        ("do", two * m * d * cfg.stages, 1024),
        ("k", two * n * d, 1024),
        ("v", two * n * d, 1024),
        ("ds", two * m * n * cfg.ds_stages, 1024),
        ("dq", 4 * cfg.half_floats * CONSUMER_WARPGROUPS * cfg.dq_slots, 1024),
    ]
    at, out = 0, []
    for name, size, align in wanted:
        at = -(-at // align) * align
        out.append(Buffer(name, size, align, at))
        at += size
    return SmemPlan(tuple(out))
