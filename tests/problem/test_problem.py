"""Problems: what they derive, and what they refuse."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.problem import (
    CAUSAL,
    Features,
    Panel,
    Problem,
    Sequence,
    SequenceColumn,
    documents,
    intervals_by_row,
    tiles,
    window,
)
from tests.strategies import document_masks, examples


def test_derived_sizes() -> None:
    problem = Problem(2, 8, 2, 100, 200, dim=64)
    assert problem.group == 4
    assert problem.softmax_scale == 0.125
    assert dataclasses.replace(problem, scale=0.5).softmax_scale == 0.5


def test_problems_are_values() -> None:
    a, b = (Problem(1, 2, 2, 8, 8, mask=CAUSAL) for _ in range(2))
    assert a == b and hash(a) == hash(b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.batch = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", ["batch", "heads_q", "heads_kv", "dim"])
def test_sizes_start_at_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Problem(**{"batch": 1, "heads_q": 1, "heads_kv": 1, "len_q": 1, "len_k": 1, "dim": 8, name: 0})


def test_errors_say_what_was_wrong() -> None:
    Problem(1, 1, 1, 0, 0)
    with pytest.raises(ValueError, match="len_k must not be negative, got -1"):
        Problem(1, 1, 1, 4, -1)
    with pytest.raises(ValueError, match="multiple of heads_kv, got 6 and 4"):
        Problem(1, 6, 4, 4, 4)
    with pytest.raises(ValueError, match=r"tiles\(1x1 of 64x64\) does not cover 128 queries x 64 keys"):
        Problem(1, 1, 1, 128, 64, mask=tiles([[1]], 64, 64))


# ---- sequences ---------------------------------------------------------------------------------------------


def test_without_documents_a_batch_entry_is_a_sequence() -> None:
    problem = Problem(3, 4, 2, 10, 20, 64, "float16", 0.3, CAUSAL)
    assert problem.sequences == ((0, 0, 10, 20), (10, 20, 10, 20), (20, 40, 10, 20))
    assert not problem.is_packed
    assert problem.alone(problem.sequences[1]) == dataclasses.replace(problem, batch=1)


def test_columns_have_the_names_of_the_fields() -> None:
    names = tuple(column.name.lower() for column in SequenceColumn)
    assert names == Sequence._fields == Panel._fields[: len(names)]


def test_documents_of_each_batch_entry_are_sequences() -> None:
    mask = documents([0, 3, 3, 8], [0, 4, 6, 6]) & window(2, 0)
    problem = Problem(2, 4, 2, 8, 6, 64, "float16", 0.3, mask)
    first = ((0, 0, 3, 4), (3, 4, 0, 2), (3, 6, 5, 0))
    assert problem.is_packed
    assert problem.sequences == (*first, *((q + 8, k + 6, *lengths) for q, k, *lengths in first))
    alone = problem.alone(problem.sequences[0])
    assert alone == Problem(1, 4, 2, 3, 4, 64, "float16", 0.3, window(2, 0))


def test_pieces_of_sequences_know_their_places() -> None:
    """Where queries meet keys, the places are those in the sequence of the caller."""
    problem = Problem(2, 1, 1, 8, 8, mask=window(10, -3).without_negative_sides(8, 8))
    assert problem.given_sequences == 2 and [origin.number for origin in problem.origins] == [0, 0, 1, 1]
    pack = (documents([0, 3, 8]) & window(-2, 20)).without_negative_sides(8, 8)
    problem = Problem(2, 1, 1, 8, 8, mask=pack)
    assert problem.given_sequences == 4
    met = [origin for origin, each in zip(problem.origins, problem.sequences, strict=True) if each.len_q and each.len_k]
    assert met == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]
    chunks = intervals_by_row(lambda row: (row // 4 * 4, row + 1), 10).without_rows(10, 10)
    problem = Problem(2, 1, 1, 10, 10, mask=chunks)
    assert problem.given_sequences == 2
    assert problem.origins == tuple((batch, row, row) for batch in range(2) for row in (0, 4, 8))
    plain = Problem(2, 1, 1, 8, 8, mask=documents([0, 3, 8]))
    assert plain.given_sequences == 4 and plain.origins == tuple((number, 0, 0) for number in range(4))


@examples(100)
@given(st.data())
def test_the_mask_of_a_pack_is_made_of_the_masks_of_its_sequences(data: st.DataObject) -> None:
    len_q, len_k = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    mask = data.draw(document_masks(len_q, len_k)) & window(data.draw(st.none() | st.integers(0, 9)), None)
    problem = Problem(2, 1, 1, len_q, len_k, mask=mask)
    expected = np.zeros((2 * len_q, 2 * len_k), bool)
    expected[:len_q, :len_k] = expected[len_q:, len_k:] = mask.dense(len_q, len_k)
    allowed = np.zeros_like(expected)
    for each in problem.sequences:
        alone = problem.alone(each)
        rows, keys = slice(each.q_row, each.q_row + each.len_q), slice(each.k_row, each.k_row + each.len_k)
        allowed[rows, keys] = alone.mask.dense(alone.len_q, alone.len_k)
    assert np.array_equal(allowed, expected)


def test_documents_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="documents must end at the number of tokens: 8 of 9 queries"):
        Problem(1, 1, 1, 9, 8, mask=documents([0, 8]))
    with pytest.raises(ValueError, match=r"mask has tiles.*cu_seqlens.*each document its own call"):
        Problem(1, 1, 1, 8, 8, mask=documents([0, 3, 8]) & tiles([[1]], 8, 8))


def test_features_are_checked_and_named() -> None:
    for wrong in ({"softcap": -1.0}, {"softcap": math.inf}, {"dropout": 1.0}, {"dropout": -0.1}, {"dim_v": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Features(**wrong)
    assert str(Features()) == "none" and str(Features(softcap=2.0, dim_v=8)) == "softcap 2.0, head dim 8 of v"


def test_features_belong_to_every_sequence_of_a_problem() -> None:
    features = Features(sinks=True, dim_v=8)
    problem = Problem(2, 4, 2, 50, 50, 16, mask=documents([0, 20, 50]), panels=2, features=features)
    assert problem.dim_v == 8 and Problem(1, 1, 1, 5, 5, 16).dim_v == 16
    assert {alone.features for alone in problem.distinct.values()} == {features}
