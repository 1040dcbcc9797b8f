"""build(schedule) -> Program: run-length coding of the templates."""

from __future__ import annotations

import numpy as np

from dash_attn.jit import compiled
from dash_attn.program.program import Geometry, Longs, Program, Table
from dash_attn.schedule.types import Schedule, Template
from dash_attn.tiling import TileState, Tiling


def build(schedule: Schedule) -> Program:
    """Freeze a schedule into tables."""
    tiling = schedule.tiling
    problem, shape = tiling.problem, tiling.shape
    coded = [encode(template, tiling) for template in schedule.templates]
    run_begin = np.concatenate([[0], np.cumsum([len(runs) for runs, _ in coded])])

    groups = np.arange(problem.batch * problem.heads_kv)
    runs_of = np.stack([first for _, first in coded])[schedule.template_of]  # group x (num_kv + 1)
    chains = np.empty((len(groups), tiling.num_kv, 5), np.int32)
    chains[..., 0] = (groups // problem.heads_kv)[:, None]
    chains[..., 1] = (groups % problem.heads_kv)[:, None]
    chains[..., 2] = np.arange(tiling.num_kv)
    chains[..., 3] = run_begin[schedule.template_of][:, None] + runs_of[:, :-1]
    chains[..., 4] = np.diff(runs_of)
    return Program(
        Geometry(problem.batch, problem.heads_kv, problem.group, problem.len_q, problem.len_k, shape.m, shape.n),
        str(schedule.choice),
        str(problem.mask),
        schedule.place,
        tile_table(tiling),
        chains.reshape(-1, 5),
        np.concatenate([runs for runs, _ in coded]),
        schedule.launch.astype(np.int32),
        schedule.bundle_first.astype(np.int32),
    )


def encode(template: Template, tiling: Tiling) -> tuple[Table, Longs]:
    """Runs of a template (columns RUN), and the first run of each chain (one more at the end)."""
    chain = np.repeat(np.arange(tiling.num_kv), np.diff(template.first))
    partial = (tiling.state[chain, template.q] == TileState.PARTIAL).astype(np.int64)
    tasks = np.stack([chain, template.head, partial, template.q, template.turn])
    begin, step, turn_step = _cut(tasks)
    runs = np.stack(
        [
            template.head[begin],
            template.q[begin],
            step,
            np.diff(np.append(begin, len(chain))),
            template.turn[begin],
            turn_step,
            partial[begin],
        ],
        axis=1,
    )
    return runs.astype(np.int32), np.searchsorted(begin, template.first)


@compiled
def _cut(tasks: Longs) -> tuple[Longs, Longs, Longs]:
    """Greedy, longest runs: where each begins, and its two steps (1 and 0 where it has one task)."""
    total = tasks.shape[1]
    begin, step, turn_step = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    runs, t = 0, 0
    while t < total:
        begin[runs], step[runs], turn_step[runs] = t, 1, 0
        length = 1
        while t + length < total:
            u = t + length
            same = tasks[0, u] == tasks[0, t] and tasks[1, u] == tasks[1, t] and tasks[2, u] == tasks[2, t]
            move, turn_move = tasks[3, u] - tasks[3, u - 1], tasks[4, u] - tasks[4, u - 1]
            if not same or abs(move) != 1 or (length > 1 and (move != step[runs] or turn_move != turn_step[runs])):
                break
            step[runs], turn_step[runs] = move, turn_move
            length += 1
        t += length
        runs += 1
    return begin[:runs], step[:runs], turn_step[:runs]


def tile_table(tiling: Tiling) -> Table:
    """Runs of equal, non-empty state along each kv tile (columns TILE)."""
    edge = np.zeros((tiling.num_kv, 1), np.uint8)
    padded = np.concatenate([edge, tiling.state, edge], axis=1)
    kv, at = np.nonzero(padded[:, 1:] != padded[:, :-1])
    begin = padded[kv, at + 1] != 0
    # Between two changes of one row the state is constant, so a run ends at the next change.
    length = np.diff(at, append=0)
    state = padded[kv, at + 1]
    rows = np.stack([kv, at, length, state == TileState.PARTIAL], axis=1)[begin]
    table: Table = rows.astype(np.int32).reshape(-1, 4)
    return table
