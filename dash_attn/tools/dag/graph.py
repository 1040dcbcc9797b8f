"""The task graph of a placed program under the paper's model, and its critical path by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import rustworkx as rx

from dash_attn.program import Board, Sequences
from dash_attn.program.program import Longs
from dash_attn.simulate import Paper, Work, board_for, task_names


@dataclass(frozen=True)
class Phase:
    """A node: the compute (C) or reduction (R) of a task, the reduction of a part of dK or dV, or the common source."""

    kind: str
    task: int
    duration: float
    name: str

    def __str__(self) -> str:
        return f"{self.kind}({self.name})" if self.name else self.kind


@dataclass(frozen=True, eq=False)
class Dag:
    """`graph` holds Phase nodes. An edge carries its reason: 'chain', 'task' or 'turn'."""

    graph: rx.PyDiGraph

    def critical_path(self) -> list[Phase]:
        """The longest path, source left out."""
        path = rx.dag_weighted_longest_path(self.graph, lambda u, v, why: self.graph[v].duration)
        return [self.graph[node] for node in path if self.graph[node].task >= 0]

    def length(self) -> float:
        """Length of the critical path: the makespan."""
        return sum(phase.duration for phase in self.critical_path())


def dag(program: Work, placement: Sequences | None = None, model: Paper | None = None) -> Dag:
    """The graph of a placed program, or of a pack. Without a placement every bundle has a worker of its own."""
    model = Paper() if model is None else model
    sequences = program.bundles if placement is None else placement
    board, names = board_for(program), task_names(program)
    steps = board.expand()
    graph = rx.PyDiGraph(check_cycle=False)
    source = graph.add_node(Phase("start", -1, 0.0, ""))
    # A task is two nodes. A part of dK or dV is computed with the tasks of its chain, so it is one node.
    labels = [names.text(t) for t in range(board.num_steps)]
    computes = list(graph.add_nodes_from([Phase("C", t, model.compute, labels[t]) for t in range(board.num_tasks)]))
    adds = list(graph.add_nodes_from([Phase("R", t, model.reduce, label) for t, label in enumerate(labels)]))
    begins = [*computes, *adds[board.num_tasks :]]
    edges = [(compute, add, "task") for compute, add in zip(computes, adds[: board.num_tasks], strict=True)]
    for before, after in worker_steps(board, sequences):
        edges.append((source if before < 0 else adds[before], begins[after], "chain"))
    by_target = np.lexsort((steps.turn, steps.target))
    for before, after in zip(by_target[:-1].tolist(), by_target[1:].tolist(), strict=True):
        if steps.target[before] == steps.target[after]:
            edges.append((adds[before], adds[after], "turn"))
    graph.add_edges_from(edges)
    return Dag(graph)


def worker_steps(board: Board, sequences: Sequences) -> list[tuple[int, int]]:
    """(step before, step) along each worker; -1 stands before a worker's first step."""
    pairs = []
    for first, last in zip(sequences.first[:-1].tolist(), sequences.first[1:].tolist(), strict=True):
        before = -1
        for chain in sequences.chains[first:last].tolist():
            for step in board.steps_of(chain):
                pairs.append((before, step))
                before = step
    return pairs


def depth_monotone(program: Work, placement: Sequences | None = None) -> bool:
    """Does every hand-over go to a later step? By Lemma 1 the order then keeps the critical path.

    Steps count along workers. Without a placement every bundle has a worker of its own, and all start together. The end
    of a cut chain has steps that compute nothing. So a later step must also have as many computes before it.
    """
    board, sequences = board_for(program), program.bundles if placement is None else placement
    steps, tasks = board.expand(), np.diff(board.task_first)
    in_chain = np.where(
        steps.q < 0,
        np.arange(board.num_steps) - board.part_first[steps.chain] + tasks[steps.chain],
        np.arange(board.num_steps) - board.task_first[steps.chain],
    )
    adds = in_chain + _before_chain(sequences, tasks + np.diff(board.part_first))[steps.chain]
    computes = np.minimum(in_chain + 1, tasks[steps.chain]) + _before_chain(sequences, tasks)[steps.chain]
    by_target = np.lexsort((steps.turn, steps.target))
    same = steps.target[by_target][1:] == steps.target[by_target][:-1]
    later = (np.diff(adds[by_target]) > 0) & (np.diff(computes[by_target]) >= 0)
    return bool(later[same].all())


def _before_chain(sequences: Sequences, lengths: Longs) -> Longs:
    """The sum of the lengths of all chains before each chain on its worker."""
    run_up = np.concatenate([[0], np.cumsum(lengths[sequences.chains])])
    begin = np.repeat(run_up[sequences.first[:-1]], np.diff(sequences.first))
    before = np.empty(len(lengths), np.int64)
    before[sequences.chains] = run_up[:-1] - begin
    return before
