"""Dropout: which weights are kept. It is a function of a sequence's seed and of places in the sequence.

All arithmetic is that of unsigned 32-bit integers. A row of a query head has two words. `low` and `high` are the halves
of the seed, and the two words differ in `start`:

    word = mix(mix(mix(mix(start ^ low) ^ high) ^ head) ^ row)

The weight of a key is kept if its number is at least the threshold, dropout * 2 ** 32:

    x = first word ^ key
    x = (x ^ x >> 16) * FACTORS[0] ^ second word
    x = (x ^ x >> 15) * FACTORS[1]
    number = x ^ x >> 16

`mix` is the same without the second word. Head is the number of the query head in the call. Row and key are counted
from the first query and the first key of the sequence. So tiles, panels, threads, batch and neighbours change nothing.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

Words = npt.NDArray[np.uint32]
Number = TypeVar("Number", int, Tensor)

STARTS = (0x243F6A88, 0x85A308D3)
FACTORS = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))
SHIFTS = (np.uint32(16), np.uint32(15), np.uint32(16))

STEP = 2**32  # from the seed of a sequence to that of the next one
SEEDS = 2**63


SEED = "seed must be a whole number from 0 to 2**63 - 1, or one for each sequence"


def later(seed: Number, number: Number) -> Number:
    """The seed of sequence `number`, if `seed` is that of the first one. Also of tensors, whose sums wrap around."""
    return (seed + number * STEP) & (SEEDS - 1)


def seeds_of(seed: Tensor, count: int) -> list[int]:
    """The seeds of `count` sequences. One number is the seed of the first sequence."""
    given: list[int] = seed.flatten().tolist()
    if min(given, default=0) < 0:
        raise ValueError(f"{SEED}; got {min(given)}")
    if seed.ndim == 0:
        return [later(given[0], number) for number in range(count)]
    if len(given) != count:
        raise ValueError(f"seed must be one number, or one for each of the {count} sequences; got {len(given)} numbers")
    return given


def row_words(seed: int, head: int, first: int, count: int) -> Words:
    """The two words of rows `first` up to `first + count - 1`, as (count, 2)."""
    x = np.broadcast_to(np.array(STARTS, np.uint32), (count, 2)).copy()
    row = np.arange(first, first + count, dtype=np.uint32)[:, None]
    for part in (np.uint32(seed % STEP), np.uint32(seed // STEP), np.uint32(head), row):
        x ^= part
        _mix(x, np.uint32(0))
    return x


def kept(words: Words, keys: Words, dropout: float) -> npt.NDArray[np.bool_]:
    """Whether the weight of each row and key is kept."""
    x = words[:, :1] ^ keys
    _mix(x, words[:, 1:])
    return x >= np.uint32(min(round(dropout * STEP), STEP - 1))


def _mix(x: Words, word: Words | np.uint32) -> None:
    x ^= x >> SHIFTS[0]
    x *= FACTORS[0]
    x ^= word
    x ^= x >> SHIFTS[1]
    x *= FACTORS[1]
    x ^= x >> SHIFTS[2]
