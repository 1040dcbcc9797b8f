"""Bits change with the version only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dash_attn import __version__
from tests.backends.cpu import golden
from tests.backends.cpu.golden import PROBLEMS, ROOT, WAYS, joined, kept, measure

OLD = {"0.2.0, here": {"a problem": "1234"}}


@pytest.mark.parametrize("way", WAYS)
def test_bits_are_those_of_this_version(way: str) -> None:
    here, results = measure(way)
    if here in kept():
        assert results == kept()[here]
        return
    missing = f"golden.json has no hashes for {here}: `python -m tests.backends.cpu.golden` adds them"
    # Every CPU with AVX2 takes the common way alike. So the bits of a torch that the file has are compared on each.
    has_avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    has_torch = any(each.startswith(f"{__version__}, torch {torch.__version__}, ") for each in kept())
    assert not (way == "common" and has_avx2 and has_torch), missing
    pytest.skip(missing)


def test_this_version_has_golden_bits() -> None:
    """Else the test above would pass everywhere. `python -m tests.backends.cpu.golden` writes them."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    of_this_version = {key: entry for key, entry in kept().items() if key.startswith(f"{__version__}, ")}
    with_pinned = [key for key in of_this_version if re.match(rf"{__version__}, torch {pinned[1]}[+,]", key)]
    for kind in ("AVX512", "AVX2", "DEFAULT"):
        assert any(f", {kind}, " in key for key in with_pinned), f"no hashes for {kind} and torch {pinned[1]}"
    assert all(list(entry) == [str(each) for each in PROBLEMS] for entry in of_this_version.values())


def test_a_kept_hash_stays() -> None:
    added = {"0.2.0, here": {"a problem": "1234", "another": "5678"}, "0.2.0, there": {"a problem": "9abc"}}
    assert joined(OLD, added, replace=False) == added


@pytest.mark.parametrize("results", [{"a problem": "5678"}, {"another": "1234"}])
def test_a_change_of_bits_needs_a_new_version(results: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"here: a problem.*raises the version"):
        joined(OLD, {"0.2.0, here": results}, replace=False)
    assert joined(OLD, {"0.2.0, here": results}, replace=True) == {"0.2.0, here": results}
    assert joined(OLD, {"0.3.0, here": results}, replace=False) == OLD | {"0.3.0, here": results}


def test_the_command_refuses_to_change_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    file.write_text('{"here": {"a problem": "1234"}}')
    monkeypatch.setattr(golden, "FILE", file)
    monkeypatch.setattr(golden, "measure", lambda way: ("here", {"a problem": "5678"}))
    with pytest.raises(SystemExit, match="raises the version"):
        golden.main([])
    assert kept() == {"here": {"a problem": "1234"}}
    golden.main(["--replace"])
    assert kept() == {"here": {"a problem": "5678"}}
