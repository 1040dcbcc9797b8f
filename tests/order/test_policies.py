"""Every policy, on every mask it applies to, gives a program that verifies; and the orders are those of the paper."""

from __future__ import annotations

import inspect
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.launch import compose
from dash_attn.order import (
    POLICIES,
    Choice,
    Order,
    applicable,
    arrange,
    looks_at_batch,
    parse,
    require_alone,
)
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, tiles, window
from dash_attn.simulate import Paper, simulate
from dash_attn.tiling import TileShape, Tiling, tile
from dash_attn.verify import verify
from tests.order.small import chains, square
from tests.strategies import examples, tilings

EVERYWHERE = ["fa3", "spt", "descending", "search"]


def bundles(order: Order, template: int = 0) -> list[tuple[int, ...]]:
    """The bundles of a group, round after round."""
    return [bundle for each in order.rounds[template] for bundle in each]


# ---- every policy is valid wherever it applies -------------------------------------------------------------


@examples(200)
@given(st.data())
def test_every_applicable_policy_verifies(data: st.DataObject) -> None:
    tiling = data.draw(tilings())
    for name in applicable(tiling):
        width = data.draw(st.none() | st.integers(1, 5)) if POLICIES[name].windowed else None
        program = compose(tiling, Choice(name, width))
        needed = verify(program).co_resident
        for workers in {needed, needed + 1, data.draw(st.integers(needed, needed + 9))} - {0}:
            verify(program).on(workers)
        if width is not None:
            assert needed <= width
        if not POLICIES[name].windowed:
            assert needed <= 1, "an order without windows waits only for chains launched before"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(37, 0), window(20, 30)], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_sizes_that_divide_nothing(name: str, mask: Mask, group: int) -> None:
    """Odd tile counts, n_q != n_kv either way, many heads, more chains than a window holds."""
    for len_q, len_k in [(77, 77), (77, 130), (130, 41), (5, 200), (200, 5)]:
        for shape in (TileShape(4, 8), TileShape(8, 4), TileShape(7, 7)):
            tiling = tile(Problem(2, 3 * group, 3, len_q, len_k, mask=mask), shape)
            if name not in applicable(tiling):
                continue
            for width in (None, 1, 4, 64) if POLICIES[name].windowed else (None,):
                program = compose(tiling, Choice(name, width))
                verified = verify(program)
                verified.on(max(1, verified.co_resident))


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (FULL, [*EVERYWHERE, "shift"]),
        (CAUSAL, [*EVERYWHERE, "symmetric_shift", "diagonal", "level", "fold"]),
        (window(6, 0), [*EVERYWHERE, "diagonal", "level"]),
        (window(6, 3), [*EVERYWHERE, "diagonal", "level"]),
        (tiles(np.array([[0, 1], [1, 0]]), 16, 16), EVERYWHERE),
    ],
    ids=str,
)
def test_which_policy_applies_where(mask: Mask, names: list[str]) -> None:
    tiling = tile(Problem(1, 1, 1, 32, 32, mask=mask), TileShape(4, 4))
    assert set(applicable(tiling)) == set(names)
    for name in set(POLICIES) - set(names):
        with pytest.raises(ValueError) as error:
            arrange(tiling, name)
        text = str(error.value)
        assert repr(name) in text and str(mask) in text
        assert all(other in text.partition("choose from")[2] for other in names)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fastest", "unknown policy 'fastest': choose from auto, fa3"),
        ("shift:many", "must be a whole number"),
        ("shift:", "must be a whole number"),
        ("shift:64:2", "must be a whole number"),
        ("shift:0", "width of at least 1 goes with shift"),
        ("fa3:4", "'fa3' cannot take width 4"),
        ("auto:4", "'auto' cannot take width 4"),
        ("auto:4@head", "'auto' cannot take width 4"),
        ("shift@heads", "behind '@' comes head or group"),
        ("auto@", "behind '@' comes head or group"),
        ("shift@group", "'@group' goes with auto"),
    ],
)
def test_bad_names(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        arrange(square(4, FULL), text)


def test_parse() -> None:
    assert parse("shift") == Choice("shift") and parse("shift:64") == Choice("shift", 64)
    assert str(Choice("shift", 64)) == "shift:64" and str(Choice("fa3")) == "fa3"


# ---- order and placement are apart -------------------------------------------------------------------------


def test_no_policy_sees_the_number_of_workers() -> None:
    """A policy is given a tiling and a width, and neither says how many workers there are."""
    assert list(inspect.signature(arrange).parameters) == ["tiling", "policy"]
    for policy in POLICIES.values():
        for build in (policy.build, policy.last):
            assert build is None or len(inspect.signature(build).parameters) == 2
    assert not [name for name in dir(Tiling) + dir(Problem) if "worker" in name]


def test_different_orders_have_different_fingerprints() -> None:
    full, causal = square(6, FULL), square(6, CAUSAL)
    assert len({compose(full, name).fingerprint for name in ("fa3", "descending", "shift", "shift:3")}) == 4
    names = ("fa3", "spt", "descending", "symmetric_shift", "symmetric_shift:2", "diagonal:2")
    assert compose(causal, "level").fingerprint == compose(causal, "descending").fingerprint
    causal = square(6, CAUSAL, heads_kv=2)
    names = (*names, "level", "fold")
    assert len({compose(causal, name).fingerprint for name in names}) == len(names)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("lengths", [(96, 96), (96, 40), (40, 96), (101, 97)])
@pytest.mark.parametrize("shape", [TileShape(4, 4), TileShape(4, 8), TileShape(8, 4)], ids=str)
def test_diagonal_without_windows_is_spt_for_causal(group: int, lengths: tuple[int, int], shape: TileShape) -> None:
    tiling = tile(Problem(1, 2 * group, 2, *lengths, mask=CAUSAL), shape)
    spt, diagonal = (compose(tiling, name) for name in ("spt", "diagonal"))
    assert spt.fingerprint == diagonal.fingerprint
    # The same order launched the other way round is what makes it fast, and needs its chains together.
    assert verify(spt).co_resident == 1 and (tiling.num_kv < 2 or verify(diagonal).co_resident > 1)


# ---- the formulas of the design ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 17])
def test_shift_is_the_formula(n: int) -> None:
    order = arrange(square(n, FULL), "shift")
    assert chains(order.templates[0]) == [[(0, (i + t) % n, t) for t in range(n)] for i in range(n)]
    assert n < 3 or len(compose(order.tiling, "shift").runs) == 2 * n - 1, "two runs a chain, one for chain 0"


@pytest.mark.parametrize("n", [2, 4, 6, 10, 32])
def test_symmetric_shift_is_the_formula(n: int) -> None:
    order = arrange(square(n, CAUSAL), "symmetric_shift")
    half = n // 2
    expected: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]
    for i in range(half):
        expected[i] = [(0, half + (i + t) % half, t) for t in range(half)] + [(0, q, q - i) for q in range(i, half)]
        expected[n - 1 - i] = [(0, q, n - 1 - i) for q in range(n - 1, n - 2 - i, -1)]
    assert chains(order.templates[0]) == expected
    assert bundles(order) == [(i, n - 1 - i) for i in range(half)]


@pytest.mark.parametrize(("n", "prefix", "width"), [(4, 13, 4), (8, 30, 3), (6, 40, 64), (15, 20, 5)])
@pytest.mark.parametrize("group", [1, 2])
def test_symmetric_shift_after_a_prefix(n: int, prefix: int, width: int, group: int) -> None:
    """Chains of keys before the queries are those of `shift`, then come those of the triangle."""
    tiling = tile(Problem(1, group, 1, n, prefix + n, mask=CAUSAL), TileShape(1, 1))
    before = tile(Problem(1, group, 1, n, prefix), TileShape(1, 1))
    whole, first, last = (
        arrange(each, f"{policy}:{width}")
        for each, policy in (
            (tiling, "symmetric_shift"),
            (before, "shift"),
            (square(n, CAUSAL, group), "symmetric_shift"),
        )
    )
    later = [[(head, q, turn + prefix) for head, q, turn in chain] for chain in chains(last.templates[0])]
    assert chains(whole.templates[0]) == chains(first.templates[0]) + later
    moved = [[tuple(chain + prefix for chain in bundle) for bundle in each] for each in last.rounds[0]]
    assert whole.rounds[0] == [*first.rounds[0], *moved]


def steps(order: Order, kv_window: list[int]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each dQ tile its (turn, step) pairs, over the chains of one window that start together."""
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for kv in kv_window:
        for step, (head, q, turn) in enumerate(chains(order.templates[0])[kv]):
            pairs.setdefault((head, q), []).append((turn, step))
    return pairs


@examples(150)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(1, 12))
def test_shift_gives_every_handover_all_the_slack(num_q: int, num_kv: int, group: int, width: int) -> None:
    """Chains of a window start evenly spread over the q tiles of each head: no hand-over is tighter than the stride."""
    tiling = tile(Problem(1, group, 1, num_q, num_kv), TileShape(1, 1))
    order = arrange(tiling, Choice("shift", width))
    turn_of = 0
    sizes = []
    for members in ([chain for (chain,) in each] for each in order.rounds[0]):
        stride = num_q // len(members)
        assert stride >= 1
        for pairs in steps(order, members).values():
            pairs.sort()
            assert [turn for turn, _ in pairs] == list(range(turn_of, turn_of + len(members)))
            assert all(later - earlier >= stride for (_, earlier), (_, later) in pairwise(pairs))
        turn_of += len(members)
        sizes.append(len(members))
    assert max(sizes) - min(sizes) <= 1 and max(sizes) <= width


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 9, 15, 16, 31])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_symmetric_shift_never_meets_itself(n: int, group: int) -> None:
    """At every step each dQ tile is visited by at most one pair of a head, for odd n as for even.

    With several query heads in the group the paired chains climb and descend head after head, so only the rotation
    is conflict free.
    """
    order = arrange(square(n, CAUSAL, group), "symmetric_shift")
    visits = chains(order.templates[0])
    seen = set()
    for bundle in bundles(order):
        at = [visit for chain in bundle for visit in visits[chain]]
        for step, (head, q, _) in enumerate(at if group == 1 else at[: group * (n - n // 2)]):
            assert (step, head, q) not in seen
            seen.add((step, head, q))


def test_spt_takes_the_shortest_first() -> None:
    order = arrange(tile(Problem(1, 2, 2, 16, 16, mask=CAUSAL), TileShape(2, 2)), "spt")
    assert order.rounds == ([[(kv,) for kv in (7, 6, 5, 4, 3, 2, 1, 0)]],)
    assert [q for _, q, _ in chains(order.templates[0])[5]] == [5, 6, 7]


def test_windows_come_in_rounds() -> None:
    order = arrange(tile(Problem(1, 2, 2, 4, 4), TileShape(1, 1)), "shift:2")
    assert order.rounds == ([[(0,), (1,)], [(2,), (3,)]],)


def test_level_is_spt_and_in_the_last_heads_descending() -> None:
    tiling = square(4, CAUSAL, group=2, heads_kv=5)
    order, spt, descending = (arrange(tiling, name) for name in ("level", "spt", "descending"))
    assert [chains(template) for template in order.templates] == [
        chains(other.templates[0]) for other in (spt, descending)
    ]
    assert order.rounds == (*spt.rounds, *descending.rounds)
    assert order.template_of.tolist() == order.block_of.tolist() == [0, 0, 0, 1, 1]
    assert verify(compose(tiling, "level")).co_resident == 1
    assert len(arrange(square(4, CAUSAL), "level").templates) == 1, "a lone head is the last one"


def test_only_level_looks_at_the_batch() -> None:
    assert [name for name in (*POLICIES, "auto", "shift:8@head", "level@head", "unknown") if looks_at_batch(name)] == [
        "level",
        "level@head",
    ]
    require_alone("auto@group")
    with pytest.raises(ValueError, match=r"policy 'level@head' orders the last heads .* which panels=2 does not take"):
        require_alone("level@head", "panels=2")


@pytest.mark.parametrize(("tiles", "heads", "last"), [(128, 32, 2), (64, 32, 4), (100, 32, 2), (256, 8, 1), (64, 4, 2)])
def test_level_has_blocks_of_256_chains(tiles: int, heads: int, last: int) -> None:
    order = arrange(square(tiles, CAUSAL, heads_kv=heads), "level")
    assert order.template_of.sum() == last
    assert max(np.bincount(order.block_of)) == min(-(-256 // tiles), heads // 2)


def test_level_alternates_where_heads_are_grouped() -> None:
    order = arrange(square(32, CAUSAL, group=2, heads_kv=16), "level")
    assert order.block_of.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert order.template_of.tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


@examples(150)
@given(st.integers(1, 24), st.integers(1, 3), st.booleans(), st.data())
def test_level_hands_over_a_step_later_whenever_chains_start(
    n: int, group: int, coming_down: bool, data: st.DataObject
) -> None:
    """Chains that start in launch order, going up: whenever they do. Coming down: at least a step apart for each
    query head, because a shorter chain gains a step in each."""
    order = arrange(square(n, CAUSAL, group, heads_kv=2), "level")
    least = group if coming_down else 0
    gaps = data.draw(st.lists(st.integers(least, least + 5), min_size=n, max_size=n))
    visited: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (kv,), start in zip(bundles(order, int(coming_down)), np.cumsum(gaps).tolist(), strict=True):
        for step, (head, q, turn) in enumerate(chains(order.templates[int(coming_down)])[kv]):
            visited.setdefault((head, q), []).append((turn, start + step))
    for visits in visited.values():
        visits.sort()
        assert all(later > earlier for (_, earlier), (_, later) in pairwise(visits))


def test_fold_takes_the_short_half_then_the_long_half() -> None:
    order = arrange(square(4, CAUSAL, group=2, heads_kv=2), "fold")
    assert bundles(order) == [(3,), (2,), (0,), (1,)]
    assert [[(head, q) for head, q, _ in chain] for chain in chains(order.templates[0])] == [
        [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (1, 0)],
        [(0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1)],
        [(0, 2), (0, 3), (1, 2), (1, 3)],
        [(0, 3), (1, 3)],
    ]


@pytest.mark.parametrize("n", [4, 5, 8, 255, 257, 511, 512, 513, 770])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_fold_gives_every_worker_as_much(n: int, group: int) -> None:
    """In each round the k-th of the short chains and the k-th of the long ones are as long as any other two. Only long
    chains come down, and those in the last query head only. Turns are taken in the order of launch."""
    order = arrange(square(n, CAUSAL, group), "fold")
    visits, launch = chains(order.templates[0]), [chain for (chain,) in bundles(order)]
    turns: dict[tuple[int, int], list[int]] = {}
    came_down = []
    for kv in launch:
        up = list(range(kv, n))
        last = [q for head, q, _ in visits[kv] if head == group - 1]
        came_down.append(last != up)
        assert last == (up[::-1] if came_down[-1] else up)
        assert [q for _, q, _ in visits[kv]] == up * (group - 1) + last
        for head, q, turn in visits[kv]:
            turns.setdefault((head, q), []).append(turn)
    assert all(each == list(range(len(each))) for each in turns.values())
    assert verify(compose(order.tiling, "fold")).co_resident == 1

    launched = zip(came_down, [n - kv for kv in launch], strict=True)
    parts = [[length for _, length in part] for _, part in groupby(launched, key=lambda each: each[0])]
    shorts, longs = parts[::2], parts[1::2]
    assert not came_down[0] and len(shorts) == len(longs) == max(1, n // 256)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert max(map(max, shorts)) < min(map(min, longs))
    for short, long in zip(shorts, longs, strict=True):
        together = {a + b for a, b in zip(short, long, strict=False)}
        assert len(together) == 1 and abs(together.pop() - (n + 1)) < len(shorts)


@pytest.mark.parametrize(("n", "group", "heads_kv"), [(6, 2, 2), (8, 4, 3), (256, 4, 2), (512, 2, 2), (768, 3, 1)])
def test_fold_begins_every_round_together(n: int, group: int, heads_kv: int) -> None:
    """As many workers as a round has short chains: none waits for a turn, and all end at once."""
    program = compose(square(n, CAUSAL, group, heads_kv), "fold")
    workers = n // (2 * max(1, n // 256))
    result = simulate(program, workers, Paper(1, 0.25), record=False)
    assert result.makespan == 1.25 * len(program.expand().q) / workers


def test_heads_ordered_by_themselves() -> None:
    """Each q head of a group has the order that it would have alone."""
    grouped, single = (Problem(2, 8, kv, 96, 96, mask=CAUSAL) for kv in (2, 8))
    shape = TileShape(8, 16)
    by_head, alone = compose(tile(grouped, shape), "level@head"), compose(tile(single, shape), "level")
    assert by_head.geometry.share == 4 and alone.geometry.share == 1
    assert np.array_equal(by_head.chains, alone.chains) and np.array_equal(by_head.runs, alone.runs)
    assert by_head.fingerprint != alone.fingerprint, "dK and dV are summed over heads in one of them"
    assert compose(tile(single, shape), "level@head").fingerprint == alone.fingerprint
    assert compose(tile(grouped, shape), "level").geometry.share == 1


@pytest.mark.parametrize("text", ["fa3", "shift:4", "shift:4@head", "auto", "auto@head", "auto@group"])
def test_a_choice_is_written_as_it_is_read(text: str) -> None:
    assert str(parse(text)) == text
