"""Turnstile counters: a word a q tile. Where turns are split, each half of the tile counts in a half of its word."""

import cutlass.cute as cute
from cutlass import Int32

from .bundles import Cta
from .config import KernelConfig
from .tasks import ring_slot


def counter_of(cta: Cta, entry):
    """Where it lies. To be asked for again rather than kept: the writers have few registers."""
    at = ring_slot(entry)
    return cta.streams.counters[cta.views.ring[1, at], None].iterator + cta.views.ring[2, at]


def turns_taken(cfg: KernelConfig, counter, writer):
    word = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    return (word >> (writer * 16)) & 0xFFFF if cfg.split else word


def pass_on(cfg: KernelConfig, counter, writer):
    one = Int32(1) << (writer * 16) if cfg.split else Int32(1)
    cute.arch.red(counter, one, op="add", dtype=Int32, sem="release", scope="gpu")
