"""The comparison with FlashAttention-4: means, worst cells, and the picture."""

from __future__ import annotations

import pytest

from dash_attn.tools.viz.headline import against, headline_plot, headline_table, peers
from dash_attn.tools.viz.plots import DARK, LIGHT, NARROW
from tests.tools.viz.results import row, us
from tests.tools.viz.test_plots import overlaps


def rows() -> list[dict]:
    """Ours takes 99; fa4 takes 49.5 in one cell and 198 in the other."""
    made = [row(1, "full", "shift"), row(1, "causal", "fa3")]
    made[0]["us"]["fa4"], made[1]["us"]["fa4"] = us(49.5), us(198.0)
    return made


def test_mean_and_worst() -> None:
    made = against(rows(), "fa4")
    assert made is not None
    assert made.mean == pytest.approx(1.0)  # geometric: the arithmetic mean is 1.25
    assert (made.worst.ratio, made.place) == (pytest.approx(0.5), "d128 full 1")
    assert against(rows(), "cudnn") is None


def test_a_wrong_peer_is_named() -> None:
    made = rows()
    made[0]["failed"] = {"fa4": "gradients are wrong"}
    compared = against(made, "fa4")
    assert compared is not None and compared.place == "d128 full 1 (wrong gradients)"


def test_peers_are_not_ours() -> None:
    assert [each.peer for each in peers(rows())] == ["fa4", "fa4 det", "fa2 det"]


def test_the_table_has_a_row_for_each_suite_that_timed_the_peer() -> None:
    alone = row(1, "full", "shift")
    alone["us"] = {"shift": us(3.0)}
    header, *lines = headline_table({"One": rows(), "Ours alone": [alone], "No times": [{"cell": "a"}]})
    assert lines == [["One", "1.21x", "1.21x", "1.00x", "0.50x", "2"]]
    assert len(header) == 6


@pytest.mark.parametrize("theme", [LIGHT, DARK, NARROW[LIGHT]])
def test_the_picture_has_a_dot_for_each_cell(theme) -> None:
    figure = headline_plot({"One": rows(), "Two": rows()[:1]}, {"device": "GPU"}, theme)
    dots = [each.get_offsets()[:, 0].tolist() for each in figure.axes[0].collections]
    assert dots == [pytest.approx(x) for x in ([120 / 99, 120 / 99], [0.5, 2.0], [120 / 99], [0.5])]
    assert overlaps(figure) == []
