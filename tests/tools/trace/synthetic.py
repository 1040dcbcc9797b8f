"""Events as a GPU would leave them, made from a simulation."""

from __future__ import annotations

import numpy as np

from dash_attn.backends.sm90.config import HEAD, STAMPS
from dash_attn.launch import compose
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.program import Program
from dash_attn.simulate import Machine, simulate
from dash_attn.tiling import TileShape, tile
from dash_attn.tools.trace.measured import Rows
from dash_attn.tools.trace.record import Trace, without_idle

HAND_OVER, STAGE = 0.3, 0.1  # of a chain's end, and of a task's dQ
ORIGIN = 7_000_000_000_000_000_000 // 4


def program_of(mask: str = "causal", policy: str = "auto", length: int = 1024) -> Program:
    problem = Problem(2, 4, 4, length, length, mask=CAUSAL if mask == "causal" else FULL)
    return compose(tile(problem, TileShape(64, 128)), policy)


def synthetic(program: Program, workers: int, model: Machine, *, split: bool = False, seed: int = 0) -> Trace:
    """What each role would have stamped, every SM with a clock of its own."""
    draw = np.random.default_rng(seed)
    result = simulate(program, workers, model)
    placement = without_idle(result.placement)
    begin, stop, _, grant, landed = result.outcome.times
    trace = Trace(program, placement, np.zeros((0, 0, 0), np.int64), {"us": {"call": result.makespan}})
    rows, count = Rows.of(trace), len(placement.first) - 1
    partial = program.expand().partial
    cost = model.compute + model.partial * partial
    columns = {
        "loaded": begin - 0.5,
        "begun": begin,
        "computed": begin + cost - STAGE,
        "slot": stop - STAGE,
        "staged": stop,
        "left": stop,
        "turn": grant,
        "landed": landed,
    }
    if split:
        columns["turn 1"], columns["landed 1"] = grant, landed
    lengths = np.diff(program.task_first)[placement.chains]
    last = program.task_first[placement.chains + 1] - 1
    end = stop[last]  # every chain of these has tasks
    assert (lengths > 0).all()
    sm = draw.permutation(count)
    ghz, zero = draw.uniform(1.5, 1.9, count), draw.integers(1 << 40, size=count)
    events = np.zeros((count, 2 + max(rows.task_row.max(), rows.chain_row.max()), len(STAMPS)), np.int64)

    def cycles(worker: np.ndarray, us: np.ndarray) -> np.ndarray:
        return zero[worker] + np.round((us + 1) * 1e3 * ghz[worker]).astype(np.int64)

    def write(worker: np.ndarray, row: np.ndarray, name: str, us: np.ndarray) -> None:
        events[worker, row, STAMPS.index(name)] = cycles(worker, us)

    for name, us in columns.items():
        write(rows.task_worker, rows.task_row, name, us)
    for name, us in {"begun": end, "computed": end, "slot": end, "staged": end + HAND_OVER}.items():
        write(rows.chain_worker, rows.chain_row, name, us)
    for name in ("landed", "landed 1") if split else ("landed",):
        write(rows.chain_worker, rows.chain_row, name, end + HAND_OVER + 0.2)
    events[rows.chain_worker, rows.chain_row, STAMPS.index("loaded")] = ORIGIN + np.round(end * 1e3).astype(np.int64)
    every = np.arange(count)
    head = {"sm": sm, "time": np.full(count, ORIGIN), "cycle": cycles(every, np.zeros(count))}
    for name, values in head.items():
        events[:, 0, HEAD.index(name)] = values
    return Trace(program, placement, events, trace.facts)
