"""Which tensors bulk loads and stores can take as they are."""

from __future__ import annotations

import torch
from torch import Tensor


class Alignment:
    """Whether the kernels take some tensors as they are. The answer for a set of strides is remembered: a call on a
    small problem has no time to look at every stride."""

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
    """The tensor, or a copy that bulk loads can take: contiguous rows; start and strides, none 0, at 16 bytes."""
    if x.data_ptr() % 16 == 0 and fits(x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() keeps a tensor whose start alone is off


def fits(strides: tuple[int, ...]) -> bool:
    *others, last = strides
    return last == 1 and all(s > 0 and s % 8 == 0 for s in others)
