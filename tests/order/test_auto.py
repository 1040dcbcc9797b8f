"""What `auto` takes: by one sequence alone, the same in every batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.launch import compose
from dash_attn.order import (
    AUTO_WIDTH,
    POLICIES,
    Choice,
    Order,
    Policy,
    applicable,
    arrange,
    choose,
    cuts,
    resolve,
)
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, tiles, window
from dash_attn.tiling import TileShape, Tiling, tile
from dash_attn.verify import verify
from tests.order.small import chains, square
from tests.strategies import examples, tilings


def in_batch(tiling: Tiling, batch: int, heads_kv: int) -> Tiling:
    """The same sequence, in a batch and among kv heads."""
    p = tiling.problem
    problem = dataclasses.replace(p, batch=batch, heads_q=p.group * heads_kv, heads_kv=heads_kv)
    return dataclasses.replace(tiling, problem=problem)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(300, 0), window(200, 100)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (2, 4)])
def test_auto_runs_on_64_workers(mask: Mask, heads: tuple[int, int]) -> None:
    problem = Problem(2, heads[0] * heads[1], heads[0], 1000, 1000, mask=mask)
    program = compose(tile(problem, TileShape(5, 5)))
    assert verify(program).on(AUTO_WIDTH).co_resident <= AUTO_WIDTH == 64


@pytest.mark.parametrize(
    ("groups", "tokens", "shape", "mask", "width"),
    [
        (64, 1024, TileShape(128, 128), FULL, 4),  # two tiles apart
        (64, 8192, TileShape(128, 128), FULL, 32),
        (64, 8192, TileShape(64, 128), FULL, 32),
        (64, 16384, TileShape(64, 128), FULL, 64),  # four tiles apart, not eight
        (64, 16384, TileShape(128, 128), FULL, 64),  # as many queries apart
        (64, 32768, TileShape(64, 128), FULL, 64),  # at most
        (2, 8192, TileShape(128, 128), FULL, 32),  # however few heads there are
    ],
)
def test_how_wide_auto_is(groups: int, tokens: int, shape: TileShape, mask: Mask, width: int) -> None:
    assert choose(tile(Problem(1, groups, groups, tokens, tokens, mask=mask), shape)).width == width


@pytest.mark.parametrize(
    ("group", "tokens", "mask", "choice"),
    [
        (1, 512, CAUSAL, "spt"),  # 4 kv tiles
        (1, 513, CAUSAL, "symmetric_shift:64"),
        (1, 16384, CAUSAL, "symmetric_shift:64"),  # 128 kv tiles, whose pairs are one window
        (1, 16385, CAUSAL, "spt"),
        (1, 65536, CAUSAL, "spt"),
        (4, 512, CAUSAL, "spt@head"),
        (4, 2048, CAUSAL, "symmetric_shift:64@head"),
        (4, 32640, CAUSAL, "spt@head"),
        (4, 32768, CAUSAL, "fold"),  # 256 kv tiles
        (7, 65536, CAUSAL, "fold"),
        (4, 1024, FULL, "shift:8@head"),
        (4, 32768, FULL, "shift:64"),
        (1, 4096, window(1000, 0), "spt"),
        (4, 4096, window(1000, 0), "spt@head"),
        (4, 65536, window(1000, 0), "spt"),
        (4, 1024, tiles(np.array([[0, 1], [1, 0]]), 512, 512), "search:64@head"),
    ],
    ids=str,
)
def test_what_auto_takes(group: int, tokens: int, mask: Mask, choice: str) -> None:
    problem = Problem(1, 8 * group, 8, tokens, tokens, mask=mask)
    assert str(resolve(tile(problem, TileShape(64, 128)), "auto")) == choice


@pytest.mark.parametrize(
    ("group", "len_q", "len_k", "choice"),
    [
        (1, 2048, 16384, "symmetric_shift:16"),
        (4, 2048, 16256, "symmetric_shift:16@head"),
        (4, 2048, 16384, "symmetric_shift:16"),  # 128 kv tiles or more, most of them before the queries: whole groups
        (4, 4224, 16384, "symmetric_shift:32@head"),  # not most of them
        (4, 8192, 16384, "symmetric_shift:32@head"),
        (4, 2048, 65536, "symmetric_shift:16"),  # 256 kv tiles or more: whole groups
        (1, 512, 2048, "symmetric_shift:64"),  # 16 kv tiles: all of them are paired
        (1, 2048, 2049, "symmetric_shift:64"),  # the first tile has one key
        (1, 32768, 49152, "spt"),  # the last 256 kv tiles have more pairs than a window
    ],
)
def test_what_auto_takes_after_a_prefix(group: int, len_q: int, len_k: int, choice: str) -> None:
    problem = Problem(1, 8 * group, 8, len_q, len_k, mask=CAUSAL)
    assert str(resolve(tile(problem, TileShape(64, 128)), "auto")) == choice


def test_short_panels_of_large_q_tiles_are_paired() -> None:
    assert str(choose(tile(Problem(1, 1, 1, 512, 512, mask=CAUSAL), TileShape(128, 128)))) == "symmetric_shift:64"


def test_auto_with_the_panels_named() -> None:
    """A suffix sets what is ordered by itself, and `auto` chooses the policy for it."""
    names = ("auto", "auto@head", "auto@group")
    short, long = (square(n, CAUSAL, group=4, heads_kv=2) for n in (60, 256))
    pairs = "symmetric_shift:64"
    assert [str(resolve(short, name)) for name in names] == [f"{pairs}@head", f"{pairs}@head", pairs]
    assert [str(resolve(long, name)) for name in names] == ["fold", "spt@head", "fold"]
    assert compose(short, "auto").policy == f"{pairs}@head" and compose(short, "auto").geometry.share == 4
    assert compose(short, "auto@group").policy == pairs and compose(short, "auto@group").geometry.share == 1


def same_template(a: Order, b: Order) -> bool:
    """One choice, one template in each of them, and the same visits in the same turns."""
    if len(a.templates) != 1 or len(b.templates) != 1:
        return False
    return a.choice == b.choice and chains(a.templates[0]) == chains(b.templates[0])


@examples(150)
@given(st.data())
def test_auto_orders_a_sequence_alike_in_every_batch(data: st.DataObject) -> None:
    """Neither the batch nor the number of kv heads changes what `auto` chooses, the visits or the turns."""
    tiling, policy = data.draw(tilings()), data.draw(st.sampled_from(["auto", "auto@head", "auto@group"]))
    group, alone = tiling.problem.group, in_batch(tiling, 1, 1)
    for batch, heads_kv in [(3, 1), (7, 1), (1, 2), (1, 5), (7, 5)]:
        other = in_batch(tiling, batch, heads_kv)
        assert other.problem.group == group and same_template(arrange(other, policy), arrange(alone, policy))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(700, 0), window(200, 100)], ids=str)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("shape", [TileShape(8, 8), TileShape(4, 8), TileShape(32, 64)], ids=str)
def test_auto_orders_a_long_sequence_alike_in_every_batch(mask: Mask, group: int, shape: TileShape) -> None:
    """256 kv tiles, where `auto` takes other orders than for few, and 32 of them, where chains go in pairs."""
    tiling = tile(Problem(1, group, 1, 2048, 2048, mask=mask), shape)
    assert same_template(arrange(tiling), arrange(in_batch(tiling, 3, 5)))


def test_a_policy_that_looks_at_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = square(8, CAUSAL)
    assert not same_template(arrange(causal, "level"), arrange(in_batch(causal, 7, 1), "level"))
    tiling = square(8, FULL)
    assert same_template(arrange(tiling), arrange(in_batch(tiling, 7, 1)))
    monkeypatch.setattr("dash_attn.order.policies.choose", lambda t: Choice("shift", 4 if t.panels > 1 else 8))
    assert not same_template(arrange(tiling), arrange(in_batch(tiling, 7, 1)))
    monkeypatch.setattr("dash_attn.order.policies.choose", lambda t: Choice("mine"))
    mine = Policy(lambda t, width: POLICIES["fa3" if t.panels > 1 else "spt"].build(t, width), "looks at panels")
    monkeypatch.setitem(POLICIES, "mine", mine)
    assert not same_template(arrange(tiling), arrange(in_batch(tiling, 7, 1)))


@examples(100)
@given(tilings())
def test_auto_is_an_applicable_policy(tiling: Tiling) -> None:
    choice = resolve(tiling, "auto")
    assert choice.policy in applicable(tiling) and choice.by_head == cuts(tiling)
    assert compose(tiling, "auto").fingerprint == compose(tiling, choice).fingerprint
