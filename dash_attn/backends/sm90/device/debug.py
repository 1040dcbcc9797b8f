"""What the writer warps do only in the debug build: they keep every contribution, and their waits end.

A writer whose turn does not come in time writes a report to host memory and traps. The trap ends the grid and destroys
the CUDA context. The report stays readable, because it is written at system scope (see launch.debug_backward).
"""

import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64, const_expr

from ..config import PATIENCE_NS, REPORT
from ..cta import WRITERS
from ..smem_plan import TaskEntry
from .bundles import Cta
from .counters import turns_taken
from .ptx import bulk_store
from .tasks import entry_word


@cute.jit
def await_turn(cta, counter, entry, writer):
    """One lane waits at the turnstile, for PATIENCE_NS at most."""
    turn = entry_word(cta, entry, TaskEntry.TURN)
    start = cute.arch.globaltimer()
    seen = turn - 1
    while seen != turn:
        seen = turns_taken(cta.cfg, counter, writer)
        if seen != turn:
            if cute.arch.globaltimer() - start > PATIENCE_NS:
                report(cta, entry, writer, seen)


def report(cta: Cta, entry, writer, seen):
    worker = cute.arch.block_idx()[0]
    q_tile, plane, turn = [entry_word(cta, entry, w) for w in (TaskEntry.Q_TILE, TaskEntry.PLANE, TaskEntry.TURN)]
    words = dict(stuck=1, worker=worker, writer=writer, entry=entry, q_tile=q_tile, plane=plane, wanted=turn, seen=seen)
    # Each writer has a row of its own.
    row = Int64(worker * WRITERS + writer) * (4 * len(REPORT))
    to = cute.make_ptr(Int32, cta.streams.debug.reports + row, AddressSpace.gmem, assumed_align=4)
    # The word `stuck` is written last, because the trap of another writer may end this warp at any time.
    for i in range(len(REPORT) - 1, -1, -1):
        cute.arch.store(to + i, Int32(words[REPORT[i]]), sem="relaxed" if i else "release", scope="sys")
    cute.arch.fence_acq_rel_sys()
    cute.arch.inline_ptx("trap;")


def keep(cta: Cta, entry, part, staged):
    """Stores one warpgroup's SumPart in its turn's place. It shares the bulk group of its add."""
    tile = TaskEntry.SUM_TILE if const_expr(cta.cfg.packed) else TaskEntry.Q_TILE
    q_tile, plane, turn = [entry_word(cta, entry, w) for w in (tile, TaskEntry.PLANE, TaskEntry.TURN)]
    kept = cta.streams.debug.contributions[plane, q_tile, turn, None]
    bulk_store(kept.iterator + part.first, staged, part.nbytes)
