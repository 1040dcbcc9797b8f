"""Panels: the query rows of a problem are cut into ranges. A panel is the part of one sequence in one range."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dash_attn.problem.mask import Mask

Longs = npt.NDArray[np.int64]


class SequenceColumn(IntEnum):
    """Columns of Problem.sequence_table: the fields of Sequence. Problem.panel_table begins with them."""

    Q_ROW = 0
    K_ROW = 1
    LEN_Q = 2
    LEN_K = 3


class Panel(NamedTuple):
    """Queries of one sequence, and the keys that they see. A panel is planned as if it were a sequence.

    Rows are counted in the tensors flattened over the batch. The keys of a panel begin at the first key of its
    sequence, so panels of one sequence share keys.

    after     how many positions the last query is before the last key of the panel. It is 0 unless the window has a
              right side, or a left side alone
    sequence  the number of its sequence in Problem.sequences
    row       the place of its first query in its sequence
    """

    q_row: int
    k_row: int
    len_q: int
    len_k: int
    after: int = 0
    sequence: int = 0
    row: int = 0

    @property
    def kind(self) -> tuple[int, int, int]:
        """Panels of one problem with equal kinds have equal plans."""
        return self.len_q, self.len_k, self.after


def cut(sequences: Longs, len_q: int, panels: int, mask: Mask) -> Longs:
    """The panels of all sequences as rows of a table. The columns are the fields of Panel.

    `sequences` has the columns SequenceColumn, for batch entries of `len_q` queries. Each batch entry is cut into
    `panels` ranges of equal length; the last ones may be shorter or empty. A sequence has a panel for each range that
    it has queries in. A sequence without queries has one panel.
    """
    size = max(1, -(-len_q // panels))
    q_row, rows = sequences[:, SequenceColumn.Q_ROW], sequences[:, SequenceColumn.LEN_Q]
    begin = q_row % max(1, len_q)  # in its batch entry
    first = begin // size
    counts = np.where(rows > 0, (begin + rows - 1) // size - first + 1, 1)
    of = np.repeat(np.arange(len(sequences)), counts)
    number = np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts) + first[of]
    q_row, rows, keys = q_row[of], rows[of], sequences[of, SequenceColumn.LEN_K]
    low = np.maximum(number * size - begin[of], 0)
    high = np.minimum((number + 1) * size - begin[of], rows)
    end, after = _seen(high, rows, keys, mask)
    k_row = sequences[of, SequenceColumn.K_ROW]
    columns = dict(q_row=q_row + low, k_row=k_row, len_q=high - low, len_k=end, after=after, sequence=of, row=low)
    table = np.stack([columns[field] for field in Panel._fields], axis=1)
    table.flags.writeable = False
    return table


def _seen(high: Longs, rows: Longs, keys: Longs, mask: Mask) -> tuple[Longs, Longs]:
    """The number of keys that the queries before `high` of a sequence see, and Panel.after."""
    stands = keys - rows + high  # one past the key at which the last query stands
    if mask.right is None:
        return keys, np.zeros_like(keys) if mask.left is None else np.where(rows > 0, rows - high, 0)
    end = np.where(rows > 0, np.clip(stands + max(mask.right, 0), 0, keys), keys)
    return end, np.where((rows > 0) & (end > 0) & (not mask.is_blind), end - stands, 0)
