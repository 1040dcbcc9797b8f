"""Lemma 1 of the paper, both directions, on random chain graphs kept acyclic."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from dash_attn.tools.dag import ChainGraph
from tests.strategies import examples

Edges = tuple[tuple[tuple[int, int], tuple[int, int]], ...]


@st.composite
def graphs(draw: st.DrawFn) -> ChainGraph:
    weights = draw(st.lists(st.integers(1, 9), min_size=2, max_size=6))
    return ChainGraph(draw(st.integers(1, 5)), tuple(weights))


@st.composite
def drawn(draw: st.DrawFn, most: int = 6) -> tuple[ChainGraph, Edges]:
    """A graph and edges added one after the other, those left out that would close a cycle."""
    graph = draw(graphs())
    node = st.tuples(st.integers(0, graph.chains - 1), st.integers(1, len(graph.weights) - 1))
    kept: Edges = ()
    for edge in draw(st.lists(st.tuples(node, node), min_size=1, max_size=most)):
        if graph.is_dag((*kept, edge)):
            kept = (*kept, edge)
    return graph, kept


def depths(graph: ChainGraph, edges: Edges) -> dict[tuple[int, int], float]:
    """Longest path from the source to every inner node, and to the sink as (-1, -1); by recursion."""

    @cache
    def end(chain: int, depth: int) -> float:
        if (chain, depth) == (-1, -1):
            return max(end(c, len(graph.weights) - 1) for c in range(graph.chains)) + graph.weights[-1]
        if depth == 0:
            return 0.0
        into = [end(*tail) for tail, head in edges if head == (chain, depth)]
        return max([end(chain, depth - 1) + graph.weights[depth - 1], *into])

    inner = [(c, d) for c in range(graph.chains) for d in range(1, len(graph.weights))]
    return {node: end(*node) for node in [*inner, (-1, -1)]}


@examples(500)
@given(drawn())
def test_lemma(case: tuple[ChainGraph, Edges]) -> None:
    """The critical path stays as it is exactly if no edge leads to a smaller depth."""
    graph, edges = case
    kept = graph.critical_path(edges) == graph.critical_path()
    event("kept" if kept else "grown")
    assert graph.keeps_critical_path(edges) == kept
    assert graph.critical_path(edges) == depths(graph, edges)[-1, -1] >= graph.critical_path() == sum(graph.weights)


@examples(300)
@given(drawn())
def test_forward_edges_move_no_node(case: tuple[ChainGraph, Edges]) -> None:
    """Sufficient, and more: with edges that never lead back, no node at all is reached later."""
    graph, edges = case
    forward = tuple((min(a, b, key=lambda n: n[1]), max(a, b, key=lambda n: n[1])) for a, b in edges if a[1] != b[1])
    assert graph.is_dag(forward) and graph.keeps_critical_path(forward)
    assert depths(graph, forward) == depths(graph, ())


@examples(300)
@given(drawn(3), st.data())
def test_one_backward_edge_is_enough(case: tuple[ChainGraph, Edges], data: st.DataObject) -> None:
    """Necessary: however many edges keep the path, one that leads back lengthens it."""
    graph, edges = case
    assume(graph.chains > 1 and len(graph.weights) > 2)
    tail_chain, head_chain = data.draw(st.permutations(range(graph.chains)))[:2]
    head_depth = data.draw(st.integers(1, len(graph.weights) - 2))
    tail_depth = data.draw(st.integers(head_depth + 1, len(graph.weights) - 1))
    back = ((tail_chain, tail_depth), (head_chain, head_depth))
    forward = tuple((a, b) for a, b in edges if a[1] <= b[1])
    assume(graph.is_dag((*forward, back)))
    assert not graph.keeps_critical_path((*forward, back))
    assert graph.critical_path((*forward, back)) > graph.critical_path(forward) == graph.critical_path()


def test_the_example_of_the_paper() -> None:
    """Two chains of two tasks: a hand-over to the next step is free, one within a step costs a reduction."""
    graph = ChainGraph(2, (3.0, 1.0, 3.0, 1.0))
    assert graph.critical_path(((((0, 2), (1, 3))),)) == 8.0
    assert graph.critical_path(((((0, 2), (1, 1))),)) == 9.0


def test_cycles_and_bad_graphs() -> None:
    graph = ChainGraph(2, (1.0, 1.0, 1.0))
    assert not graph.is_dag((((0, 2), (1, 1)), ((1, 2), (0, 1))))
    assert not graph.is_dag((((0, 1), (1, 1)), ((1, 1), (0, 1))))
    assert graph.is_dag((((0, 1), (1, 1)),))
    for chains, weights in [(0, (1.0, 1.0)), (2, (1.0,)), (2, (1.0, 0.0))]:
        with pytest.raises(ValueError, match="at least one chain of at least two edges, all of positive weight"):
            ChainGraph(chains, weights)
