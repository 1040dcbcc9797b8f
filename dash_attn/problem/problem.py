"""Problem: everything that fixes the mathematical answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dash_attn.lazily import cached_property
from dash_attn.problem.features import PLAIN, Features
from dash_attn.problem.mask import FULL, Mask
from dash_attn.problem.panels import Panel, SequenceColumn, cut

# The first row and the number of rows, of queries and of keys.
SIDES = (SequenceColumn.Q_ROW, SequenceColumn.LEN_Q), (SequenceColumn.K_ROW, SequenceColumn.LEN_K)


class Sequence(NamedTuple):
    """Queries and keys that meet: one batch entry, or one document of it. A document can be a piece of a sequence that
    the caller has given: see Origin.

    Rows are counted in the tensors flattened over the batch. Query rows are q_row .. q_row + len_q - 1.
    """

    q_row: int
    k_row: int
    len_q: int
    len_k: int


class Origin(NamedTuple):
    """Where a Sequence comes from: the number of the caller's sequence, and the places of its first query and of its
    first key there."""

    number: int
    row: int
    key: int


@dataclass(frozen=True)
class Problem:
    """Attention over `batch` sequences. Query heads h*group .. h*group+group-1 share key/value head h.

    The query rows of a batch entry are cut into `panels` ranges. The cut changes the bits of the answer, not the
    answer.
    """

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    dim: int = 128
    dtype: str = "bfloat16"
    scale: float | None = None
    mask: Mask = FULL
    panels: int = 1
    features: Features = PLAIN

    def __post_init__(self) -> None:
        for name in ("batch", "heads_q", "heads_kv", "dim", "panels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("len_q", "len_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q must be a multiple of heads_kv, got {self.heads_q} and {self.heads_kv}")
        if self.mask.tiles is not None and not self.mask.tiles.covers(self.len_q, self.len_k):
            raise ValueError(f"mask {self.mask} does not cover {self.len_q} queries x {self.len_k} keys")
        if self.mask.documents is not None:
            if self.mask.tiles is not None:
                raise ValueError(
                    "mask has tiles, which do not go with documents (cu_seqlens): give each document its own call, "
                    "with its part of the tiles"
                )
            if self.mask.rows is not None:
                raise ValueError(
                    "mask has intervals row by row, which do not go with documents (cu_seqlens): give each document "
                    "its own call, with the intervals of its rows"
                )
            self.mask.documents.check_ends(self.len_q, self.len_k)
        if self.mask.rows is not None:
            self.mask.rows.check_rows(self.len_q)
        if self.panels > 1:
            self._check_panels()

    def _check_panels(self) -> None:
        mask = self.mask
        if mask.tiles is not None:
            raise ValueError(
                f"panels is {self.panels}, and mask has tiles, which are not cut: leave panels at 1, or give each "
                "range of queries its own call, with its part of the tiles"
            )
        if mask.rows is not None:
            raise ValueError(
                f"panels is {self.panels}, and mask has intervals row by row, which are not cut: leave panels at 1, or "
                "give each range of queries its own call, with the intervals of its rows"
            )
        if not mask.is_blind and any(side is not None and side < 0 for side in (mask.left, mask.right)):
            raise ValueError(
                f"panels is {self.panels}, and mask {mask} has a negative side: give the mask that "
                "Mask.without_negative_sides makes of it"
            )

    @property
    def group(self) -> int:
        """The number of query heads that share a key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def groups(self) -> int:
        """The number of key/value heads of the whole batch. Each has its own chains and turns."""
        return self.batch * self.heads_kv

    @property
    def softmax_scale(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def dim_v(self) -> int:
        """Head dim of v and out."""
        return self.features.dim_v or self.dim

    @property
    def is_packed(self) -> bool:
        """The mask has documents. Each of them is a sequence of its own."""
        return self.mask.documents is not None

    @property
    def has_parts(self) -> bool:
        """The problem is planned part by part: its mask has documents, or it is cut into panels."""
        return self.is_packed or self.panels > 1

    @cached_property
    def sequence_table(self) -> npt.NDArray[np.int64]:
        """The sequences as rows of a table. Its columns are SequenceColumn."""
        cuts, lengths = self.mask.documents, (self.len_q, self.len_k)
        given = ((0, self.len_q), (0, self.len_k)) if cuts is None else (cuts.cu_q, cuts.cu_k)
        table = np.empty((self.batch, len(given[0]) - 1, len(SequenceColumn)), np.int64)
        entries = np.arange(self.batch)[:, None]
        for (row, count), length, cu in zip(SIDES, lengths, given, strict=True):
            ends = np.array(cu)
            table[..., row] = ends[:-1] + entries * length
            table[..., count] = ends[1:] - ends[:-1]
        rows = table.reshape(-1, len(SequenceColumn))
        rows.flags.writeable = False
        return rows

    @cached_property
    def sequences(self) -> tuple[Sequence, ...]:
        """The documents of each batch entry. Without documents, the batch entries."""
        return tuple(map(Sequence._make, self.sequence_table.tolist()))

    @property
    def given_sequences(self) -> int:
        """The number of sequences that the caller has given. Documents can be pieces of them."""
        cuts = self.mask.documents
        return self.batch * (1 if cuts is None else len((cuts.within or cuts).cu_q) - 1)

    @cached_property
    def origins(self) -> tuple[Origin, ...]:
        """For each of `sequences`, where it comes from."""
        cuts = self.mask.documents
        if cuts is None or cuts.within is None:
            return tuple(Origin(number, 0, 0) for number in range(len(self.sequence_table)))
        given, own = ([np.array(x) for x in (each.cu_q, each.cu_k)] for each in (cuts.within, cuts))
        count = len(given[0]) - 1
        # A piece without queries or without keys has no weights, so it may be in any sequence.
        number = np.clip(np.searchsorted(given[0], own[0][:-1], "right") - 1, 0, count - 1)
        row, key = (np.maximum(0, mine[:-1] - cu[number]) for mine, cu in zip(own, given, strict=True))
        pieces = np.stack([number, row, key], 1).tolist()
        return tuple(Origin(batch * count + n, *places) for batch in range(self.batch) for n, *places in pieces)

    @cached_property
    def panel_table(self) -> npt.NDArray[np.int64]:
        """The panels of all sequences as rows of a table. The columns are the fields of Panel."""
        return cut(self.sequence_table, self.len_q, self.panels, self.mask)

    @cached_property
    def panel_list(self) -> tuple[Panel, ...]:
        """The panels of all sequences. With `panels` = 1 they are the sequences."""
        return tuple(map(Panel._make, self.panel_table.tolist()))

    @cached_property
    def distinct(self) -> dict[tuple[int, int, int], Problem]:
        """The problems of single panels, by their kind."""
        return {panel.kind: self.alone(panel) for panel in {each.kind: each for each in self.panel_list}.values()}

    def alone(self, part: Sequence | Panel) -> Problem:
        """The problem of one sequence or panel with all its heads, as if there were no other."""
        mask, after = self.mask, part.after if isinstance(part, Panel) else 0
        if mask.documents is not None:
            mask = replace(mask, documents=None)
        if after:  # the last query is before the last key, so the window moves to the left
            left, right = mask.left, mask.right
            mask = Mask(None if left is None else left + after, None if right is None else right - after)
        return replace(self, batch=1, len_q=part.len_q, len_k=part.len_k, mask=mask, panels=1)
