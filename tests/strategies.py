"""Hypothesis strategies shared by the tests of the core: masks, problems, tilings, and orders of every kind.

Every test states its number of examples for the default profile. Ten times as many of all of them:

    python -m pytest -n 2 -p tests.strategies --hypothesis-profile=thorough
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from dash_attn.launch import compose
from dash_attn.order import POLICIES, Choice, Order, Template, applicable
from dash_attn.order.types import HEAD
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, intervals, tiles, window
from dash_attn.program import Program, Queue, build
from dash_attn.tiling import TileShape, Tiling, grid, tile

settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=1000)


def examples(count: int) -> settings:
    """`count` examples in a profile of 100, in proportion in others."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))


# ---- masks and problems ------------------------------------------------------------------------------------


@st.composite
def boundaries(draw: st.DrawFn, length: int, count: int) -> tuple[int, ...]:
    """Cumulative lengths of `count` documents over `length` tokens, empty ones among them."""
    inner = draw(st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1))
    return (0, *sorted(inner), length)


def windows() -> st.SearchStrategy[Mask]:
    side = st.none() | st.integers(0, 12) | st.integers(-12, 12)
    return st.builds(window, side, side)


@st.composite
def document_masks(draw: st.DrawFn, len_q: int, len_k: int) -> Mask:
    count = draw(st.integers(1, 4))
    cu_q = draw(boundaries(len_q, count))
    cu_k = cu_q if len_q == len_k and draw(st.booleans()) else draw(boundaries(len_k, count))
    return documents(cu_q, cu_k, causal=draw(st.booleans()))


@st.composite
def tile_masks(draw: st.DrawFn, len_q: int, len_k: int, cell: TileShape | None = None) -> Mask:
    shape = cell or TileShape(draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    size = (-(-len_q // shape.m), -(-len_k // shape.n))
    bits = draw(st.lists(st.booleans(), min_size=size[0] * size[1], max_size=size[0] * size[1]))
    return tiles(np.array(bits, bool).reshape(size), shape.m, shape.n)


@st.composite
def interval_masks(draw: st.DrawFn, len_q: int, len_k: int) -> Mask:
    """Intervals row by row, with empty rows and ends past the keys. Half of them move forward from row to row."""
    ends = st.lists(st.integers(-3, len_k + 3), min_size=len_q, max_size=len_q)
    first, end = draw(ends), draw(ends)
    if draw(st.booleans()):
        first, end = sorted(first), sorted(end)
    return intervals(np.array(first, np.int64), np.array(end, np.int64))


def plain_masks() -> st.SearchStrategy[Mask]:
    """Masks of single sequences."""
    return st.sampled_from([FULL, CAUSAL]) | windows()


def masks(len_q: int, len_k: int) -> st.SearchStrategy[Mask]:
    """Any mask but explicit tiles, which fit only tiles that divide their cells."""
    packed = document_masks(len_q, len_k)
    return plain_masks() | packed | st.builds(Mask.__and__, windows(), packed)


lengths = st.integers(0, 40)
shapes = st.builds(TileShape, st.integers(1, 9), st.integers(1, 9))


@st.composite
def problems(draw: st.DrawFn, longest: int = 40, *, packed: bool = False) -> Problem:
    """Batches of equal sequences, or with `packed` of the same documents."""
    len_q = draw(st.integers(0, longest))
    len_k = draw(st.integers(0, longest) | st.just(len_q))
    heads_kv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)]))
    batch = draw(st.integers(1, max(1, 4 // (heads_kv * group))))
    mask = draw(plain_masks())
    if packed:
        mask = mask & draw(document_masks(len_q, len_k))
    return Problem(batch, heads_kv * group, heads_kv, len_q, len_k, mask=mask)


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    """A problem cut into tiles, or states drawn tile by tile: at most some hundred tasks."""
    if draw(st.booleans()):
        shape = draw(shapes)
        return tile(draw(problems(min(40, 7 * min(shape.m, shape.n)))), shape)
    return draw(grids())


@st.composite
def grids(draw: st.DrawFn, most: int = 5) -> Tiling:
    num_kv, num_q = draw(st.integers(1, most)), draw(st.integers(1, most))
    states = draw(st.lists(st.integers(0, 2), min_size=num_kv * num_q, max_size=num_kv * num_q))
    heads_kv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    shape = TileShape(2, 3)
    problem = Problem(1, heads_kv * group, heads_kv, num_q * shape.m, num_kv * shape.n)
    return grid(np.array(states).reshape(num_kv, num_q), problem, shape)


# ---- orders ------------------------------------------------------------------------------------------------


@st.composite
def policy_programs(draw: st.DrawFn) -> Program:
    """A named policy, with any width it can take, for whole groups or for each q head."""
    tiling = draw(tilings())
    name = draw(st.sampled_from(applicable(tiling)))
    width = draw(st.none() | st.integers(1, 6)) if POLICIES[name].windowed else None
    return compose(tiling, Choice(name, width, HEAD if draw(st.booleans()) else None))


@st.composite
def arbitrary_orders(draw: st.DrawFn) -> tuple[Order, Queue]:
    """Any order that can run at all, and a queue that runs it.

    Bundles are cut and launched at random, and run in a random interleaving of at most `slots` at a time, which hands
    out the turns.
    """
    tiling = draw(grids())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    groups, n = tiling.problem.batch * tiling.problem.heads_kv, tiling.num_kv
    visits = {
        (g, kv): rng.permutation(
            [(h, q) for h in range(tiling.problem.group) for q in np.flatnonzero(tiling.state[kv])]
        )
        for g in range(groups)
        for kv in range(n)
    }
    launch = rng.permutation(groups * n)
    cuts = np.sort(rng.choice(np.arange(1, len(launch)), rng.integers(0, len(launch)), replace=False))
    bundle_first = np.concatenate([[0], cuts, [len(launch)]]).astype(np.int64)
    slots = int(rng.integers(1, len(bundle_first)))

    counter: dict[tuple[int, int, int], int] = {}
    turn: dict[tuple[int, int], list[int]] = {key: [] for key in visits}
    queues = [
        [divmod(int(c), n) for c in launch[a:b] for _ in visits[divmod(int(c), n)]] for a, b in pairwise(bundle_first)
    ]
    while any(queues):
        queue = queues[rng.choice([i for i, queue in enumerate(queues) if queue][:slots])]
        key = queue.pop(0)
        head, q = visits[key][len(turn[key])]
        turn[key].append(counter.setdefault((key[0], int(head), int(q)), 0))
        counter[key[0], int(head), int(q)] += 1
    templates = tuple(_template([(visits[g, kv], turn[g, kv]) for kv in range(n)]) for g in range(groups))
    rounds = tuple([[(kv,) for kv in range(n)]] for _ in range(groups))
    each = np.arange(groups)
    return Order(tiling, Choice("drawn"), templates, rounds, each, each), Queue(launch, bundle_first, "dealt")


def _template(chains: list[tuple[np.ndarray, list[int]]]) -> Template:
    where = np.concatenate([np.asarray(visits, np.int64).reshape(-1, 2) for visits, _ in chains])
    first = np.cumsum([0, *(len(visits) for visits, _ in chains)])
    return Template(first, where[:, 0], where[:, 1], np.array([t for _, turn in chains for t in turn], np.int64))


def programs() -> st.SearchStrategy[Program]:
    return policy_programs() | arbitrary_orders().map(lambda made: build(*made))
