"""The comparison with FlashAttention-4: which rows count, means and worst cells."""

from __future__ import annotations

import pytest

from dash_attn.tools.bench.headline import EVERY, HEADER, headline
from dash_attn.tools.bench.report import against, best_us, peers, ratios, times
from tests.tools.viz.results import row, us


def rows() -> list[dict]:
    """Ours takes 9,900; fa4 takes 4,950 in one cell and 19,800 in the other."""
    made = [row(100, "full", "shift"), row(100, "causal", "fa3")]
    made[0]["us"]["fa4"], made[1]["us"]["fa4"] = us(4950.0), us(19800.0)
    return made


def test_mean_and_worst() -> None:
    made = against(rows(), "fa4")
    assert made is not None
    assert made.mean == pytest.approx(1.0)  # geometric: the arithmetic mean is 1.25
    assert made.worst == ("d128 full 100", pytest.approx(0.5))
    assert against(rows(), "cudnn") is None


def test_a_wrong_peer_does_not_count() -> None:
    made = rows()
    made[0]["failed"] = {"fa4": "gradients are wrong"}
    compared = against(made, "fa4")
    assert compared is not None and compared.cells == (("d128 causal 100", pytest.approx(2.0)),)
    assert "default order: geometric mean 2.000x fa4, worst 2.000x at d128 causal 100" in ratios({"rows": made})
    made[1]["failed"] = {"fa4": "gradients are wrong"}
    assert against(made, "fa4") is None


def test_the_best_order_need_not_be_the_default() -> None:
    made = rows()
    made[0]["us"]["spt"] = us(2475.0)
    (best, *_), (default, *_) = peers(made, best_us), peers(made)
    assert (best.worst.ratio, default.worst.ratio) == (pytest.approx(2.0), pytest.approx(0.5))


def test_peers_are_not_ours() -> None:
    assert [each.peer for each in peers(rows())] == ["fa4", "fa4 det", "fa2 det"]


def test_a_group_that_timed_no_peer_is_left_out() -> None:
    alone = row(100, "full", "shift")
    alone["us"] = {"shift": us(3.0)}
    (group,) = headline({"grid_close": {"rows": rows()}, "step": {"rows": [alone]}, "grid": {"rows": rows()}})
    assert group.suites == ("grid_close",)
    assert group.line == ["the grid of the paper (2 shapes)", "1.21x", "1.21x", "1.00x", "0.50x"]
    assert len(HEADER) == len(group.line)


def test_a_peer_that_was_not_timed_has_no_numbers() -> None:
    alone = row(100, "full", "shift")
    del alone["us"]["fa4"]
    (group,) = headline({"packed": {"rows": [alone]}})
    assert group.line == ["packed documents (1 packs)", "1.21x", "1.21x", "-", "-"]


def test_quick_calls_have_a_row_of_their_own() -> None:
    slow, quick = row(4096, "causal", "fa3"), row(1024, "causal", "fa3")
    slow["us"]["fa4"], quick["us"]["fa4"] = us(250.0), us(249.0)
    groups = headline({suite: {"rows": [slow, quick]} for suite in ("length", "few")} | {"packed": {"rows": [slow]}})
    assert [(group.suites, [cell for cell, _ in group.over["fa4"].cells]) for group in groups] == [
        (("length",), [slow["cell"]]),
        (("few",), [slow["cell"]]),
        (("packed",), [slow["cell"]]),
        (("length", "few"), [quick["cell"]] * 2),
    ]


def test_a_name_counts_what_its_mean_counts() -> None:
    made = rows()
    made[0]["failed"] = {"fa4": "gradients are wrong", "fa4 det": "gradients are wrong"}
    (group,) = headline({"models": {"rows": made}})
    assert group.name == "known models (1 shapes)"


@pytest.mark.parametrize("suite", EVERY)
def test_every_row_counts_once(suite: str) -> None:
    made = [row(n, "causal", "fa3") for n in (1024, 8192)]
    late, capped = row(2048, "causal", "fa3"), row(4096, "causal", "fa3")
    late["shape"]["len_k"], capped["shape"]["features"] = 8192, "softcap 50.0"
    everything = [*made, late, capped]
    made[0]["us"]["fa4"] = us(100.0)
    counted = [cell for group in headline({suite: {"rows": everything}}) for cell, _ in group.over["fa4"].cells]
    assert sorted(counted) == sorted(each["cell"] for each in everything)


@pytest.mark.parametrize("ratio, text", [(1.0, "1.00x"), (0.997, "0.997x"), (0.994, "0.99x"), (1.004, "1.00x")])
def test_what_is_slower_does_not_read_as_equal(ratio: float, text: str) -> None:
    assert times(ratio) == text
