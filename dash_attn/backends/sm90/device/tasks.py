"""Entries of the task ring: the producer decodes the Program once, consumers and writers read entries.

An entry is four int32 words: (flags, a, b, c).
    task  flags = PARTIAL | FIRST | LAST | BEGINS | ENDS | ODD, (q tile, plane, turn)
    grad  flags = GRAD,                   (kv tile, kv head, batch)
    end   flags = END
Every chain ends with a grad entry: dV leaves through a dQ slot, while dK takes the dS buffers.
"""

import cutlass.cute as cute
from cutlass import Int32

from ..config import RING
from .bundles import Cta

RING_BITS = RING.bit_length() - 1

PARTIAL = 1
FIRST = 2  # nothing has been added to this dQ tile yet: store instead of add
LAST = 4  # completes this dQ tile
GRAD = 8
END = 16
BEGINS = 32  # first task of its chain
ENDS = 64  # last task of its chain
ODD = 128  # parity of the chain


def my_chains(cta: Cta):
    """(first, count) of this worker's chains in worker_chains. Each role reads it for itself: held over from the
    start of the kernel it would cost the worker warps registers they do not have."""
    worker = cute.arch.block_idx()[0]
    first = cta.tables.worker_first[worker]
    return first, cta.tables.worker_first[worker + 1] - first


def ring_slot(entry):
    return entry & (RING - 1)


def ring_phase(entry):
    return (entry >> RING_BITS) & 1


def publish(cta: Cta, entry, words):
    """One thread writes an entry and announces it to the writers."""
    slot = ring_slot(entry)
    for i in range(4):
        cta.views.ring[i, slot] = Int32(words[i])
    cta.bars.arrive("task_full", slot)


def flags_of(cta: Cta, entry):
    return cta.views.ring[0, ring_slot(entry)]


@cute.jit
def await_entry(cta, entry):
    cta.bars.wait("task_full", ring_slot(entry), ring_phase(entry))
