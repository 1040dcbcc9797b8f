"""Packed sequences in the form that flash kernels take."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dash_attn.problem import Documents, Problem

from .tables import uploaded


class Packing(NamedTuple):
    """Arguments of a flash kernel for packed sequences, under FlashAttention's names."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@lru_cache(maxsize=256)
def packing_of(documents: Documents, batch: int, device: torch.device) -> Packing:
    """The rows of a batch as one pack, each row with the same documents.

    The boundaries are copied to the device once: a copy in every call could not be captured in a CUDA graph.
    """
    sides = (documents.cu_q, documents.cu_k)
    starts = [[0, *(row * cu[-1] + end for row in range(batch) for end in cu[1:])] for cu in sides]
    cu_q, cu_k = (uploaded(torch.tensor(cu, dtype=torch.int32), device) for cu in starts)
    max_q, max_k = (max(b - a for a, b in pairwise(cu)) for cu in sides)
    return Packing(cu_q, cu_k, max_q, max_k)


def idle_rows(documents: Documents, batch: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Marks of the queries whose document has no keys, and of the keys whose document has no queries.

    Each is (tokens, 1, 1) over all rows of a batch, or None if there are no such rows.
    """
    sides = [[b - a for a, b in pairwise(cu)] for cu in (documents.cu_q, documents.cu_k)]
    marks = list[Tensor | None]()
    for mine, others in (sides, sides[::-1]):
        idle = torch.tensor([other == 0 for other in others]).repeat_interleave(torch.tensor(mine))
        marks.append(uploaded(idle.repeat(batch)[:, None, None], device) if idle.any() else None)
    return marks[0], marks[1]


def unpacked(problem: Problem, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape out (tokens, heads, dim) to (batch, seqlen, heads, dim), and lse (heads, tokens) to (batch, heads,
    seqlen)."""
    shape = (problem.batch, problem.len_q, problem.heads_q)
    lse = lse.view(shape[2], *shape[:2]).transpose(0, 1)
    return out.view(*shape, -1), lse if problem.batch == 1 else lse.contiguous()
