"""The run-length coding of templates, against a loop that extends one run at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.order import Template
from dash_attn.problem import Problem
from dash_attn.program.tables import encode
from dash_attn.tiling import TileShape, TileState
from dash_attn.tiling.tiling import grid
from tests.strategies import examples

NUM_Q = 6


def longest_runs(template: Template, state: np.ndarray) -> tuple[list[tuple[int, ...]], list[int]]:
    runs, first = list[tuple[int, ...]](), list[int]()
    for chain in range(len(template.first) - 1):
        first.append(len(runs))
        begin, end = template.first[chain], template.first[chain + 1]
        visits = list(zip(template.head[begin:end].tolist(), template.q[begin:end].tolist(), strict=True))
        turns, at = template.turn[begin:end].tolist(), 0
        while at < len(visits):
            moves, stop = list[tuple[int, int]](), at + 1
            while stop < len(visits):
                (head, q), (before_head, before) = visits[stop], visits[stop - 1]
                moves.append((q - before, turns[stop] - turns[stop - 1]))
                same = head == before_head and state[chain, q] == state[chain, before]
                if not same or abs(q - before) != 1 or moves[-1] != moves[0]:
                    break
                stop += 1
            step, turn_step = moves[0] if stop - at > 1 else (1, 0)
            (head, q), partial = visits[at], state[chain, visits[at][1]] == TileState.PARTIAL
            runs.append((head, q, step, stop - at, turns[at], turn_step, int(partial)))
            at = stop
    return runs, [*first, len(runs)]


@examples(500)
@given(st.data())
def test_every_run_is_as_long_as_it_can_be(data: st.DataObject) -> None:
    """Neighbouring q tiles and small turns, so that runs begin, break and change their steps everywhere."""
    visit = st.tuples(st.integers(0, 1), st.integers(-1, 1), st.integers(0, 2))
    chains = data.draw(st.lists(st.lists(visit, max_size=24), min_size=1, max_size=3))
    state = data.draw(
        st.lists(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=NUM_Q, max_size=NUM_Q), min_size=3, max_size=3)
    )
    tiling = grid(state[: len(chains)], Problem(1, 2, 1, NUM_Q, len(chains)), TileShape(1, 1))
    flat = [each for chain in chains for each in chain]
    head = np.array([each[0] for each in flat], np.int64)
    q = np.cumsum([each[1] for each in flat], dtype=np.int64) % NUM_Q
    turn = np.array([each[2] for each in flat], np.int64)
    template = Template(np.cumsum([0, *map(len, chains)]), head, q, turn)
    runs, first = encode(template, tiling)
    assert (list(map(tuple, runs.tolist())), first.tolist()) == longest_runs(template, tiling.state)
