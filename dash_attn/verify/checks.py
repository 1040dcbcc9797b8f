"""verify: a Program visits every tile once, its turns are complete, and it cannot deadlock. Nothing runs unverified."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dash_attn.launch import place
from dash_attn.program import Chain, Program, Replay, Run, Sequences, Task, play
from dash_attn.program.program import CHAIN_NAME, END_OF_CHAIN, Longs
from dash_attn.program.replay import STUCK, Standing
from dash_attn.verify.errors import VerifyError, require, require_workers
from dash_attn.verify.panels import check_panel, panels
from dash_attn.verify.tables import check_tables, tile_states
from dash_attn.verify.waits import rounds_of, waits


@dataclass(frozen=True, eq=False)
class Verified:
    """A program that may run. `co_resident` is the number of workers that must run at the same time.

    `rounds` gives the round of each bundle. Bundles wait only for bundles of their own round and of earlier rounds. If
    the launch queue does not go round by round, `rounds` is None.
    """

    program: Program
    co_resident: int
    rounds: Longs | None

    def on(self, workers: int) -> Placed:
        """Place the program on `workers` co-resident workers. If they are too few, TooFewWorkers says so."""
        require_workers(self.program.policy, self.co_resident, workers)
        return Placed(self.program, self.co_resident, place(self.program, workers, self.rounds))

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
    """Check a program. A VerifyError says what is wrong, and names tasks if it can."""
    check_tables(program)
    state = tile_states(program)
    kinds, kind_of = panels(program)
    maybe = [waits(panel, check_panel(panel, state)) for panel in kinds]
    known = [each for each in maybe if each is not None]
    rounds = rounds_of(program, [known[kind].held == 0 for kind in kind_of]) if len(known) == len(kinds) else None
    # Panels that add to the same dK and dV wait for each other, so none of them can be replayed alone.
    together = program.geometry.share > 1 and not all(each.orderly for each in known)
    if rounds is None or together:
        return Verified(program, _needs(program, program.bundles), rounds)
    # The queue needs as many workers as the panel that needs most: see `rounds_of`.
    needs = [
        int(each.held.max(initial=-1)) + 1 if each.orderly else _needs(program, panel.bundles)
        for panel, each in zip(kinds, known, strict=True)
    ]
    return Verified(program, max(needs), rounds)


def _needs(program: Program, bundles: Sequences) -> int:
    """The number of co-resident workers that these bundles need. A cycle in their order is a VerifyError."""
    outcome = play(program, bundles, None, resident=1)
    if outcome.status == STUCK:
        raise VerifyError(*_cycle(program, bundles, outcome))
    return outcome.resident


def _check_placement(program: Program, placement: Sequences) -> None:
    require(
        np.array_equal(np.sort(placement.chains), np.arange(len(program.chains))),
        "the placement must hold every chain once",
    )
    first = placement.first
    require(
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
    s = int(np.flatnonzero(outcome.standing[:, Standing.POSITION] < sequences.first[1:])[0])
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
    """The chain of the task that has the turn before this one at the same sum, and that task. No run is unrolled,
    because there may be more tasks than fit in memory."""
    kv_head, head = divmod(task.q_head, program.geometry.group)
    if task.q_tile == END_OF_CHAIN:
        name = [task.batch, kv_head - 1, task.kv_tile]
        chain = int(np.flatnonzero((program.chains[:, CHAIN_NAME] == name).all(axis=1))[0])
        return chain, program.task(chain, int(program.chains[chain, [Chain.FIRST_RUN, Chain.NUM_RUNS]].sum()), 0)
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
