"""Whole numbers as callers give them: ints, numpy numbers and tensors. They become plain ints, so that equal masks are
one value in every cache and in every text."""

from __future__ import annotations

from operator import index
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]


def whole(name: str, given: object, expected: str = "a whole number") -> int:
    """One number, or a ValueError that names it. A bool is no number, because it is most often a mistake."""
    if type(given) is int:
        return given
    is_one = not getattr(given, "ndim", 0) and "bool" not in _kind(given)
    try:
        if is_one and isinstance(given, SupportsIndex):
            return index(given)
    except TypeError:  # tensors of floats have the method too
        pass
    raise ValueError(f"{name} must be {expected}, got {given!r}")


def whole_row(name: str, given: object, expected: str) -> Longs:
    """One row of numbers. `expected` says what the caller must give."""
    array = array_of(name, given, expected)
    has_flags = isinstance(given, list | tuple) and any(isinstance(x, bool) for x in given)
    if array.ndim != 1 or has_flags or (array.size and array.dtype.kind not in "iu"):
        kind = "bool" if has_flags else array.dtype
        raise ValueError(f"{name} must {expected}, got {array.ndim} dimensions of {kind}")
    if array.dtype.kind == "u":
        array = np.minimum(array.astype(np.uint64), np.iinfo(np.int64).max)
    return array.astype(np.int64)


def boundaries(name: str, given: object) -> tuple[int, ...]:
    """0 and the ends of documents."""
    if isinstance(given, tuple) and all(type(x) is int for x in given):
        return given
    return tuple(whole_row(name, given, "be a list of whole numbers, 0 and the end of each document").tolist())


def side(name: str, given: object) -> int | None:
    """One side of a window."""
    return None if given is None else whole(f"window {name}", given, "a whole number, or None for no limit")


def array_of(name: str, given: Any, expected: str) -> npt.NDArray[Any]:
    """A list, array or tensor as an array. A tensor may be on a GPU, and may need a gradient."""
    try:
        return np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (TypeError, ValueError, RuntimeError) as error:  # numpy has no bfloat16, and no lists of unequal lengths
        raise ValueError(f"{name} must {expected}, got {_kind(given)}") from error


def _kind(given: object) -> str:
    return str(getattr(given, "dtype", type(given).__name__))
