"""Copies of the operands in one fixed layout. The layout of a caller's tensor can change the bits of a product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dash_attn.backends.cpu.threads import Job

LINE = 16  # float32 numbers in 64 bytes, the alignment of torch's memory and the widest vector of a CPU


def padded(dim: int) -> int:
    """The distance of two rows, in numbers."""
    return -(-dim // LINE) * LINE


def planes(x: Tensor) -> Tensor:
    """float32 memory (batch, heads, seqlen, dim) for a tensor (batch, seqlen, heads, dim).

    Every row starts at a multiple of 64 bytes, so every tile does.
    """
    batch, rows, heads, dim = x.shape
    return torch.empty((batch, heads, rows, padded(dim)), dtype=torch.float32, device="cpu")[..., :dim]


def copies(x: Tensor, into: Tensor, scale: float = 1.0) -> Iterator[Job]:
    """Jobs that copy a tensor to its planes, and multiply it by `scale`."""
    return (partial(_copy, x[b, :, h], into[b, h], scale) for b in range(len(into)) for h in range(into.shape[1]))


def _copy(plane: Tensor, into: Tensor, scale: float) -> None:
    into.copy_(plane).mul_(scale)
