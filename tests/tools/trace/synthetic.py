"""Events as a GPU would leave them, made from a simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dash_attn.backends.sm90.config import HEAD, STAMPS
from dash_attn.launch import compose
from dash_attn.pack import Pack
from dash_attn.problem import CAUSAL, FULL, Problem, documents
from dash_attn.program import Program
from dash_attn.simulate import Machine, Tickets, simulate
from dash_attn.simulate.simulation import Work
from dash_attn.tiling import TileShape, tile
from dash_attn.tools.trace.measured import EventRows
from dash_attn.tools.trace.record import PACK, Trace, facts_of_pack, without_idle

HAND_OVER, STAGE = 0.3, 0.1  # of a chain's end, and of a task's dQ
ORIGIN = 7_000_000_000_000_000_000 // 4


def program_of(mask: str = "causal", policy: str = "auto", length: int = 1024) -> Program:
    problem = Problem(2, 4, 4, length, length, mask=CAUSAL if mask == "causal" else FULL)
    return compose(tile(problem, TileShape(64, 128)), policy)


def cut_program() -> Program:
    """Grouped heads: each q head has chains of its own, which end with parts of dV and dK."""
    return compose(tile(Problem(2, 4, 2, 1024, 1024, mask=CAUSAL), TileShape(64, 128)), "auto@head")


def pack_of_documents(policy: str = "auto") -> Pack:
    cu = [0, 700, 710, 1400, 1400, 2048]
    problem = Problem(1, 4, 2, cu[-1], cu[-1], mask=documents(cu, causal=True))
    return Pack(problem, lambda _: TileShape(64, 128), policy)


def packed_trace(workers: int, model: Machine) -> Trace:
    pack = pack_of_documents()
    trace = synthetic(Tickets.of(pack), workers, model)
    return replace(trace, facts=trace.facts | {PACK: facts_of_pack(pack)})


def synthetic(program: Work, workers: int, model: Machine, *, split: bool = False, seed: int = 0) -> Trace:
    """What each role would have stamped, every SM with a clock of its own."""
    draw = np.random.default_rng(seed)
    result = simulate(program, workers, model)
    placement = without_idle(result.placement)
    trace = Trace(program, placement, np.zeros((0, 0, 0), np.int64), {"us": {"call": result.makespan}})
    board = trace.board
    begin, stop, _, grant, landed = result.outcome.times[:, : board.num_tasks]
    rows, count = EventRows.of(trace), len(placement.first) - 1
    cost = model.compute + model.partial * board.tasks().partial
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
    lengths = np.diff(board.task_first)[placement.chains]
    end = stop[board.task_first[placement.chains + 1] - 1]  # every chain of these has tasks
    assert (lengths > 0).all()
    sm = draw.permutation(count)
    ghz, zero = draw.uniform(1.5, 1.9, count), draw.integers(1 << 40, size=count)
    events = np.zeros((count, 2 + rows.most, len(STAMPS)), np.int64)

    def cycles(worker: np.ndarray, us: np.ndarray) -> np.ndarray:
        return zero[worker] + np.round((us + 1) * 1e3 * ghz[worker]).astype(np.int64)

    def write(worker: np.ndarray, row: np.ndarray, name: str, us: np.ndarray) -> None:
        events[worker, row, STAMPS.index(name)] = cycles(worker, us)

    for name, us in columns.items():
        write(rows.task_worker, rows.task_row, name, us)
    names = ("computed", "slot", "staged", "turn", "landed", *(("turn 1", "landed 1") if split else ()))
    over = end + HAND_OVER
    times = np.stack([end, end, over, over, over + 0.2])[..., None]  # one store, which has no turn
    if board.parts:
        times = result.outcome.times[:, board.num_tasks :].reshape(5, -1, board.parts)[:, placement.chains]
        times[2] = times[1]  # the consumers are done when a part is staged
    for name, us in zip(names, (*times, *times[3:]), strict=False):
        for part in range(us.shape[1]):
            write(rows.chain_worker, rows.end_row[:, part], name, us[:, part])
    first = rows.chain_worker, rows.end_row[:, 0]
    write(*first, "begun", end)
    events[(*first, STAMPS.index("loaded"))] = ORIGIN + np.round(end * 1e3).astype(np.int64)
    every = np.arange(count)
    head = {"sm": sm, "time": np.full(count, ORIGIN), "cycle": cycles(every, np.zeros(count))}
    for name, values in head.items():
        events[:, 0, HEAD.index(name)] = values
    return Trace(program, placement, events, trace.facts)
