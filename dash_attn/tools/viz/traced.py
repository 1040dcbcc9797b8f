"""A trace as charts: the run on the SMs, the same program in the model, and the shares of the SMs' time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dash_attn.simulate import Machine, Simulation
from dash_attn.timeline import COMPUTE, Timeline
from dash_attn.timeline.timeline import Longs
from dash_attn.tools.trace.fit import fit_trace
from dash_attn.tools.trace.measured import WHAT, Measured, Shares, measured, shares
from dash_attn.tools.trace.record import Trace
from dash_attn.tools.trace.timelines import simulated, timeline
from dash_attn.tools.viz.charts import Chart


@dataclass(frozen=True, eq=False)
class Traced:
    """A measured run, the model fitted to it, the simulation with that model, and a chart of the run and of the
    simulation."""

    run: Measured
    sums: Shares
    model: Machine
    simulation: Simulation
    charts: tuple[Chart, Chart]

    @staticmethod
    def of(trace: Trace) -> Traced:
        """Fit the model to a trace and simulate its program."""
        run = measured(trace)
        sums, model, policy = shares(run), fit_trace(run), trace.program.policy
        simulation, modelled = simulated(run, model)
        real = Chart(timeline(run), f"measured, {policy}", run.makespan, sums.turns, sums.bubble, policy=policy)
        ideal = Chart(modelled, f"simulated, {policy}", simulation.makespan, simulation.stall, simulation.bubble)
        return Traced(run, sums, model, simulation, (real, ideal))

    def table(self) -> list[tuple[str, str, str, str]]:
        """The shares of the SMs' time, with a header."""
        rows = [(name, f"{us:.0f}", f"{share:.1%}", WHAT[name]) for name, us, share in self.sums.table()]
        return [("part", "us, all SMs", "share", "meaning"), *rows]

    def telling(self, count: int) -> Longs:
        """Numbers of `count` SMs: half waited longest for a slot, half least."""
        waited = np.bincount(self.run.rows.task_worker, self.run.blocked, len(self.run.sm))
        order = np.argsort(waited, kind="stable")
        chosen: Longs = np.sort(self.run.sm[np.append(order[: count // 2], order[len(order) - (count - count // 2) :])])
        return chosen

    def some(self, sms: Sequence[int] | Longs) -> list[Chart]:
        """The charts of a few SMs, with the sums of those SMs beside them."""
        return [_cut(each, only(each.timeline, sms)) for each in self.charts]


def _cut(each: Chart, line: Timeline) -> Chart:
    computes = line.role == COMPUTE
    first, last = np.full(line.workers, np.inf), np.zeros(line.workers)
    np.minimum.at(first, line.worker[computes], line.begin[computes])
    np.maximum.at(last, line.worker[computes], line.end[computes])
    bubble = float((np.minimum(first, each.makespan) + each.makespan - last).sum())
    return replace(each, timeline=line, stall=line.total("stall"), bubble=bubble)


def only(line: Timeline, workers: Sequence[int] | Longs) -> Timeline:
    """The events of some workers and their tasks. The workers get new row numbers."""
    row = np.full(line.workers, -1)
    row[workers] = np.arange(len(workers))
    kept = row[line.worker] >= 0
    tasks, task = np.unique(line.task[kept], return_inverse=True)
    names = line.names.only(tasks)
    columns = {name: getattr(line, name)[kept] for name in ("role", "begin", "end")}
    return replace(line, workers=len(workers), names=names, worker=row[line.worker[kept]], task=task, **columns)
