"""The map of two records: which line and which step is marked as parted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dash_attn.tools.viz.parted import EQUAL, MOST_LINES, MOST_STEPS, NOTHING, PARTED, parted, picture
from dash_attn.watching.difference import first_difference
from dash_attn.watching.files import Record, Row, Step


def record(modules: int, steps: int, wrong: tuple[int, int] | None = None) -> Record:
    """`wrong` is the step and the module from which on values are others."""
    names = [f"blocks.{i // 4}.part{i % 4}" for i in range(modules)]
    rows = (
        Row("data", "", "input", 0, 0),
        *(Row("forward", name, "output", 0, i + 1) for i, name in enumerate(names)),
        *(Row("backward", name, "weight", 0, modules + i + 1) for i, name in enumerate(names[:2])),
    )
    made = {}
    for number in range(steps):
        values = np.arange(len(rows), dtype=np.uint64) + np.uint64(1000 * number)
        if wrong is not None and number >= wrong[0]:
            values[1 + (wrong[1] if number == wrong[0] else 0) :] += np.uint64(7)
        made[number] = Step(number, rows, ("float32 [2]",), values)
    return Record(0, {}, made, True)


def test_cells() -> None:
    a, b = record(6, 5), record(6, 5, (2, 3))
    first = first_difference([a], [b])
    drawn = parted(a, b, first)
    assert drawn.lines[0] == "(data)" and "blocks.0.part3" in drawn.lines and drawn.steps == [0, 1, 2, 3, 4]
    forward = dict(zip(drawn.lines, drawn.cells[0].tolist(), strict=True))
    assert forward["(data)"] == [EQUAL] * 5
    assert forward["blocks.0.part2"] == [EQUAL] * 3 + [PARTED] * 2
    assert forward["blocks.0.part3"] == [EQUAL] * 2 + [PARTED] * 3
    backward = dict(zip(drawn.lines, drawn.cells[1].tolist(), strict=True))
    assert backward["blocks.0.part0"] == [EQUAL] * 2 + [PARTED] * 3
    assert backward["blocks.1.part1"] == [NOTHING] * 5


@pytest.mark.parametrize("wrong", [(0, 0), (100, 70), (199, 5)])
def test_many_modules_and_steps_fit(wrong: tuple[int, int], tmp_path: Path) -> None:
    a, b = record(80, 200), record(80, 200, wrong)
    first = first_difference([a], [b])
    drawn = parted(a, b, first)
    assert len(drawn.lines) <= MOST_LINES and len(drawn.steps) <= MOST_STEPS and wrong[0] in drawn.steps
    assert (drawn.cells == PARTED).any()
    picture(a, b, first, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_runs_without_a_difference_have_a_map(tmp_path: Path) -> None:
    a = record(3, 2)
    picture(a, a, None, tmp_path / "map.png")
    assert not (parted(a, a, None).cells == PARTED).any()
