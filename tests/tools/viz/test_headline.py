"""The picture of the headline."""

from __future__ import annotations

import pytest

from dash_attn.tools.bench.headline import headline
from dash_attn.tools.viz.headline import headline_plot
from dash_attn.tools.viz.plots import DARK, LIGHT, NARROW
from tests.tools.viz.results import row, us
from tests.tools.viz.test_plots import overlaps


@pytest.mark.parametrize("theme", [LIGHT, DARK, NARROW[LIGHT]])
def test_the_picture_has_a_dot_for_each_cell(theme) -> None:
    rows = [row(100, "full", "shift"), row(100, "causal", "fa3")]  # ours takes 9,900
    rows[0]["us"]["fa4"], rows[1]["us"]["fa4"] = us(4950.0), us(19800.0)
    rows[1]["failed"] = {"fa4 det": "gradients are wrong"}
    groups = headline({"grid_close": {"rows": rows}, "packed": {"rows": rows[:1]}})
    figure = headline_plot(groups, {"device": "GPU"}, theme)
    dots = [each.get_offsets()[:, 0].tolist() for each in figure.axes[0].collections]
    assert dots == [pytest.approx(x) for x in ([120 / 99], [0.5, 2.0], [120 / 99], [0.5])]
    assert overlaps(figure) == []
