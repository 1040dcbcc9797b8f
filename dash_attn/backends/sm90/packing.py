"""Packed sequences in the form that flash kernels take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dash_attn.kept import kept
from dash_attn.problem import Documents, Problem
from dash_attn.program.program import Int32, Longs

from .config import PIECE_ROWS
from .tables import joined, uploaded


class Packing(NamedTuple):
    """Arguments of a flash kernel for packed sequences, under FlashAttention's names."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class RoomyPacking(NamedTuple):
    """A packing whose keys have room: every document's keys end with a whole tile of the copy that `pieces` makes.

    The copy has `rows` rows. Document d begins at row cu_seqlens_k[d] there and has seqused_k[d] keys.
    """

    packing: Packing
    seqused_k: Tensor
    pieces: Tensor
    rows: int


@kept()
def packing_of(documents: Documents, batch: int, device: torch.device) -> Packing:
    """The rows of a batch as one pack, each row with the same documents.

    The boundaries are copied to the device once: a copy in every call could not be captured in a CUDA graph.
    """
    q, k = (_lengths(cu, batch) for cu in (documents.cu_q, documents.cu_k))
    cu_q, cu_k = joined([_starts(q), _starts(k)], device)
    return Packing(cu_q, cu_k, int(q.max()), int(k.max()))


@kept()
def spread_of(documents: Documents, batch: int, tile: int, device: torch.device) -> RoomyPacking | None:
    """Room for whole tiles of keys. None if keys need none: only the last document ends inside a tile."""
    q, k = (_lengths(cu, batch) for cu in (documents.cu_q, documents.cu_k))
    (with_keys,) = np.nonzero(k)
    if not (k[with_keys[:-1]] % tile).any():
        return None
    room = -(-k // tile) * tile
    pieces = spread_pieces(k, room)
    cu_q, cu_k, used, table = joined([_starts(q), _starts(room), k.astype(np.int32), pieces], device)
    return RoomyPacking(Packing(cu_q, cu_k, int(q.max()), int(k.max())), used, table, int(room.sum()))


def spread_pieces(lengths: Longs, room: Longs) -> Int32:
    """The table `pieces` for documents of these lengths, one after the other, that get this room."""
    count = -(-room // PIECE_ROWS)
    doc = np.repeat(np.arange(len(room)), count)
    row = (np.arange(len(doc)) - np.repeat(count.cumsum() - count, count)) * PIECE_ROWS  # inside its document
    filled = np.clip(lengths[doc] - row, 0, PIECE_ROWS)
    source = np.where(filled > 0, (lengths.cumsum() - lengths)[doc] + row, 0)
    copy, rows = (room.cumsum() - room)[doc] + row, np.minimum(room[doc] - row, PIECE_ROWS)
    return np.stack([source, filled, copy, rows], axis=1).astype(np.int32)


def rows_without_keys(documents: Documents, batch: int, device: torch.device) -> Tensor | None:
    """Marks of the queries whose document has no keys: (tokens, 1, 1) over all rows of a batch, or None."""
    q, k = (_lengths(cu, batch) for cu in (documents.cu_q, documents.cu_k))
    marks = np.repeat(k == 0, q)
    return uploaded(torch.from_numpy(marks)[:, None, None], device) if marks.any() else None


def unpacked(problem: Problem, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape out (tokens, heads, dim) to (batch, seqlen, heads, dim), and lse (heads, tokens) to (batch, heads,
    seqlen)."""
    shape = (problem.batch, problem.len_q, problem.heads_q)
    lse = lse.view(shape[2], *shape[:2]).transpose(0, 1)
    return out.view(*shape, -1), lse if problem.batch == 1 else lse.contiguous()


def _lengths(cu: tuple[int, ...], batch: int) -> Longs:
    return np.tile(np.diff(cu), batch).astype(np.int64)


def _starts(lengths: Longs) -> Int32:
    return np.append(0, lengths.cumsum()).astype(np.int32)
