"""Panels: every query is in one panel, and a panel alone is a problem with the same pairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, tiles, window
from tests.strategies import examples, problems


def without_negative_sides(problem: Problem) -> Problem:
    return replace(problem, mask=problem.mask.without_negative_sides(problem.len_q, problem.len_k))


any_problem = (problems() | problems(packed=True)).map(without_negative_sides)


@examples(300)
@given(any_problem, st.integers(1, 7))
def test_the_panels_have_every_pair_once(problem: Problem, panels: int) -> None:
    cut = replace(problem, panels=panels)
    whole = problem.mask.dense(problem.len_q, problem.len_k)
    for entry in range(problem.batch):
        pairs = np.zeros(whole.shape, np.int64)
        queries = np.zeros(problem.len_q, np.int64)
        for panel in cut.panel_list:
            q, k = panel.q_row - entry * problem.len_q, panel.k_row - entry * problem.len_k
            if panel.len_q and 0 <= q < problem.len_q:
                rows, keys = slice(q, q + panel.len_q), slice(k, k + panel.len_k)
                pairs[rows, keys] += cut.alone(panel).mask.dense(panel.len_q, panel.len_k)
                queries[rows] += 1
        assert (queries == 1).all() and np.array_equal(pairs, whole)


@examples(300)
@given(any_problem, st.integers(1, 7))
def test_cuts_are_at_multiples_of_the_range(problem: Problem, panels: int) -> None:
    cut, size = replace(problem, panels=panels), -(-problem.len_q // panels)
    for panel in cut.panel_list:
        sequence = cut.sequences[panel.sequence]
        begin = panel.q_row % max(1, problem.len_q)
        assert panel.len_q == 0 or begin // size == (begin + panel.len_q - 1) // size, "in one range"
        end = panel.q_row + panel.len_q
        assert end == sequence.q_row + sequence.len_q or end % max(1, problem.len_q) % size == 0, "no other cut"
        last = end == sequence.q_row + sequence.len_q
        assert panel.k_row == sequence.k_row and (not last or (panel.len_k, panel.after) == (sequence.len_k, 0))
    assert sorted({panel.sequence for panel in cut.panel_list}) == list(range(len(cut.sequences)))


def test_a_causal_panel_is_aligned_at_its_end() -> None:
    problem = Problem(2, 1, 1, 10, 12, mask=CAUSAL, panels=3)
    assert problem.panel_list[:3] == ((0, 0, 4, 6, 0, 0, 0), (4, 0, 4, 10, 0, 0, 4), (8, 0, 2, 12, 0, 0, 8))
    assert problem.panel_list[3:5] == ((10, 12, 4, 6, 0, 1, 0), (14, 12, 4, 10, 0, 1, 4))
    assert problem.alone(problem.panel_list[1]) == Problem(1, 1, 1, 4, 10, mask=CAUSAL)


def test_queries_that_see_nothing_have_a_panel_without_keys() -> None:
    assert Problem(1, 1, 1, 10, 2, mask=CAUSAL, panels=2).panel_list == ((0, 0, 5, 0, 0, 0, 0), (5, 0, 5, 2, 0, 0, 5))


def test_a_pack_is_cut_by_the_rows_of_the_stream() -> None:
    problem = Problem(1, 1, 1, 10, 10, mask=documents([0, 3, 3, 10], causal=True), panels=2)
    assert problem.panel_list == (
        (0, 0, 3, 3, 0, 0, 0),
        (3, 3, 0, 0, 0, 1, 0),
        (3, 3, 2, 2, 0, 2, 0),
        (5, 3, 5, 7, 0, 2, 2),
    )


@pytest.mark.parametrize(
    ("mask", "keys", "alone"),
    [
        (FULL, [10, 10], FULL),
        (window(3, 0), [5, 10], window(3, 0)),
        (window(3, 2), [7, 10], window(5, 0)),
        (window(None, 20), [10, 10], window(None, 15)),
        (window(3, None), [10, 10], window(8, None)),
    ],
    ids=str,
)
def test_the_window_of_a_panel(mask: Mask, keys: list[int], alone: Mask) -> None:
    problem = Problem(1, 1, 1, 10, 10, mask=mask, panels=2)
    assert [panel.len_k for panel in problem.panel_list] == keys
    assert problem.alone(problem.panel_list[0]).mask == alone and problem.alone(problem.panel_list[1]).mask == mask


def test_without_a_cut_panels_are_sequences() -> None:
    problem = Problem(2, 1, 1, 10, 12, mask=documents([0, 4, 10], [0, 5, 12]))
    assert [panel[:4] for panel in problem.panel_list] == list(problem.sequences)
    assert replace(problem, panels=1) == problem != replace(problem, panels=2)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="panels must be at least 1, got 0"):
        Problem(1, 1, 1, 8, 8, panels=0)
    with pytest.raises(ValueError, match=r"panels is 2, and mask has tiles.*leave panels at 1"):
        Problem(1, 1, 1, 8, 8, mask=tiles([[True]], 8, 8), panels=2)
    with pytest.raises(ValueError, match=r"panels is 2.*negative side.*without_negative_sides"):
        Problem(1, 1, 1, 8, 8, mask=window(5, -3), panels=2)
