"""The facts that every picture starts from: a timeline, the numbers beside it, and the lane of each event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dash_attn.simulate import Simulation
from dash_attn.timeline import COMPUTE, Timeline
from dash_attn.timeline.timeline import Longs


@dataclass(frozen=True, eq=False)
class Chart:
    """A timeline and the numbers written beside it. `stall` and `bubble` are sums over the workers.

    A simulation can end after its last event, because the epilogue of a chain is no event. So a chart has its own
    makespan. `policy` names the policy that ordered the tasks, where it is known.
    """

    timeline: Timeline
    title: str
    makespan: float
    stall: float
    bubble: float
    lower_bound: float | None = None
    policy: str = ""

    def facts(self) -> list[tuple[str, str]]:
        """The numbers, by name. Stalls and bubbles are shares of the time of all workers."""
        unit, whole = self.timeline.unit, self.timeline.workers * self.makespan or 1.0
        # A worker goes on while its writer waits, so such a stall is no part of the worker's time.
        stall = "stall beside compute" if self.timeline.overlapping else "stall"
        # A sum of floats may end a hair below or above a half: rounding it first makes equal times look equal.
        bound = [] if self.lower_bound is None else [("lower bound", f"{round(self.lower_bound, 6):.5g} {unit}")]
        return [
            ("makespan", f"{round(self.makespan, 6):.5g} {unit}"),
            *bound,
            (stall, f"{self.stall / whole:.1%}"),
            ("bubble", f"{self.bubble / whole:.1%}"),
        ]


Source = Chart | Timeline | Simulation


def chart(source: Source, title: str | None = None) -> Chart:
    """A chart of anything that has a timeline."""
    if isinstance(source, Chart):
        return source if title is None else replace(source, title=title)
    if isinstance(source, Simulation):
        line, sums = source.timeline, (source.makespan, source.stall, source.bubble)
        return Chart(line, title or line.title, *sums, source.lower_bound, source.program.policy)
    busy = source.total("compute") if source.overlapping else float((source.end - source.begin).sum())
    bubble = max(0.0, source.workers * source.makespan - busy)
    return Chart(source, title or source.title, source.makespan, source.total("stall"), bubble)


def charts(sources: Source | Sequence[Source]) -> list[Chart]:
    """Charts of one source or of several."""
    return [chart(source) for source in (sources if isinstance(sources, Sequence) else [sources])]


def best(drawn: Sequence[Chart]) -> set[int]:
    """The places of the charts with the shortest makespan. Nothing is best unless all policies are known and differ."""
    names = [each.policy for each in drawn]
    if len(drawn) < 2 or not all(names) or len(set(names)) < len(names):
        return set()
    shortest = min(each.makespan for each in drawn)
    return {i for i, each in enumerate(drawn) if each.makespan <= shortest * (1 + 1e-9)}


def lanes(timeline: Timeline) -> Longs:
    """Lane of each event in its worker's row. No two events of a lane overlap.

    Lane 0 is the worker itself. Where reductions run beside its compute they have lanes of their own, as few as
    possible.
    """
    lane = np.zeros(len(timeline), np.int64)
    if not timeline.overlapping:
        return lane
    # A stall and the reduction after it are one stay of a contribution: they share a lane.
    beside = timeline.role != COMPUTE
    tasks = len(timeline.names.turn)
    arrive, leave, worker = np.full(tasks, np.inf), np.full(tasks, -np.inf), np.zeros(tasks, np.int64)
    np.minimum.at(arrive, timeline.task[beside], timeline.begin[beside])
    np.maximum.at(leave, timeline.task[beside], timeline.end[beside])
    worker[timeline.task] = timeline.worker
    stays = np.flatnonzero(np.isfinite(arrive))
    stays = stays[np.lexsort((arrive[stays], worker[stays]))]
    columns = (stays, worker[stays], arrive[stays], leave[stays])
    free: dict[int, list[float]] = {}
    lane_of = np.zeros(tasks, np.int64)
    for task, row, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        ends = free.setdefault(row, [])
        at = next((i for i, until in enumerate(ends) if until <= begin), len(ends))
        ends[at : at + 1] = [end]
        lane_of[task] = at + 1
    lane[beside] = lane_of[timeline.task[beside]]
    return lane
