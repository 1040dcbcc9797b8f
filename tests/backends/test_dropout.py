"""Which weights dropout keeps: a function of seed, head, row and key, well mixed, written down once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dash_attn.backends.dropout import STEP, kept, row_words, seeds_of

MASK = 2**32 - 1


def mix(x: int, word: int = 0) -> int:
    x = ((x ^ x >> 16) * 0x7FEB352D & MASK) ^ word
    x = (x ^ x >> 15) * 0x846CA68B & MASK
    return x ^ x >> 16


def number(seed: int, head: int, row: int, key: int) -> int:
    """The definition, in whole numbers without limits."""
    first, second = (
        mix(mix(mix(mix(start ^ seed & MASK) ^ seed >> 32) ^ head) ^ row) for start in (0x243F6A88, 0x85A308D3)
    )
    return mix(first ^ key, second)


def drawn(seed: int, head: int = 0, rows: int = 400, keys: int = 500, dropout: float = 0.3) -> np.ndarray:
    return kept(row_words(seed, head, 0, rows), np.arange(keys, dtype=np.uint32), dropout)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
def test_the_definition(seed: int) -> None:
    rows, keys = (0, 1, 70_000), (0, 3, 100_000)
    for head in (0, 5):
        for row in rows:
            got = kept(row_words(seed, head, row, 1), np.array(keys, np.uint32), 0.4)[0]
            assert got.tolist() == [number(seed, head, row, key) >= round(0.4 * 2**32) for key in keys]


def test_some_numbers() -> None:
    """They stay, because runs that are repeated later need them."""
    assert [number(1, 0, 0, 0), number(1, 0, 0, 1), number(1, 0, 1, 0), number(2, 3, 4, 5)] == NUMBERS


NUMBERS = [2572143549, 2255786643, 1147580363, 761401915]


def test_rows_can_be_computed_in_parts() -> None:
    whole = row_words(9, 2, 0, 50)
    assert np.array_equal(whole[17:40], row_words(9, 2, 17, 23))


@pytest.mark.parametrize("dropout", [0.001, 0.1, 0.5, 0.9])
def test_share_of_dropped_weights(dropout: float) -> None:
    dropped = ~drawn(11, rows=1000, keys=1000, dropout=dropout)
    spread = (dropout * (1 - dropout) / dropped.size) ** 0.5
    assert abs(dropped.mean() - dropout) < 5 * spread
    for axis in (0, 1):  # no row and no key is favoured
        each = (dropout * (1 - dropout) / 1000) ** 0.5
        assert abs(dropped.mean(axis) - dropout).max() < 6 * each


def test_neighbours_are_independent() -> None:
    """Beside each other in rows, keys, heads, seeds and sequences: no correlation of what is kept."""
    base = drawn(5)
    others = [drawn(5, head=1), drawn(6), drawn(5 + STEP), drawn(5 ^ 1 << 40), drawn(5 + 2 * STEP, head=3)]
    pairs = [(base, other) for other in others]
    pairs += [(base[:-lag], base[lag:]) for lag in (1, 2, 16, 64, 256)]
    pairs += [(base[:, :-lag], base[:, lag:]) for lag in (1, 2, 16, 64, 256)]
    for a, b in pairs:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / a.size**0.5


def test_one_seed_gives_those_of_all_sequences() -> None:
    assert seeds_of(torch.tensor(7), 3) == [7, 7 + 2**32, 7 + 2 * 2**32]
    assert seeds_of(torch.tensor(2**63 - 1), 2) == [2**63 - 1, 2**32 - 1]
    assert seeds_of(torch.tensor([3, 9]), 2) == [3, 9]
    with pytest.raises(ValueError, match="one for each of the 2 sequences; got 1 numbers"):
        seeds_of(torch.tensor([3]), 2)
