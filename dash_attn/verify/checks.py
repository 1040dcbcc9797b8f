"""verify: a Program visits every tile once, its turns are complete, and it cannot deadlock. Nothing runs unverified."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from dash_attn.jit import compiled
from dash_attn.launch import place
from dash_attn.program import Chain, Program, Replay, Run, Sequences, Task, play
from dash_attn.program.program import CHAIN_NAME, Longs
from dash_attn.program.replay import PASSED, STUCK
from dash_attn.tiling import TileState


class VerifyError(ValueError):
    """A program that must not run. `tasks` are the tasks that the message names."""

    def __init__(self, message: str, tasks: tuple[Task, ...] = ()) -> None:
        super().__init__(message)
        self.tasks = tasks


class TooFewWorkers(VerifyError):
    """The program is right, but its chains wait for each other and need `needed` workers at once."""

    def __init__(self, policy: str, needed: int, workers: int) -> None:
        super().__init__(
            f"this order needs {needed} co-resident workers, {workers} are there "
            f"(policy {policy}; a smaller window width needs fewer)"
        )
        self.needed, self.workers = needed, workers


@dataclass(frozen=True, eq=False)
class Verified:
    """A program that may run. `co_resident` is how many workers it needs at once."""

    program: Program
    co_resident: int

    def on(self, workers: int) -> Placed:
        """Place it on `workers` co-resident workers. Whether they are enough is decided here and nowhere else."""
        if workers < max(1, self.co_resident):
            raise TooFewWorkers(self.program.policy, max(1, self.co_resident), workers)
        return Placed(self.program, self.co_resident, place(self.program, workers, self.co_resident))

    def placed(self, placement: Sequences) -> Placed:
        """Check a placement made elsewhere."""
        _check_placement(self.program, placement)
        return Placed(self.program, self.co_resident, placement)


@dataclass(frozen=True, eq=False)
class Placed:
    """A verified program with a placement that finishes."""

    program: Program
    co_resident: int
    placement: Sequences

    @property
    def workers(self) -> int:
        return len(self.placement.first) - 1


def verify(program: Program) -> Verified:
    """Check a program. VerifyError says what is wrong, and names tasks where it can."""
    _check_tables(program)
    _check_cover(program)
    return Verified(program, min(1, program.num_bundles) if _needs_one(program) else _needs(program))


# ---- the tables are well formed ----------------------------------------------------------------------------


class Fault(IntEnum):
    """What the first look at the tables finds."""

    NONE = 0
    BATCH = 1
    KV_HEAD = 2
    KV_TILE = 3
    NOT_ONCE = 4
    NO_SUCH_RUN = 5
    RUN_EMPTY = 6
    RUN_HEAD = 7
    RUN_TILES = 8
    LAUNCH = 9
    BUNDLES = 10


SAID = {
    Fault.BATCH: "a chain's batch is out of range",
    Fault.KV_HEAD: "a chain's kv head is out of range",
    Fault.KV_TILE: "a chain's kv tile is out of range",
    Fault.RUN_EMPTY: "a run has no tasks",
    Fault.RUN_HEAD: "a run's head is out of range",
    Fault.RUN_TILES: "a run leaves the q tiles",
    Fault.LAUNCH: "the launch sequence must hold every chain once",
    Fault.BUNDLES: "bundles must cut the launch sequence into non-empty parts",
}


def _check_tables(program: Program) -> None:
    g = program.geometry
    times = np.zeros(g.num_groups * g.num_kv, np.int64)
    fault, chain = _first_fault(program.chains, program.runs, program.launch, program.bundle_first, g.sizes, times)
    if fault is Fault.NOT_ONCE:
        batch, rest = divmod(int(chain), g.heads_kv * g.num_kv)
        head, tile = divmod(rest, g.num_kv)
        name = f"(batch {batch}, kv head {head}, kv tile {tile})"
        raise VerifyError(f"broken chain: {name} stands {times[chain]} times, not once")
    if fault is Fault.NO_SUCH_RUN:
        batch, kv_head, kv_tile = program.chains[chain, CHAIN_NAME].tolist()
        name = f"(batch {batch}, kv head {kv_head}, kv tile {kv_tile})"
        raise VerifyError(f"broken chain: {name} names runs that do not exist")
    if fault is not Fault.NONE:
        raise VerifyError(SAID[fault])


@compiled
def _first_fault(chains, runs, launch, bundle_first, sizes, times):  # type: ignore[no-untyped-def]
    """A Fault, and the chain it is about. `times` becomes how often each chain stands in the table.

    A table may hold any 32-bit number: int() keeps sums of them from overflowing.
    """
    batch, heads_kv, group, num_q, num_kv = sizes
    for c in range(len(chains)):
        in_batch, kv_head, kv_tile = chains[c, Chain.BATCH], chains[c, Chain.KV_HEAD], chains[c, Chain.KV_TILE]
        if not 0 <= in_batch < batch:
            return Fault.BATCH, c
        if not 0 <= kv_head < heads_kv:
            return Fault.KV_HEAD, c
        if not 0 <= kv_tile < num_kv:
            return Fault.KV_TILE, c
        times[(int(in_batch) * heads_kv + kv_head) * num_kv + kv_tile] += 1
    for c in range(len(times)):
        if times[c] != 1:
            return Fault.NOT_ONCE, c
    for c in range(len(chains)):
        first, count = int(chains[c, Chain.FIRST_RUN]), int(chains[c, Chain.NUM_RUNS])
        if first < 0 or count < 0 or first + count > len(runs):
            return Fault.NO_SUCH_RUN, c
    for j in range(len(runs)):
        first, step, count = int(runs[j, Run.FIRST_Q]), int(runs[j, Run.STEP]), int(runs[j, Run.COUNT])
        if count <= 0:
            return Fault.RUN_EMPTY, 0
        if not 0 <= runs[j, Run.HEAD] < group:
            return Fault.RUN_HEAD, 0
        if not (0 <= first < num_q and 0 <= first + step * (count - 1) < num_q):
            return Fault.RUN_TILES, 0
    launched = np.zeros(len(times), np.bool_)
    for c in launch:
        if not 0 <= c < len(times) or launched[c]:
            return Fault.LAUNCH, 0
        launched[c] = True
    if len(launch) != len(times):
        return Fault.LAUNCH, 0
    if len(bundle_first) == 0 or bundle_first[0] != 0 or bundle_first[-1] != len(launch):
        return Fault.BUNDLES, 0
    for b in range(len(bundle_first) - 1):
        if bundle_first[b] >= bundle_first[b + 1]:
            return Fault.BUNDLES, 0
    return Fault.NONE, 0


# ---- every tile is visited once ----------------------------------------------------------------------------

COVERED, TWICE, EMPTY, FLAG, MISSED = range(5)


def _check_cover(program: Program) -> None:
    """Each chain visits each of its non-empty tiles once per query head of its group, with the right mask flag."""
    g = program.geometry
    state, needed = tile_states(program)
    fault, chain, run, offset = (int(x) for x in _cover(program.chains, program.runs, state, needed, g.group))
    if fault == COVERED:
        return
    if fault == MISSED:
        head, q = run, offset
        batch, kv_head, kv_tile = program.chains[chain, CHAIN_NAME].tolist()
        missed = Task(batch, kv_head * g.group + head, q, kv_tile, -1)
        text = str(missed).replace(", turn -1", "")
        raise VerifyError(f"tile missed: {text} is not empty and no task visits it", (missed,))
    task = program.task(chain, run, offset)
    message = {
        TWICE: f"tile done twice: {task} was visited before in its chain",
        EMPTY: f"empty tile visited: {task} has nothing to do",
        FLAG: f"wrong mask flag: {task} is {'not ' if task.partial else ''}partial",
    }[fault]
    raise VerifyError(message, (task,))


def tile_states(program: Program) -> tuple[npt.NDArray[np.int8], Longs]:
    """What the tile table says: the TileState of each tile (kv tiles x q tiles), and how many tiles of each kv tile are
    not empty."""
    g = program.geometry
    state, needed = np.zeros((g.num_kv, g.num_q), np.int8), np.zeros(g.num_kv, np.int64)
    _require(_unroll_tiles(program.tiles, state, needed), "the tile table is broken")
    return state, needed


@compiled
def _unroll_tiles(tiles, state, needed):  # type: ignore[no-untyped-def]
    """Fill in the TileState of each tile and count the non-empty tiles of each kv tile. False if rows of the table
    overlap or lead outside."""
    num_kv, num_q = state.shape
    for row in range(len(tiles)):
        kv, first, count, partial = tiles[row]
        if kv < 0 or kv >= num_kv or first < 0 or count < 1 or count > num_q - first or partial not in (0, 1):
            return False
        for q in range(first, first + count):
            if state[kv, q] != TileState.EMPTY:
                return False
            state[kv, q] = TileState.PARTIAL if partial else TileState.FULL
        needed[kv] += count
    return True


@compiled
def _cover(chains, runs, state, needed, group):  # type: ignore[no-untyped-def]
    """COVERED, or what is wrong, with chain, run and offset (MISSED: chain, head and q tile)."""
    num_kv, num_q = state.shape
    stamp = np.full(group * num_q, -1, np.int64)
    checked = np.full(num_kv, -1, np.int64)  # the last chain of each kv tile: others with the same runs are as right
    for c in range(len(chains)):
        kv, first, count = chains[c, Chain.KV_TILE], chains[c, Chain.FIRST_RUN], chains[c, Chain.NUM_RUNS]
        twin = checked[kv]
        if twin >= 0 and chains[twin, Chain.FIRST_RUN] == first and chains[twin, Chain.NUM_RUNS] == count:
            continue
        checked[kv] = c
        visited = 0
        for j in range(first, first + count):
            for o in range(runs[j, Run.COUNT]):
                q = runs[j, Run.FIRST_Q] + runs[j, Run.STEP] * o
                slot = runs[j, Run.HEAD] * num_q + q
                if stamp[slot] == c:
                    return TWICE, c, j, o
                if state[kv, q] == TileState.EMPTY:
                    return EMPTY, c, j, o
                if (state[kv, q] == TileState.PARTIAL) != (runs[j, Run.PARTIAL] != 0):
                    return FLAG, c, j, o
                stamp[slot] = c
                visited += 1
        if visited != needed[kv] * group:
            for head in range(group):
                for q in range(num_q):
                    if state[kv, q] != TileState.EMPTY and stamp[head * num_q + q] != c:
                        return MISSED, c, head, q
    return COVERED, 0, 0, 0


# ---- turns are a permutation, and nobody waits for ever ----------------------------------------------------


def _needs_one(program: Program) -> bool:
    """If chains run one after the other as they are launched, does every task find that its turn has come?

    Where that holds, no chain ever waits for a later one, and the turns of every dQ tile are 0, 1, 2, ...
    """
    return bool(_in_sequence(program.chains, program.runs, program.launch, program.geometry.sizes))


@compiled
def _in_sequence(chains, runs, launch, sizes):  # type: ignore[no-untyped-def]
    batch, heads_kv, heads, num_q, num_kv = sizes
    num_groups = batch * heads_kv
    chain_of = np.empty((num_groups, num_kv), np.int64)  # the chains of each group as they are launched
    filled = np.zeros(num_groups, np.int64)
    for c in launch:
        group = chains[c, Chain.BATCH] * heads_kv + chains[c, Chain.KV_HEAD]
        chain_of[group, filled[group]] = c
        filled[group] += 1
    counter = np.empty(heads * num_q, np.int32)
    for group in range(num_groups):
        same = group > 0  # no two groups share a dQ tile: a group with the runs of the first group is as right as it
        for i in range(num_kv):
            c, twin = chain_of[group, i], chain_of[0, i]
            same = (
                same
                and chains[c, Chain.FIRST_RUN] == chains[twin, Chain.FIRST_RUN]
                and chains[c, Chain.NUM_RUNS] == chains[twin, Chain.NUM_RUNS]
            )
        if same:
            continue
        counter[:] = 0
        for c in chain_of[group]:
            for j in range(chains[c, Chain.FIRST_RUN], chains[c, Chain.FIRST_RUN] + chains[c, Chain.NUM_RUNS]):
                for o in range(runs[j, Run.COUNT]):
                    target = runs[j, Run.HEAD] * num_q + runs[j, Run.FIRST_Q] + runs[j, Run.STEP] * o
                    if counter[target] != int(runs[j, Run.TURN]) + int(runs[j, Run.TURN_STEP]) * o:
                        return False
                    counter[target] += 1
    return True


def _needs(program: Program) -> int:
    """How many co-resident workers the order needs, if turns are right and no cycle is in it."""
    _check_turns(program)
    outcome = play(program, program.bundles, None, resident=1)
    if outcome.status == STUCK:
        raise VerifyError(*_cycle(program, program.bundles, outcome))
    if outcome.status == PASSED:
        raise VerifyError(*_passed(program, program.bundles, outcome))
    return outcome.resident


IN_ORDER, OUTSIDE, CLAIMED = range(3)


def _check_turns(program: Program) -> None:
    """In each plane the turns of a dQ tile are 0 .. contributors - 1, each once."""
    g = program.geometry
    begin = np.concatenate([[0], np.cumsum(np.tile(program.contributors, g.group), dtype=np.int64)])
    clash = _first_clash(program.chains, program.runs, begin, g.sizes)
    fault, chain, run, offset, other, other_run, other_offset = (int(x) for x in clash)
    if fault == IN_ORDER:
        return
    task = program.task(chain, run, offset)
    if fault == OUTSIDE:
        count = int(program.contributors[task.q_tile])
        raise VerifyError(f"turns are no permutation: {task} is outside 0..{count - 1}", (task,))
    twin = program.task(other, other_run, other_offset)
    raise VerifyError(f"turns are no permutation: {twin} and {task} claim the same turn", (twin, task))


@compiled
def _first_clash(chains, runs, begin, sizes):  # type: ignore[no-untyped-def]
    """IN_ORDER, or what is wrong, with chain, run and offset of a task, and of the task that claimed its turn first."""
    batch, heads_kv, _, num_q, num_kv = sizes
    num_groups = batch * heads_kv
    chain_of = np.empty((num_groups, num_kv), np.int64)
    for c in range(len(chains)):
        chain_of[chains[c, Chain.BATCH] * heads_kv + chains[c, Chain.KV_HEAD], chains[c, Chain.KV_TILE]] = c
    owner = np.empty((begin[-1], 3), np.int32)
    for group in range(num_groups):
        same = group > 0  # a group with the runs of the first group is as right as the first group
        for kv in range(num_kv):
            c, twin = chain_of[group, kv], chain_of[0, kv]
            same = (
                same
                and chains[c, Chain.FIRST_RUN] == chains[twin, Chain.FIRST_RUN]
                and chains[c, Chain.NUM_RUNS] == chains[twin, Chain.NUM_RUNS]
            )
        if same:
            continue
        owner[:] = -1
        for c in chain_of[group]:
            for j in range(chains[c, Chain.FIRST_RUN], chains[c, Chain.FIRST_RUN] + chains[c, Chain.NUM_RUNS]):
                for o in range(runs[j, Run.COUNT]):
                    target = runs[j, Run.HEAD] * num_q + runs[j, Run.FIRST_Q] + runs[j, Run.STEP] * o
                    turn = int(runs[j, Run.TURN]) + int(runs[j, Run.TURN_STEP]) * o
                    if turn < 0 or turn >= begin[target + 1] - begin[target]:
                        return OUTSIDE, c, j, o, -1, -1, -1
                    at = begin[target] + turn
                    if owner[at, 0] >= 0:
                        return CLAIMED, c, j, o, owner[at, 0], owner[at, 1], owner[at, 2]
                    owner[at, 0], owner[at, 1], owner[at, 2] = c, j, o
    return IN_ORDER, -1, -1, -1, -1, -1, -1


def _check_placement(program: Program, placement: Sequences) -> None:
    _require(
        np.array_equal(np.sort(placement.chains), np.arange(len(program.chains))),
        "the placement must hold every chain once",
    )
    first = placement.first
    _require(
        len(first) > 1 and first[0] == 0 and first[-1] == len(program.chains) and bool((np.diff(first) >= 0).all()),
        "the placement must cut its chains into the parts of at least one worker",
    )
    outcome = play(program, placement, None)
    if outcome.status == STUCK:
        message, tasks = _cycle(program, placement, outcome)
        raise VerifyError(f"deadlock with {len(first) - 1} co-resident workers: {message}", tasks)


def _cycle(program: Program, sequences: Sequences, outcome: Replay) -> tuple[str, tuple[Task, ...]]:
    """Follow who waits for whom, from the first stuck sequence until a sequence comes up again."""
    holder = np.empty(len(program.chains), np.int64)
    holder[sequences.chains] = np.repeat(np.arange(len(sequences.first) - 1), np.diff(sequences.first))
    standing, awaited = dict[int, Task](), dict[int, Task]()
    s = int(np.flatnonzero(outcome.standing[:, 0] < sequences.first[1:])[0])
    while s not in standing:
        position, run, offset = outcome.standing[s].tolist()
        standing[s] = program.task(int(sequences.chains[position]), run, offset)
        # The task with the turn before this one is not done, so its sequence is stuck as well.
        chain, awaited[s] = _before(program, standing[s])
        s = int(holder[chain])
    path = list(standing)
    ring = path[path.index(s) :]
    parts, named = [], dict[Task, None]()
    for s, after in zip(ring, [*ring[1:], ring[0]], strict=True):
        waits, comes, stands = standing[s], awaited[s], standing[after]
        named |= dict.fromkeys((waits, comes, stands))
        parts.append(f"{waits} waits for {comes}" + ("" if comes == stands else f", which comes after {stands}"))
    return "the order has a cycle: " + "; ".join(parts), tuple(named)


def _before(program: Program, task: Task) -> tuple[int, Task]:
    """The task with the turn before this one at the same dQ tile, and its chain. No run is unrolled: there may be more
    tasks than fit in memory."""
    kv_head, head = divmod(task.q_head, program.geometry.group)
    same = (program.chains[:, Chain.BATCH] == task.batch) & (program.chains[:, Chain.KV_HEAD] == kv_head)
    for chain in np.flatnonzero(same).tolist():
        first, count = program.chains[chain, [Chain.FIRST_RUN, Chain.NUM_RUNS]].tolist()
        rows = program.runs[first : first + count].astype(np.int64)
        step, steps = rows[:, Run.STEP], task.q_tile - rows[:, Run.FIRST_Q]
        offset = np.where(step == 0, 0, steps // np.where(step == 0, 1, step))
        visits = (rows[:, Run.HEAD] == head) & (offset * step == steps) & (offset >= 0) & (offset < rows[:, Run.COUNT])
        turn = rows[:, Run.TURN] + offset * rows[:, Run.TURN_STEP]
        runs = np.flatnonzero(visits & (turn == task.turn - 1))
        if len(runs):
            return chain, program.task(chain, first + int(runs[0]), int(offset[runs[0]]))
    raise AssertionError(f"turns are checked before: one comes before {task}")


def _passed(program: Program, sequences: Sequences, outcome: Replay) -> tuple[str, tuple[Task, ...]]:
    position, run, offset = outcome.standing[0].tolist()
    task = program.task(int(sequences.chains[position]), run, offset)
    return f"turns are no permutation: {task} comes after its turn has passed", (task,)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise VerifyError(otherwise)
