"""Panels: every tile is visited once, and turns are complete. Panels that are alike are checked once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dash_attn.program import Chain, Program, Run, Sequences, Task
from dash_attn.program.program import Int32, Longs, numbers
from dash_attn.tiling import TileState
from dash_attn.verify.errors import VerifyError
from dash_attn.verify.tables import States

Bools = npt.NDArray[np.bool_]
BLOCK = 2**18  # tiles that are unrolled at a time: the arrays stay in cache


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

    task: Longs
    opens: Bools


def check_panel(panel: PanelChains, state: States) -> Sums:
    """Raises a VerifyError if a tile is not visited once with the right mask flag, or if turns are no permutation."""
    program, g = panel.program, panel.program.geometry
    kv, size = program.chains[panel.chains, Chain.KV_TILE], g.group * g.num_q
    tasks = panel.tasks
    wrong = tasks != np.count_nonzero(state, axis=1)[kv] * g.group
    if wrong.any():  # there may be more tasks than fit in memory
        raise _cover_error(program, int(panel.chains[wrong][0]), state)
    room = np.tile(program.contributors.astype(np.int64), g.group)
    begin = np.cumsum(room) - room
    task = np.full(tasks.sum(), -1, np.int64)
    opens = np.zeros(len(task) + 1, bool)
    opens[begin] = True
    done, chains_at_once = 0, max(1, BLOCK // max(1, size))
    for first in range(0, len(kv), chains_at_once):
        some = slice(first, first + chains_at_once)
        target, turn, states = _visits(panel, some)
        chain = np.repeat(np.arange(len(kv[some])), tasks[some])
        visited = np.zeros((len(kv[some]), g.group, g.num_q), np.int8)
        visited.reshape(-1)[chain * size + target] = states
        differ = visited != state[kv[some], None]
        if differ.any():
            raise _cover_error(program, int(panel.chains[some][differ.any((1, 2))][0]), state)
        if ((turn < 0) | (turn >= room[target])).any():
            raise _turn_error(panel, room)
        task[begin[target] + turn] = np.arange(done, done + len(turn))
        done += len(turn)
    if (task < 0).any():
        raise _turn_error(panel, room)
    return Sums(task, opens[:-1])


def _visits(panel: PanelChains, some: slice) -> tuple[Longs, Longs, States]:
    """All tasks of some chains: the dQ tile in the group, the turn, and the TileState that the mask flag stands for."""
    runs = panel.program.runs[panel.program.runs_of(panel.chains[some])]
    head, q, step, count, turn, turn_step, partial = runs.T.astype(np.int64)
    states = np.where(partial != 0, TileState.PARTIAL, TileState.FULL).astype(np.int8)
    target = numbers(head * panel.program.geometry.num_q + q, step, count)
    return target, numbers(turn, turn_step, count), np.repeat(states, count)


def _cover_error(program: Program, chain: int, state: States) -> VerifyError:
    """The error of a chain that does not visit each of its non-empty tiles once per query head, with the right flag."""
    batch, kv_head, kv_tile, first, count = program.chains[chain].tolist()
    heads, seen = program.geometry.group, set[tuple[int, int]]()
    for run in range(first, first + count):
        for offset in range(program.runs[run, Run.COUNT]):
            task = program.task(chain, run, offset)
            if (task.q_head, task.q_tile) in seen:
                return VerifyError(f"tile done twice: {task} was visited before in its chain", (task,))
            if state[kv_tile, task.q_tile] == TileState.EMPTY:
                return VerifyError(f"empty tile visited: {task} has nothing to do", (task,))
            if task.partial != (state[kv_tile, task.q_tile] == TileState.PARTIAL):
                return VerifyError(f"wrong mask flag: {task} is {'not ' if task.partial else ''}partial", (task,))
            seen.add((task.q_head, task.q_tile))
    for q_head in range(kv_head * heads, (kv_head + 1) * heads):
        for q_tile in np.flatnonzero(state[kv_tile]).tolist():
            if (q_head, q_tile) not in seen:
                missed = Task(batch, q_head, q_tile, kv_tile, -1)
                text = str(missed).replace(", turn -1", "")
                return VerifyError(f"tile missed: {text} is not empty and no task visits it", (missed,))
    raise AssertionError("the chain is right")


def _turn_error(panel: PanelChains, room: Longs) -> VerifyError:
    """The error of a panel in which the turns of some dQ tile are not 0 .. contributors - 1, each once."""
    target, turn, _ = _visits(panel, slice(None))
    for outside in np.flatnonzero((turn < 0) | (turn >= room[target]))[:1]:
        task = _task(panel, int(outside))
        return VerifyError(f"turns are no permutation: {task} is outside 0..{room[target[outside]] - 1}", (task,))
    slot = (np.cumsum(room) - room)[target] + turn
    by_slot = np.argsort(slot, kind="stable")
    at = int(np.flatnonzero(slot[by_slot][1:] == slot[by_slot][:-1])[0])
    twin, task = (_task(panel, int(number)) for number in by_slot[at : at + 2])
    return VerifyError(f"turns are no permutation: {twin} and {task} claim the same turn", (twin, task))


def _task(panel: PanelChains, number: int) -> Task:
    """A task by its number in the panel."""
    program = panel.program
    runs = program.runs_of(panel.chains)
    end = np.cumsum(program.runs[runs, Run.COUNT], dtype=np.int64)
    run = int(np.searchsorted(end, number, "right"))
    chain = np.searchsorted(np.cumsum(program.chains[panel.chains, Chain.NUM_RUNS]), run, "right")
    offset = number - int(end[run]) + int(program.runs[runs[run], Run.COUNT])
    return program.task(int(panel.chains[chain]), int(runs[run]), offset)
