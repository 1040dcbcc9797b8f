"""The comparison with FlashAttention-4: which rows count, means and worst cells."""

from __future__ import annotations

import pytest

from dash_attn.tools.bench.headline import HEADER, KINDS, headline
from dash_attn.tools.bench.report import against, best_us, peers, ratios
from tests.tools.viz.results import row, us


def rows() -> list[dict]:
    """Ours takes 99; fa4 takes 49.5 in one cell and 198 in the other."""
    made = [row(1, "full", "shift"), row(1, "causal", "fa3")]
    made[0]["us"]["fa4"], made[1]["us"]["fa4"] = us(49.5), us(198.0)
    return made


def test_mean_and_worst() -> None:
    made = against(rows(), "fa4")
    assert made is not None
    assert made.mean == pytest.approx(1.0)  # geometric: the arithmetic mean is 1.25
    assert made.worst == ("d128 full 1", pytest.approx(0.5))
    assert against(rows(), "cudnn") is None


def test_a_wrong_peer_does_not_count() -> None:
    made = rows()
    made[0]["failed"] = {"fa4": "gradients are wrong"}
    compared = against(made, "fa4")
    assert compared is not None and compared.cells == (("d128 causal 1", pytest.approx(2.0)),)
    assert "default order: geometric mean 2.000x fa4, worst 2.000x at d128 causal 1" in ratios({"rows": made})
    made[1]["failed"] = {"fa4": "gradients are wrong"}
    assert against(made, "fa4") is None


def test_the_best_order_need_not_be_the_default() -> None:
    made = rows()
    made[0]["us"]["spt"] = us(24.75)
    (best, *_), (default, *_) = peers(made, best_us), peers(made)
    assert (best.worst.ratio, default.worst.ratio) == (pytest.approx(2.0), pytest.approx(0.5))


def test_peers_are_not_ours() -> None:
    assert [each.peer for each in peers(rows())] == ["fa4", "fa4 det", "fa2 det"]


def test_a_group_that_timed_no_peer_is_left_out() -> None:
    alone = row(1, "full", "shift")
    alone["us"] = {"shift": us(3.0)}
    (group,) = headline({"grid_close": {"rows": rows()}, "step": {"rows": [alone]}, "grid": {"rows": rows()}})
    assert group.suite == "grid_close"
    assert group.line == ["the grid of the paper (2 shapes)", "1.21x", "1.21x", "1.00x", "0.50x"]
    assert len(HEADER) == len(group.line)


def test_a_peer_that_was_not_timed_has_no_numbers() -> None:
    alone = row(1, "full", "shift")
    del alone["us"]["fa4"]
    (group,) = headline({"packed": {"rows": [alone]}})
    assert group.line == ["packed documents (1 packs)", "1.21x", "1.21x", "-", "-"]


@pytest.mark.parametrize("suite", dict.fromkeys(kind.suite for kind in KINDS))
def test_every_row_counts_once(suite: str) -> None:
    made = [row(n, "causal", "fa3") for n in (1024, 8192)]
    late, capped = row(2048, "causal", "fa3"), row(4096, "causal", "fa3")
    late["shape"]["len_k"], capped["shape"]["features"] = 8192, "softcap 50.0"
    everything = [*made, late, capped]
    counted = [cell for group in headline({suite: {"rows": everything}}) for cell, _ in group.over["fa4"].cells]
    assert sorted(counted) == sorted(each["cell"] for each in everything)
