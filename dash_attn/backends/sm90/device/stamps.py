"""The tracing build: one lane of each role notes in global memory when it got how far.

Stamps are the SM's own cycle counter, which is cheap to read and fine. Row 0 of a worker says on which SM it runs, and
with the end of every chain it ties cycles to the GPU's common clock (see dash_attn/tools/trace/measured.py).
"""

import cutlass.cute as cute
from cutlass import Int64

from ..config import HEAD, STAMPS, WARPGROUP
from .bundles import Cta
from .ptx import fresh_thread_index


def cycle(cta: Cta):
    """Now, where stamps are wanted."""
    return cute.arch.clock64() if cta.cfg.trace else Int64(0)


def stamp(cta: Cta, entry, name: str):
    """Called by one thread."""
    note(cta, entry + 1, STAMPS.index(name), cycle(cta))


def note(cta: Cta, row, column, value):
    cta.streams.events[cute.arch.block_idx()[0], row, column] = Int64(value)


def introduce(cta: Cta):
    """Row 0, by one thread."""
    for name, value in dict(sm=cute.arch.smid(), time=cute.arch.globaltimer(), cycle=cute.arch.clock64()).items():
        note(cta, 0, HEAD.index(name), value)


@cute.jit
def consumer_stamp(cta, entry, name):
    """By the first thread of the first consumer warpgroup; all threads of its warp come here."""
    if fresh_thread_index() == WARPGROUP:
        stamp(cta, entry, name)
    cute.arch.sync_warp()  # products are issued by whole warps


@cute.jit
def tie_clocks(cta, entry):
    """At a chain's end: the common clock beside the cycle counter."""
    if fresh_thread_index() == WARPGROUP:
        note(cta, entry + 1, STAMPS.index("loaded"), cute.arch.globaltimer())
        stamp(cta, entry, "begun")
    cute.arch.sync_warp()
