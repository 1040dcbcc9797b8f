"""Compiled loops where numba may write nowhere."""

from __future__ import annotations

import numba
import pytest
from numba.core.caching import CacheImpl

from dash_attn.jit import compiled


def test_without_a_folder_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba raises an error if none of its locators has a folder that it may write to."""
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])

    def count(limit: int) -> int:
        total = 0
        for i in range(limit):
            total += i
        return total

    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(count)
    assert compiled(count)(5) == 10
