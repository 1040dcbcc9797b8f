"""Every barrier of the kernel, declared once: who arrives, how often. Pure Python.

mbarrier        completes when                                      waited for by
q_full, do_full producer announced the bytes and they landed        consumers
q_empty, ...    every consumer warp is done with the stage          producer
k_full, v_full  K (with the chain's facts) and V landed             consumers
k_empty, ...    every consumer warp is done with the chain's K, V   producer
task_full       the producer wrote entry e of the task ring         writers
ds_full         both warpgroups wrote their columns of dS            consumers
dq_full         one warpgroup staged its half of a tile             the slot's writer
dq_empty        the slot's half is free (and holds the partial sum, consumers
                when the tile is to be finished)
dk_full         one warpgroup staged its rows of dK in the dS buffers  the dK writer
dk_empty        those rows are stored, dS may be written again         consumers
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .config import CONSUMER_WARPGROUPS, RING, WARPGROUP, KernelConfig

HARDWARE_NAMED_BARRIERS = 16


class NamedBarrier(IntEnum):
    """Hardware barriers (bar.sync ids)."""

    CTA = 0  # reserved for sync_threads
    CONSUMERS = 1  # both consumer warpgroups
    GROUP = 2  # GROUP + warpgroup: one consumer warpgroup


@dataclass(frozen=True)
class MBarrierSpec:
    name: str
    count: int  # barriers of this kind
    arrivals: int  # per phase


def mbarrier_specs(cfg: KernelConfig) -> tuple[MBarrierSpec, ...]:
    warps = cfg.consumer_threads // 32
    halves = cfg.dq_slots * CONSUMER_WARPGROUPS
    return (
        MBarrierSpec("q_full", cfg.stages, 1),
        MBarrierSpec("q_empty", cfg.stages, warps),
        MBarrierSpec("do_full", cfg.stages, 1),
        MBarrierSpec("do_empty", cfg.stages, warps),
        MBarrierSpec("k_full", 1, 1),
        MBarrierSpec("k_empty", 1, warps),
        MBarrierSpec("v_full", 1, 1),
        MBarrierSpec("v_empty", 1, warps),
        MBarrierSpec("task_full", RING, 1),
        MBarrierSpec("ds_full", cfg.ds_stages, warps),
        MBarrierSpec("dq_full", halves, WARPGROUP // 32),
        MBarrierSpec("dq_empty", halves, 1),
        MBarrierSpec("dk_full", 1, warps),
        MBarrierSpec("dk_empty", 1, 1),
    )


def mbarrier_count(cfg: KernelConfig) -> int:
    return sum(s.count for s in mbarrier_specs(cfg))


def mbarrier_offsets(cfg: KernelConfig) -> dict[str, int]:
    at, out = 0, {}
    for s in mbarrier_specs(cfg):
        out[s.name] = at
        at += s.count
    return out


def named_barrier_threads(cfg: KernelConfig) -> dict[int, int]:
    ids = {int(NamedBarrier.CTA): cfg.threads, int(NamedBarrier.CONSUMERS): cfg.consumer_threads}
    for wg in range(CONSUMER_WARPGROUPS):
        ids[NamedBarrier.GROUP + wg] = WARPGROUP
    return ids


def ring_depth_needed(cfg: KernelConfig) -> int:
    """Entries that can be published but not yet read.

    The producer runs at most `stages` tasks and two chain ends (one entry each) ahead of the consumers,
    because every task waits for its Q stage and every chain for K of the chain before; the consumers are at
    most `dq_slots` entries ahead of the writers, because every entry waits for its slot. One end mark per
    writer follows the last chain, and one more entry is being written.
    """
    return cfg.stages + 2 + cfg.dq_slots + cfg.writers + 1


def barrier_problems(cfg: KernelConfig) -> list[str]:
    out = []
    if max(named_barrier_threads(cfg)) >= HARDWARE_NAMED_BARRIERS:
        out.append("named barrier ids run past the hardware's 16")
    if any(t % 32 for t in named_barrier_threads(cfg).values()):
        out.append("named barriers count whole warps")
    if ring_depth_needed(cfg) > RING:
        out.append(f"the task ring needs {ring_depth_needed(cfg)} entries and has {RING}")
    return out
