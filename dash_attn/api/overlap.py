"""Tensors that take results must not share memory with other tensors of a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Named = tuple[str, Tensor]

# Steps of the exact comparison, about a millisecond. Any, because the types of numpy know only 0 and -1.
MOST_WORK: Any = 100_000


def refuse_overlap(rooms: Sequence[Named], inputs: Sequence[Named]) -> None:
    """Raise an error that names two tensors, if one of `rooms` shares memory with another room or with an input.

    Slices of one tensor may lie between each other, as dq, dk and dv of a fused tensor do.
    """
    taken = [(name, x, *_range(x)) for name, x in rooms]
    others = [(name, x, *_range(x)) for name, x in inputs]
    pairs = [*combinations(taken, 2), *[(room, other) for room in taken for other in others]]
    for (name, x, begin, end), (other_name, y, other_begin, other_end) in pairs:
        if begin < other_end and other_begin < end and _share(x, y):
            raise ValueError(
                f"{name} and {other_name} share memory, and the backward writes to {name} before it has read and "
                f"written everything else: give {name} memory of its own, as torch.empty_like(...) does, or leave it "
                "out"
            )


def _range(x: Tensor) -> tuple[int, int]:
    """The first address of a tensor, and the address behind its last element."""
    begin = x.data_ptr()
    return begin, begin + _span(x.shape, x.stride()) * x.element_size()


@lru_cache(maxsize=256)
def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first one of a tensor to its last one, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class _Layout:
    """Where the elements of a tensor lie. numpy never reads the memory, which may be that of a GPU."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (x.data_ptr(), True),
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "typestr": f"|V{size}",
        }

    def array(self) -> npt.NDArray[Any]:
        return np.asarray(self)


def _share(x: Tensor, y: Tensor) -> bool:
    """Whether an element of one tensor lies on an element of the other. If that is too hard to say: yes."""
    shared: bool = np.may_share_memory(_Layout(x).array(), _Layout(y).array(), max_work=MOST_WORK)
    return shared
