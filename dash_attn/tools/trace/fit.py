"""The machine model read off a trace: medians of what tasks, chains and turns took."""

from __future__ import annotations

import numpy as np

from dash_attn.simulate import Machine
from dash_attn.tools.trace.measured import Floats, Measured


def fit_trace(found: Measured) -> Machine:
    """A Machine whose every time is the median of its counterpart in the trace."""
    program, base = found.trace.program, Machine()
    tasks, task, chain = program.expand(), found.task, found.chain
    own = found.pitch() - found.blocked
    compute = median(own[~tasks.partial], base.compute)
    add = task["landed"] - found.granted
    reduce = median(add[(tasks.turn > 0) & ~found.takes_sum], base.reduce)
    alike = (found.blocked == 0) & ~tasks.partial
    alike[program.task_first[1:] - 1] = False  # the last of a chain ends without a next one
    # A hand-over shows where the writer of the next contribution had nothing else to do and watched for it.
    order = np.lexsort((tasks.turn, tasks.target))
    before, after = order[:-1], order[1:]
    idle = found.landed_before(found.rows.task_worker, found.rows.task_row, 1 if found.split else base.writers)
    watched = (tasks.target[before] == tasks.target[after]) & (idle[after] < task["landed"][before])
    handoff = (task["turn"][after] - task["landed"][before])[watched]
    # The last contributor's slot comes with the sum in it, where it finishes dQ and could not do so at once.
    fetched = found.takes_sum & (task["turn"] > task["computed"])
    since = chain["staged"][:-1]
    begin = np.full(len(chain["begun"]), np.nan)
    has_tasks = np.diff(program.task_first)[found.trace.placement.chains] > 0
    begin[has_tasks] = task["begun"][found.first_tasks]
    inner = np.ones(len(begin), bool)
    inner[found.trace.placement.first[:-1]] = False  # a worker's first chain has start-up in it
    return Machine(
        compute=compute,
        reduce=reduce,
        handoff=median(handoff, base.handoff),
        prologue=median((begin[1:] - since)[inner[1:]], base.prologue),
        epilogue=median(chain["staged"] - chain["begun"] - found.chain_blocked, base.epilogue),
        partial=max(0.0, median(own[tasks.partial], compute + base.partial) - compute),
        writers=1 if found.split else base.writers,
        store=median(chain["landed"] - chain["staged"], base.store),
        fetch=median((task["slot"] - task["turn"])[fetched], base.fetch),
        first=round(median(add[tasks.turn == 0], reduce) / reduce, 3) if reduce else base.first,
        jitter=min(0.5, round(float(np.std(own[alike])) / compute, 3)) if alike.any() else base.jitter,
    )


def median(values: Floats, otherwise: float) -> float:
    """Rounded to the nanosecond; what cannot be seen in this trace stays as it was."""
    seen = values[np.isfinite(values)]
    return max(0.0, round(float(np.median(seen)), 3)) if len(seen) else otherwise
