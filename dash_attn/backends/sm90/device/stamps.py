"""The tracing build: one lane of each role writes time stamps to global memory.

A stamp is the SM's own cycle counter, which is cheap to read and precise. Row 0 of a worker names its SM. Row 0 and the
end of every chain also have the GPU's common clock, so that cycles can be converted
(see dash_attn/tools/trace/measured.py).
"""

import cutlass.cute as cute
from cutlass import Int64

from ..config import HEAD, STAMPS
from ..cta import WARPGROUP
from .bundles import Cta
from .ptx import fresh_thread_index


def cycle(cta: Cta):
    """The cycle counter in a tracing build, else 0."""
    return cute.arch.clock64() if cta.cfg.trace else Int64(0)


def stamp(cta: Cta, entry, name: str):
    """Called by one thread."""
    note(cta, entry + 1, STAMPS.index(name), cycle(cta))


def note(cta: Cta, row, column, value):
    cta.streams.events[cute.arch.block_idx()[0], row, column] = Int64(value)


def introduce(cta: Cta):
    """Writes row 0. Called by one thread."""
    for name, value in dict(sm=cute.arch.smid(), time=cute.arch.globaltimer(), cycle=cute.arch.clock64()).items():
        note(cta, 0, HEAD.index(name), value)


@cute.jit
def consumer_stamp(cta, entry, name):
    """Stamped by the first consumer thread. All threads of its warp call this."""
    if fresh_thread_index() == WARPGROUP:
        stamp(cta, entry, name)
    cute.arch.sync_warp()  # the next product needs the whole warp


@cute.jit
def tie_clocks(cta, entry):
    """At the end of a chain: the common clock and the cycle counter."""
    if fresh_thread_index() == WARPGROUP:
        note(cta, entry + 1, STAMPS.index("loaded"), cute.arch.globaltimer())
        stamp(cta, entry, "begun")
    cute.arch.sync_warp()
