"""The launch queue holds every chain once, keeps rounds in order, and changes no bit."""

from __future__ import annotations

import dataclasses
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.launch import enqueue
from dash_attn.launch.queue import IN_FLIGHT
from dash_attn.order import Choice, Order, applicable, arrange
from dash_attn.problem import CAUSAL, FULL, Mask, Problem
from dash_attn.program import Queue, build
from dash_attn.tiling import TileShape, Tiling, tile
from dash_attn.verify import verify
from tests.strategies import arbitrary_orders, examples, tilings


def square(n: int, mask: Mask, group: int = 1, heads_kv: int = 1) -> Tiling:
    """One tile a token: n x n tiles."""
    return tile(Problem(1, heads_kv * group, heads_kv, n, n, mask=mask), TileShape(1, 1))


def bundles(queue: Queue) -> list[tuple[int, ...]]:
    return [tuple(queue.chains[a:b].tolist()) for a, b in pairwise(queue.bundle_first.tolist())]


@examples(150)
@given(st.data())
def test_queue_holds_the_bundles_of_the_order(data: st.DataObject) -> None:
    """Every bundle of every group once, and the rounds of a group one after the other."""
    tiling = data.draw(tilings())
    order = arrange(tiling, data.draw(st.sampled_from(applicable(tiling))))
    launched = bundles(enqueue(order))
    n = tiling.num_kv
    for group in range(tiling.problem.groups):
        mine = [tuple(c % n for c in bundle) for bundle in launched if bundle[0] // n == group]
        at = 0
        for each in order.rounds[order.template_of[group]]:
            assert mine[at : at + len(each)] == each
            at += len(each)
        assert at == len(mine)


@pytest.mark.parametrize("policy", ["symmetric_shift:64@head", "spt@head", "fa3@head"])
def test_q_heads_of_a_group_are_far_apart(policy: str) -> None:
    """They add to the same dK and dV. The first q heads of all groups come before the second ones."""
    tiling = square(8, CAUSAL, group=4, heads_kv=16)
    queue = enqueue(arrange(tiling, policy))
    heads = [head for head, _ in groupby((queue.chains // 8 % 4).tolist())]
    assert heads == [0, 1, 2, 3]


@examples(100)
@given(arbitrary_orders(), st.data())
def test_the_queue_is_not_in_the_fingerprint(made: tuple[Order, Queue], data: st.DataObject) -> None:
    order, queue = made
    chains = np.array(data.draw(st.permutations(queue.chains.tolist())), np.int64)
    other = Queue(chains, np.arange(len(chains) + 1), data.draw(st.sampled_from(["balanced", "faster"])))
    programs = [build(order, each) for each in (queue, other, enqueue(order))]
    assert len({program.fingerprint for program in programs}) == 1
    for program in programs[1:]:
        verify(program)  # chains that are bundles by themselves run in any order, on enough workers


@pytest.mark.parametrize(("name", "n", "width"), [("shift", 4, 2), ("shift", 6, 2), ("symmetric_shift", 8, 2)])
@pytest.mark.parametrize("heads", [1, 63, 64, 127, 128, 150])
def test_windows_are_launched_a_few_heads_at_a_time(name: str, n: int, width: int, heads: int) -> None:
    """The windows of a head follow each other while its tiles are in cache: after as many bundles as fill a GPU."""
    mask = CAUSAL if name == "symmetric_shift" else FULL
    order = arrange(square(n, mask, heads_kv=heads), Choice(name, width))
    queue = enqueue(order)
    rounds = [list(each) for _, each in groupby(bundles(queue), key=lambda bundle: bundle[0] % n // width)]
    least = min(IN_FLIGHT, heads * width)
    assert all(least <= len(each) < 2 * least for each in rounds)
    windows = len(order.rounds[0])
    for part in (rounds[at : at + windows] for at in range(0, len(rounds), windows)):
        assert len({frozenset(bundle[0] // n for bundle in each) for each in part}) == 1, "the same heads"
    assert verify(build(order, queue)).on(132).co_resident <= width


@pytest.mark.parametrize("name", ["diagonal", "search"])
def test_windows_of_unequal_chains_are_launched_in_all_heads_first(name: str) -> None:
    """The short chains of one window would not give the long chains of the next window time to get ahead."""
    head = enqueue(arrange(square(8, CAUSAL, heads_kv=150), Choice(name, 4))).chains.reshape(2, 150, 4) // 8
    assert (head == np.arange(150)[:, None]).all()


def test_level_takes_the_heads_of_a_block_in_turn() -> None:
    queue = enqueue(arrange(square(4, CAUSAL, group=2, heads_kv=5), "level"))
    first = [group * 4 + kv for kv in (3, 2, 1, 0) for group in (0, 1, 2)]
    last = [group * 4 + kv for kv in range(4) for group in (3, 4)]
    assert bundles(queue) == [(chain,) for chain in first + last]


def test_level_takes_few_tiny_heads_in_turn_before_the_last() -> None:
    """Only where q tiles are smaller than kv tiles, and never in the last block."""
    heads = Problem(1, 80, 80, 4, 4, mask=CAUSAL)
    narrow, even = (enqueue(arrange(tile(heads, TileShape(m, 2)), "level")).chains // 2 for m in (1, 2))
    assert even.tolist() == [*range(40), *range(40), *range(40, 80), *range(40, 80)]
    assert narrow[80:].tolist() == even[80:].tolist()
    apart = [np.diff(np.flatnonzero(narrow == head)).item() for head in range(40)]
    assert min(apart) > 1 and max(apart) < 40, "the two chains of a head are nearer, with other heads between"


def test_a_policy_of_ones_own_is_launched_plainly() -> None:
    order = arrange(square(4, FULL, heads_kv=2), "shift:2")
    queue = enqueue(dataclasses.replace(order, choice=Choice("mine")))
    assert queue.chains.tolist() == [0, 1, 4, 5, 2, 3, 6, 7] and queue.place == "balanced"
