"""Tickets: a pack as a GPU runs it. Workers draw tickets in order, and each ticket is a bundle of one panel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dash_attn.pack import Assembly, Doc, Pack, PackedBundle, PackedChain, Round, assemble
from dash_attn.program import CHAIN, RUN, Board, Chain, Sequences
from dash_attn.program.board import parts_of
from dash_attn.program.program import Longs, frozen, tasks_before


@dataclass(frozen=True, eq=False)
class Tickets:
    """The chains of all panels of a pack, and the tickets that hold them.

    board        its chains, in the order of tickets. Column BATCH is the number of the document in the pack
    bundles      the chains of each ticket
    co_resident  the number of workers that must run at the same time
    """

    policy: str
    mask: str
    fingerprint: str
    board: Board
    bundles: Sequences
    co_resident: int

    @property
    def num_tickets(self) -> int:
        return len(self.bundles.first) - 1

    @staticmethod
    def of(pack: Pack) -> Tickets:
        """The tickets of a pack whose documents all have the same tile shape, as on a GPU."""
        assembly = assemble(pack.problem, pack.shape_of(pack.problem), pack.policy)
        policies = dict.fromkeys(each.program.policy for each in pack.plans.values() if each.num_tasks)
        board, first = board_of_pack(assembly)
        bundles = Sequences(first.astype(np.int32), np.arange(len(board.chains), dtype=np.int32))
        words = ", ".join(policies) or pack.policy, str(pack.problem.mask)
        return Tickets(*words, pack.fingerprint, board, bundles, assembly.co_resident)


def board_of_pack(assembly: Assembly) -> tuple[Board, Longs]:
    """The board of a pack, and the first chain of each ticket (one more at the end).

    If chains of some documents are cut, the chains of all documents end with sums of dK and dV. A sum of a document
    with whole groups has one contributor.
    """
    docs, sizes = assembly.docs.astype(np.int64), assembly.sizes
    num_q, num_kv = -(-docs[:, Doc.Q_ROWS] // sizes.shape.m), -(-docs[:, Doc.K_ROWS] // sizes.shape.n)
    group = sizes.heads_q // sizes.heads_kv
    ticket = np.arange(assembly.tickets)
    rounds = assembly.rounds.astype(np.int64)
    row = rounds[np.searchsorted(rounds[:, Round.TICKET], ticket, side="right") - 1]
    doc = row[:, Round.DOC]
    panel: Longs = (ticket - row[:, Round.TICKET]) // row[:, Round.BUNDLES]
    bundle = (ticket - row[:, Round.TICKET]) % row[:, Round.BUNDLES]
    cut = docs[doc, Doc.PANELS] > sizes.heads_kv
    q_head: Longs = np.where(cut, panel % sizes.heads_kv * group + panel // sizes.heads_kv, panel * group)
    bundles = assembly.bundles[row[:, Round.BUNDLE] + bundle].astype(np.int64)
    first, count = bundles[:, PackedBundle.FIRST_CHAIN], bundles[:, PackedBundle.NUM_CHAINS]

    of = np.repeat(ticket, count)  # the ticket of each chain
    begins = np.concatenate([[0], np.cumsum(count)])
    at = first[of] + np.arange(len(of)) - begins[of]
    chains = np.empty((len(of), len(CHAIN)), np.int32)
    chains[:, Chain.BATCH] = _in_pack(docs)[doc[of]]
    chains[:, Chain.KV_HEAD] = panel[of]
    chains[:, Chain.KV_TILE] = assembly.chains[at, PackedChain.KV_TILE]
    chains[:, Chain.FIRST_RUN] = assembly.chains[at, PackedChain.FIRST_RUN]
    chains[:, Chain.NUM_RUNS] = assembly.chains[at, PackedChain.NUM_RUNS]
    runs = np.ascontiguousarray(assembly.runs[:, : len(RUN)])

    dq_tiles, kv_tiles = sizes.heads_q * num_q, sizes.heads_kv * num_kv
    dq_tile = _before(dq_tiles)[doc] + q_head * num_q[doc]
    kv_tile = _before(kv_tiles)[doc] + q_head // group * num_kv[doc]
    parts = parts_of(sizes.shape.m, sizes.shape.n) if sizes.cut else 0
    task_first = tasks_before(chains, runs)
    board = Board(
        chains=frozen(chains),
        runs=frozen(runs),
        q_head=q_head[of],
        dq_sum=frozen(dq_tile[of]),
        num_q=num_q[doc[of]],
        contributors=frozen(assembly.contributors),
        q_tile=docs[doc[of], Doc.CONTRIBUTORS],
        task_first=frozen(task_first),
        part_first=task_first[-1] + parts * np.arange(len(of) + 1),
        kv_sum=int(dq_tiles.sum()) + (kv_tile[of] + chains[:, Chain.KV_TILE].astype(np.int64)) * parts,
        kv_turn=(q_head % group * cut)[of],
        parts=parts,
        num_sums=int(dq_tiles.sum()) + int(kv_tiles.sum()) * parts,
    )
    return board, begins


def _in_pack(docs: Longs) -> Longs:
    """The number of each document in the pack. `docs` has the documents in launch order.

    An empty document begins at the same row as the next document, and comes before it.
    """
    order = np.lexsort((docs[:, Doc.Q_ROWS] + docs[:, Doc.K_ROWS] > 0, docs[:, Doc.K_ROW], docs[:, Doc.Q_ROW]))
    number = np.empty(len(docs), np.int64)
    number[order] = np.arange(len(docs))
    return number


def _before(counts: Longs) -> Longs:
    """For each count: the sum of the counts before it."""
    return np.cumsum(counts) - counts
