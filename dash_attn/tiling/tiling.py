"""The score matrix cut into tiles, each empty, partial or full."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from dash_attn.lazily import cached_property
from dash_attn.problem import Problem

Ints = npt.NDArray[np.signedinteger]
States = npt.NDArray[np.uint8]  # a TileState for each kv tile and q tile


class TileState(IntEnum):
    """What the kernel does with a tile: nothing, products with element masking, or plain products."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class Span(IntEnum):
    """Columns of `Tiling.spans`: first q tile of a chain, the tile after its last one, and the number of its tiles."""

    FIRST = 0
    END = 1
    COUNT = 2


@dataclass(frozen=True)
class TileShape:
    """`m` queries x `n` keys."""

    m: int
    n: int

    def __post_init__(self) -> None:
        if self.m < 1 or self.n < 1:
            raise ValueError(f"a tile must be at least 1x1, got {self}")

    def __str__(self) -> str:
        return f"{self.m}x{self.n}"


@dataclass(frozen=True, eq=False)
class Tiling:
    """Tiles of one (batch, query head) plane. All planes of a problem have the same tiles.

    `state[n, m]` is the TileState of kv tile n and q tile m. A tile is PARTIAL if a pair in it is masked or if it
    reaches past the last key. Rows past the last query need no mask, because their probabilities are zero.

    Panels of `heads` q heads are ordered by themselves: all q heads of a kv head, or one. Where it is one, the chain of
    a kv tile is cut, and dK and dV of the panels are summed.
    """

    problem: Problem
    shape: TileShape
    state: States
    heads: int

    @cached_property
    def by_head(self) -> Tiling:
        """The same tiles in panels of one q head."""
        return replace(self, heads=1)

    @property
    def panels(self) -> int:
        """Panels of all sequences; each has chains and turns of its own."""
        return self.problem.batch * self.problem.heads_q // self.heads

    @property
    def num_q(self) -> int:
        return int(self.state.shape[1])

    @property
    def num_kv(self) -> int:
        return int(self.state.shape[0])

    @cached_property
    def num_tiles(self) -> int:
        """Non-empty tiles of one (batch, query head)."""
        return int(self.spans[:, Span.COUNT].sum())

    @cached_property
    def is_rectangle(self) -> bool:
        """No tile is empty."""
        return self.num_tiles == self.state.size

    @cached_property
    def spans(self) -> npt.NDArray[np.int64]:
        """First, end and number of the q tiles of each chain (columns Span). A chain without tasks has zeros."""
        touched = self.state != TileState.EMPTY
        spans = np.zeros((self.num_kv, len(Span)), np.int64)
        spans[:, Span.COUNT] = touched.sum(1)
        if touched.any():
            spans[:, Span.FIRST] = touched.argmax(1)
            spans[:, Span.END] = np.where(spans[:, Span.COUNT], self.num_q - touched[:, ::-1].argmax(1), 0)
        return spans

    @cached_property
    def is_staircase(self) -> bool:
        """Each chain is one run of neighbouring q tiles, and neither end moves back from chain to chain.

        Causal masks and windows are staircases.
        """
        first, last, count = self.spans[self.spans[:, Span.COUNT] > 0].T
        return bool((last - first == count).all() and (np.diff(first) >= 0).all() and (np.diff(last) >= 0).all())

    @cached_property
    def is_triangle(self) -> bool:
        """A staircase in which every chain goes on to the last q tile: the causal mask, and also the full mask."""
        return self.is_staircase and bool((self.spans[:, Span.END] == self.num_q).all())


def tile(problem: Problem, shape: TileShape) -> Tiling:
    """Cut the planes of a problem into tiles of `shape`. A problem with documents or panels is cut part by part."""
    if problem.has_parts:
        parts = f"mask {problem.mask} has documents" if problem.is_packed else f"there are {problem.panels} panels"
        raise ValueError(
            f"{parts}, and no tile spans two of them: tile Problem.alone(panel) for each of Problem.panel_list, or "
            "plan all of them with dash_attn.pack.Pack"
        )
    num_q, num_kv = -(-problem.len_q // shape.m), -(-problem.len_k // shape.n)
    lo, hi = problem.mask.intervals(problem.len_q, problem.len_k)
    state = _states(lo, hi, shape, num_kv)
    if problem.mask.tiles is not None:
        state *= _allowed(problem, shape, (num_q, num_kv)).T
    return Tiling(problem, shape, state, problem.group)


def grid(state: npt.ArrayLike, problem: Problem, shape: TileShape) -> Tiling:
    """A tiling given by its states (kv tiles x q tiles), for studies of orders."""
    states = np.ascontiguousarray(state, dtype=np.uint8)
    expected = (-(-problem.len_k // shape.n), -(-problem.len_q // shape.m))
    if states.shape != expected or states.max(initial=0) > TileState.FULL:
        raise ValueError(f"states must be 0, 1 or 2 for each of {expected[0]} kv tiles x {expected[1]} q tiles")
    return Tiling(problem, shape, states, problem.group)


def _states(lo: Ints, hi: Ints, shape: TileShape, num_kv: int) -> States:
    """A tile is touched if the interval of any row reaches it, and full if the interval of every row covers it."""
    band = np.arange(len(lo)) // shape.m
    touching = _rows_of_tiles(band, lo // shape.n, np.where(lo == hi, 0, -(-hi // shape.n)), num_kv)
    covering = _rows_of_tiles(band, -(-lo // shape.n), hi // shape.n, num_kv)
    states: States = (touching > 0).astype(np.uint8) + (covering == np.bincount(band))
    return states


def _rows_of_tiles(band: Ints, first: Ints, end: Ints, num_kv: int) -> Ints:
    """How many rows of each band of queries have each kv tile between `first` and `end`. A row may have none."""
    bands, some = int(band[-1]) + 1 if len(band) else 0, first < end
    size, at = bands * (num_kv + 1), band[some] * (num_kv + 1)
    steps = np.bincount(at + first[some], minlength=size) - np.bincount(at + end[some], minlength=size)
    return steps.reshape(bands, num_kv + 1)[:, :-1].cumsum(1).T


def _allowed(problem: Problem, shape: TileShape, grid_shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
    cells = problem.mask.tiles
    assert cells is not None
    # A cell that holds all tokens has no border inside, so every tile fits it.
    if (cells.shape[0] > 1 and cells.cell_m % shape.m) or (cells.shape[1] > 1 and cells.cell_n % shape.n):
        raise ValueError(
            f"tile mask cells of {cells.cell_m}x{cells.cell_n} must be multiples of the tile {shape}: "
            "choose a tile that divides them"
        )
    rows, columns = np.arange(grid_shape[0]) * shape.m, np.arange(grid_shape[1]) * shape.n
    return cells.cells()[(rows // cells.cell_m)[:, None], columns // cells.cell_n].astype(np.uint8)
