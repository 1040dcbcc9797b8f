"""The forward of flex_attention, without a GPU: the blocks of a mask, and what is compiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from dash_attn.backends.sm90 import flex
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, intervals, tiles, window
from tests.backends.sm90.featured import attend
from tests.strategies import examples


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    len_q, len_k = draw(st.integers(1, 500)), draw(st.integers(1, 500))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    mask = draw(st.sampled_from([FULL, CAUSAL, window(100, 20), Mask(-3, None)]))
    if draw(st.booleans()):
        first = rng.integers(0, len_k, len_q) // draw(st.sampled_from([1, 200]))
        mask &= intervals(first, first + rng.integers(0, len_k + 1, len_q))
    if draw(st.booleans()):
        cell_m, cell_n = draw(st.sampled_from([(128, 128), (64, 256), (40, 80)]))
        cells = rng.random((-(-len_q // cell_m), -(-len_k // cell_n))) < 0.6
        mask &= tiles(cells, cell_m, cell_n)
    return Problem(1, 1, 1, len_q, len_k, 16, "float32", mask=mask)


@examples(150)
@given(problems())
def test_blocks_hold_every_pair_and_full_ones_no_other(problem: Problem) -> None:
    seen = problem.mask.dense(problem.len_q, problem.len_k)
    blocks, size = flex.blocks_of(problem), flex.BLOCK
    for q in range(-(-problem.len_q // size)):
        partial, full = blocks.partial[q, : blocks.partial_count[q]], blocks.full[q, : blocks.full_count[q]]
        assert (np.diff(partial) > 0).all() and (np.diff(full) > 0).all() and not set(partial) & set(full)
        for k in range(-(-problem.len_k // size)):
            block = seen[q * size : (q + 1) * size, k * size : (k + 1) * size]
            assert (k in full) == block.all()
            assert k in full or k in partial or not block.any()
            if problem.mask.tiles is None:
                assert (k in full or k in partial) == block.any()


def prefix(length: int, end: int) -> Problem:
    rows = np.arange(length)
    return Problem(1, 2, 1, length, length, 16, "float32", mask=intervals(rows * 0, np.maximum(rows + 1, end)))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    counter = CompileCounter()
    monkeypatch.setattr(flex, "COMPILER", counter)
    flex.compiled.cache_clear()
    yield counter
    flex.compiled.cache_clear()


@torch._dynamo.config.patch(recompile_limit=1)
def test_masks_of_a_shape_share_one_compilation(counter: CompileCounter) -> None:
    """And every shape has one, also if torch compiles a function for one shape only."""
    lengths = range(50, 53)
    for length in lengths:
        for end in (10, 20, 30) if length == 50 else (20,):
            problem = prefix(length, end)
            q, k, v = (torch.randn(1, length, heads, 16) for heads in (2, 1, 1))
            out, lse = flex.FlexForward(problem)(q, k, v)
            want, want_lse = attend(problem, q, k, v)
            torch.testing.assert_close(out, want.float())
            torch.testing.assert_close(lse, want_lse.float())
    assert counter.frame_count == len(lengths)
