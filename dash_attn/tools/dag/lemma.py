"""Lemma 1 of the paper, to run: which edges of weight zero leave the critical path of parallel chains as it is."""

from __future__ import annotations

from dataclasses import dataclass

import rustworkx as rx

Node = tuple[int, int]  # (chain, depth), depth counting edges from the source; the sink has its own depth


@dataclass(frozen=True)
class ChainGraph:
    """`chains` isomorphic chains from a source (depth 0) to a sink, whose edges weigh `weights`, all positive."""

    chains: int
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.chains < 1 or len(self.weights) < 2 or min(self.weights) <= 0:
            raise ValueError("a chain graph has at least one chain of at least two edges, all of positive weight")

    def build(self, edges: tuple[tuple[Node, Node], ...] = ()) -> rx.PyDiGraph:
        """The graph with zero-weight edges added between inner nodes."""
        graph = rx.PyDiGraph()
        last = len(self.weights)
        source, sink = graph.add_node("s"), graph.add_node("t")
        node = {}
        for chain in range(self.chains):
            before = source
            for depth in range(1, last):
                node[chain, depth] = graph.add_node((chain, depth))
                graph.add_edge(before, node[chain, depth], self.weights[depth - 1])
                before = node[chain, depth]
            graph.add_edge(before, sink, self.weights[last - 1])
        for tail, head in edges:
            graph.add_edge(node[tail], node[head], 0.0)
        return graph

    def is_dag(self, edges: tuple[tuple[Node, Node], ...]) -> bool:
        return bool(rx.is_directed_acyclic_graph(self.build(edges)))

    def critical_path(self, edges: tuple[tuple[Node, Node], ...] = ()) -> float:
        """Length of the longest path from source to sink."""
        return float(rx.dag_weighted_longest_path_length(self.build(edges), lambda u, v, weight: weight))

    def keeps_critical_path(self, edges: tuple[tuple[Node, Node], ...]) -> bool:
        """The condition of the lemma: no edge leads to a smaller depth."""
        return all(tail[1] <= head[1] for tail, head in edges)
