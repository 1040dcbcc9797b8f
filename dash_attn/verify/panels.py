"""Panels: every tile is visited once, and turns are complete. Panels that are alike are checked once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dash_attn.program import Chain, Program, Run, Sequences, Task, Tile
from dash_attn.program.program import Int32, Longs, numbers, unroll
from dash_attn.tiling import TileState
from dash_attn.verify.errors import VerifyError
from dash_attn.verify.tables import BLOCK, States, pieces

Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.signedinteger[Any]]  # of as few bytes as hold them: a panel may have millions of tasks


@dataclass(frozen=True, eq=False)
class PanelChains:
    """The chains of one panel, in launch order. `starts` says which of them begin a bundle."""

    program: Program
    chains: Int32
    starts: Bools

    @property
    def tasks(self) -> Longs:
        """The number of tasks of each chain."""
        counts: Longs = np.diff(self.program.task_first)[self.chains]
        return counts

    @property
    def bundles(self) -> Sequences:
        first = np.concatenate([np.flatnonzero(self.starts), [len(self.chains)]]).astype(np.int32)
        return Sequences(first, self.chains)


def panels(program: Program) -> tuple[list[PanelChains], Longs]:
    """The kinds of panels, which differ in their runs, launch or bundles, and the number of the kind of each panel."""
    g = program.geometry
    chains = program.launch[np.argsort(program.groups[program.launch], kind="stable")]
    starts = np.zeros(len(chains), bool)
    starts[program.launch[program.bundle_first[:-1]]] = True
    by_group = chains.reshape(g.num_groups, g.num_kv)
    rows = np.concatenate([program.chains[by_group, Chain.KV_TILE :], starts[by_group, None]], 2, dtype=np.int32)
    keys = rows.reshape(g.num_groups, -1)
    if (keys == keys[0]).all():
        first, kind_of = np.zeros(1, np.int64), np.zeros(len(keys), np.int64)
    else:
        _, first, kind_of = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return [PanelChains(program, by_group[group], starts[by_group[group]]) for group in first], kind_of.reshape(-1)


@dataclass(frozen=True, eq=False)
class Sums:
    """The contributions of a panel, sorted by dQ tile and then by turn.

    `task` is the number of the contributing task. The tasks of a panel are numbered in launch order. `opens` marks the
    first contribution of each sum.
    """

    task: Numbers
    opens: Bools


class Visits(NamedTuple):
    """Neighbouring tasks of a panel: the number of the first one, and the dQ tile in the group and the turn of each."""

    first: int
    target: Longs
    turn: Longs


def check_panel(panel: PanelChains, state: States) -> Sums:
    """Raises a VerifyError if a tile is not visited once with the right mask flag, or if turns are no permutation."""
    program, g = panel.program, panel.program.geometry
    kv, tasks, tiles = program.chains[panel.chains, Chain.KV_TILE], panel.tasks, program.tiles
    wrong = tasks != (np.bincount(tiles[:, Tile.KV_TILE], tiles[:, Tile.COUNT], g.num_kv) * g.group)[kv]
    if wrong.any():  # there may be more tasks than fit in memory
        raise _cover_error(program, int(panel.chains[wrong][0]), state)
    room = np.tile(program.contributors.astype(np.int64), g.group)
    begin, total = np.cumsum(room) - room, int(tasks.sum())
    task = np.full(total, -1, np.min_scalar_type(-1 - total))
    for first, target, turn in _checked_visits(panel, state):
        if ((turn < 0) | (turn >= room[target])).any():
            raise _turn_error(panel, room)
        task[begin[target] + turn] = np.arange(first, first + len(turn))
    if task.min(initial=0) < 0:
        raise _turn_error(panel, room)
    opens = np.zeros(total + 1, bool)
    opens[begin] = True
    return Sums(task, opens[:-1])


def _checked_visits(panel: PanelChains, state: States) -> Iterator[Visits]:
    """All tasks of a panel, some chains at a time. Raises a VerifyError if a tile is not visited once."""
    program, g = panel.program, panel.program.geometry
    kv, tasks, size, first = program.chains[panel.chains, Chain.KV_TILE], panel.tasks, g.group * g.num_q, 0
    for some in pieces(np.full(len(kv), max(1, size)), BLOCK):
        target, turn, states = _visits(panel, panel.chains[some])
        chain = np.repeat(np.arange(len(kv[some])), tasks[some])
        visited = np.zeros((len(kv[some]), g.group, g.num_q), np.int8)
        visited.reshape(-1)[chain * size + target] = states
        differ = visited != state[kv[some], None]
        if differ.any():
            raise _cover_error(program, int(panel.chains[some][differ.any((1, 2))][0]), state)
        yield Visits(first, target, turn)
        first += len(turn)


def _visits(panel: PanelChains, chains: Int32) -> tuple[Longs, Longs, States]:
    """All tasks of some chains: the dQ tile in the group, the turn, and the TileState that the mask flag stands for."""
    runs = panel.program.runs[panel.program.runs_of(chains)]
    head, q, step, count, turn, turn_step, partial = runs.T.astype(np.int64)
    states = np.where(partial != 0, TileState.PARTIAL, TileState.FULL).astype(np.int8)
    target = numbers(head * panel.program.geometry.num_q + q, step, count)
    return target, numbers(turn, turn_step, count), np.repeat(states, count)


def _cover_error(program: Program, chain: int, state: States) -> VerifyError:
    """The error of a chain that does not visit each of its non-empty tiles once per query head, with the right flag."""
    batch, kv_head, kv_tile, first, _ = program.chains[chain].tolist()
    heads, num_q, runs = program.geometry.group, program.geometry.num_q, program.runs_of(np.array([chain]))
    rows = program.runs[runs].copy()
    # Among as many tasks and one more, one has the tile of another. More need not be unrolled.
    begin = np.cumsum(rows[:, Run.COUNT], dtype=np.int64) - rows[:, Run.COUNT]
    rows = rows[begin <= heads * num_q]
    rows[:, Run.COUNT] = np.minimum(rows[:, Run.COUNT], heads * num_q + 1 - begin[: len(rows)])
    head, q, _, partial = unroll(rows)
    twice, stated = np.ones(len(q), bool), state[kv_tile, q]
    twice[np.unique(head * num_q + q, return_index=True)[1]] = False
    flag = np.where(partial != 0, TileState.PARTIAL, TileState.FULL)
    for at in np.flatnonzero(twice | (stated != flag))[:1].tolist():
        run = int(np.searchsorted(begin, at, "right")) - 1
        task = program.task(chain, first + run, at - int(begin[run]))
        if twice[at]:
            return VerifyError(f"tile done twice: {task} was visited before in its chain", (task,))
        if stated[at] == TileState.EMPTY:
            return VerifyError(f"empty tile visited: {task} has nothing to do", (task,))
        return VerifyError(f"wrong mask flag: {task} is {'not ' if task.partial else ''}partial", (task,))
    left = np.tile(state[kv_tile] != TileState.EMPTY, (heads, 1))
    left[head, q] = False
    for missed_head, q_tile in np.argwhere(left)[:1].tolist():
        missed = Task(batch, kv_head * heads + missed_head, q_tile, kv_tile, -1)
        text = str(missed).replace(", turn -1", "")
        return VerifyError(f"tile missed: {text} is not empty and no task visits it", (missed,))
    raise AssertionError("the chain is right")


def _turn_error(panel: PanelChains, room: Longs) -> VerifyError:
    """The error of a panel in which the turns of some dQ tile are not 0 .. contributors - 1, each once."""
    for first, target, turn in _all_visits(panel):
        for outside in np.flatnonzero((turn < 0) | (turn >= room[target]))[:1]:
            task = _task(panel, first + int(outside))
            return VerifyError(f"turns are no permutation: {task} is outside 0..{room[target[outside]] - 1}", (task,))
    # All turns of a sum are inside it, so each slot that nobody claims has a twin that two tasks claim.
    begin = np.cumsum(room) - room
    claims = np.zeros(room.sum(), np.int8)
    for _, target, turn in _all_visits(panel):
        slots, times = np.unique(begin[target] + turn, return_counts=True)
        claims[slots] = np.minimum(claims[slots] + times, 2)
    twice = int(np.argmax(claims > 1))
    claimants = [
        first + each
        for first, target, turn in _all_visits(panel)
        for each in np.flatnonzero(begin[target] + turn == twice)[:2].tolist()
    ]
    twin, task = (_task(panel, number) for number in claimants[:2])
    return VerifyError(f"turns are no permutation: {twin} and {task} claim the same turn", (twin, task))


def _all_visits(panel: PanelChains) -> Iterator[Visits]:
    """All tasks of a panel, some chains at a time."""
    first = 0
    for some in pieces(panel.tasks, BLOCK):
        target, turn, _ = _visits(panel, panel.chains[some])
        yield Visits(first, target, turn)
        first += len(turn)


def _task(panel: PanelChains, number: int) -> Task:
    """A task by its number in the panel."""
    program = panel.program
    runs = program.runs_of(panel.chains)
    end = np.cumsum(program.runs[runs, Run.COUNT], dtype=np.int64)
    run = int(np.searchsorted(end, number, "right"))
    chain = np.searchsorted(np.cumsum(program.chains[panel.chains, Chain.NUM_RUNS]), run, "right")
    offset = number - int(end[run]) + int(program.runs[runs[run], Run.COUNT])
    return program.task(int(panel.chains[chain]), int(runs[run]), offset)
