"""The debug build's share of the writer warps: waits that end, and contributions that are kept.

A writer whose turn has not come in time reports to host memory and traps. The trap ends the grid and the CUDA
context with it; what reached host memory at system scope before stays readable (see launch.debug_backward).
"""

import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64

from ..config import PATIENCE_NS, REPORT
from .bundles import Cta
from .counters import turns_taken
from .ptx import bulk_store
from .tasks import ring_slot


@cute.jit
def await_turn(cta, counter, entry, writer):
    """As the wait of the turnstile, by one lane."""
    turn = cta.views.ring[3, ring_slot(entry)]
    start = cute.arch.globaltimer()
    seen = turn - 1
    while seen != turn:
        seen = turns_taken(cta.cfg, counter, writer)
        if seen != turn:
            if cute.arch.globaltimer() - start > PATIENCE_NS:
                report(cta, entry, writer, seen)


def report(cta: Cta, entry, writer, seen):
    at, worker = ring_slot(entry), cute.arch.block_idx()[0]
    q_tile, plane, turn = [cta.views.ring[1 + i, at] for i in range(3)]
    words = dict(stuck=1, worker=worker, writer=writer, entry=entry, q_tile=q_tile, plane=plane, wanted=turn, seen=seen)
    # A row per writer, so that no two write to one.
    row = Int64(worker * cta.cfg.writers + writer) * (4 * len(REPORT))
    to = cute.make_ptr(Int32, cta.streams.debug.reports + row, AddressSpace.gmem, assumed_align=4)
    # The mark comes last: another's trap may end this warp at any time.
    for i in range(len(REPORT) - 1, -1, -1):
        cute.arch.store(to + i, Int32(words[REPORT[i]]), sem="relaxed" if i else "release", scope="sys")
    cute.arch.fence_acq_rel_sys()
    cute.arch.inline_ptx("trap;")


def keep(cta: Cta, entry, part, staged):
    """One warpgroup's part (first float, bytes), as staged, into its place by turn; counted with the add behind it."""
    at = ring_slot(entry)
    q_tile, plane, turn = [cta.views.ring[1 + i, at] for i in range(3)]
    kept = cta.streams.debug.contributions[plane, q_tile, turn, None]
    bulk_store(kept.iterator + part[0], staged, part[1])
