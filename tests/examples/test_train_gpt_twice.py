"""The GPT example with a few steps of a small model: what it says, draws and exits with."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/train_gpt_twice.py"
# Three key tiles: a sum of two has one order only.
SMALL = ["--device", "cpu", "--layers", "1", "--length", "768"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt_twice", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names of their fields' types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def test_runs_are_the_same(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.png"
    assert example.main([*SMALL, "--steps", "3", "--out", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "identical: all 15 tensors, bit for bit, after each of 3 steps" in printed
    assert printed.count("fingerprint") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_another_order_parts_them(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "curves.png")
    assert example.main([*SMALL, "--steps", "2", "--second-policy", "fa3", "--out", out]) == 0
    assert "different: the runs part at step 1, in " in capsys.readouterr().out
    # Meant to part, and could not: one key tile is added in one order only.
    assert example.main([*SMALL, "--length", "64", "--steps", "1", "--second-policy", "fa3", "--out", out]) == 1
    assert "they were meant to part" in capsys.readouterr().out


def test_any_order_parts_them(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By chance, so it may take a few attempts."""
    for _ in range(5):
        # Sums of up to five, in which there is more to go another way.
        few = [*SMALL, "--length", "1280", "--steps", "4"]
        status = example.main([*few, "--non-deterministic", "--out", str(tmp_path / "curves.png")])
        if status == 0:
            break
    printed = capsys.readouterr().out
    assert status == 0 and "the runs part at step" in printed and "any order" in printed


def test_the_first_difference_is_named(example: ModuleType) -> None:
    first = example.Run([2.0, 1.5, 1.0], [{"a": "0", "b": "0"}, {"a": "1", "b": "1"}, {"a": "2", "b": "2"}])
    second = example.Run([2.0, 1.5, 1.1], [{"a": "0", "b": "0"}, {"a": "1", "b": "x"}, {"a": "y", "b": "x"}])
    parted = example.parting(first, second)
    assert parted == (1, ["b"])
    text = example.report(first, second, parted)
    assert "part at step 2, in 1 of 2 tensors, the first is b" in text
    assert "losses differ first at step 3, and by up to 1.0e-01" in text
    assert example.parting(first, first) is None


@pytest.mark.gpu
def test_on_a_gpu(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--device", "cuda", "--steps", "20", "--out", str(tmp_path / "curves.png")]
    assert example.main(out) == 0
    assert "after each of 20 steps" in capsys.readouterr().out
    assert example.main([*out, "--non-deterministic"]) == 0
