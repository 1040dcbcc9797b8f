"""Masks against the plainest possible reading of their words, element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.problem import (
    CAUSAL,
    FULL,
    Documents,
    Mask,
    TileMask,
    documents,
    intervals,
    intervals_by_row,
    tiles,
    window,
)
from tests.strategies import boundaries, document_masks, examples, interval_masks, lengths, masks, tile_masks, windows


def brute(mask: Mask, len_q: int, len_k: int) -> np.ndarray:
    """Pair by pair, from the definitions: positions aligned at the end of the sequence or of the document."""
    allowed = np.zeros((len_q, len_k), bool)
    cu_q, cu_k = (0, len_q), (0, len_k)
    if mask.documents is not None:
        cu_q, cu_k = mask.documents.cu_q, mask.documents.cu_k
    for d in range(len(cu_q) - 1):
        for i in range(cu_q[d], cu_q[d + 1]):
            for j in range(cu_k[d], cu_k[d + 1]):
                # The last query of a document stands at its last key.
                ahead = (cu_k[d + 1] - 1 - j) - (cu_q[d + 1] - 1 - i)
                allowed[i, j] = (mask.left is None or ahead <= mask.left) and (
                    mask.right is None or -ahead <= mask.right
                )
                if mask.rows is not None:
                    first, end = mask.rows.read()
                    allowed[i, j] &= first[i] <= j < end[i]
                if mask.tiles is not None:
                    allowed[i, j] &= mask.tiles.cells()[i // mask.tiles.cell_m, j // mask.tiles.cell_n]
    return allowed


@st.composite
def masks_with_lengths(draw: st.DrawFn) -> tuple[Mask, int, int]:
    len_q, len_k = draw(lengths), draw(lengths)
    mask = draw(masks(len_q, len_k))
    if draw(st.booleans()):
        mask = mask & draw(interval_masks(len_q, len_k))
    return (mask & draw(tile_masks(len_q, len_k)) if draw(st.booleans()) else mask), len_q, len_k


@examples(300)
@given(masks_with_lengths())
def test_dense_is_the_definition(drawn: tuple[Mask, int, int]) -> None:
    mask, len_q, len_k = drawn
    np.testing.assert_array_equal(mask.dense(len_q, len_k), brute(mask, len_q, len_k))


@examples(200)
@given(masks_with_lengths())
def test_intervals_are_the_rows_of_dense(drawn: tuple[Mask, int, int]) -> None:
    mask, len_q, len_k = drawn
    lo, hi = mask.intervals(len_q, len_k)
    assert lo.dtype == hi.dtype == np.int32
    assert (lo >= 0).all() and (lo <= hi).all() and (hi <= len_k).all()
    key = np.arange(len_k)
    without_tiles = replace(mask, tiles=None).dense(len_q, len_k)
    np.testing.assert_array_equal((key >= lo[:, None]) & (key < hi[:, None]), without_tiles)


@examples(200)
@given(masks_with_lengths())
def test_unseeing_rows_are_empty_in_dense(drawn: tuple[Mask, int, int]) -> None:
    mask, len_q, len_k = drawn
    np.testing.assert_array_equal(mask.unseeing(len_q, len_k), ~mask.dense(len_q, len_k).any(1))


@examples(300)
@given(masks_with_lengths())
def test_documents_replace_negative_sides(drawn: tuple[Mask, int, int]) -> None:
    mask, len_q, len_k = drawn
    other = mask.without_negative_sides(len_q, len_k)
    np.testing.assert_array_equal(other.dense(len_q, len_k), mask.dense(len_q, len_k))
    if mask.tiles is None and mask.rows is None and not mask.is_blind:
        assert all(side is None or side >= 0 for side in (other.left, other.right))


def test_negative_sides() -> None:
    np.testing.assert_array_equal(window(None, -2).dense(3, 3), [[0, 0, 0], [0, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(window(-2, None).dense(3, 3), [[0, 0, 1], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(window(3, -2).dense(2, 6), [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]])
    np.testing.assert_array_equal(window(-2, 3).dense(1, 1), [[0]])


def test_rows_set_apart() -> None:
    """Each document keeps its first rows; the rest has no partner."""
    whole = Documents((0, 4, 7), (0, 5, 5))
    parts = whole.set_apart([1, 0], [2, 0])
    assert parts == Documents((0, 3, 4, 4, 7), (0, 3, 3, 5, 5), whole)
    assert parts.set_apart([1, 0, 0, 2], [0, 0, 0, 0]).within == whole and whole.set_apart([0, 0], [0, 0]) is whole


def test_pieces_meet_as_their_sequences_do() -> None:
    whole, others = Documents((0, 4, 4, 9), (0, 4, 4, 9)), Documents((0, 6, 9), (0, 6, 9))
    parts = whole.set_apart([1, 0, 0], [0, 0, 2])
    assert (parts & whole).within == whole and (parts & others).within == whole & others == (others & parts).within
    assert (parts & parts) is parts


@pytest.mark.parametrize("last", [0, 2])
def test_documents_as_numbers(last: int) -> None:
    documents = Documents((0, 4, 7), (0, 5, 5)).set_apart([last, 0], [0, 0])
    assert Documents.of_numbers(documents.numbers()) == documents
    assert Documents.of_numbers([]) is None


def test_causal_is_aligned_at_the_bottom_right() -> None:
    np.testing.assert_array_equal(CAUSAL.dense(2, 4), [[1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(CAUSAL.dense(4, 2), [[0, 0], [0, 0], [1, 0], [1, 1]])


def test_documents_align_each_at_its_own_end() -> None:
    mask = documents([0, 1, 1, 3], [0, 2, 3, 4], causal=True)
    np.testing.assert_array_equal(mask.dense(3, 4), [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]])


def test_constructors() -> None:
    assert FULL.is_full and not FULL.is_causal and CAUSAL.is_causal and not CAUSAL.is_full
    assert window(-1, 0) == CAUSAL and window(-1, -1) == window(None, None) == window(-5, -1) == window(-2, -3) == FULL
    assert window(-5, None) == Mask(-5, None) and window(None, -5) == Mask(None, -5)
    assert window(4, -2) == Mask(4, -2) and not Mask(4, -2).is_blind and Mask(2, -4).is_blind
    assert window(2, -2) == Mask(2, -2) and window(2, -3) == window(-3, 2) == FULL
    assert documents([0, 3]) == documents(np.array([0, 3], np.int32), (0, 3))
    assert documents([0, 3], causal=True) == CAUSAL & documents([0, 3])
    cells = np.array([[True, False, True]])
    np.testing.assert_array_equal(TileMask.of(cells, 2, 1).cells(), cells)
    assert hash(tiles(cells, 2, 1)) == hash(tiles(cells.copy(), 2, 1))


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (FULL, "full"),
        (CAUSAL, "causal"),
        (window(3, 0), "window(3, 0)"),
        (window(None, 2), "window(inf, 2)"),
        (documents([0, 2, 5], causal=True), "causal & documents(2)"),
        (tiles([[1, 0]], 64, 128), "tiles(1x2 of 64x128)"),
        (intervals([0, 0, 2], [1, 3, 3]) & CAUSAL, "causal & intervals(3 rows)"),
    ],
)
def test_text(mask: Mask, text: str) -> None:
    assert str(mask) == text


# ---- intervals row by row ----------------------------------------------------------------------------------


def test_intervals_are_equal_if_their_pairs_are() -> None:
    first, end = np.array([0, 3, -2], np.int32), torch.tensor([2, 1, 4])
    mask = intervals(first, end)
    assert mask == intervals([0, 0, 0], [2, 0, 4]) and hash(mask) == hash(intervals([0, 7, 0], [2, 7, 4]))
    np.testing.assert_array_equal(mask.dense(3, 3), [[1, 1, 0], [0, 0, 0], [1, 1, 1]])  # cut to the three keys
    assert intervals_by_row(lambda row: (row, 2 * row), 4) == intervals([0, 1, 2, 3], [0, 2, 4, 6])
    assert intervals_by_row(lambda row: (0, 1), 0) == intervals([], [])


@pytest.mark.parametrize("count", range(9))
def test_intervals_know_their_rows(count: int) -> None:
    rows = intervals(np.zeros(count, int), np.ones(count, int)).rows
    assert rows is not None and rows.count == count


@examples(300)
@given(st.data())
def test_intervals_become_windows_where_they_are(data: st.DataObject) -> None:
    """Full and causal masks and packs of documents are recognised. A lone key does not say where a window ends."""
    len_q = data.draw(lengths)
    len_k = data.draw(lengths | st.just(len_q))
    kind = windows()
    if len_q == len_k:
        cu = data.draw(st.integers(1, 4).flatmap(lambda count: boundaries(len_q, count)))
        kind = kind | st.builds(lambda causal: documents(cu, causal=causal), st.booleans())
    drawn = data.draw(kind)
    given_ = intervals(*drawn.intervals(len_q, len_k))
    simple = given_.without_rows(len_q, len_k)
    np.testing.assert_array_equal(simple.dense(len_q, len_k), drawn.dense(len_q, len_k))
    if len_k > 1 and (drawn.documents is not None or drawn in (FULL, CAUSAL)):
        assert simple.rows is None


@examples(300)
@given(masks_with_lengths())
def test_other_masks_keep_their_pairs(drawn: tuple[Mask, int, int]) -> None:
    mask, len_q, len_k = drawn
    simple = mask.without_rows(len_q, len_k)
    np.testing.assert_array_equal(simple.dense(len_q, len_k), mask.dense(len_q, len_k))
    if simple.rows is not None and simple.documents is None:
        assert (simple.left, simple.right) == (None, None)


def test_recognised_masks() -> None:
    row = np.arange(8)
    assert intervals(0 * row, row + 1).without_rows(8, 8) == CAUSAL
    assert intervals(0 * row, row + 1).without_rows(8, 12) == window(None, -4)
    assert intervals(0 * row, 0 * row + 8).without_rows(8, 8) == FULL
    assert (intervals(row - 2, 0 * row + 9) & CAUSAL).without_rows(8, 8) == window(2, 0)
    chunks, whole = intervals(row // 4 * 4, row + 1).without_rows(8, 8), Documents((0, 8), (0, 8))
    assert chunks == CAUSAL & Mask(documents=Documents((0, 4, 8), (0, 4, 8), whole))
    padded = np.where(row < 2, 0, row + 1)  # the first two queries see nothing, and nobody sees their keys
    chunks = intervals(np.maximum(row // 4 * 4, 2), padded).without_rows(8, 8)
    assert chunks == CAUSAL & Mask(documents=Documents((0, 2, 2, 4, 8), (0, 0, 2, 4, 8), whole))
    assert intervals(0 * row, 0 * row).without_rows(8, 8).is_blind
    prefix = intervals(0 * row, np.maximum(row + 1, 3))
    assert prefix.without_rows(8, 8) == prefix


# ---- intersections -----------------------------------------------------------------------------------------


@st.composite
def in_one_frame(draw: st.DrawFn) -> tuple[list[Mask], int, int]:
    """Three masks that count positions alike: either no documents, or documents with as many queries as keys."""
    len_q = draw(lengths)
    if draw(st.booleans()):
        len_k = draw(lengths)
        parts = windows() | st.sampled_from([FULL, CAUSAL])
    else:
        len_k = len_q
        cu = st.integers(1, 4).flatmap(lambda count: boundaries(len_q, count))
        parts = windows() | st.builds(lambda cu, causal: documents(cu, causal=causal), cu, st.booleans())
    cell = draw(tile_masks(len_q, len_k)).tiles
    assert cell is not None
    on_grid = st.builds(
        lambda flip: Mask(tiles=TileMask.of(cell.cells() ^ flip, cell.cell_m, cell.cell_n)), st.booleans()
    )
    parts = parts | on_grid | interval_masks(len_q, len_k)
    return draw(st.lists(parts, min_size=3, max_size=3)), len_q, len_k


@examples(300)
@given(in_one_frame())
def test_intersection_is_elementwise_and(drawn: tuple[list[Mask], int, int]) -> None:
    (a, b, c), len_q, len_k = drawn
    dense = lambda mask: mask.dense(len_q, len_k)  # noqa: E731
    np.testing.assert_array_equal(dense(a & b), dense(a) & dense(b))
    np.testing.assert_array_equal(dense(a & b), dense(b & a))
    np.testing.assert_array_equal(dense((a & b) & c), dense(a & (b & c)))
    np.testing.assert_array_equal(dense((a & b) & c), dense(a) & dense(b) & dense(c))
    assert a & a == a and a & FULL == a == FULL & a


@examples(200)
@given(st.data())
def test_documents_of_unequal_lengths_intersect_to_what_shares_both(data: st.DataObject) -> None:
    """Without a window no position is counted, so any two document masks intersect element by element."""
    len_q, len_k = data.draw(lengths), data.draw(lengths)
    a, b = (Mask(documents=data.draw(document_masks(len_q, len_k)).documents) for _ in range(2))
    np.testing.assert_array_equal((a & b).dense(len_q, len_k), a.dense(len_q, len_k) & b.dense(len_q, len_k))
    np.testing.assert_array_equal((a & b).dense(len_q, len_k), (b & a).dense(len_q, len_k))


def test_documents_of_no_tokens_intersect() -> None:
    assert (documents([0, 0]) & documents([0, 0, 0])).dense(0, 0).shape == (0, 0)


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cu", [[], [0], [1, 2], [0, 3, 2], [0, -1]])
def test_bad_boundaries(cu: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_q must start at 0"):
        documents(cu)
    with pytest.raises(ValueError, match="cu_k must start at 0"):
        documents([0, 1], cu)


def test_errors_say_what_was_wrong() -> None:
    with pytest.raises(ValueError, match="same number of documents, got 1 and 2"):
        Documents((0, 4), (0, 2, 4))
    with pytest.raises(ValueError, match=r"window right must be None .* got -1"):
        Mask(right=-1)
    with pytest.raises(ValueError, match="got 3 dimensions"):
        tiles(np.zeros((1, 1, 1)), 1, 1)
    with pytest.raises(ValueError, match="at least 1x1, got 0x4"):
        tiles(np.zeros((1, 1)), 0, 4)
    with pytest.raises(ValueError, match="at most 2147483647 long, got 4x2147483648"):
        tiles(np.zeros((1, 1)), 4, 2**31)
    with pytest.raises(ValueError, match=r"only on one grid, got \(1x1 of 2x2\) and \(1x2 of 2x2\)"):
        tiles([[1]], 2, 2) & tiles([[1, 1]], 2, 2)
    with pytest.raises(ValueError, match="cannot intersect documents over 3 and 4 tokens"):
        documents([0, 3]) & documents([0, 4])
    with pytest.raises(ValueError, match="must have one number for each query, got 1 and 2"):
        intervals([0], [1, 2])
    with pytest.raises(ValueError, match="end must have one whole number for each query, got 1 dimensions of float64"):
        intervals([0], [1.5])
    with pytest.raises(ValueError, match="first must have one whole number for each query, got 2 dimensions"):
        intervals([[0]], [[1]])
    with pytest.raises(ValueError, match=r"must return \(first key, one past the last key\), got 0 for row 0"):
        intervals_by_row(lambda row: row, 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="intervals of the mask are for 2 queries, not 3"):
        intervals([0, 0], [1, 1]).dense(3, 3)
    with pytest.raises(ValueError, match="intervals of the mask are for 3 queries, not 2"):
        intervals([0, 0], [1, 1]) & intervals([0, 0, 0], [1, 1, 1])
    with pytest.raises(ValueError, match="3 of 4 queries, 3 of 4 keys"):
        documents([0, 3]).dense(4, 4)


@pytest.mark.parametrize("five", [np.int64(5), np.array(5), np.uint8(5), torch.tensor(5), torch.tensor(5).short()])
def test_numbers_become_plain_ints(five: Any) -> None:
    """Equal masks have equal texts, whichever kind of number comes first."""
    ends = [0, five, torch.tensor(9)]
    pairs = [
        (window(five, 0), window(5, 0)),
        (window(None, five), Mask(right=5)),
        (Mask(five, five), Mask(5, 5)),
        (documents(ends), documents([0, 5, 9])),
        (tiles([[1]], five, five), tiles([[1]], 5, 5)),
        (intervals_by_row(lambda row: (0, row), five), intervals([0] * 5, range(5))),
    ]
    for got, want in pairs:
        assert got == want and repr(got) == repr(want)
    assert repr(Documents((0, five), (0, five))) == repr(Documents((0, 5), (0, 5)))
    assert window(np.int64(-1), torch.tensor(-1)) == FULL


@pytest.mark.parametrize(
    "cu", [torch.tensor([0, 5]), torch.tensor([0, 5], dtype=torch.uint8), np.array([0, 5], np.uint64), range(0, 6, 5)]
)
def test_rows_of_numbers(cu: Any) -> None:
    assert repr(documents(cu)) == repr(documents([0, 5])) and intervals(cu, cu) == intervals([0, 5], [0, 5])


def test_huge_numbers_are_cut() -> None:
    most = np.array([2**64 - 1], np.uint64)
    assert intervals([0], most) == intervals([0], [2**63 - 1]) == intervals([0], [2**31 - 1])


NO_NUMBERS = (True, np.True_, torch.tensor(True), 5.0, np.float32(5), torch.tensor(5.0), float("nan"), "5", [5], (), {})


@pytest.mark.parametrize("given_", NO_NUMBERS, ids=repr)
def test_what_is_no_whole_number_is_refused(given_: Any) -> None:
    for make, name in (
        (lambda x: window(x, 0), "window left must be a whole number, or None for no limit"),
        (lambda x: window(0, x), "window right must be a whole number, or None"),
        (lambda x: Mask(right=x), "window right must be a whole number, or None"),
        (lambda x: tiles([[1]], x, 64), "cell_m must be a whole number of tokens, at least 1"),
        (lambda x: tiles([[1]], 64, x), "cell_n must be a whole number of tokens, at least 1"),
        (lambda x: intervals_by_row(lambda row: (0, 1), x), "len_q must be the number of queries, a whole number"),
    ):
        with pytest.raises(ValueError, match=f"{name}.* got "):
            make(given_)


NO_ROWS = ([0, 2.7, 64], [0, True], [False, True], "08", 5, None, [[0, 8]], [[0], [1, 2]], [0, None], {0: 8}, [0, "8"])


@pytest.mark.parametrize("given_", NO_ROWS, ids=repr)
def test_what_is_no_row_of_whole_numbers_is_refused(given_: Any) -> None:
    for make, name in (
        (documents, "cu_q must be a list of whole numbers, 0 and the end of each document"),
        (lambda x: Documents((0, 8), x), "cu_k must be a list of whole numbers"),
        (lambda x: intervals(x, [1, 2]), "first must have one whole number for each query"),
        (lambda x: intervals([0, 0], x), "end must have one whole number for each query"),
    ):
        with pytest.raises(ValueError, match=f"{name}.* got "):
            make(given_)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.bool, torch.complex64])
def test_tensors_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    row = torch.ones(2, dtype=dtype)
    rows = [row, row.requires_grad_()] if dtype.is_floating_point else [row]
    for each in rows:
        with pytest.raises(ValueError, match="first must have one whole number for each query, got"):
            intervals(each, [1, 2])
        with pytest.raises(ValueError, match="cu_q must be a list of whole numbers"):
            documents(each)


def test_cells() -> None:
    expected = tiles([[True, False]], 4, 4)
    for cells in ([[1, 0]], np.array([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]], requires_grad=True)):
        assert tiles(cells, 4, 4) == expected
    for wrong in (torch.ones(1, 2).bfloat16(), [["a", "b"]], [[1], [1, 0]], [[0.0, -float("inf")]], [[None, 1]], 5):
        with pytest.raises(ValueError, match=r"cells must be a matrix \(q tiles, kv tiles\) of True and False"):
            tiles(wrong, 4, 4)  # type: ignore[arg-type]


def test_a_function_of_rows_has_a_number_of_rows() -> None:
    with pytest.raises(ValueError, match="len_q must be the number of queries, at least 0; got -3"):
        intervals_by_row(lambda row: (0, 1), -3)


@pytest.mark.parametrize("other", [True, None, 3, documents([0, 4]).documents])
def test_a_mask_meets_only_masks(other: Any) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        CAUSAL & other
