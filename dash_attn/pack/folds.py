"""Folds: which panels add to which dK and dV tile, and in which order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dash_attn.pack.tables import Assembly, Doc, Fold, Part, TileRows
from dash_attn.program.program import Int32, Longs

Bool = npt.NDArray[np.bool_]


def fold_tables(docs: Int32, kv_tiles: Int32, n: int) -> tuple[Int32, Int32]:
    """The tables `folds` and `parts`.

    The kv tiles of all panels of a sequence are cut from its first key. So kv tiles with the same first row belong to
    the same kv tile of the sequence. Tiles of different sequences never have the same first row. The panel with the
    last queries sees all keys, so it comes first.
    """
    first, rows = kv_tiles[:, TileRows.FIRST], kv_tiles[:, TileRows.COUNT]
    order = np.lexsort((-_first_queries(docs, n), first))
    _, begin, counts = np.unique(first[order], return_index=True, return_counts=True)
    folds = np.stack([first[order][begin], rows[order][begin], begin, counts], axis=1)
    return folds.astype(np.int32), np.stack([order, rows[order]], axis=1).astype(np.int32)


def fold_fault(made: Assembly) -> str | None:
    """What is wrong with the panels that share keys, or with their folds. None means that all is right."""
    sizes, docs, tiles, folds, parts = made.sizes, made.docs, made.kv_tiles, made.folds, made.parts
    if sizes.apart and (docs[:, Doc.K_ROW].astype(np.int64) + docs[:, Doc.K_ROWS] > sizes.rows_k).any():
        return "a panel has keys behind the last one"
    if sizes.panels == 1 or sizes.apart:
        return "folds without panels that share keys" if len(folds) or len(parts) else None
    if not _aligned(docs, sizes.all_keys):
        return "the keys of a panel are not those that its queries see"
    tile, rows = parts[:, Part.KV_TILE], parts[:, Part.K_ROWS]
    if not np.array_equal(np.sort(tile), np.arange(len(tiles))):
        return "a kv tile of a panel is in two folds, or in none"
    begin, counts = folds[:, Fold.PART], folds[:, Fold.PARTS]
    if (counts < 1).any() or not np.array_equal(begin, counts.cumsum() - counts) or counts.sum() != len(parts):
        return "the parts of a fold do not follow those of the fold before"
    fold = np.repeat(np.arange(len(folds)), counts)
    same_rows = np.array_equal(tiles[tile, TileRows.COUNT], rows)
    if not (same_rows and np.array_equal(tiles[tile, TileRows.FIRST], folds[fold, Fold.K_ROW])):
        return "a part has not the rows of its kv tile, or is in the fold of another tile"
    if not np.array_equal(folds[:, Fold.K_ROWS], rows[begin]) or (rows > folds[fold, Fold.K_ROWS]).any():
        return "the first part of a fold has not all of its rows"
    query = _first_queries(docs, sizes.shape.n)[tile]
    if (np.diff(query)[np.diff(fold) == 0] >= 0).any():
        return "the parts of a fold are not in the order from the last queries to the first"
    ends = folds[:, Fold.K_ROW] + folds[:, Fold.K_ROWS]
    if folds[:1, Fold.K_ROW].any() or (folds[1:, Fold.K_ROW] != ends[:-1]).any() or ends[-1:].sum() != sizes.rows_k:
        return "a row of k is in two folds, or in none"
    return None


def _first_queries(docs: Int32, n: int) -> Longs:
    """For each kv tile: the first query of its panel."""
    return np.repeat(docs[:, Doc.Q_ROW].astype(np.int64), -(-docs[:, Doc.K_ROWS] // n))


def _aligned(docs: Int32, all_keys: bool) -> bool:
    """Whether the panels of each sequence follow each other, and have the keys that their queries see.

    With `all_keys` every panel sees all keys. Otherwise a panel of n queries sees n keys more than the panel before it.
    """
    seeing = docs[(docs[:, Doc.Q_ROWS] > 0) & (docs[:, Doc.K_ROWS] > 0)]
    seeing = seeing[np.argsort(seeing[:, Doc.Q_ROW])]
    before, panel = seeing[:-1], seeing[1:]
    shared: Bool = before[:, Doc.K_ROW] == panel[:, Doc.K_ROW]
    more = panel[:, Doc.K_ROWS] - before[:, Doc.K_ROWS]
    adjacent = panel[:, Doc.Q_ROW] == before[:, Doc.Q_ROW] + before[:, Doc.Q_ROWS]
    expected = 0 if all_keys else panel[:, Doc.Q_ROWS]
    return bool((adjacent & (more == expected))[shared].all())
