"""The exchange over heads: from all heads of some tokens to some heads of more tokens, and back.

It moves numbers and computes nothing, so it changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dash_attn.distributed.layout import Layout, Range
from dash_attn.distributed.ranks import Arrival, Axis


@dataclass(frozen=True)
class Heads:
    """The exchange of the tokens of q, or of k, between the ranks that share heads.

    Before `spread` a rank has its own tokens and all heads. After it, the rank has the tokens of all ranks of the axis,
    in ascending order, and its own block of heads.
    """

    axis: Axis
    lengths: tuple[int, ...]  # tokens of each rank of the axis
    pieces: tuple[tuple[int, Range], ...]  # all these tokens in ascending order: the rank, and its rows

    @staticmethod
    def of(axis: Axis, layout: Layout, length: int, number: int) -> Heads:
        """`layout` is the one of all ranks, and `number` is this rank among them."""
        first = number - axis.number
        own = layout.lengths(length)[first : first + axis.size]
        pieces = ((rank - first, rows) for rank, rows in layout.pieces(length) if 0 <= rank - first < axis.size)
        return Heads(axis, tuple(own), tuple(pieces))

    def spread_numbers(self, batch: int, width: int) -> int:
        """The numbers that `spread` sends to other ranks, of a tensor with `width` numbers a token."""
        return batch * self.lengths[self.axis.number] * width // self.axis.size * (self.axis.size - 1)

    def collect_numbers(self, batch: int, width: int) -> int:
        """The numbers that `collect` sends to other ranks."""
        return batch * (sum(self.lengths) - self.lengths[self.axis.number]) * width // self.axis.size

    def spread(self, x: Tensor) -> Arrival:
        """(batch, own tokens, heads, dim) to (batch, tokens, own heads, dim)."""
        batch, _, heads, dim = x.shape
        heads //= self.axis.size
        sent = x.reshape(batch, x.shape[1], self.axis.size, heads, dim).permute(2, 0, 1, 3, 4)
        sizes = [batch * length * heads * dim for length in self.lengths]
        arrived = self.axis.exchange(sent.flatten(), [sizes[self.axis.number]] * self.axis.size, sizes)

        def finish() -> Tensor:
            parts = [
                part.view(batch, length, heads, dim)
                for part, length in zip(torch.split(arrived(), sizes), self.lengths, strict=True)
            ]
            rows = [parts[rank][:, begin:end] for rank, (begin, end) in self.pieces]
            return torch.cat(rows or parts, 1)

        return finish

    def collect(self, x: Tensor) -> Arrival:
        """The way back: (batch, tokens, own heads, dim) to (batch, own tokens, heads, dim)."""
        batch, _, heads, dim = x.shape
        rows: list[list[Tensor]] = [[] for _ in self.lengths]
        first = 0
        for rank, (begin, end) in self.pieces:
            rows[rank].append(x[:, first : first + end - begin])
            first += end - begin
        sent = torch.cat([torch.cat(part, 1).flatten() if part else x.new_empty(0) for part in rows])
        sizes = [batch * length * heads * dim for length in self.lengths]
        arrived = self.axis.exchange(sent, sizes, [sizes[self.axis.number]] * self.axis.size)
        shape = (self.axis.size, batch, self.lengths[self.axis.number], heads, dim)
        return lambda: arrived().view(shape).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()
