"""Environment variables that every call reads."""

from __future__ import annotations

import os
from collections.abc import Callable


def variable(name: str) -> Callable[[], str | None]:
    """A function that gives the current value of an environment variable, or None if it is not set.

    os.environ raises and catches an error for a variable that is not set, which takes most of a microsecond. The
    dictionary behind it answers thirty times faster and always has the same content.
    """
    key = os.environ.encodekey(name)

    def value() -> str | None:
        try:
            raw = os.environ._data.get(key)  # type: ignore[attr-defined]
        except AttributeError:  # somebody has put another mapping in the place of os.environ
            return os.environ.get(name)
        return None if raw is None else os.environ.decodevalue(raw)

    return value
