"""Every barrier of the kernel, declared once. Pure Python.

The kernel takes offsets and arrival counts from these tables. The model of the roles in tests/backends/sm90/protocol.py
runs on the same tables, and a test compares them with the calls in the kernel's source.

    mbarrier         completes a phase when
    q_full, do_full  the producer has announced the bytes of a stage and they have landed. If the product dP^T subtracts
                     delta, its operand is written, too
    q_empty, ...     every consumer warp has left the stage
    k_full           K has landed, and the chain's column of `info` is written; in a pack also the end of all chains
    v_full           V has landed
    k_empty, ...     every consumer warp has left the chain's K or V. If chains are cut and the dK writer follows the
                     tasks, it has also read the end of the chain
    task_full        the producer has written an entry of the task ring
    ds_full          both warpgroups have written their columns of dS
    dq_full          one warpgroup has staged its half of a dQ slot
    dq_empty         the half is free. For a task that finishes its dQ tile, the half also holds the partial sum
    dk_full          both warpgroups have staged dK in the dS buffers. Cut chains do not use it, nor dk_empty
    dk_empty         dK is stored, and dS may be written again
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from .cta import (
    CHAINS_IN_FLIGHT,
    CONSUMER_THREADS,
    CONSUMER_WARPS,
    DQ_SLOTS,
    HALF_SLOTS,
    RING,
    STAGES,
    THREADS,
    WARP,
    WARPGROUP,
    WRITERS,
)


class Role(Enum):
    PRODUCER = "producer"
    CONSUMER = "consumer"
    DQ_WRITER = "dQ writer"
    DK_WRITER = "dK writer"


@dataclass(frozen=True)
class MBarrierSpec:
    """One kind of mbarrier (a barrier in shared memory)."""

    name: str
    count: int  # barriers of this kind
    arrivals: int  # per phase. A load that counts bytes arrives once
    arrives: tuple[Role, ...]
    waits: tuple[Role, ...]


MBARRIERS = (
    MBarrierSpec("q_full", STAGES, 1, (Role.PRODUCER,), (Role.CONSUMER,)),
    MBarrierSpec("q_empty", STAGES, CONSUMER_WARPS, (Role.CONSUMER,), (Role.PRODUCER,)),
    MBarrierSpec("do_full", STAGES, 1, (Role.PRODUCER,), (Role.CONSUMER,)),
    MBarrierSpec("do_empty", STAGES, CONSUMER_WARPS, (Role.CONSUMER,), (Role.PRODUCER,)),
    MBarrierSpec("k_full", 1, 1, (Role.PRODUCER,), (Role.CONSUMER,)),
    MBarrierSpec("k_empty", 1, CONSUMER_WARPS, (Role.CONSUMER,), (Role.PRODUCER,)),
    MBarrierSpec("v_full", 1, 1, (Role.PRODUCER,), (Role.CONSUMER,)),
    MBarrierSpec("v_empty", 1, CONSUMER_WARPS, (Role.CONSUMER,), (Role.PRODUCER,)),
    MBarrierSpec("task_full", RING, 1, (Role.PRODUCER,), (Role.DQ_WRITER,)),
    MBarrierSpec("ds_full", STAGES, CONSUMER_WARPS, (Role.CONSUMER,), (Role.CONSUMER,)),
    MBarrierSpec("dq_full", HALF_SLOTS, WARPGROUP // WARP, (Role.CONSUMER,), (Role.DQ_WRITER,)),
    MBarrierSpec("dq_empty", HALF_SLOTS, 1, (Role.DQ_WRITER,), (Role.CONSUMER,)),
    MBarrierSpec("dk_full", 1, CONSUMER_WARPS, (Role.CONSUMER,), (Role.DK_WRITER,)),
    MBarrierSpec("dk_empty", 1, 1, (Role.DK_WRITER,), (Role.CONSUMER,)),
)
# If the product dP^T subtracts delta, the dK writer follows the tasks: it makes the operand of that step.
DELTA_MBARRIERS = {
    "q_full": MBarrierSpec("q_full", STAGES, 1, (Role.PRODUCER,), (Role.CONSUMER, Role.DK_WRITER)),
    "do_full": MBarrierSpec("do_full", STAGES, 2, (Role.PRODUCER, Role.DK_WRITER), (Role.CONSUMER,)),
    "task_full": MBarrierSpec("task_full", RING, 1, (Role.PRODUCER,), (Role.DQ_WRITER, Role.DK_WRITER)),
}
# Consumers wait for the dK writer of a cut chain only at its tasks. A row of empty chains must not pass it by.
CUT_DELTA_MBARRIERS = {
    "k_empty": MBarrierSpec("k_empty", 1, CONSUMER_WARPS + 1, (Role.CONSUMER, Role.DK_WRITER), (Role.PRODUCER,)),
}
MBARRIER_COUNT = sum(spec.count for spec in MBARRIERS)
# Number of the first barrier of each kind, counted from the start of the buffer.
MBARRIER_OFFSETS = {spec.name: sum(before.count for before in MBARRIERS[:i]) for i, spec in enumerate(MBARRIERS)}


def mbarriers(delta_in_product: bool, cut: bool) -> tuple[MBarrierSpec, ...]:
    """Those of a build. Only arrivals and roles differ between builds."""
    others = DELTA_MBARRIERS if delta_in_product else {}
    if delta_in_product and cut:
        others = others | CUT_DELTA_MBARRIERS
    return tuple(others.get(spec.name, spec) for spec in MBARRIERS)


class NamedBarrier(IntEnum):
    """Hardware barriers by id. An SM has 16 for a CTA."""

    CTA = 0  # all threads, once; the id that sync_threads uses
    CONSUMERS = 1  # both consumer warpgroups
    GROUP_0 = 2  # consumer warpgroup 0
    GROUP_1 = 3  # consumer warpgroup 1


NAMED_BARRIER_THREADS = {
    NamedBarrier.CTA: THREADS,
    NamedBarrier.CONSUMERS: CONSUMER_THREADS,
    NamedBarrier.GROUP_0: WARPGROUP,
    NamedBarrier.GROUP_1: WARPGROUP,
}


def ring_depth_needed(chain_entries: int) -> int:
    """Entries of the task ring that can be written before the slowest writer has read the first of them.

    - STAGES tasks ahead of the consumers, because every task waits for its stage of Q;
    - the ends of CHAINS_IN_FLIGHT chains, because every chain waits for the K of the chain before (k_empty);
    - DQ_SLOTS entries by which the consumers are ahead of the writers, because every entry waits for its slot;
    - an end mark for each writer, behind the last chain;
    - the entry that is being written.
    """
    return STAGES + CHAINS_IN_FLIGHT * chain_entries + DQ_SLOTS + WRITERS + 1
