"""Alignment: whether the kernels' bulk loads and stores can use a tensor without a copy."""

from __future__ import annotations

import torch
from torch import Tensor


class Alignment:
    """Says whether the kernels can use tensors without copies. It caches the answer by strides, because checking them
    at every call would be slow for a small problem."""

    def __init__(self) -> None:
        self._by_strides: dict[tuple[tuple[int, ...], ...], bool] = {}

    def __call__(self, *tensors: Tensor) -> bool:
        strides = tuple([x.stride() for x in tensors])
        fit = self._by_strides.get(strides)
        if fit is None:
            fit = self._by_strides[strides] = all(map(fits, strides))
        starts = 0
        for x in tensors:
            starts |= x.data_ptr()
        return fit and starts % 16 == 0


def aligned(x: Tensor) -> Tensor:
    """The tensor itself, or an aligned copy: contiguous rows, start and strides multiples of 16 bytes, no stride 0."""
    if x.data_ptr() % 16 == 0 and fits(x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() does not copy if only the start is off


def fits(strides: tuple[int, ...]) -> bool:
    *others, last = strides
    return last == 1 and all(s > 0 and s % 8 == 0 for s in others)
