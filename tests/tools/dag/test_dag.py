"""The task graph says the same as the simulator, and depth-monotone orders are those that keep the critical path."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import rustworkx as rx
from hypothesis import assume, event, given
from hypothesis import strategies as st

from dash_attn.launch import compose
from dash_attn.order import Choice, Order, Template
from dash_attn.problem import CAUSAL, Problem
from dash_attn.program import Chain, Program, Queue, Sequences, board_of, build
from dash_attn.simulate import Paper, simulate
from dash_attn.tiling import TileShape, tile
from dash_attn.tools.dag import Dag, dag, depth_monotone
from dash_attn.verify import VerifyError, verify
from tests.strategies import examples, programs

costs = st.integers(1, 9)


def longest(graph: rx.PyDiGraph) -> float:
    """Longest path by hand, so as not to ask the code under test."""
    end = dict[int, float]()
    for node in rx.topological_sort(graph):
        before = max((end[parent] for parent in graph.predecessor_indices(node)), default=0.0)
        end[node] = before + graph[node].duration
    return max(end.values())


def without_turns(whole: Dag) -> rx.PyDiGraph:
    """The same tasks and workers, nobody waiting for anybody else."""
    graph = whole.graph.copy()
    for edge in graph.filter_edges(lambda why: why == "turn"):
        graph.remove_edge_from_index(edge)
    return graph


@examples(200)
@given(programs(), costs, costs, st.integers(0, 3))
def test_length_is_the_makespan(program: Program, c: int, r: int, more: int) -> None:
    workers = max(1, verify(program).co_resident) + more
    placement, model = verify(program).on(workers).placement, Paper(c, r)
    graph = dag(program, placement, model)
    makespan = simulate(program, workers, model, placement=placement).makespan
    assert graph.length() == makespan == longest(graph.graph)
    alone = program.bundles
    assert (
        dag(program, None, model).length() == simulate(program, len(alone.first) - 1, model, placement=alone).makespan
    )


@examples(100)
@given(programs(), costs, costs)
def test_critical_path_is_a_path_of_named_phases(program: Program, c: int, r: int) -> None:
    graph = dag(program, None, Paper(c, r))
    path = graph.critical_path()
    assert sum(phase.duration for phase in path) == graph.length()
    number = {(graph.graph[node].kind, graph.graph[node].task): node for node in graph.graph.node_indices()}
    nodes = [number[phase.kind, phase.task] for phase in path]
    assert all(graph.graph.has_edge(a, b) for a, b in pairwise(nodes))
    times = simulate(program, program.num_bundles, Paper(c, r), placement=program.bundles).outcome.times if path else []
    clock = 0.0
    for phase in path:  # no phase on it can start any earlier, so its begin is where the one before ended
        assert (times[0] if phase.kind == "C" else times[3])[phase.task] == clock
        clock += phase.duration
        assert f"kv {program.chains[board_of(program).expand().chain[phase.task], Chain.KV_TILE]}" in str(phase)


def test_every_edge_says_why_it_is_there() -> None:
    program = compose(tile(Problem(1, 1, 1, 3, 3, mask=CAUSAL), TileShape(1, 1)), "fa3")
    graph = dag(program, verify(program).on(2).placement).graph
    whys = [graph.get_edge_data_by_index(edge) for edge in graph.edge_indices()]
    # 6 tasks on workers, each with its two phases; q tiles 0, 1, 2 get 1, 2, 3 contributions.
    assert {why: whys.count(why) for why in set(whys)} == {"task": 6, "chain": 6, "turn": 3}


def test_the_ends_of_cut_chains_are_in_the_graph() -> None:
    """Two q heads on two workers: each end has a part of dK and one of dV, which head 1 adds after head 0."""
    program = compose(tile(Problem(1, 2, 1, 2, 2), TileShape(2, 2)), "fa3@head")
    graph = dag(program, None, Paper(3, 1))
    whys = [graph.graph.get_edge_data_by_index(edge) for edge in graph.graph.edge_indices()]
    assert {why: whys.count(why) for why in set(whys)} == {"task": 2, "chain": 6, "turn": 2}
    assert rx.is_directed_acyclic_graph(graph.graph) and graph.length() == 7
    assert str(graph.critical_path()[-1]) == "R(batch 0 head 1 dK dV kv 0 turn 1)"
    assert not depth_monotone(program)


def test_q_heads_that_wait_for_each_other_make_a_cycle() -> None:
    """One worker runs head 1 before head 0, which must add to dK and dV first: verify and the graph both see it."""
    program = compose(tile(Problem(1, 2, 1, 2, 2), TileShape(2, 2)), "fa3@head")
    backwards = Sequences(np.array([0, 2], np.int32), np.array([1, 0], np.int32))
    assert not rx.is_directed_acyclic_graph(dag(program, backwards).graph)
    with pytest.raises(VerifyError, match=r"q head 1, dK and dV, kv tile 0, turn 1\) waits for .*q head 0, dK and dV"):
        verify(program).placed(backwards)


# ---- depth-monotone ----------------------------------------------------------------------------------------


@st.composite
def equal_lines(draw: st.DrawFn) -> Program:
    """A full mask, so that all chains are as long, in any visit order; turns by step, some of them exchanged."""
    num_kv, num_q = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    if draw(st.booleans()):
        start = draw(st.permutations(range(num_kv)))
        visits = [[(start[kv] + t) % num_q for t in range(num_q)] for kv in range(num_kv)]
    else:
        visits = [draw(st.permutations(range(num_q))) for _ in range(num_kv)]
    ranked: dict[int, list[tuple[int, int]]] = {
        q: sorted((row.index(q), kv) for kv, row in enumerate(visits)) for q in range(num_q)
    }
    for q in draw(st.lists(st.integers(0, num_q - 1), max_size=1)):
        i, j = draw(st.integers(0, num_kv - 1)), draw(st.integers(0, num_kv - 1))
        ranked[q][i], ranked[q][j] = ranked[q][j], ranked[q][i]
    turn = [[kv for _, kv in ranked[q]].index(kv) for kv, row in enumerate(visits) for q in row]
    flat = np.array([q for row in visits for q in row], np.int64)
    template = Template(np.arange(num_kv + 1) * num_q, np.zeros_like(flat), flat, np.array(turn, np.int64))
    tiling = tile(Problem(1, 1, 1, num_q, num_kv), TileShape(1, 1))
    launch, alone = np.arange(num_kv), np.arange(num_kv + 1)
    order = Order.of_one(tiling, Choice("drawn"), template, [[(kv,) for kv in range(num_kv)]])
    program = build(order, Queue(launch, alone, "dealt"))
    try:
        verify(program)
    except VerifyError:
        assume(False)
    return program


@examples(500)
@given(equal_lines(), costs, costs)
def test_depth_monotone_is_keeping_the_critical_path(program: Program, c: int, r: int) -> None:
    """Lemma 1 on programs, both ways: equal lines, and the critical path grows exactly if some turn goes back."""
    graph = dag(program, None, Paper(c, r))
    keeps = graph.length() == longest(without_turns(graph))
    event("keeps" if keeps else "grows")
    assert depth_monotone(program) == keeps


@examples(150)
@given(programs(), costs, costs, st.integers(1, 5))
def test_depth_monotone_orders_never_wait(program: Program, c: int, r: int, workers: int) -> None:
    """Lines of any length: one way still holds."""
    verified = verify(program)
    placement = verified.on(max(workers, verified.co_resident)).placement
    if depth_monotone(program, placement):
        graph = dag(program, placement, Paper(c, r))
        assert graph.length() == longest(without_turns(graph))
        assert simulate(program, len(placement.first) - 1, Paper(c, r), placement=placement).stall == 0


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_depth_of_the_papers_orders(n: int) -> None:
    def made(policy: str, **mask: object) -> Program:
        return compose(tile(Problem(1, 2, 2, n, n, **mask), TileShape(1, 1)), policy)  # type: ignore[arg-type]

    assert depth_monotone(made("shift"))
    assert depth_monotone(made("fa3")) == (n == 1)
    assert depth_monotone(made("symmetric_shift", mask=CAUSAL))
    assert depth_monotone(made("descending", mask=CAUSAL)) == (n == 1)


def test_nothing_to_do() -> None:
    for lengths in [(0, 0), (0, 4), (4, 0)]:
        program = compose(tile(Problem(1, 1, 1, *lengths), TileShape(2, 2)), "fa3")
        for placement in (None, verify(program).on(3).placement):
            assert dag(program, placement).length() == 0 and depth_monotone(program, placement)
    empty = Sequences(np.zeros(4, np.int32), np.zeros(0, np.int32))
    assert depth_monotone(compose(tile(Problem(1, 1, 1, 4, 0), TileShape(2, 2)), "fa3"), empty)
