"""build(schedule) -> Program: run-length coding of the templates."""

from __future__ import annotations

import numpy as np

from dash_attn.jit import compiled
from dash_attn.order.types import Schedule, Template
from dash_attn.program.program import Geometry, Longs, Program, Table
from dash_attn.tiling import TileState, Tiling


def build(schedule: Schedule) -> Program:
    """Freeze a schedule into tables."""
    tiling = schedule.tiling
    problem, shape = tiling.problem, tiling.shape
    coded = [encode(template, tiling) for template in schedule.templates]
    run_begin = np.concatenate([[0], np.cumsum([len(runs) for runs, _ in coded])])

    groups = np.arange(problem.groups)
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
    runs, first = _cut(template.first, template.head, template.q, template.turn, tiling.state)
    return runs.copy(), first


@compiled
def _cut(first, head, q, turn, state):  # type: ignore[no-untyped-def]
    """Greedy, longest runs; the steps of one with a single task are 1 and 0."""
    runs, run_first = np.empty((len(q), 7), np.int32), np.empty(len(first), np.int64)
    r = 0
    for chain in range(len(first) - 1):
        run_first[chain] = r
        t = first[chain]
        while t < first[chain + 1]:
            step, turn_step, kind, u = 1, 0, state[chain, q[t]], t + 1
            while u < first[chain + 1] and head[u] == head[t] and (state[chain, q[u]] == kind):
                move, turn_move = q[u] - q[u - 1], turn[u] - turn[u - 1]
                if abs(move) != 1 or (u > t + 1 and (move != step or turn_move != turn_step)):
                    break
                step, turn_step = move, turn_move
                u += 1
            runs[r, 0], runs[r, 1], runs[r, 2], runs[r, 3] = head[t], q[t], step, u - t
            runs[r, 4], runs[r, 5], runs[r, 6] = turn[t], turn_step, kind == TileState.PARTIAL
            t = u
            r += 1
    run_first[-1] = r
    return runs[:r], run_first


def tile_table(tiling: Tiling) -> Table:
    """Runs of equal, non-empty state along each kv tile (columns TILE)."""
    table: Table = _cut_tiles(tiling.state, tiling.spans).copy()
    return table


@compiled
def _cut_tiles(state, spans):  # type: ignore[no-untyped-def]
    table = np.empty((spans[:, 2].sum(), 4), np.int32)
    row = 0
    for kv in range(len(spans)):
        q = spans[kv, 0]
        while q < spans[kv, 1]:
            kind, end = state[kv, q], q + 1
            while end < spans[kv, 1] and state[kv, end] == kind:
                end += 1
            if kind != TileState.EMPTY:
                table[row, 0], table[row, 1], table[row, 2], table[row, 3] = kv, q, end - q, kind == TileState.PARTIAL
                row += 1
            q = end
    return table[:row]
