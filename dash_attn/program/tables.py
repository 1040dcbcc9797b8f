"""build(order, queue) -> Program: run-length coding of the templates."""

from __future__ import annotations

import numpy as np

from dash_attn.jit import compiled
from dash_attn.order import Order, Template
from dash_attn.program.program import CHAIN, RUN, TILE, Chain, Geometry, Int32, Longs, Program, Queue, Run, Tile
from dash_attn.tiling import Span, TileState, Tiling


def build(order: Order, queue: Queue) -> Program:
    """Freeze an order and its launch queue into tables."""
    tiling = order.tiling
    problem, shape = tiling.problem, tiling.shape
    coded = [encode(template, tiling) for template in order.templates]
    run_begin = np.concatenate([[0], np.cumsum([len(runs) for runs, _ in coded])])

    groups = np.arange(problem.groups)
    runs_of = np.stack([first for _, first in coded])[order.template_of]  # group x (num_kv + 1)
    chains = np.empty((len(groups), tiling.num_kv, len(CHAIN)), np.int32)
    chains[..., Chain.BATCH] = (groups // problem.heads_kv)[:, None]
    chains[..., Chain.KV_HEAD] = (groups % problem.heads_kv)[:, None]
    chains[..., Chain.KV_TILE] = np.arange(tiling.num_kv)
    chains[..., Chain.FIRST_RUN] = run_begin[order.template_of][:, None] + runs_of[:, :-1]
    chains[..., Chain.NUM_RUNS] = np.diff(runs_of)
    return Program(
        Geometry(problem.batch, problem.heads_kv, problem.group, problem.len_q, problem.len_k, shape.m, shape.n),
        str(order.choice),
        str(problem.mask),
        queue.place,
        tile_table(tiling),
        chains.reshape(-1, len(CHAIN)),
        np.concatenate([runs for runs, _ in coded]),
        queue.chains.astype(np.int32),
        queue.bundle_first.astype(np.int32),
    )


def encode(template: Template, tiling: Tiling) -> tuple[Int32, Longs]:
    """Runs of a template (columns RUN), and the first run of each chain (one more at the end)."""
    runs, first = _cut(template.first, template.head, template.q, template.turn, tiling.state)
    return runs.copy(), first


@compiled
def _cut(first, head, q, turn, state):  # type: ignore[no-untyped-def]
    """Each run is as long as it can be. A run of one task has step 1 and turn step 0."""
    runs, run_first = np.empty((len(q), len(RUN)), np.int32), np.empty(len(first), np.int64)
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
            runs[r, Run.HEAD], runs[r, Run.FIRST_Q] = head[t], q[t]
            runs[r, Run.STEP], runs[r, Run.COUNT] = step, u - t
            runs[r, Run.TURN], runs[r, Run.TURN_STEP] = turn[t], turn_step
            runs[r, Run.PARTIAL] = kind == TileState.PARTIAL
            t = u
            r += 1
    run_first[-1] = r
    return runs[:r], run_first


def tile_table(tiling: Tiling) -> Int32:
    """Runs of equal, non-empty state along each kv tile (columns TILE)."""
    table: Int32 = _cut_tiles(tiling.state, tiling.spans).copy()
    return table


@compiled
def _cut_tiles(state, spans):  # type: ignore[no-untyped-def]
    table = np.empty((spans[:, Span.COUNT].sum(), len(TILE)), np.int32)
    row = 0
    for kv in range(len(spans)):
        q = spans[kv, Span.FIRST]
        while q < spans[kv, Span.END]:
            kind, end = state[kv, q], q + 1
            while end < spans[kv, Span.END] and state[kv, end] == kind:
                end += 1
            if kind != TileState.EMPTY:
                table[row, Tile.KV_TILE], table[row, Tile.FIRST_Q], table[row, Tile.COUNT] = kv, q, end - q
                table[row, Tile.PARTIAL] = kind == TileState.PARTIAL
                row += 1
            q = end
    return table[:row]
