"""A program that verifies is compared with the problem that it shall run on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from dash_attn.launch import compose
from dash_attn.problem import CAUSAL, FULL, Problem, window
from dash_attn.program import Tile
from dash_attn.tiling import TileShape, Tiling, tile
from dash_attn.verify import VerifyError, matches, verify
from tests.strategies import examples, tilings

PROBLEM, SHAPE = Problem(2, 4, 2, 24, 20, mask=CAUSAL), TileShape(4, 3)


@examples(100)
@given(tilings())
def test_a_program_matches_the_problem_that_it_was_made_for(tiling: Tiling) -> None:
    if np.array_equal(tile(tiling.problem, tiling.shape).state, tiling.state):  # a grid's states come from no mask
        for policy in ("fa3", "fa3@head"):
            matches(compose(tiling, policy), tiling.problem, tiling.shape)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("batch", {"batch": 1}),
        ("heads_kv", {"heads_kv": 4}),
        ("group", {"heads_q": 2}),
        ("len_q", {"len_q": 23}),
        ("len_k", {"len_k": 19}),
    ],
)
def test_sizes_that_differ_are_named(name: str, other: dict[str, int]) -> None:
    """Most of these have the same tiles, so nothing but the geometry tells them apart."""
    program = compose(tile(dataclasses.replace(PROBLEM, **other), SHAPE), "fa3")
    verify(program)
    with pytest.raises(VerifyError, match=f"its {name} is"):
        matches(program, PROBLEM, SHAPE)


@pytest.mark.parametrize(("name", "shape"), [("tile_m", TileShape(5, 3)), ("tile_n", TileShape(4, 4))])
def test_tiles_that_differ_are_named(name: str, shape: TileShape) -> None:
    with pytest.raises(VerifyError, match=f"its {name} is"):
        matches(compose(tile(PROBLEM, shape), "fa3"), PROBLEM, SHAPE)


@pytest.mark.parametrize(("mask", "said"), [(FULL, "full, .* empty"), (window(3, 0), "partial, .* full")])
def test_a_mask_that_differs_is_named_by_its_first_tile(mask: object, said: str) -> None:
    program = compose(tile(dataclasses.replace(PROBLEM, mask=mask), SHAPE), "fa3")
    verify(program)
    with pytest.raises(VerifyError, match=rf"another mask: q tile \d+, kv tile \d+ is {said}"):
        matches(program, PROBLEM, SHAPE)


def test_masks_with_the_same_tiles_match() -> None:
    """The element mask inside partial tiles is an input: the backend takes it from the problem."""
    wider = dataclasses.replace(PROBLEM, mask=window(19, 0))
    program = compose(tile(wider, SHAPE), "fa3")
    assert np.array_equal(tile(wider, SHAPE).state, tile(PROBLEM, SHAPE).state) and wider.mask != PROBLEM.mask
    matches(program, PROBLEM, SHAPE)


def test_the_cut_of_the_tile_table_means_nothing() -> None:
    program = compose(tile(PROBLEM, SHAPE), "fa3")
    rows = [
        [kv, first + i, 1, partial]
        for kv, first, count, partial in program.tiles.tolist()
        for i in reversed(range(count))
    ]
    matches(dataclasses.replace(program, tiles=np.array(rows, np.int32)), PROBLEM, SHAPE)


def test_a_broken_tile_table_is_refused() -> None:
    tiles = compose(tile(PROBLEM, SHAPE), "fa3").tiles.copy()
    tiles[0, Tile.COUNT] = 99
    program = dataclasses.replace(compose(tile(PROBLEM, SHAPE), "fa3"), tiles=tiles)
    with pytest.raises(VerifyError, match="tile table is broken"):
        matches(program, PROBLEM, SHAPE)
