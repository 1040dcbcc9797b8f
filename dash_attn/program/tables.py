"""build(order, queue) -> Program: run-length coding of the templates."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dash_attn.order import Order, Template
from dash_attn.program.program import CHAIN, RUN, TILE, Chain, Geometry, Int32, Longs, Program, Queue, Run, Tile
from dash_attn.tiling import TileState, Tiling

Bools = npt.NDArray[np.bool_]


def build(order: Order, queue: Queue) -> Program:
    """Freeze an order and its launch queue into tables."""
    tiling = order.tiling
    problem, shape = tiling.problem, tiling.shape
    share = problem.group // tiling.heads
    coded = [encode(template, tiling) for template in order.templates]
    run_begin = np.concatenate([[0], np.cumsum([len(runs) for runs, _ in coded])])

    panels, in_batch = np.arange(tiling.panels), problem.heads_q // tiling.heads
    runs_of = np.stack([first for _, first in coded])[order.template_of]  # panel x (num_kv + 1)
    chains = np.empty((len(panels), tiling.num_kv, len(CHAIN)), np.int32)
    chains[..., Chain.BATCH] = (panels // in_batch)[:, None]
    chains[..., Chain.KV_HEAD] = (panels % in_batch)[:, None]
    chains[..., Chain.KV_TILE] = np.arange(tiling.num_kv)
    chains[..., Chain.FIRST_RUN] = run_begin[order.template_of][:, None] + runs_of[:, :-1]
    chains[..., Chain.NUM_RUNS] = np.diff(runs_of)
    return Program(
        Geometry(problem.batch, in_batch, tiling.heads, problem.len_q, problem.len_k, shape.m, shape.n, share),
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
    """Runs of a template (columns RUN), and the first run of each chain (one more at the end).

    Each run is as long as it can be. A run of one task has step 1 and turn step 0.
    """
    head, q, turn = (column.astype(np.int32) for column in (template.head, template.q, template.turn))
    chain = np.repeat(np.arange(tiling.num_kv), np.diff(template.first))
    kind = tiling.state.reshape(-1).take(chain * tiling.num_q + q)
    alike = (chain.astype(np.int32) * tiling.heads + head) * len(TileState) + kind
    move, turn_move = np.zeros_like(q), np.zeros_like(q)  # from the task before
    move[1:], turn_move[1:] = q[1:] - q[:-1], turn[1:] - turn[:-1]
    linked = np.abs(move) == 1
    linked[1:] &= alike[1:] == alike[:-1]
    begins = ~linked
    begins[_cuts(linked, move, turn_move)] = True
    begin = np.flatnonzero(begins)
    count = np.diff(begin, append=len(q))
    runs = np.empty((len(begin), len(RUN)), np.int32)
    runs[:, Run.HEAD], runs[:, Run.FIRST_Q], runs[:, Run.COUNT] = head[begin], q[begin], count
    runs[:, Run.TURN], runs[:, Run.PARTIAL] = turn[begin], kind[begin] == TileState.PARTIAL
    second = np.where(count > 1, begin + 1, begin)
    runs[:, Run.STEP], runs[:, Run.TURN_STEP] = np.where(count > 1, move[second], 1), (turn[second] - turn[begin])
    return runs, np.searchsorted(begin, template.first)


def _cuts(linked: Bools, move: Int32, turn_move: Int32) -> Longs:
    """Which links are cut, so that all links of a run have the same moves.

    A stretch of equal links is one run. The link to the task after the run is cut. It is the first link of the next
    stretch, if links go on. If it is the only link of that stretch, the stretch after it keeps all its links. So a
    stretch that follows another loses its first link, and of stretches of one link in a row every other does.
    """
    same = linked.copy()
    same[1:] &= linked[:-1] & (move[1:] == move[:-1]) & (turn_move[1:] == turn_move[:-1])
    first = np.flatnonzero(linked & ~same)
    follows, single = linked[first - 1], ~np.append(same, False)[first + 1]
    in_a_row = follows.copy()
    in_a_row[1:] &= single[:-1]
    number = np.arange(len(first))
    since = np.maximum.accumulate(np.where(in_a_row, 0, number))
    cuts: Longs = first[follows[since] ^ ((number - since) & 1 == 1)]
    return cuts


def tile_table(tiling: Tiling) -> Int32:
    """Runs of equal, non-empty state along each kv tile (columns TILE)."""
    state = tiling.state
    begins = np.ones(state.shape, bool)
    begins[:, 1:] = state[:, 1:] != state[:, :-1]
    begin = np.flatnonzero(begins)
    kind = state.reshape(-1)[begin]
    table = np.empty((len(begin), len(TILE)), np.int32)
    table[:, Tile.KV_TILE], table[:, Tile.FIRST_Q] = np.divmod(begin, max(1, tiling.num_q))
    table[:, Tile.COUNT], table[:, Tile.PARTIAL] = np.diff(begin, append=state.size), kind == TileState.PARTIAL
    not_empty: Int32 = table[kind != TileState.EMPTY]
    return not_empty
