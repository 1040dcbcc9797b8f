"""A trace as charts: what the SMs did over the same program in the model, and where their time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dash_attn.simulate import Machine, Simulation
from dash_attn.timeline import COMPUTE, TaskNames, Timeline
from dash_attn.timeline.timeline import Longs
from dash_attn.tools.trace.fit import fit_trace
from dash_attn.tools.trace.measured import WHAT, Measured, Shares, measured, shares
from dash_attn.tools.trace.record import Trace
from dash_attn.tools.trace.timelines import simulated, timeline
from dash_attn.tools.viz.chart import Chart


@dataclass(frozen=True, eq=False)
class Traced:
    """The run, the model that was fitted to it, and a chart of each."""

    found: Measured
    sums: Shares
    model: Machine
    result: Simulation
    charts: tuple[Chart, Chart]

    @staticmethod
    def of(trace: Trace) -> Traced:
        found = measured(trace)
        sums, model, policy = shares(found), fit_trace(found), trace.program.policy
        result, modelled = simulated(found, model)
        real = Chart(timeline(found), f"measured, {policy}", found.makespan, sums.turns, sums.idle)
        ideal = Chart(modelled, f"simulated, {policy}", result.makespan, result.stall, result.bubble)
        return Traced(found, sums, model, result, (real, ideal))

    def table(self) -> list[tuple[str, str, str, str]]:
        rows = [(name, f"{us:.0f}", f"{100 * share:.1f} %", WHAT[name]) for name, us, share in self.sums.table()]
        return [("", "us, all SMs", "share", "what"), *rows]

    def telling(self, count: int) -> Longs:
        """Some SMs: those that waited longest for a slot, and as many that waited least."""
        waited = np.bincount(self.found.rows.task_worker, self.found.blocked, len(self.found.sm))
        order = np.argsort(waited, kind="stable")
        chosen: Longs = np.sort(
            self.found.sm[np.append(order[: count // 2], order[len(order) - (count - count // 2) :])]
        )
        return chosen

    def some(self, sms: Sequence[int] | Longs) -> list[Chart]:
        """The charts of a few SMs, with their own sums beside."""
        return [_cut(each, only(each.timeline, sms)) for each in self.charts]


def _cut(each: Chart, line: Timeline) -> Chart:
    computes = line.role == COMPUTE
    first, last = np.full(line.workers, np.inf), np.zeros(line.workers)
    np.minimum.at(first, line.worker[computes], line.begin[computes])
    np.maximum.at(last, line.worker[computes], line.end[computes])
    idle = float((np.minimum(first, each.makespan) + each.makespan - last).sum())
    return replace(each, timeline=line, stall=line.total("stall"), idle=idle)


def only(line: Timeline, workers: Sequence[int] | Longs) -> Timeline:
    """The events of some workers, in new rows, and their tasks."""
    row = np.full(line.workers, -1)
    row[workers] = np.arange(len(workers))
    kept = row[line.worker] >= 0
    tasks, task = np.unique(line.task[kept], return_inverse=True)
    names = TaskNames(*(getattr(line.names, name)[tasks] for name in TaskNames.__dataclass_fields__))
    columns = {name: getattr(line, name)[kept] for name in ("role", "begin", "end")}
    return replace(line, workers=len(workers), names=names, worker=row[line.worker[kept]], task=task, **columns)
