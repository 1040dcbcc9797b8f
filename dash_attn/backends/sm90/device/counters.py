"""Turnstile counters. With split turns and one word a tile, each half of the tile counts in 16 bits of the word."""

import cutlass.cute as cute
from cutlass import Int32

from ..config import KernelConfig


def turns_taken(cfg: KernelConfig, counter, writer):
    word = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    return (word >> (writer * 16)) & 0xFFFF if share_a_word(cfg) else word


def pass_on(cfg: KernelConfig, counter, writer):
    one = Int32(1) << (writer * 16) if share_a_word(cfg) else Int32(1)
    cute.arch.red(counter, one, op="add", dtype=Int32, sem="release", scope="gpu")


def share_a_word(cfg: KernelConfig) -> bool:
    return cfg.split and cfg.counters[0] == 1
