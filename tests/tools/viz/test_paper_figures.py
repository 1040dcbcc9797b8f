"""The paper's figures: all of them, and what their tables say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dash_attn.problem import CAUSAL, FULL
from dash_attn.tools.viz import FIGURES, figures
from dash_attn.tools.viz.paper_figures import program, steps

DOCS = Path(__file__).resolve().parents[3] / "docs" / "figures"


def test_every_figure_is_drawn(tmp_path: Path) -> None:
    paths = figures(tmp_path / "new", formats=("png",))
    assert [path.stem for path in paths] == list(FIGURES)
    for path in paths:
        image = np.asarray(Image.open(path).convert("RGB"))
        assert image.std() > 15, f"{path.name} is blank"


def test_both_formats_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(FIGURES) - {"fig5_lemma"}:
        monkeypatch.delitem(FIGURES, name)
    assert [path.name for path in figures(tmp_path)] == ["fig5_lemma.png", "fig5_lemma.svg"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_documents_have_them(ending: str) -> None:
    assert {path.stem for path in DOCS.glob(f"*.{ending}")} >= set(FIGURES)


def test_shift_table_is_the_papers() -> None:
    assert steps(program(4, 2, FULL, "shift")).tolist() == [[0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3], [3, 2, 1, 0]]


@pytest.mark.parametrize("n", [4, 8, 12])
def test_symmetric_shift_table_has_no_conflict(n: int) -> None:
    step = steps(program(n, 1, CAUSAL, "symmetric_shift"))
    assert ((step >= 0) == np.tri(n, dtype=bool)).all()
    for row in step:
        visited = row[row >= 0]
        assert len(set(visited.tolist())) == len(visited)
    assert step.max() == n
