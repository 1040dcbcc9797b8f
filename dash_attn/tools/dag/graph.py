"""The task graph of a placed program under the paper's model, and its critical path by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import rustworkx as rx

from dash_attn.program import Program, Sequences
from dash_attn.simulate import Paper, task_names


@dataclass(frozen=True)
class Phase:
    """A node: the compute (C) or reduction (R) of a task, or the common source."""

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


def dag(program: Program, placement: Sequences | None = None, model: Paper | None = None) -> Dag:
    """The graph of a placed program. Without a placement every bundle has a worker of its own."""
    model = Paper() if model is None else model
    sequences = program.bundles if placement is None else placement
    tasks, names = program.expand(), task_names(program)
    graph = rx.PyDiGraph(check_cycle=False)
    source = graph.add_node(Phase("start", -1, 0.0, ""))
    phases = []
    for t in range(program.num_tasks):
        label = names.text(t)
        phases += [Phase("C", t, model.compute, label), Phase("R", t, model.reduce, label)]
    nodes = list(graph.add_nodes_from(phases))
    edges = [(nodes[2 * t], nodes[2 * t + 1], "task") for t in range(program.num_tasks)]
    for before, after in worker_steps(program, sequences):
        edges.append((source if before < 0 else nodes[2 * before + 1], nodes[2 * after], "chain"))
    by_target = np.lexsort((tasks.turn, tasks.target))
    for before, after in zip(by_target[:-1].tolist(), by_target[1:].tolist(), strict=True):
        if tasks.target[before] == tasks.target[after]:
            edges.append((nodes[2 * before + 1], nodes[2 * after + 1], "turn"))
    graph.add_edges_from(edges)
    return Dag(graph)


def worker_steps(program: Program, sequences: Sequences) -> list[tuple[int, int]]:
    """(task before, task) along each worker; -1 stands before a worker's first task."""
    pairs = []
    for first, last in zip(sequences.first[:-1].tolist(), sequences.first[1:].tolist(), strict=True):
        before = -1
        for chain in sequences.chains[first:last].tolist():
            for task in range(int(program.task_first[chain]), int(program.task_first[chain + 1])):
                pairs.append((before, task))
                before = task
    return pairs


def depth_monotone(program: Program, placement: Sequences | None = None) -> bool:
    """Does every hand-over go to a later step? By Lemma 1 the order then keeps the critical path.

    Steps count along workers. Without a placement every bundle has a worker of its own, and all start together.
    """
    sequences = program.bundles if placement is None else placement
    length = np.diff(program.task_first)[sequences.chains]
    run_up = np.concatenate([[0], np.cumsum(length)])
    begin = np.repeat(run_up[sequences.first[:-1]], np.diff(sequences.first))
    chain_start = np.empty(len(program.chains), np.int64)
    chain_start[sequences.chains] = run_up[:-1] - begin
    tasks = program.expand()
    step = np.arange(program.num_tasks) - program.task_first[tasks.chain] + chain_start[tasks.chain]
    by_target = np.lexsort((tasks.turn, tasks.target))
    same = tasks.target[by_target][1:] == tasks.target[by_target][:-1]
    return bool((np.diff(step[by_target]) > 0)[same].all())
