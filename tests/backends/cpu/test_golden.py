"""Bits change with the version only."""

from __future__ import annotations

import pytest

from dash_attn import __version__
from tests.backends.cpu.golden import PROBLEMS, WAYS, kept, measure


@pytest.mark.parametrize("way", WAYS)
def test_bits_are_those_of_this_version(way: str) -> None:
    here, results = measure(way)
    if here not in kept():
        pytest.skip(f"golden.json has no hashes for {here}")
    assert results == kept()[here]


def test_this_version_has_golden_bits() -> None:
    """Else the test above would pass everywhere. `python -m tests.backends.cpu.golden` writes them."""
    of_this_version = [entry for here, entry in kept().items() if here.startswith(f"{__version__}, ")]
    assert of_this_version
    assert all(len(entry) == len(PROBLEMS) for entry in of_this_version)
