"""Loops that numpy cannot replace are compiled with numba. Without numba they run as plain Python, more slowly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

log = logging.getLogger(__name__)
Loop = Callable[..., Any]


def compiled(function: Loop) -> Loop:
    """Compile a loop when it is first called, and keep the machine code on disk, if a folder there is writable.

    numba is imported by that first call. Most plans need no such loop, so most processes never load it. If the machine
    code on disk is damaged, this process compiles the loop again and keeps it in memory.
    """
    loop: Loop | None = None

    @wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal loop
        if loop is None:
            loop = _with_numba(function)
        try:
            return loop(*arguments)
        except MemoryError:
            raise
        except Exception as error:  # what numba raises for a damaged file depends on the damage; no loop raises itself
            folder = _cache_folder(loop)
            if folder is None:
                raise
            without = _uncached(function)
            result = without(*arguments)  # raises an error that is the loop's own
            _warn(folder, repr(error))
            loop = without
            return result

    return call


def _with_numba(function: Loop) -> Loop:
    try:
        import numba
    except ImportError:
        return function
    try:
        loop: Loop = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba may write neither beside the package nor in a home: every process compiles again
        loop = _uncached(function)
    return loop


def _uncached(function: Loop) -> Loop:
    import numba

    loop: Loop = numba.njit(nogil=True)(function)
    return loop


def _cache_folder(loop: Loop) -> str | None:
    """Where numba keeps the machine code of a loop; None if it keeps none."""
    return getattr(getattr(loop, "stats", None), "cache_path", None)


@cache
def _warn(folder: str, error: str) -> None:
    log.warning("compiled loops in %s cannot be used (%s); compiling without them: delete that folder", folder, error)
