"""Alignment: whether the kernels' bulk loads and stores can use a tensor without a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Strides = tuple[int, ...]


def aligned(x: Tensor) -> Tensor:
    """The tensor itself, or an aligned copy: contiguous rows, start and strides multiples of 16 bytes, no stride 0."""
    if x.data_ptr() % 16 == 0 and fits(x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() does not copy if only the start is off


def fits(strides: Strides) -> bool:
    *others, last = strides
    return last == 1 and all(s > 0 and s % 8 == 0 for s in others)


def maker(*models: Tensor) -> Callable[[Tensor], Tensor]:
    """The fastest function that makes a new contiguous tensor like any of the models, or like one with its strides."""
    contiguous = partial(torch.empty_like, memory_format=torch.contiguous_format)
    # A dimension of size 1 may have any stride in a contiguous tensor, so the strides themselves are compared.
    if all(x.stride() == contiguous(x, device="meta").stride() for x in models):
        return torch.empty_like
    return contiguous
