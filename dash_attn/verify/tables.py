"""The tables of a program are well formed: every number is in its range, and every chain is there once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dash_attn.program import Chain, Program, Run
from dash_attn.program.program import CHAIN_NAME, Int32, Longs, numbers
from dash_attn.tiling import TileState
from dash_attn.verify.errors import VerifyError, require

States = npt.NDArray[np.int8]
BLOCK = 2**18  # tiles or tasks that are unrolled at a time: their arrays stay in cache


def check_tables(program: Program) -> None:
    g, chains, runs = program.geometry, program.chains, program.runs
    require(
        g.heads_kv % g.share == 0, f"{g.heads_kv} panels are no multiple of {g.share}, which add to the same dK and dV"
    )
    for column, end in ((Chain.BATCH, g.batch), (Chain.KV_HEAD, g.heads_kv), (Chain.KV_TILE, g.num_kv)):
        name = column.name.lower().replace("_", " ")
        require(_within(chains[:, column], end), f"a chain's {name} is out of range")
    times = np.bincount(program.groups * g.num_kv + chains[:, Chain.KV_TILE], minlength=g.num_groups * g.num_kv)
    for number in np.flatnonzero(times != 1)[:1].tolist():
        rest, tile = divmod(number, g.num_kv)
        batch, head = divmod(rest, g.heads_kv)
        raise VerifyError(f"broken chain: {_name(batch, head, tile)} stands {times[number]} times, not once")
    # A table may hold any 32-bit number, and sums of them need more bits.
    first, count = (chains[:, column].astype(np.int64) for column in (Chain.FIRST_RUN, Chain.NUM_RUNS))
    for chain in np.flatnonzero((first < 0) | (count < 0) | (first + count > len(runs)))[:1]:
        raise VerifyError(f"broken chain: {_name(*chains[chain, CHAIN_NAME].tolist())} names runs that do not exist")
    first, step, count = (runs[:, column].astype(np.int64) for column in (Run.FIRST_Q, Run.STEP, Run.COUNT))
    require((count > 0).all(), "a run has no tasks")
    require(_within(runs[:, Run.HEAD], g.group), "a run's head is out of range")
    require(_within(first, g.num_q) and _within(first + step * (count - 1), g.num_q), "a run leaves the q tiles")
    once = np.array_equal(np.sort(program.launch), np.arange(len(chains)))
    require(once, "the launch sequence must hold every chain once")
    ends, last = program.bundle_first[[0, -1]].tolist() if len(program.bundle_first) else None, len(program.launch)
    parted = ends == [0, last] and bool((program.bundle_first[1:] > program.bundle_first[:-1]).all())
    require(parted, "bundles must cut the launch sequence into non-empty parts")


def tile_states(program: Program) -> States:
    """The TileState of each tile in the tile table, kv tiles x q tiles."""
    g = program.geometry
    kv, first, count, partial = program.tiles.T.astype(np.int64)
    state = np.zeros((g.num_kv, g.num_q), np.int8)
    known = _within(kv, g.num_kv) and _within(first, g.num_q) and _within(partial, 2)
    # If the rows have more tiles in all than exist, some rows overlap. Such rows are not unrolled, because they may
    # have more tiles than fit in memory.
    fits = known and bool(((count > 0) & (count <= g.num_q - first)).all()) and count.sum() <= state.size
    if fits:
        begin, states = kv * g.num_q + first, np.where(partial, TileState.PARTIAL, TileState.FULL).astype(np.int8)
        for some in pieces(count, BLOCK):
            tiles = numbers(begin[some], np.ones_like(count[some]), count[some])
            state.reshape(-1)[tiles] = np.repeat(states[some], count[some])
    require(fits and np.count_nonzero(state) == count.sum(), "the tile table is broken")
    return state


def pieces(count: Longs, most: int) -> Iterator[slice]:
    """Neighbouring rows that have at most `most` items in all. A row that has more is alone."""
    end, first = np.cumsum(count), 0
    while first < len(count):
        before = end[first] - count[first]
        last = max(first + 1, int(np.searchsorted(end, before + most, "right")))
        yield slice(first, last)
        first = last


def _within(column: Int32 | Longs, end: int) -> bool:
    return bool(((column >= 0) & (column < end)).all())


def _name(batch: int, kv_head: int, kv_tile: int) -> str:
    return f"(batch {batch}, kv head {kv_head}, kv tile {kv_tile})"
