"""Board: the chains of a program or of a pack, and the sums that they add to. Checks and models of time read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dash_attn.program.program import (
    CHAIN_NAME,
    END_OF_CHAIN,
    Int32,
    Longs,
    Program,
    Run,
    TaskArrays,
    expand_tasks,
    per_chain,
)


class Board(NamedTuple):
    """Every task of a chain adds to a dQ tile. A cut chain also adds its dK and dV at its end, in `parts` parts.

    A part is as large as a dQ tile and has a turnstile of its own. Steps are tasks and parts: first all tasks, chain by
    chain, then all parts, chain by chain.

    chains        columns CHAIN. BATCH is the number of the sequence, KV_HEAD the number of the panel in it
    runs          columns RUN
    q_head        first q head of each chain
    dq_sum        number of the sum of q tile 0 of the first q head of each chain
    num_q         the number of q tiles of each chain's sequence
    contributors  the number of contributions to the dQ tile of each q tile. A pack has these numbers for each template
    q_tile        row of `contributors` for q tile 0 of each chain's sequence
    task_first    task number at which each chain begins, and the number of tasks
    part_first    step number at which the parts of each chain begin, and the number of steps
    kv_sum        sum that the first part of each chain's dK and dV adds to
    kv_turn       turn of each chain in the sums of its parts
    parts         the number of parts of a cut chain
    num_sums      the number of sums: dQ tiles, and parts of dK and dV
    """

    chains: Int32
    runs: Int32
    q_head: Longs
    dq_sum: Longs
    num_q: Longs
    contributors: Int32
    q_tile: Longs
    task_first: Longs
    part_first: Longs
    kv_sum: Longs
    kv_turn: Longs
    parts: int
    num_sums: int

    @property
    def num_tasks(self) -> int:
        return int(self.task_first[-1])

    @property
    def num_steps(self) -> int:
        return int(self.part_first[-1])

    @property
    def partial_per_chain(self) -> Longs:
        """How many tasks of each chain need the element mask."""
        return per_chain(self.chains, self.runs[:, Run.COUNT] * (self.runs[:, Run.PARTIAL] != 0))

    def tasks(self) -> TaskArrays:
        """All tasks as flat arrays."""
        return expand_tasks(self.chains, self.runs, self.dq_sum, self.num_q)

    def expand(self) -> TaskArrays:
        """All steps as flat arrays. The q tile of a part is END_OF_CHAIN, and its target is a sum of dK or dV."""
        tasks = self.tasks()
        count = np.diff(self.part_first)
        chain = np.repeat(np.arange(len(self.chains)), count)
        part = np.arange(count.sum()) - np.repeat(self.part_first[:-1] - self.num_tasks, count)
        none = np.zeros(len(chain), np.int64)
        ends = TaskArrays(chain, none, none + END_OF_CHAIN, self.kv_turn[chain], none != 0, self.kv_sum[chain] + part)
        pairs = zip(vars(tasks).values(), vars(ends).values(), strict=True)
        return TaskArrays(*(np.concatenate(pair) for pair in pairs))

    def steps_of(self, chain: int) -> list[int]:
        """The steps of a chain, as a worker runs them."""
        tasks, parts = (range(int(first[chain]), int(first[chain + 1])) for first in (self.task_first, self.part_first))
        return [*tasks, *parts]


def board_of(program: Program) -> Board:
    """The board of a program. The q heads of a group add to dK and dV in the order of their numbers."""
    g, chains = program.geometry, len(program.chains)
    batch, panel, kv_tile = program.chains[:, CHAIN_NAME].astype(np.int64).T
    cut = g.share > 1
    parts = parts_of(g.tile_m, g.tile_n) if cut else 0
    kv_plane = (batch * g.heads_kv + panel) // g.share
    return Board(
        chains=program.chains,
        runs=program.runs,
        q_head=panel * g.group,
        dq_sum=program.target_base,
        num_q=np.full(chains, g.num_q),
        contributors=program.contributors,
        q_tile=np.zeros(chains, np.int64),
        task_first=program.task_first,
        part_first=program.num_tasks + parts * np.arange(chains + 1),
        kv_sum=g.num_targets + (kv_plane * g.num_kv + kv_tile) * parts,
        kv_turn=panel % g.share,
        parts=parts,
        num_sums=g.num_targets + g.num_groups // g.share * g.num_kv * parts,
    )


def parts_of(tile_m: int, tile_n: int) -> int:
    """The number of parts of dK and dV of a kv tile. A part is as large as a dQ tile."""
    return -(-2 * tile_n // tile_m)
