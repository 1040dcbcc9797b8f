"""A clock that ticks: workers, writers, buffers and turnstiles as little state machines, whole-numbered time.

Slow, obvious, and sharing no code with the package: what the simulator must agree with on small programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dash_attn.program import Costs, Program, Sequences

Sum = tuple[object, ...]  # a dQ tile, or a part of a dK and dV tile


@dataclass
class Job:
    """One task: when its compute begins and ends (buffer in hand), and its reduction begins and lands.

    The end of a cut chain has a job for each part of its dK and dV, which needs no compute.
    """

    number: int
    target: Sum
    turn: int
    cost: int
    times: list[int] = field(default_factory=list)


@dataclass
class Writer:
    """Adds contributions in the order in which they come; with depth 0 the worker itself does."""

    inbox: list[Job] = field(default_factory=list)
    until: int | None = None


@dataclass
class Worker:
    """A list of (what, how long or which job) still to do."""

    script: list[tuple[str, int, Job | None]]
    writers: list[Writer]
    until: int | None = None
    handed: int = 0
    in_buffers: list[Job | None] = field(default_factory=list)


@dataclass
class Outcome:
    makespan: int
    busy: int
    stall: int
    blocked: int
    times: dict[int, list[int]]


def jobs(program: Program, costs: Costs) -> list[list[Job]]:
    """Jobs of each chain, spelled out from the tables."""
    g, chains, number = program.geometry, [], 0
    for batch, kv_head, _, first, count in program.chains.tolist():
        visits = []
        for head, q, step, length, turn, turn_step, partial in program.runs[first : first + count].tolist():
            for i in range(length):
                target = ("dQ", batch, kv_head, head, q + i * step)
                cost = int(costs.compute) + int(costs.partial) * bool(partial)
                visits.append(Job(number, target, turn + i * turn_step, cost))
                number += 1
        chains.append(visits)
    if g.share > 1:
        for visits, (batch, q_head, kv_tile, *_) in zip(chains, program.chains.tolist(), strict=True):
            for part in range(math.ceil(2 * g.tile_n / g.tile_m)):  # dK and dV, in pieces of the size of a dQ tile
                target = ("dK dV", batch, q_head // g.share, kv_tile, part)
                visits.append(Job(number, target, q_head % g.share, 0))
                number += 1
    return chains


def run(program: Program, placement: Sequences, costs: Costs, patience: int = 10_000) -> Outcome:
    chains, workers = jobs(program, costs), []
    for a, b in zip(placement.first[:-1].tolist(), placement.first[1:].tolist(), strict=True):
        script: list[tuple[str, int, Job | None]] = []
        for c in placement.chains[a:b].tolist():
            script.append(("busy", int(costs.prologue), None))
            for job in chains[c]:
                script += [("compute", job.cost, job), ("hand over", 0, job)]
            script.append(("busy", int(costs.epilogue), None))
        writers = [Writer() for _ in range(max(1, costs.writers if costs.depth else 1))]
        workers.append(Worker(script, writers, in_buffers=[None] * max(1, costs.depth)))
    out, gate, opening = Outcome(0, 0, 0, 0, {}), {}, list[tuple[int, Sum]]()
    for now in range(patience):
        while any([_open(now, gate, opening), *[_step(w, now, gate, opening, costs, out) for w in workers]]):
            pass
        if not any(w.script or any(w.in_buffers) for w in workers):
            out.times = {job.number: job.times for chain in chains for job in chain}
            return out
        for w in workers:  # the tick that now passes
            if w.until is not None:
                out.busy += 1
            elif costs.depth and w.script and w.script[0][0] == "hand over":
                out.blocked += 1
            for writer in w.writers:
                if writer.until is not None:
                    out.busy += costs.depth == 0
                elif writer.inbox:
                    out.stall += 1
    raise AssertionError("deadlock")


def _open(now: int, gate: dict[Sum, int], opening: list[tuple[int, Sum]]) -> bool:
    """Turnstiles whose hand-over has arrived let the next one in."""
    due = [entry for entry in opening if entry[0] <= now]
    for entry in due:
        opening.remove(entry)
        gate[entry[1]] = gate.get(entry[1], 0) + 1
    return bool(due)


def _step(
    worker: Worker, now: int, gate: dict[Sum, int], opening: list[tuple[int, Sum]], costs: Costs, out: Outcome
) -> bool:
    """One thing that can happen at this instant; False if nothing can."""
    for writer in worker.writers:
        if writer.until is not None and now >= writer.until:
            job, writer.until = writer.inbox.pop(0), None
            job.times.append(now)
            opening.append((now + int(costs.handoff), job.target))
            worker.in_buffers[worker.in_buffers.index(job)] = None
            out.makespan = now
            return True
        if writer.until is None and writer.inbox and gate.get(writer.inbox[0].target, 0) == writer.inbox[0].turn:
            writer.inbox[0].times.append(now)
            writer.until = now + int(costs.reduce) * (int(costs.first) if writer.inbox[0].turn == 0 else 1)
            return True
    if not worker.script or (costs.depth == 0 and any(worker.in_buffers)):
        return False
    what, duration, job = worker.script[0]
    if what == "hand over":
        slot = worker.handed % len(worker.in_buffers)
        if worker.in_buffers[slot] is not None:
            return False
        assert job is not None
        job.times.append(now)
        worker.in_buffers[slot] = job
        worker.writers[worker.handed % len(worker.writers)].inbox.append(job)
        worker.handed += 1
        worker.script.pop(0)
        return True
    if worker.until is None:
        if job is not None:
            job.times.append(now)
        worker.until = now + duration
        return True
    if now < worker.until:
        return False
    worker.until = None
    worker.script.pop(0)
    out.makespan = now
    return True
