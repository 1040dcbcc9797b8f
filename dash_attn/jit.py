"""Loops that numpy cannot replace are compiled with numba. Without numba they run as plain Python, more slowly."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Loop = Callable[..., Any]


def compiled(function: Loop) -> Loop:
    """Compile a loop when it is first called, and keep the machine code on disk, if a folder there is writable.

    numba is imported by that first call. Most plans need no such loop, so most processes never load it.
    """
    loop: Loop | None = None

    @wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal loop
        if loop is None:
            loop = _with_numba(function)
        return loop(*arguments)

    return call


def _with_numba(function: Loop) -> Loop:
    try:
        import numba
    except ImportError:
        return function
    try:
        loop: Loop = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba may write neither beside the package nor in a home: every process compiles again
        loop = numba.njit(nogil=True)(function)
    return loop
