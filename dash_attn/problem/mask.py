"""Masks as values: which (query, key) pairs attend.

A mask gives each query row one half-open interval of keys: two integers a row. The intersection of two intervals is an
interval too. The backends read these integers and nothing else. The intervals follow from windows and documents, or are
given row by row. Only a tile mask adds more: a matrix of allowed tiles. The tiling reads this matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dash_attn.problem.numbers import Longs, array_of, boundaries, side, whole
from dash_attn.problem.rows import RowIntervals

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]

MOST = 2**31 - 1


@dataclass(frozen=True)
class Documents:
    """Boundaries of packed sequences. Document d owns queries cu_q[d]:cu_q[d+1] and keys cu_k[d]:cu_k[d+1].

    `within` are the sequences of the caller, if the documents are pieces of them. The seeds of dropout follow the
    sequences of the caller.
    """

    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]
    within: Documents | None = None

    def __post_init__(self) -> None:
        for field in ("cu_q", "cu_k"):
            given = getattr(self, field)
            cu = boundaries(field, given)
            if cu is not given:
                object.__setattr__(self, field, cu)
            if len(cu) < 2 or cu[0] != 0 or sorted(cu) != list(cu):
                raise ValueError(
                    f"{field} must start at 0, never decrease and hold at least two values, got {_brief(cu)}"
                )
        if len(self.cu_q) != len(self.cu_k):
            raise ValueError(
                f"cu_q and cu_k must name the same number of documents, got {len(self.cu_q) - 1} and "
                f"{len(self.cu_k) - 1}"
            )

    @staticmethod
    def of_numbers(numbers: Sequence[int]) -> Documents | None:
        """The way back of `numbers`. No numbers are no documents."""
        if not numbers:
            return None
        size = -2 * min(0, numbers[0])  # of `within`
        within = Documents.of_numbers(numbers[1 : size + 1])
        own = tuple(numbers[size + 1 if size else 0 :])
        return Documents(own[: len(own) // 2], own[len(own) // 2 :], within)

    def numbers(self) -> list[int]:
        """All boundaries as one list. Those of `within` come first, after the negative number of its boundaries."""
        own = [*self.cu_q, *self.cu_k]
        return own if self.within is None else [-len(self.within.cu_q), *self.within.numbers(), *own]

    def check_ends(self, len_q: int, len_k: int) -> None:
        """Raises a ValueError if the documents do not hold all queries and keys."""
        if (self.cu_q[-1], self.cu_k[-1]) != (len_q, len_k):
            raise ValueError(
                f"documents must end at the number of tokens: {self.cu_q[-1]} of {len_q} queries, {self.cu_k[-1]} of "
                f"{len_k} keys"
            )

    def set_apart(self, last_q: Sequence[int], last_k: Sequence[int]) -> Documents:
        """Documents from which the last `last_q` queries and the last `last_k` keys are taken out.

        One document becomes up to three: the queries and keys that stay, the last queries without keys, and the last
        keys without queries. `last_q` and `last_k` have one number for each document.
        """
        if not any(last_q) and not any(last_k):
            return self
        cu_q, cu_k = [0], [0]
        for (_, end_q), (_, end_k), q, k in zip(pairwise(self.cu_q), pairwise(self.cu_k), last_q, last_k, strict=True):
            for more, row_q, row_k in ((True, end_q - q, end_k - k), (q > 0, end_q, end_k - k), (k > 0, end_q, end_k)):
                if more:
                    cu_q.append(row_q)
                    cu_k.append(row_k)
        return Documents(tuple(cu_q), tuple(cu_k), self.within or self)

    def __and__(self, other: Documents) -> Documents:
        if self == other:
            return self
        within = None
        if self.within or other.within:
            within = (self.within or self) & (other.within or other)
        # Piece (a, b) holds the tokens that are in document a of one mask and in document b of the other. Along both
        # axes a + b never decreases, so pieces sorted by a + b are contiguous in queries and in keys.
        pieces: dict[tuple[int, int], list[int]] = {}
        for axis, (mine, theirs) in enumerate(((self.cu_q, other.cu_q), (self.cu_k, other.cu_k))):
            if mine[-1] != theirs[-1]:
                raise ValueError(f"cannot intersect documents over {mine[-1]} and {theirs[-1]} tokens")
            cuts = sorted({*mine, *theirs})
            for begin, end in pairwise(cuts):
                key = (int(np.searchsorted(mine, begin, "right")), int(np.searchsorted(theirs, begin, "right")))
                pieces.setdefault(key, [0, 0])[axis] += end - begin
        # Masks over no tokens have no pieces; the result is then one empty document.
        lengths = [pieces[key] for key in sorted(pieces, key=lambda ab: (ab[0] + ab[1], ab[0]))] or [[0, 0]]
        cu = np.cumsum([[0, 0], *lengths], axis=0)
        return Documents(tuple(cu[:, 0].tolist()), tuple(cu[:, 1].tolist()), within)


@dataclass(frozen=True)
class TileMask:
    """An explicit mask. Cell (i, j) covers cell_m queries x cell_n keys; `bits` packs the cells row by row.

    The bits are a text of hexadecimal digits, because torch.compile takes texts as constants.
    """

    cell_m: int
    cell_n: int
    shape: tuple[int, int]
    bits: str

    def __post_init__(self) -> None:
        for name in ("cell_m", "cell_n"):
            object.__setattr__(self, name, whole(name, getattr(self, name), "a whole number of tokens, at least 1"))
        if self.cell_m < 1 or self.cell_n < 1:
            raise ValueError(f"tile mask cells must be at least 1x1, got {self.cell_m}x{self.cell_n}")
        if max(self.cell_m, self.cell_n) > MOST:  # tokens are counted in 32 bits
            raise ValueError(f"tile mask cells must be at most {MOST} long, got {self.cell_m}x{self.cell_n}")

    @staticmethod
    def of(cells: npt.ArrayLike, cell_m: int, cell_n: int) -> TileMask:
        expected = "be a matrix (q tiles, kv tiles) of True and False, or of 1 and 0"
        matrix = array_of("cells", cells, expected)
        if matrix.ndim != 2:
            raise ValueError(f"cells must {expected}, got {matrix.ndim} dimensions")
        # Floats that are added to scores have 0 where a mask has True.
        if matrix.dtype.kind not in "biuf" or (matrix.dtype.kind == "f" and not np.isin(matrix, (0, 1)).all()):
            raise ValueError(f"cells must {expected}, got other values of {matrix.dtype}")
        bits = np.packbits(matrix.astype(bool)).tobytes().hex()
        return TileMask(cell_m, cell_n, (matrix.shape[0], matrix.shape[1]), bits)

    def cells(self) -> Bool:
        flat = np.unpackbits(np.frombuffer(bytes.fromhex(self.bits), np.uint8), count=self.shape[0] * self.shape[1])
        return flat.astype(bool).reshape(self.shape)

    def covers(self, len_q: int, len_k: int) -> bool:
        return self.shape == (-(-len_q // self.cell_m), -(-len_k // self.cell_n))

    def __and__(self, other: TileMask) -> TileMask:
        if (self.cell_m, self.cell_n, self.shape) != (other.cell_m, other.cell_n, other.shape):
            raise ValueError(f"tile masks intersect only on one grid, got {_grid(self)} and {_grid(other)}")
        return TileMask.of(self.cells() & other.cells(), self.cell_m, self.cell_n)


@dataclass(frozen=True)
class Mask:
    """The keys that a query sees: those in a window around its position, in its document, in the allowed tiles, and in
    the interval of its row.

    `left` and `right` count keys before and after the position of the query. None is no limit, and `right=0` is causal.
    A side below -1 moves that end of the window to the other side of the query: with `right=-3` a query sees keys up to
    the third before its position. The last query of a sequence or document is at the position of its last key.
    """

    left: int | None = None
    right: int | None = None
    documents: Documents | None = None
    tiles: TileMask | None = None
    rows: RowIntervals | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = side(name, getattr(self, name))
            if value is not getattr(self, name):
                object.__setattr__(self, name, value)
            if value == -1:  # the functions and the operators take it for no limit
                raise ValueError(f"window {name} must be None (no limit), at least 0 or below -1, got {value}")

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(
            _smaller(self.left, other.left),
            _smaller(self.right, other.right),
            self.documents & other.documents
            if self.documents and other.documents
            else self.documents or other.documents,
            self.tiles & other.tiles if self.tiles and other.tiles else self.tiles or other.tiles,
            self.rows & other.rows if self.rows and other.rows else self.rows or other.rows,
        )

    @property
    def is_full(self) -> bool:
        return self == FULL

    @property
    def is_causal(self) -> bool:
        """Causal and nothing else."""
        return self == CAUSAL

    @property
    def is_blind(self) -> bool:
        """The window ends before it begins, so no query sees a key."""
        return self.left is not None and self.right is not None and self.left + self.right < 0

    def without_negative_sides(self, len_q: int, len_k: int) -> Mask:
        """A mask with the same pairs and without negative sides, because few kernels take negative sides. A mask with
        tiles or rows stays as it is.

        The last query is at the last key. Without the last three keys every position is three lower, so `right=-3`
        becomes `right=0`. Likewise positions are higher without the last queries, and a negative `left` becomes 0.
        """
        last_q, last_k = (max(0, -side) if side is not None else 0 for side in (self.left, self.right))
        if not (last_q or last_k) or self.is_blind or self.tiles is not None or self.rows is not None:
            return self
        parts = self.documents or Documents((0, len_q), (0, len_k))
        apart = parts.set_apart(
            [min(last_q, end - begin) for begin, end in pairwise(parts.cu_q)],
            [min(last_k, end - begin) for begin, end in pairwise(parts.cu_k)],
        )
        higher = last_q - last_k
        left = None if self.left is None else self.left + higher
        return Mask(left, None if self.right is None else self.right - higher, apart)

    def without_rows(self, len_q: int, len_k: int) -> Mask:
        """A mask with the same pairs: a window, with documents or without, if there is such a mask. Otherwise the
        window becomes part of the rows.

        Kernels and orders know more about windows and documents than about rows. A mask of rows and documents stays as
        it is.
        """
        if self.rows is None or self.documents is not None:
            return self
        lo, hi = (x.astype(np.int64) for x in self.intervals(len_q, len_k))
        if (lo == hi).all():
            return replace(BLIND, tiles=self.tiles)
        whole = Documents((0, len_q), (0, len_k))
        for parts in (whole, _blocks(lo, hi) if len_q == len_k and self.tiles is None else whole):
            band = _window_inside(parts, lo, hi)
            if band is not None:
                return replace(
                    band, documents=None if parts == whole else replace(parts, within=whole), tiles=self.tiles
                )
        return Mask(tiles=self.tiles, rows=RowIntervals.of(lo, hi))

    def intervals(self, len_q: int, len_k: int) -> tuple[Int32, Int32]:
        """(lo, hi) of every query row. If a row sees nothing, lo == hi. The tile mask does not count."""
        parts = self.documents or Documents((0, len_q), (0, len_k))
        parts.check_ends(len_q, len_k)
        far = len_q + len_k  # a limit that no pair reaches
        left, right = (far if x is None else max(-far, min(x, far)) for x in (self.left, self.right))
        cu_q, cu_k = np.array(parts.cu_q), np.array(parts.cu_k)
        rows = np.diff(cu_q)
        begin, end = np.repeat(cu_k[:-1], rows), np.repeat(cu_k[1:], rows)
        position = np.arange(len_q) + np.repeat(cu_k[1:] - cu_q[1:], rows)
        lo = np.clip(position - left, begin, end)
        hi = np.maximum(lo, np.minimum(end, position + right + 1))
        if self.rows is not None:
            self.rows.check_rows(len_q)
            first, last = self.rows.read()
            lo = np.minimum(np.maximum(lo, first), len_k)
            hi = np.maximum(lo, np.minimum(hi, last))
        return lo.astype(np.int32), hi.astype(np.int32)

    def unseeing(self, len_q: int, len_k: int) -> Bool:
        """Which query rows see no key."""
        lo, hi = self.intervals(len_q, len_k)
        if self.tiles is None:
            return np.asarray(lo == hi)
        shown = np.pad(self.tiles.cells().cumsum(1), ((0, 0), (1, 0)))  # cells of a row before each cell
        row, size = np.arange(len_q) // self.tiles.cell_m, self.tiles.cell_n
        return np.asarray((lo == hi) | (shown[row, -(-hi // size)] == shown[row, lo // size]))

    def dense(self, len_q: int, len_k: int) -> Bool:
        """The mask element by element, for tests and small references."""
        lo, hi = self.intervals(len_q, len_k)
        key = np.arange(len_k)
        allowed: Bool = (key >= lo[:, None]) & (key < hi[:, None])
        if self.tiles is not None:
            if not self.tiles.covers(len_q, len_k):
                raise ValueError(f"mask {self} does not cover {len_q} queries x {len_k} keys")
            row = np.arange(len_q)[:, None]  # repeated cells would need memory for tokens that do not exist
            allowed &= self.tiles.cells()[row // self.tiles.cell_m, key // self.tiles.cell_n]
        return allowed

    def __str__(self) -> str:
        parts = []
        if self.right == 0 and self.left is None:
            parts.append("causal")
        elif self.left is not None or self.right is not None:
            parts.append(f"window({_limit(self.left)}, {_limit(self.right)})")
        if self.documents is not None:
            parts.append(f"documents({len(self.documents.cu_q) - 1})")
        if self.tiles is not None:
            parts.append(f"tiles{_grid(self.tiles)}")
        if self.rows is not None:
            parts.append(f"intervals({self.rows.count} rows)")
        return " & ".join(parts) or "full"


FULL = Mask()
CAUSAL = Mask(right=0)
BLIND = Mask(left=0, right=-2)  # no query sees a key


def window(left: int | None, right: int | None) -> Mask:
    """Sliding window: keys from `left` before to `right` after the query's position. None or -1 means no limit.

    A side below -1 is counted in the other direction: (10, -3) are the keys from 10 to 3 before the position. Two
    negative sides mean no limits, and so do sides with no key between them, such as (2, -5), as in FlashAttention 4.
    """
    left, right = side("left", left), side("right", right)
    band = Mask(None if left == -1 else left, None if right == -1 else right)
    both_negative = left is not None and right is not None and max(left, right) < 0
    return FULL if both_negative or band.is_blind else band


def documents(cu_q: npt.ArrayLike, cu_k: npt.ArrayLike | None = None, *, causal: bool = False) -> Mask:
    """Packed sequences: a query sees only keys of its own document, and with `causal` only those up to its position.

    `cu_q` holds 0 and the end of each document among the queries. `cu_k` holds the same for keys. Without `cu_k` both
    are equal.
    """
    first = boundaries("cu_q", cu_q)
    second = first if cu_k is None else boundaries("cu_k", cu_k)
    return Mask(right=0 if causal else None, documents=Documents(first, second))


def tiles(cells: npt.ArrayLike, cell_m: int, cell_n: int) -> Mask:
    """A tile mask. Cell (i, j) covers `cell_m` queries x `cell_n` keys. Queries see the keys of True cells."""
    return Mask(tiles=TileMask.of(cells, cell_m, cell_n))


def intervals(first: npt.ArrayLike, end: npt.ArrayLike) -> Mask:
    """Query i sees keys first[i] .. end[i] - 1: two lists, arrays or tensors with one whole number for each query.

    An interval is cut to the keys that exist. A query whose interval is empty sees nothing. Rows and keys are
    counted from the start of the tensors. The batch entries and heads of a call share the mask.
    """
    return Mask(rows=RowIntervals.of(first, end))


def intervals_by_row(function: Callable[[int], tuple[int, int]], len_q: int) -> Mask:
    """As `intervals`, where `function(row)` returns the first key of a row and one past its last key."""
    return Mask(rows=RowIntervals.by(function, len_q))


def _blocks(lo: Longs, hi: Longs) -> Documents:
    """The smallest documents that hold all pairs. Each document has as many queries as keys.

    Queries that see nothing form a document without keys. If no query sees the keys at the same positions, these keys
    form a document without queries.
    """
    empty = lo == hi
    furthest = np.maximum.accumulate(np.where(empty, 0, hi))  # one past the last key of all rows up to this one
    nearest = np.minimum.accumulate(np.where(empty, len(lo), lo)[::-1])[::-1]  # first key of all rows from this one
    cut = np.arange(1, len(lo))
    ends = np.append(cut[(furthest[:-1] <= cut) & (nearest[1:] >= cut)], len(lo))
    begins = np.append(0, ends[:-1])
    paired = np.add.reduceat(~empty, begins) > 0
    last = np.append(paired[:-1] | paired[1:], True)  # neighbours without pairs are one
    cu_q, cu_k = [0], [0]
    for end, has_pairs in zip(ends[last].tolist(), paired[last].tolist(), strict=True):
        if not has_pairs:
            cu_q.append(end)
            cu_k.append(cu_k[-1])
        cu_q.append(end)
        cu_k.append(end)
    return Documents(tuple(cu_q), tuple(cu_k))


def _window_inside(parts: Documents, lo: Longs, hi: Longs) -> Mask | None:
    """The window that gives these intervals inside the documents. None if there is none: no Mask has a side of -1."""
    rows = np.diff(parts.cu_q)
    cu_q, cu_k = np.array(parts.cu_q), np.array(parts.cu_k)
    position = np.arange(len(lo)) + np.repeat(cu_k[1:] - cu_q[1:], rows)
    begins, ends = lo > np.repeat(cu_k[:-1], rows), hi < np.repeat(cu_k[1:], rows)
    seen = lo < hi
    left, right = (
        int(side[limited & seen][0]) if (limited & seen).any() else None
        for side, limited in ((position - lo, begins), (hi - 1 - position, ends))
    )
    if -1 in (left, right):
        return None
    band = Mask(left, right)
    first, end = replace(band, documents=parts).intervals(len(lo), parts.cu_k[-1])
    same = np.where(seen, (first == lo) & (end == hi), first == end)
    return band if same.all() else None


def _smaller(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _limit(value: int | None) -> str:
    return "inf" if value is None else str(value)


def _grid(mask: TileMask) -> str:
    return f"({mask.shape[0]}x{mask.shape[1]} of {mask.cell_m}x{mask.cell_n})"


def _brief(values: tuple[int, ...]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:6]))}, ... {values[-1]}]"
