"""A second, slow opinion on programs: plain Python over the tables, sharing no code with the package.

A program is opened into a Book (every task spelled out), judged, and run with a number of slots.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np

from dash_attn.program import Program, Task

Name = tuple[int, int, int, int]  # batch, q head, q tile (-1: the end of a cut chain), kv tile
Sum = tuple[object, ...]
Step = tuple[Name, int, Sum]  # a task or the end of a cut chain, its turn, and what it adds to


@dataclass
class Visit:
    head: int
    q: int
    turn: int
    partial: bool


@dataclass
class Book:
    """`names[c]` is (batch, kv head, kv tile) of chain c, `chains[c]` its visits in order."""

    program: Program
    names: list[tuple[int, int, int]]
    chains: list[list[Visit]]
    launch: list[int]
    bundle_first: list[int]

    @staticmethod
    def of(program: Program) -> Book:
        names, chains = [], []
        for batch, kv_head, kv_tile, first, count in program.chains.tolist():
            visits = []
            for head, q, step, length, turn, turn_step, partial in program.runs[first : first + count].tolist():
                visits += [Visit(head, q + i * step, turn + i * turn_step, bool(partial)) for i in range(length)]
            names.append((batch, kv_head, kv_tile))
            chains.append(visits)
        return Book(program, names, chains, program.launch.tolist(), program.bundle_first.tolist())

    def close(self) -> Program:
        """Tables again, one run a visit."""
        rows, runs = [], []
        for name, visits in zip(self.names, self.chains, strict=True):
            rows.append((*name, len(runs), len(visits)))
            runs += [(v.head, v.q, 1, 1, v.turn, 0, int(v.partial)) for v in visits]
        return dataclasses.replace(
            self.program,
            chains=np.array(rows, np.int32).reshape(-1, 5),
            runs=np.array(runs, np.int32).reshape(-1, 7),
            launch=np.array(self.launch, np.int32),
            bundle_first=np.array(self.bundle_first, np.int32),
        )

    def task(self, chain: int, visit: Visit) -> Name:
        batch, kv_head, kv_tile = self.names[chain]
        return (batch, kv_head * self.program.geometry.group + visit.head, visit.q, kv_tile)

    def steps(self, chain: int) -> list[Step]:
        """The tasks of a chain. A cut chain then adds to dK and dV, after the q head before it."""
        names = [self.task(chain, visit) for visit in self.chains[chain]]
        steps: list[Step] = [
            (name, visit.turn, ("dQ", *name[:3])) for name, visit in zip(names, self.chains[chain], strict=True)
        ]
        batch, q_head, kv_tile = self.names[chain]
        share = self.program.geometry.share
        if share > 1:
            steps.append(((batch, q_head, -1, kv_tile), q_head % share, ("dK dV", batch, q_head // share, kv_tile)))
        return steps

    def sequences(self) -> list[list[Step]]:
        """The steps of each bundle, in order."""
        return [[step for c in self.launch[a:b] for step in self.steps(c)] for a, b in pairwise(self.bundle_first)]

    def tile_states(self) -> dict[tuple[int, int], bool]:
        """(kv tile, q tile) -> partial?, for tiles with work."""
        return {(kv, q): bool(p) for kv, a, n, p in self.program.tiles.tolist() for q in range(a, a + n)}

    def needed(self) -> set[Name]:
        g, states = self.program.geometry, self.tile_states()
        return {(b, h, q, kv) for b in range(g.batch) for h in range(g.heads_kv * g.group) for kv, q in states}


def faults(book: Book) -> dict[str, set[Name]]:
    """What is wrong, by kind, and the tasks it may be blamed on; nothing wrong, nothing in it.

    The kinds stand in the order in which a program has to be sound for the next question to make sense.
    """
    g = book.program.geometry
    chains = Counter(book.names)
    expected = {(b, h, kv) for b in range(g.batch) for h in range(g.heads_kv) for kv in range(g.num_kv)}
    if set(chains) != expected or max(chains.values(), default=1) > 1:
        return {"broken chain": set()}
    if sorted(book.launch) != list(range(len(book.chains))):
        return {"launch": set()}
    ends = (book.bundle_first[0], book.bundle_first[-1])
    if ends != (0, len(book.launch)) or any(a >= b for a, b in pairwise(book.bundle_first)):
        return {"bundles": set()}

    wrong: dict[str, set[Name]] = defaultdict(set)
    visits = [(c, v) for c, visits in enumerate(book.chains) for v in visits]
    if any(not (0 <= v.head < g.group and 0 <= v.q < g.num_q) for _, v in visits):
        return {"range": set()}
    done, needed, states = Counter(book.task(c, v) for c, v in visits), book.needed(), book.tile_states()
    for name in done.keys() | needed:
        if name not in needed:
            wrong["empty tile visited"].add(name)
        elif done[name] != 1:
            wrong["tile done twice" if done[name] else "tile missed"].add(name)
    for c, v in visits:
        if v.partial != states.get((book.names[c][2], v.q), v.partial):
            wrong["wrong mask flag"].add(book.task(c, v))
    if wrong:
        return dict(wrong)

    by_target: dict[Name, list[tuple[int, Name]]] = defaultdict(list)
    for c, v in visits:
        name = book.task(c, v)
        by_target[(*name[:3], 0)].append((v.turn, name))
    for entries in by_target.values():
        turns = Counter(turn for turn, _ in entries)
        for turn, name in entries:
            if not 0 <= turn < len(entries) or turns[turn] > 1:
                wrong["turns are no permutation"].add(name)
    if wrong:
        return dict(wrong)

    graph: dict[Name, list[Name]] = defaultdict(list)
    by_sum: dict[Sum, list[tuple[int, Name]]] = defaultdict(list)
    for sequence in book.sequences():
        for (before, *_), (after, *_) in pairwise(sequence):
            graph[after].append(before)
        for name, turn, total in sequence:
            by_sum[total].append((turn, name))
    for entries in by_sum.values():
        for (_, before), (_, after) in pairwise(sorted(entries)):
            graph[after].append(before)
    return {} if acyclic(graph) else {"cycle": set(done)}


def proves_deadlock(tasks: tuple[Task, ...], sequences: list[list[Step]]) -> bool:
    """Do these tasks alone, by who comes before whom on a worker and at a turnstile, form a cycle?"""
    where = {step[0]: (s, i, *step[1:]) for s, sequence in enumerate(sequences) for i, step in enumerate(sequence)}
    names = [(t.batch, t.q_head, t.q_tile, t.kv_tile) for t in tasks]
    graph: dict[Name, list[Name]] = {}
    for a in names:
        s, i, turn, total = where[a]
        on_worker = [b for b in names if where[b][0] == s and where[b][1] < i]
        graph[a] = on_worker + [b for b in names if where[b][3] == total and where[b][2] < turn]
    return not acyclic(graph)


def acyclic(before: dict[Name, list[Name]]) -> bool:
    try:
        tuple(TopologicalSorter(before).static_order())
    except CycleError:
        return False
    return True


def finishes(sequences: list[list[Step]], slots: int) -> bool:
    """Start sequences in order, `slots` at a time, the next when one ends; do any task whose turn it is."""
    counter: Counter[Sum] = Counter()
    waiting, running = list(range(len(sequences))), list[int]()
    at = [0] * len(sequences)
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        moved = False
        for s in list(running):
            while at[s] < len(sequences[s]):
                _, turn, total = sequences[s][at[s]]
                if counter[total] != turn:
                    break
                counter[total] += 1
                at[s] += 1
                moved = True
            if at[s] == len(sequences[s]):
                running.remove(s)
                moved = True
        if not moved:
            return False
    return True
