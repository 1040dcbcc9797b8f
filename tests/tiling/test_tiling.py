"""Tile states against a brute-force element mask."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, tiles, window
from dash_attn.tiling import TileShape, TileState, Tiling, grid, tile
from tests.strategies import examples, interval_masks, problems, shapes, tile_masks, tilings

KERNEL_SHAPES = [TileShape(64, 128), TileShape(80, 128), TileShape(128, 128)]


def expected(problem: Problem, shape: TileShape) -> np.ndarray:
    """Empty: no pair attends. Partial: a pair of a real query does not, or the tile reaches past the last key."""
    dense = problem.mask.dense(problem.len_q, problem.len_k)
    state = np.empty((-(-problem.len_k // shape.n), -(-problem.len_q // shape.m)), np.uint8)
    for kv in range(state.shape[0]):
        for q in range(state.shape[1]):
            part = dense[q * shape.m : (q + 1) * shape.m, kv * shape.n : (kv + 1) * shape.n]
            masked = not part.all() or (kv + 1) * shape.n > problem.len_k
            state[kv, q] = TileState.EMPTY if not part.any() else TileState.PARTIAL if masked else TileState.FULL
    return state


def check(problem: Problem, shape: TileShape) -> None:
    tiling = tile(problem, shape)
    np.testing.assert_array_equal(tiling.state, expected(problem, shape))
    assert (tiling.num_kv, tiling.num_q) == tiling.state.shape
    assert tiling.num_tiles == np.count_nonzero(tiling.state)


@examples(400)
@given(problems(), shapes)
def test_random_small_tilings(problem: Problem, shape: TileShape) -> None:
    check(problem, shape)


@examples(300)
@given(st.data())
def test_intervals_in_any_order(data: st.DataObject) -> None:
    len_q, len_k = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    check(Problem(1, 1, 1, len_q, len_k, mask=data.draw(interval_masks(len_q, len_k))), data.draw(shapes))


@examples(150)
@given(st.data())
def test_tile_masks_cover_whole_tiles(data: st.DataObject) -> None:
    shape = TileShape(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    cell = TileShape(shape.m * data.draw(st.integers(1, 3)), shape.n * data.draw(st.integers(1, 3)))
    len_q, len_k = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    mask = data.draw(st.sampled_from([FULL, CAUSAL, window(4, 2)])) & data.draw(tile_masks(len_q, len_k, cell))
    check(Problem(1, 1, 1, len_q, len_k, mask=mask), shape)


@pytest.mark.parametrize("shape", KERNEL_SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [(512, 512), (640, 640), (333, 511), (129, 700), (700, 129), (1, 257), (257, 1)])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(100, 0), window(64, 64), window(0, 0)], ids=str)
def test_kernel_shapes(shape: TileShape, lengths: tuple[int, int], mask: Mask) -> None:
    check(Problem(1, 1, 1, *lengths, mask=mask), shape)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 300), (300, 0)])
def test_zero_lengths(lengths: tuple[int, int]) -> None:
    tiling = tile(Problem(1, 1, 1, *lengths, mask=CAUSAL), TileShape(64, 128))
    assert tiling.num_tiles == 0 and tiling.spans.shape == (tiling.num_kv, 3)
    assert tiling.is_staircase


@pytest.mark.parametrize("cell", [300, 65537, 2**31 - 1])
def test_a_cell_that_holds_all_tokens_takes_every_tile(cell: int) -> None:
    mask = tiles([[1]], cell, cell) & CAUSAL
    check(Problem(1, 1, 1, 300, 300, mask=mask), TileShape(64, 128))
    check(Problem(1, 1, 1, 300, 300, mask=tiles([[1], [0], [1]], 128, cell)), TileShape(64, 96))
    assert not tile(Problem(1, 1, 1, 300, 300, mask=tiles([[0]], cell, cell)), TileShape(64, 128)).state.any()


# ---- what a tiling says about its shape --------------------------------------------------------------------


@examples(300)
@given(tilings())
def test_spans_and_shape(tiling: Tiling) -> None:
    rows = [np.flatnonzero(row) for row in tiling.state]
    spans = [(int(r[0]), int(r[-1]) + 1, len(r)) if len(r) else (0, 0, 0) for r in rows]
    assert [tuple(row) for row in tiling.spans.tolist()] == spans
    assert tiling.is_rectangle == all(len(r) == tiling.num_q for r in rows)
    ends = [(first, last) for first, last, count in spans if count]
    contiguous = all(last - first == count for first, last, count in spans)
    staircase = contiguous and all(a <= c and b <= d for (a, b), (c, d) in pairwise(ends))
    assert tiling.is_staircase == staircase
    assert tiling.is_triangle == (staircase and all(last == tiling.num_q for _, last, _ in spans))


@pytest.mark.parametrize("shape", KERNEL_SHAPES, ids=str)
def test_causal_is_a_triangle_at_any_shape(shape: TileShape) -> None:
    for lengths in [(1000, 1000), (300, 1000), (1000, 300)]:
        assert tile(Problem(1, 1, 1, *lengths, mask=CAUSAL), shape).is_triangle
        assert tile(Problem(1, 1, 1, *lengths, mask=window(200, 0)), shape).is_staircase
        assert tile(Problem(1, 1, 1, *lengths), shape).is_rectangle


def test_grid_takes_states_as_they_are() -> None:
    tiling = grid([[2, 1], [0, 2]], Problem(1, 1, 1, 4, 4), TileShape(2, 2))
    assert tiling.state.dtype == np.uint8 and tiling.num_tiles == 3


def test_errors_say_what_was_wrong() -> None:
    for states in ([[2, 1]], [[2, 3], [0, 1]], [2, 1]):
        with pytest.raises(ValueError, match="for each of 2 kv tiles x 2 q tiles"):
            grid(states, Problem(1, 1, 1, 4, 4), TileShape(2, 2))
    with pytest.raises(ValueError, match="a tile must be at least 1x1, got 0x128"):
        TileShape(0, 128)
    with pytest.raises(ValueError, match=r"documents\(2\) has documents.*Problem.alone\(panel\)"):
        tile(Problem(1, 1, 1, 8, 8, mask=documents([0, 3, 8], causal=True)), TileShape(4, 4))
    mask = tiles(np.ones((2, 2)), 96, 128)
    with pytest.raises(ValueError, match="cells of 96x128 must be multiples of the tile 64x128"):
        tile(Problem(1, 1, 1, 192, 256, mask=mask), TileShape(64, 128))
