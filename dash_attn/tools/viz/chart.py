"""What every picture starts from: a timeline, what is written beside it, and the lane of each event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dash_attn.simulate import Simulation
from dash_attn.timeline import COMPUTE, Timeline
from dash_attn.timeline.timeline import Longs


@dataclass(frozen=True, eq=False)
class Chart:
    """A timeline and the numbers written beside it; `stall` and `idle` are sums over the workers.

    A simulation may end after its last event (a chain's epilogue is no event), so it brings its own makespan.
    """

    timeline: Timeline
    title: str
    makespan: float
    stall: float
    idle: float
    lower_bound: float | None = None

    def facts(self) -> list[tuple[str, str]]:
        """The numbers, by name."""
        unit, whole = self.timeline.unit, self.timeline.workers * self.makespan
        bound = [] if self.lower_bound is None else [("lower bound", f"{self.lower_bound:.5g} {unit}")]
        return [
            ("makespan", f"{self.makespan:.5g} {unit}"),
            *bound,
            ("stalls", f"{self.stall:.4g} {unit}"),
            ("idle", f"{100 * self.idle / whole if whole else 0:.1f} %"),
        ]


Source = Chart | Timeline | Simulation


def chart(source: Source, title: str | None = None) -> Chart:
    """A chart of anything that has a timeline."""
    if isinstance(source, Chart):
        return source if title is None else replace(source, title=title)
    if isinstance(source, Simulation):
        line = source.timeline
        return Chart(line, title or line.title, source.makespan, source.stall, source.bubble, source.lower_bound)
    own = source.total("compute") if source.overlapping else float((source.end - source.begin).sum())
    idle = max(0.0, source.workers * source.makespan - own)
    return Chart(source, title or source.title, source.makespan, source.total("stall"), idle)


def charts(sources: Source | Sequence[Source]) -> list[Chart]:
    """Charts of one source or of several."""
    return [chart(source) for source in (sources if isinstance(sources, Sequence) else [sources])]


def lanes(timeline: Timeline) -> Longs:
    """Lane of each event in its worker's row, so that no two events of a lane overlap: 0 is the worker itself;
    where reductions run beside its compute they get lanes of their own, as few as will do."""
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
