"""Nothing runs unverified: a program does every tile once, in an order that exists and cannot deadlock."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dash_attn.jit import compiled
from dash_attn.program import Chain, Program, Run, Sequences, Task, TaskArrays, bundles, place, replay
from dash_attn.program.program import CHAIN_NAME
from dash_attn.program.replay import PASSED, STUCK, Replay

# What can be wrong with tables, told as it stands here; two more need a chain's name.
RULES = (
    "a chain's batch is out of range",
    "a chain's kv head is out of range",
    "a chain's kv tile is out of range",
    "a run has no tasks",
    "a run's head is out of range",
    "a run leaves the q tiles",
    "the launch sequence must hold every chain once",
    "bundles must cut the launch sequence into non-empty parts",
)
NOT_ONCE, NO_SUCH_RUN = 8, 9


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
    placement: Sequences | None = None

    def on(self, workers: int) -> Verified:
        """The same, placed on so many co-resident workers. The program is not checked again, it cannot have changed."""
        if workers < self.co_resident:
            raise VerifyError(
                f"deadlock with {workers} co-resident workers: this order needs {self.co_resident} "
                f"(policy {self.program.policy}; a smaller window width needs fewer)"
            )
        return replace(self, placement=place(self.program, workers, self.co_resident))  # which proves what it gives


def verify(program: Program, workers: int | None = None, placement: Sequences | None = None) -> Verified:
    """Check a program, and with `workers` (or a placement) that this many co-resident workers finish it."""
    _check_tables(program)
    _check_cover(program)
    found = Verified(program, min(1, program.num_bundles) if _needs_one(program) else _needs(program), placement)
    if placement is not None:
        _check_placement(program, placement, workers)
    elif workers is not None:
        return found.on(workers)
    return found


def _check_tables(program: Program) -> None:
    g = program.geometry
    seen = np.zeros(g.num_groups * g.num_kv, np.int64)
    rule, chain = _broken_rule(
        (program.chains, program.runs, program.launch, program.bundle_first),
        (g.batch, g.heads_kv, g.num_kv, g.group, g.num_q),
        seen,
    )
    if rule == NOT_ONCE:
        batch, rest = divmod(int(chain), g.heads_kv * g.num_kv)
        head, tile = divmod(rest, g.num_kv)
        name = f"(batch {batch}, kv head {head}, kv tile {tile})"
        raise VerifyError(f"broken chain: {name} stands {seen[chain]} times, not once")
    if rule == NO_SUCH_RUN:
        raise VerifyError(f"broken chain: {_chain(program, int(chain))} names runs that do not exist")
    if rule >= 0:
        raise VerifyError(RULES[rule])


@compiled
def _broken_rule(tables, sizes, seen):  # type: ignore[no-untyped-def]
    """What is wrong, and with which chain; (-1, 0) if nothing is. `seen` becomes the number of times a chain stands.

    Numbers are anything that fits 32 bits: int() keeps sums of them from overflowing.
    """
    chains, runs, launch, bundle_first = tables
    batch, heads_kv, num_kv, group, num_q = sizes
    for c in range(len(chains)):
        if not 0 <= chains[c, Chain.BATCH] < batch:
            return 0, c
        if not 0 <= chains[c, Chain.KV_HEAD] < heads_kv:
            return 1, c
        if not 0 <= chains[c, Chain.KV_TILE] < num_kv:
            return 2, c
        seen[
            (int(chains[c, Chain.BATCH]) * heads_kv + chains[c, Chain.KV_HEAD]) * num_kv + chains[c, Chain.KV_TILE]
        ] += 1
    for c in range(len(seen)):
        if seen[c] != 1:
            return NOT_ONCE, c
    for c in range(len(chains)):
        if (
            chains[c, Chain.FIRST_RUN] < 0
            or chains[c, Chain.NUM_RUNS] < 0
            or int(chains[c, Chain.FIRST_RUN]) + int(chains[c, Chain.NUM_RUNS]) > len(runs)
        ):
            return NO_SUCH_RUN, c
    for j in range(len(runs)):
        head, first, step, count = (
            int(runs[j, Run.HEAD]),
            int(runs[j, Run.FIRST_Q]),
            int(runs[j, Run.STEP]),
            int(runs[j, Run.COUNT]),
        )
        if count <= 0:
            return 3, 0
        if not 0 <= head < group:
            return 4, 0
        if not (0 <= first < num_q and 0 <= first + step * (count - 1) < num_q):
            return 5, 0
    launched = np.zeros(len(seen), np.bool_)
    for c in launch:
        if not 0 <= c < len(seen) or launched[c]:
            return 6, 0
        launched[c] = True
    if len(launch) != len(seen):
        return 6, 0
    if len(bundle_first) == 0 or bundle_first[0] != 0 or bundle_first[-1] != len(launch):
        return 7, 0
    for b in range(len(bundle_first) - 1):
        if bundle_first[b] >= bundle_first[b + 1]:
            return 7, 0
    return -1, 0


def _check_cover(program: Program) -> None:
    """Each chain visits each of its non-empty tiles once per query head of its group, with the right mask flag."""
    g = program.geometry
    state, needed = np.zeros((g.num_kv, g.num_q), np.int8), np.zeros(g.num_kv, np.int64)
    _require(_unroll_tiles(program.tiles, state, needed), "the tile table is broken")
    kind, chain, run, offset = (int(x) for x in _cover(program.chains, program.runs, state, needed, g.group))
    if kind == 0:
        return
    if kind == 4:
        head, q = run, offset
        kv_tile = int(program.chains[chain, Chain.KV_TILE])
        name = Task(
            int(program.chains[chain, Chain.BATCH]),
            int(program.chains[chain, Chain.KV_HEAD]) * g.group + head,
            q,
            kv_tile,
            -1,
        )
        text = str(name).replace(", turn -1", "")
        raise VerifyError(f"tile missed: {text} is not empty and no task visits it", (name,))
    task = program.task(chain, run, offset)
    message = {
        1: f"tile done twice: {task} was visited before in its chain",
        2: f"empty tile visited: {task} has nothing to do",
        3: f"wrong mask flag: {task} is {'not ' if task.partial else ''}partial",
    }[kind]
    raise VerifyError(message, (task,))


@compiled
def _unroll_tiles(tiles, state, needed):  # type: ignore[no-untyped-def]
    """Fill in 1 for full and 2 for partial tiles and count them per kv tile; false if rows overlap or lead outside."""
    num_kv, num_q = state.shape
    for row in range(len(tiles)):
        kv, first, count, partial = tiles[row]
        if kv < 0 or kv >= num_kv or first < 0 or count < 1 or count > num_q - first or partial not in (0, 1):
            return False
        for q in range(first, first + count):
            if state[kv, q] != 0:
                return False
            state[kv, q] = 1 + partial
        needed[kv] += count
    return True


@compiled
def _cover(chains, runs, state, needed, group):  # type: ignore[no-untyped-def]
    """0, or what is wrong (1 twice, 2 empty, 3 flag, 4 missed) with chain, run (or head) and offset (or q tile)."""
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
                    return 1, c, j, o
                if state[kv, q] == 0:
                    return 2, c, j, o
                if (state[kv, q] == 2) != (runs[j, Run.PARTIAL] != 0):
                    return 3, c, j, o
                stamp[slot] = c
                visited += 1
        if visited != needed[kv] * group:
            for head in range(group):
                for q in range(num_q):
                    if state[kv, q] != 0 and stamp[head * num_q + q] != c:
                        return 4, c, head, q
    return 0, 0, 0, 0


def _needs_one(program: Program) -> bool:
    """Chains one after the other as they are launched: each of their tasks finds its turn come.

    Where that holds no chain ever waits for a later one, and turns are what they should be, 0, 1, .. at every dQ tile.
    """
    g = program.geometry
    sizes = (g.num_groups, g.heads_kv, g.num_kv, g.group * g.num_q, g.num_q)
    return bool(_in_sequence(program.chains, program.runs, program.launch, sizes))


@compiled
def _in_sequence(chains, runs, launch, sizes):  # type: ignore[no-untyped-def]
    num_groups, heads_kv, num_kv, num_targets, num_q = sizes
    chain_of = np.empty((num_groups, num_kv), np.int64)  # each group's chains as they are launched
    filled = np.zeros(num_groups, np.int64)
    for c in launch:
        group = chains[c, Chain.BATCH] * heads_kv + chains[c, Chain.KV_HEAD]
        chain_of[group, filled[group]] = c
        filled[group] += 1
    counter = np.empty(num_targets, np.int32)
    for group in range(num_groups):
        same = group > 0  # as the first group in every chain: no two groups share a dQ tile, so as right as that was
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
    needs = replay(program, bundles(program), None, resident=1)
    if needs.status == STUCK:
        raise VerifyError(*_cycle(program, bundles(program), needs))
    if needs.status == PASSED:
        raise VerifyError(*_passed(program, bundles(program), needs))
    return needs.resident


def _check_turns(program: Program) -> None:
    """In each plane the turns of a dQ tile are 0 .. contributors - 1, each once."""
    g = program.geometry
    begin = np.concatenate([[0], np.cumsum(np.tile(program.contributors, g.group), dtype=np.int64)])
    found = _turns(program.chains, program.runs, begin, (g.num_groups, g.heads_kv, g.num_kv, g.num_q))
    kind, chain, run, offset, other, other_run, other_offset = (int(x) for x in found)
    if kind == 0:
        return
    task = program.task(chain, run, offset)
    if kind == 1:
        count = int(program.contributors[task.q_tile])
        raise VerifyError(f"turns are no permutation: {task} is outside 0..{count - 1}", (task,))
    twin = program.task(other, other_run, other_offset)
    raise VerifyError(f"turns are no permutation: {twin} and {task} claim the same turn", (twin, task))


@compiled
def _turns(chains, runs, begin, sizes):  # type: ignore[no-untyped-def]
    """0, or what is wrong (1 outside, 2 claimed before) with chain, run and offset, and those of the other claim."""
    num_groups, heads_kv, num_kv, num_q = sizes
    chain_of = np.empty((num_groups, num_kv), np.int64)
    for c in range(len(chains)):
        chain_of[chains[c, Chain.BATCH] * heads_kv + chains[c, Chain.KV_HEAD], chains[c, Chain.KV_TILE]] = c
    owner = np.empty((begin[-1], 3), np.int32)
    for group in range(num_groups):
        same = group > 0  # the runs of the first group in every chain: as right as that was
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
    outcome = replay(program, placement, None)
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
            done = int(program.runs[program.chains[chain, Chain.FIRST_RUN] : run, Run.COUNT].sum()) + offset
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
    batch, kv_head, kv_tile = program.chains[tasks.chain[t], CHAIN_NAME].tolist()
    q_head = kv_head * program.geometry.group + int(tasks.head[t])
    return Task(batch, q_head, int(tasks.q[t]), kv_tile, int(tasks.turn[t]), bool(tasks.partial[t]))


def _passed(program: Program, sequences: Sequences, outcome: Replay) -> tuple[str, tuple[Task, ...]]:
    position, run, offset = outcome.standing[0].tolist()
    task = program.task(int(sequences.chains[position]), run, offset)
    return f"turns are no permutation: {task} comes after its turn has passed", (task,)


def _chain(program: Program, chain: int) -> str:
    batch, kv_head, kv_tile = program.chains[chain, CHAIN_NAME].tolist()
    return f"(batch {batch}, kv head {kv_head}, kv tile {kv_tile})"


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise VerifyError(otherwise)
