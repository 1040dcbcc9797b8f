"""The machine model of one trace: medians of the times of tasks, chains and turns."""

from __future__ import annotations

import numpy as np

from dash_attn.simulate import Machine
from dash_attn.tools.trace.measured import Floats, Measured


def fit_trace(times: Measured) -> Machine:
    """A Machine whose every time is the median of its counterpart in the trace."""
    board, base, task = times.trace.board, Machine(), times.task
    tasks = board.tasks()
    own = times.pitch() - times.blocked
    compute = median(own[~tasks.partial], base.compute)
    add = task["landed"] - times.granted
    reduce = median(add[(tasks.turn > 0) & ~times.takes_sum], base.reduce)
    alike = (times.blocked == 0) & ~tasks.partial
    alike[board.task_first[1:] - 1] = False  # no task follows the last task of a chain
    # A hand-over can be measured only if the writer of the next contribution was idle and waited for its turn.
    order = np.lexsort((tasks.turn, tasks.target))
    before, after = order[:-1], order[1:]
    idle = times.landed_before(times.rows.task_worker, times.rows.task_row, 1 if times.split else base.writers)
    watched = (tasks.target[before] == tasks.target[after]) & (idle[after] < task["landed"][before])
    handoff = (task["turn"][after] - task["landed"][before])[watched]
    # If the last contributor finishes dQ, it gets its slot with the sum in it, some time after its turn.
    fetched = times.takes_sum & (task["turn"] > task["computed"])
    since = times.over[:-1]
    begin = np.full(len(times.begun), np.nan)
    has_tasks = np.diff(board.task_first)[times.trace.placement.chains] > 0
    begin[has_tasks] = task["begun"][times.first_tasks]
    inner = np.ones(len(begin), bool)
    inner[times.trace.placement.first[:-1]] = False  # the first chain of a worker includes its start-up
    return Machine(
        compute=compute,
        reduce=reduce,
        handoff=median(handoff, base.handoff),
        prologue=median((begin[1:] - since)[inner[1:]], base.prologue),
        epilogue=median(times.over - times.begun - times.end_blocked, base.epilogue),
        partial=max(0.0, median(own[tasks.partial], compute + base.partial) - compute),
        writers=1 if times.split else base.writers,
        store=base.store if board.parts else median(times.end["landed"][:, 0] - times.over, base.store),
        fetch=median((task["slot"] - task["turn"])[fetched], base.fetch),
        first=round(median(add[tasks.turn == 0], reduce) / reduce, 3) if reduce else base.first,
        jitter=min(0.5, round(float(np.std(own[alike])) / compute, 3)) if alike.any() else base.jitter,
    )


def median(values: Floats, otherwise: float) -> float:
    """The median, rounded to the nanosecond. Without values it is `otherwise`."""
    seen = values[np.isfinite(values)]
    return max(0.0, round(float(np.median(seen)), 3)) if len(seen) else otherwise
