"""Pictures of results: their panels, axes and labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from dash_attn.tools.viz.plots import DARK, DRAWN, LIGHT, NARROW, figure_of
from tests.tools.viz.results import result


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts on top of each other, and texts that the edge of the picture cuts."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    figure.canvas.draw()
    texts = [*figure.texts, *(text for each in figure.legends for text in each.get_texts())]
    for ax in figure.axes:
        texts += [ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label, *_ticks(ax)]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]
    inside = figure.bbox.padded(1)
    cut = [(name, "edge") for name, box in boxes if not (inside.contains(*box.min) and inside.contains(*box.max))]
    pairs = [(a, b) for i, (a, x) in enumerate(boxes) for b, y in boxes[i + 1 :] if x.padded(-1).overlaps(y.padded(-1))]
    return cut + pairs


def _ticks(ax: Axes) -> list[Text]:
    """The labels of the ticks that are in view; matplotlib also makes some outside of it."""
    low, high = sorted(ax.get_ylim())
    return [label for at, label in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True) if low <= at <= high]


@pytest.mark.parametrize("theme", [LIGHT, NARROW[DARK]])
@pytest.mark.parametrize("suite", DRAWN)
def test_texts_are_whole_and_apart(suite: str, theme) -> None:
    assert overlaps(figure_of(suite, result(suite), theme)) == []


@pytest.mark.parametrize("suite", DRAWN)
def test_every_axis_has_its_unit(suite: str) -> None:
    for ax in figure_of(suite, result(suite), LIGHT).axes:
        assert ax.get_ylabel()


def test_a_panel_for_each_head_dim_and_mask() -> None:
    figure = figure_of("grid", result("grid"), LIGHT)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["head dim 128, causal mask", "head dim 128, full mask"]
    labels = {line.get_label() for line in figure.axes[0].lines}
    assert {"ours", "any", "fa4", "fa4 det"} <= labels


def test_phones_get_one_panel_a_row() -> None:
    wide, narrow = (figure_of("grid", result("grid"), theme) for theme in (LIGHT, replace(LIGHT, narrow=True)))
    assert wide.axes[0].get_position().y0 == wide.axes[1].get_position().y0
    assert narrow.axes[0].get_position().y0 > narrow.axes[1].get_position().y1
    assert narrow.get_figwidth() < 0.5 * wide.get_figwidth()


def test_names_from_files_are_no_formulas() -> None:
    nasty = result("models", device="GPU $x^2$ $")
    nasty["rows"][0]["cell"] = "$\\frac{"  # as a formula this could not be drawn
    figure_of("models", nasty, LIGHT).canvas.draw()
