"""Loops over millions of tasks are compiled with numba; without it the same loops run, slowly, as plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Loop = Callable[..., Any]

try:
    import numba
except ImportError:  # pragma: no cover - numba is a declared dependency, machines without it stay usable

    def compiled(function: Loop) -> Loop:
        return function

else:

    def compiled(function: Loop) -> Loop:
        """Compile on first call, keep the machine code on disk for the next process."""
        wrapped: Loop = numba.njit(cache=True, nogil=True)(function)
        return wrapped
