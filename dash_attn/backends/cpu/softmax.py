"""What a call has where it is not plain softmax: sinks, the random numbers of dropout, and the gradient of lse."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dash_attn.backends.base import Extras
from dash_attn.backends.dropout import kept, row_words, seeds_of
from dash_attn.problem import Origin, Panel, Problem


@dataclass(frozen=True, eq=False)
class Softmax:
    """For the sequences of one batch, or for one panel, whose batch is 1.

    sinks  float32 (heads of q), or None
    seeds  of dropout, one for each batch entry; empty without dropout
    dlse   float32 (batch, heads, seqlen), or None
    head   the number of the first q head
    row    the place of the first query in the caller's sequence
    key    the place of the first key in the caller's sequence
    """

    sinks: Tensor | None
    seeds: list[int]
    dlse: Tensor | None
    head: int = 0
    row: int = 0
    key: int = 0
    origins: tuple[Origin, ...] = ()  # of all sequences, with dropout

    @staticmethod
    def of(problem: Problem, extras: Extras | None) -> Softmax | None:
        """For all sequences of a problem, or None if there is nothing to say."""
        if extras is None:
            if problem.features.sinks or problem.features.dropout:
                raise ValueError("the problem has sinks or dropout: give Extras with the sinks and the seed")
            return None
        sinks = extras.sinks if problem.features.sinks else None
        if not problem.features.dropout:
            return Softmax(sinks, [], extras.dlse, extras.head)
        assert extras.seed is not None
        seeds, origins = seeds_of(extras.seed, problem.given_sequences), problem.origins
        return Softmax(sinks, [seeds[each.number] for each in origins], extras.dlse, extras.head, origins=origins)

    def of_panel(self, panel: Panel, dlse: Tensor | None) -> Softmax:
        """For one panel, with its rows of dlse."""
        if not self.seeds:
            return Softmax(self.sinks, [], dlse, self.head)
        _, row, key = self.origins[panel.sequence]
        return Softmax(self.sinks, [self.seeds[panel.sequence]], dlse, self.head, row + panel.row, key)

    def words(self, batch: int, head: int, rows: slice) -> Tensor:
        """The words of rows, int32 (rows, 2), or with no columns if there is no dropout."""
        count = rows.stop - rows.start
        if not self.seeds:
            return torch.empty((count, 0), dtype=torch.int32, device="cpu")
        words = row_words(self.seeds[batch], self.head + head, self.row + rows.start, count)
        return torch.from_numpy(words.view(np.int32))


def keep(words: Tensor, keys: Tensor, dropout: float, into: Tensor) -> Tensor:
    """Write 1 for each weight that is kept and 0 for the others."""
    np.copyto(into.numpy(), kept(words.numpy().view(np.uint32), keys.numpy().view(np.uint32), dropout))
    return into
