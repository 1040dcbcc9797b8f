"""Compiled loops where numba may write nowhere, and where what it wrote is damaged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.caching import CacheImpl

from dash_attn import jit
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


LOOPS = """
def count(limit):
    total = 0
    for i in range(limit):
        total += i
    return total


def refuse(limit):
    if limit > 3:
        raise ValueError("too many")
    return limit
"""


@pytest.fixture
def loops(tmp_path: Path) -> dict[str, Any]:
    """Functions of a file, beside which numba keeps their machine code."""
    path, names = tmp_path / "loops.py", dict[str, Any]()
    path.write_text(LOOPS, encoding="utf-8")
    exec(compile(LOOPS, str(path), "exec"), {"__name__": "loops"}, names)
    jit._warn.cache_clear()
    return names


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 100])
def test_damaged_files_are_compiled_anew_with_one_warning(
    kind: str, left: int, loops: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert compiled(loops["count"])(5) == 10
    files = list(tmp_path.rglob(f"*.{kind}"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:left])
    with caplog.at_level(logging.WARNING):
        again = compiled(loops["count"])
        assert again(5) == again(5) == compiled(loops["count"])(5) == 10
    assert len(caplog.records) == 1 and str(files[0].parent) in caplog.text


def test_an_error_of_a_loop_is_no_damage(loops: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    refuse = compiled(loops["refuse"])
    assert refuse(3) == 3
    with pytest.raises(ValueError, match="too many"):
        refuse(4)
    assert refuse(2) == 2 and not caplog.records
