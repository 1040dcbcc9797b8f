"""Whoever compares programs verifies and places each of them once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dash_attn.order import applicable
from dash_attn.problem import CAUSAL, Problem
from dash_attn.tiling import TileShape, tile
from dash_attn.tools.cli.main import main
from dash_attn.verify import checks


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often programs were checked, and placed."""
    counted: Counter[str] = Counter()

    def count(name: str) -> None:
        function = getattr(checks, name)

        def counting(*arguments: Any) -> Any:
            counted[name] += 1
            return function(*arguments)

        monkeypatch.setattr(checks, name, counting)

    count("check_tables")
    count("place")
    return counted


@pytest.mark.parametrize("html", [False, True])
def test_compare(calls: Counter[str], html: bool, tmp_path: Path) -> None:
    tiling = tile(Problem(1, 4, 4, 8, 8, mask=CAUSAL), TileShape(1, 1))
    shape = ["--mask", "causal", "--q-tiles", "8", "--kv-tiles", "8", "--heads", "4"]
    run("compare", *shape, "--json", *(["--html", str(tmp_path / "all.html")] if html else []))
    count = len(applicable(tiling))
    assert calls == {"check_tables": count, "place": count}


@pytest.mark.parametrize("command", ["simulate", "explain"])
def test_one_program(calls: Counter[str], command: str) -> None:
    run(command, "--mask", "causal", "--seqlen", "512", "--heads", "2", "--json")
    assert calls == {"check_tables": 1, "place": 1}


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code in (0, None)
