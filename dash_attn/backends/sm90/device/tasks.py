"""Tasks on the device: the words of the tables, and the task ring.

Only the producer reads the Program. It writes an entry of the task ring for every task and for every end of a chain,
and the other roles read the entries:

    task   flags = PARTIAL | FIRST | LAST | BEGINS | ENDS | ODD, then the words of smem_plan.TaskEntry
    grad   flags = GRAD, then the words of smem_plan.GradEntry: the end of a chain. A cut chain has several, and the
           flags also hold the number of the part, PART * 0, PART * 1, ...: dV, then dK, 64 columns each
    end    flags = END: no entry follows, one for each dQ writer

A worker counts its tasks, its chains and its entries from 0. Task t of chain c is entry t + c * cfg.chain_entries,
because every chain before has entries for its end beside those of its tasks.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, const_expr

from dash_attn.pack import Doc, PackedBundle, Round
from dash_attn.program import Chain, Run

from ..cta import RING
from ..smem_plan import GradEntry, Info, TaskEntry
from .bundles import Cta
from .rows import Coords

RING_BITS = RING.bit_length() - 1

PARTIAL = 1  # the tile is masked element by element
FIRST = 2  # the first contribution to its dQ tile: it is stored, not added
LAST = 4  # the last contribution to its dQ tile
GRAD = 8
END = 16
BEGINS = 32  # the first task of its chain
ENDS = 64  # the last task of its chain
ODD = 128  # the chain's number is odd
PART = 256  # the part of a cut chain's end, as a multiple


def my_chains(cta: Cta):
    """(first, count) of this worker's chains in worker_chains.

    Every role reads the table anew: the values, held from the start of the kernel on, would take registers that the
    worker warps do not have.
    """
    worker = cute.arch.block_idx()[0]
    first = cta.tables.worker_first[worker]
    return first, cta.tables.worker_first[worker + 1] - first


def chain_word(cta: Cta, chain, column: Chain):
    """A pack's table has only the columns from the kv tile on: chains of all sequences and heads share its rows."""
    return cta.tables.chains[chain, int(column) - (int(Chain.KV_TILE) if const_expr(cta.cfg.packed) else 0)]


def run_word(cta: Cta, run, column: Run):
    return cta.tables.runs[run, int(column)]


def info_word(cta: Cta, parity, word: Info):
    return cta.views.info[int(word), parity]


def entry_word(cta: Cta, entry, word: TaskEntry | GradEntry):
    return cta.views.ring[int(word), ring_slot(entry)]


def doc_word(cta: Cta, row, column: Doc):
    """Of the sequence of a round. The words of the round come first."""
    return cta.tables.docs[row, len(Round) + int(column)]


def round_word(cta: Cta, row, column: Round):
    return cta.tables.docs[row, int(column)]


def bundle_word(cta: Cta, bundle, column: PackedBundle):
    return cta.tables.bundles[bundle, int(column)]


def kv_coords(cta: Cta, parity):
    """Of the K and V of the chain with this parity."""
    if const_expr(cta.cfg.packed):
        words = (Info.ROW, Info.KV_HEAD, Info.SHIFT)
    else:
        words = (Info.KV_TILE, Info.KV_HEAD, Info.BATCH)
    first, head, last = (info_word(cta, parity, word) for word in words)
    return Coords(first, 0, head, last)


class Lengths(NamedTuple):
    q: Any
    k: Any


def lengths(cta: Cta, parity):
    """Queries and keys of the sequence of the chain with this parity."""
    if const_expr(cta.cfg.packed):
        return Lengths(info_word(cta, parity, Info.LEN_Q), info_word(cta, parity, Info.LEN_K))
    return Lengths(cta.facts.seqlen_q, cta.facts.seqlen_k)


def stage_of(task):
    """The stage of Q, dO and dS that a task uses, and the parity of its phase there."""
    return task & 1, (task >> 1) & 1


def half_slot(entry, wg):
    """A warpgroup's half of the dQ slot that an entry uses, and the parity of its phase there."""
    return (entry & 1) * 2 + wg, (entry >> 1) & 1


def ring_slot(entry):
    return entry & (RING - 1)


def ring_phase(entry):
    return (entry >> RING_BITS) & 1


def publish(cta: Cta, entry, words):
    """One thread writes an entry and announces it to the writers."""
    slot = ring_slot(entry)
    for i, word in enumerate(words):
        cta.views.ring[i, slot] = Int32(word)
    cta.bars.arrive("task_full", slot)


@cute.jit
def await_entry(cta, entry):
    cta.bars.wait("task_full", ring_slot(entry), ring_phase(entry))
