"""Nothing runs unverified: a program does every tile once, in an order that exists and cannot deadlock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dash_attn.jit import compiled
from dash_attn.program import Costs, Program, Sequences, Task, TaskArrays, bundles, place, replay
from dash_attn.program.program import Longs, Table
from dash_attn.program.replay import PASSED, STUCK, Replay


class VerifyError(ValueError):
    """A program that must not run; `tasks` are those the message names."""

    def __init__(self, message: str, tasks: tuple[Task, ...] = ()) -> None:
        super().__init__(message)
        self.tasks = tasks


@dataclass(frozen=True)
class Verified:
    """What verification found out: how many workers the order needs at once, and the placement checked, if any."""

    program: Program
    co_resident: int
    placement: Sequences | None


def verify(program: Program, workers: int | None = None, placement: Sequences | None = None) -> Verified:
    """Check a program, and with `workers` (or a placement) that this many co-resident workers finish it."""
    _check_tables(program)
    _check_cover(program)
    _check_turns(program)
    needs = replay(program, bundles(program), Costs(), resident=1)
    if needs.status == STUCK:
        raise VerifyError(*_cycle(program, bundles(program), needs))
    if needs.status == PASSED:
        raise VerifyError(*_passed(program, bundles(program), needs))
    if workers is not None and placement is None:
        if workers < needs.resident:
            raise VerifyError(
                f"deadlock with {workers} co-resident workers: this order needs {needs.resident} "
                f"(policy {program.policy}; a smaller window width needs fewer)"
            )
        placement = place(program, workers)  # gives only what it has replayed
    elif placement is not None:
        _check_placement(program, placement, workers)
    return Verified(program, needs.resident, placement)


def _check_tables(program: Program) -> None:
    g, chains, runs = program.geometry, program.chains, program.runs
    _require(bool((chains[:, 0] >= 0).all() and (chains[:, 0] < g.batch).all()), "a chain's batch is out of range")
    _require(bool((chains[:, 1] >= 0).all() and (chains[:, 1] < g.heads_kv).all()), "a chain's kv head is out of range")
    _require(bool((chains[:, 2] >= 0).all() and (chains[:, 2] < g.num_kv).all()), "a chain's kv tile is out of range")
    expected = g.num_groups * g.num_kv
    ids = (chains[:, 0].astype(np.int64) * g.heads_kv + chains[:, 1]) * g.num_kv + chains[:, 2]
    seen = np.bincount(ids, minlength=expected)
    if (seen != 1).any():
        batch, rest = divmod(int(np.flatnonzero(seen != 1)[0]), g.heads_kv * g.num_kv)
        head, tile = divmod(rest, g.num_kv)
        raise VerifyError(
            f"broken chain: (batch {batch}, kv head {head}, kv tile {tile}) stands {seen[seen != 1][0]} times, not once"
        )
    end = chains[:, 3].astype(np.int64) + chains[:, 4]
    inside = (chains[:, 3] >= 0) & (chains[:, 4] >= 0) & (end <= len(runs))
    if not inside.all():
        raise VerifyError(
            f"broken chain: {_chain(program, int(np.flatnonzero(~inside)[0]))} names runs that do not exist"
        )
    if len(runs):
        last = runs[:, 1].astype(np.int64) + runs[:, 2].astype(np.int64) * (runs[:, 3] - 1)
        _require(bool((runs[:, 3] > 0).all()), "a run has no tasks")
        _require(bool((runs[:, 0] >= 0).all() and (runs[:, 0] < g.group).all()), "a run's head is out of range")
        _require(
            bool((np.minimum(runs[:, 1], last) >= 0).all() and (np.maximum(runs[:, 1], last) < g.num_q).all()),
            "a run leaves the q tiles",
        )
    _require(
        len(program.launch) == expected and np.array_equal(np.sort(program.launch), np.arange(expected)),
        "the launch sequence must hold every chain once",
    )
    first = program.bundle_first
    _require(
        len(first) > 0 and first[0] == 0 and first[-1] == expected and bool((np.diff(first) > 0).all()),
        "bundles must cut the launch sequence into non-empty parts",
    )


def _check_cover(program: Program) -> None:
    """Each chain visits each of its non-empty tiles once per query head of its group, with the right mask flag."""
    g = program.geometry
    state = np.zeros((g.num_kv, g.num_q), np.int8)
    _require(_unroll_tiles(program.tiles, state), "the tile table is broken")
    at = _distinct(program.chains[:, 2:])
    distinct = program.chains[at, 2:]
    kind, row, run, offset = _cover(distinct, program.runs, state, g.group)
    if kind == 0:
        return
    chain = int(at[row])
    if kind == 4:
        head, q = int(run), int(offset)
        kv_tile = int(program.chains[chain, 2])
        name = Task(int(program.chains[chain, 0]), int(program.chains[chain, 1]) * g.group + head, q, kv_tile, -1)
        text = str(name).replace(", turn -1", "")
        raise VerifyError(f"tile missed: {text} is not empty and no task visits it", (name,))
    task = program.task(chain, int(run), int(offset))
    message = {
        1: f"tile done twice: {task} was visited before in its chain",
        2: f"empty tile visited: {task} has nothing to do",
        3: f"wrong mask flag: {task} is {'not ' if task.partial else ''}partial",
    }[int(kind)]
    raise VerifyError(message, (task,))


@compiled
def _unroll_tiles(tiles, state):  # type: ignore[no-untyped-def]
    """Fill in 1 for full and 2 for partial tiles; false if rows of the table overlap or lead outside."""
    num_kv, num_q = state.shape
    for row in range(len(tiles)):
        kv, first, count, partial = tiles[row]
        if kv < 0 or kv >= num_kv or first < 0 or count < 1 or count > num_q - first or partial not in (0, 1):
            return False
        for q in range(first, first + count):
            if state[kv, q] != 0:
                return False
            state[kv, q] = 1 + partial
    return True


@compiled
def _cover(distinct, runs, state, group):  # type: ignore[no-untyped-def]
    """0, or what is wrong (1 twice, 2 empty, 3 flag, 4 missed) with row, run (or head) and offset (or q tile)."""
    num_q = state.shape[1]
    stamp = np.full(group * num_q, -1, np.int64)
    for row in range(len(distinct)):
        kv, first, count = distinct[row]
        visited = 0
        for j in range(first, first + count):
            for o in range(runs[j, 3]):
                q = runs[j, 1] + runs[j, 2] * o
                slot = runs[j, 0] * num_q + q
                if stamp[slot] == row:
                    return 1, row, j, o
                if state[kv, q] == 0:
                    return 2, row, j, o
                if (state[kv, q] == 2) != (runs[j, 6] != 0):
                    return 3, row, j, o
                stamp[slot] = row
                visited += 1
        needed = 0
        for q in range(num_q):
            needed += state[kv, q] != 0
        if visited != needed * group:
            for head in range(group):
                for q in range(num_q):
                    if state[kv, q] != 0 and stamp[head * num_q + q] != row:
                        return 4, row, head, q
    return 0, 0, 0, 0


def _check_turns(program: Program) -> None:
    """In each plane the turns of a dQ tile are 0 .. contributors - 1, each once."""
    g = program.geometry
    by_group = np.lexsort((program.chains[:, 2], program.chains[:, 1], program.chains[:, 0]))
    pattern = program.chains[by_group, 3:].reshape(g.num_groups, -1)
    groups = _distinct(pattern)  # groups that share all runs are checked once
    begin = np.concatenate([[0], np.cumsum(np.tile(program.contributors, g.group), dtype=np.int64)])
    for group in groups.tolist():
        chains = by_group[group * g.num_kv : (group + 1) * g.num_kv]
        kind, chain, run, offset, other, other_run, other_offset = _turns(
            program.chains, chains, program.runs, begin, g.num_q
        )
        if kind == 0:
            continue
        task = program.task(int(chain), int(run), int(offset))
        if kind == 1:
            count = int(program.contributors[task.q_tile])
            raise VerifyError(f"turns are no permutation: {task} is outside 0..{count - 1}", (task,))
        twin = program.task(int(other), int(other_run), int(other_offset))
        raise VerifyError(f"turns are no permutation: {twin} and {task} claim the same turn", (twin, task))


@compiled
def _turns(table, chains, runs, begin, num_q):  # type: ignore[no-untyped-def]
    owner = np.full((begin[-1], 3), -1, np.int32)
    for c in chains:
        for j in range(table[c, 3], table[c, 3] + table[c, 4]):
            for o in range(runs[j, 3]):
                target = runs[j, 0] * num_q + runs[j, 1] + runs[j, 2] * o
                turn = runs[j, 4] + runs[j, 5] * o
                if turn < 0 or turn >= begin[target + 1] - begin[target]:
                    return 1, c, j, o, -1, -1, -1
                at = begin[target] + turn
                if owner[at, 0] >= 0:
                    return 2, c, j, o, owner[at, 0], owner[at, 1], owner[at, 2]
                owner[at, 0], owner[at, 1], owner[at, 2] = c, j, o
    return 0, -1, -1, -1, -1, -1, -1


def _check_placement(program: Program, placement: Sequences, workers: int | None) -> None:
    count = len(placement.first) - 1
    if workers is not None and workers < count:
        raise VerifyError(f"the placement is for {count} workers, only {workers} are co-resident")
    _require(
        np.array_equal(np.sort(placement.chains), np.arange(len(program.chains))),
        "the placement must hold every chain once",
    )
    first = placement.first
    _require(
        len(first) > 1 and first[0] == 0 and first[-1] == len(program.chains) and bool((np.diff(first) >= 0).all()),
        "the placement must cut its chains into the parts of at least one worker",
    )
    outcome = replay(program, placement, Costs())
    if outcome.status == STUCK:
        message, tasks = _cycle(program, placement, outcome)
        raise VerifyError(f"deadlock with {count} co-resident workers: {message}", tasks)


def _cycle(program: Program, sequences: Sequences, outcome: Replay) -> tuple[str, tuple[Task, ...]]:
    """Follow who waits for whom from the first stuck sequence until one comes up again."""
    tasks = program.expand()
    standing = {}
    for s, (position, run, offset) in enumerate(outcome.standing.tolist()):
        if position < sequences.first[s + 1]:
            chain = int(sequences.chains[position])
            done = int(program.runs[program.chains[chain, 3] : run, 3].sum()) + offset
            standing[s] = int(program.task_first[chain]) + done
    holder = np.empty(len(program.chains), np.int64)
    holder[sequences.chains] = np.repeat(np.arange(len(sequences.first) - 1), np.diff(sequences.first))
    awaited, path = dict[int, int](), list[int]()
    s = min(standing)
    while s not in path:
        path.append(s)
        t = standing[s]
        # Turns up to this one are open, so whoever has the one before it is unfinished, and stuck as well.
        awaited[s] = int(np.flatnonzero((tasks.target == tasks.target[t]) & (tasks.turn == tasks.turn[t] - 1))[0])
        s = int(holder[tasks.chain[awaited[s]]])
    ring = path[path.index(s) :]
    parts, named = [], dict[int, Task]()
    for s, after in zip(ring, [*ring[1:], ring[0]], strict=True):
        numbers = (standing[s], awaited[s], standing[after])
        waits, comes, stands = (named.setdefault(t, _task(program, tasks, t)) for t in numbers)
        parts.append(f"{waits} waits for {comes}" + ("" if comes == stands else f", which comes after {stands}"))
    return "the order has a cycle: " + "; ".join(parts), tuple(named.values())


def _task(program: Program, tasks: TaskArrays, t: int) -> Task:
    batch, kv_head, kv_tile = program.chains[tasks.chain[t], :3].tolist()
    q_head = kv_head * program.geometry.group + int(tasks.head[t])
    return Task(batch, q_head, int(tasks.q[t]), kv_tile, int(tasks.turn[t]), bool(tasks.partial[t]))


def _passed(program: Program, sequences: Sequences, outcome: Replay) -> tuple[str, tuple[Task, ...]]:
    position, run, offset = outcome.standing[0].tolist()
    task = program.task(int(sequences.chains[position]), run, offset)
    return f"turns are no permutation: {task} comes after its turn has passed", (task,)


def _distinct(rows: Table) -> Longs:
    """The index of one row of each kind. Rows that differ fall apart by a hash; equal hashes are looked at again."""
    mixed = rows.astype(np.uint64) @ np.random.default_rng(0).integers(1, 2**63, rows.shape[1], np.uint64)
    _, first, kind = np.unique(mixed, return_index=True, return_inverse=True)
    odd = np.flatnonzero((rows != rows[first[kind]]).any(1))
    return np.concatenate([first, odd])


def _chain(program: Program, chain: int) -> str:
    batch, kv_head, kv_tile = program.chains[chain, :3].tolist()
    return f"(batch {batch}, kv head {kv_head}, kv tile {kv_tile})"


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise VerifyError(otherwise)
