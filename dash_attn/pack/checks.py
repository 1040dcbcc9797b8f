"""check: refuses tables of a pack whose sequences overlap, leave rows out or do not fit their templates."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import numpy as np

from dash_attn.jit import compiled
from dash_attn.pack.folds import fold_fault
from dash_attn.pack.tables import Assembly, Doc, PackedBundle, PackedChain, Round, TileRows
from dash_attn.program import Run
from dash_attn.program.program import Int32


class AssemblyError(ValueError):
    """Tables of a pack that must not run."""


class Fault(IntEnum):
    """What is wrong with the tables."""

    NONE = 0
    NEGATIVE = 1
    TICKETS = 2
    IDLE = 3
    TILE_NUMBERS = 4
    TILES = 5
    TILE_ROWS = 6
    ROWS = 7
    BUNDLES = 8
    CHAINS = 9
    KV_TILES = 10
    RUNS = 11
    CONTRIBUTORS = 12
    TASKS = 13
    PANELS = 14
    ROUNDS = 15
    AWAITS = 16


SAID = {
    Fault.NEGATIVE: "a number of the sequence is negative",
    Fault.TICKETS: "the tickets of a round do not follow those of the round before",
    Fault.ROUNDS: "its rounds are not its bundles, each of them once and in their order",
    Fault.AWAITS: "a bundle awaits bundles of another round, or not those that the bundle before awaits",
    Fault.IDLE: "a sequence has tickets exactly if it has queries and keys",
    Fault.TILE_NUMBERS: "its tiles do not follow those of the sequence before",
    Fault.TILES: "tiles are missing, or too many",
    Fault.TILE_ROWS: "a tile is not cut from the rows of the sequence",
    Fault.ROWS: "a row is in two sequences, or in none",
    Fault.BUNDLES: "its bundles are outside their table, or leave chains out",
    Fault.CHAINS: "its template has not one chain for each of its kv tiles",
    Fault.KV_TILES: "its template has a kv tile twice, or one that the sequence has not",
    Fault.RUNS: "its template has runs outside their table, or outside the q tiles and heads of the sequence",
    Fault.CONTRIBUTORS: "its contributors are outside their table",
    Fault.PANELS: "its panels are neither kv heads nor q heads",
    Fault.TASKS: "its tasks are not the contributions that its dQ tiles wait for",
}


class Checked(IntEnum):
    """What a template was checked for: the numbers of a sequence that decide whether the template fits it."""

    BUNDLES = 0
    CONTRIBUTORS = 1
    Q_TILES = 2
    KV_TILES = 3
    HEADS = 4


COPIED_BYTES = 2**20
NUM_CHECKED = len(Checked)  # compiled loops cannot take the length of an enum


def check(assembly: Assembly) -> None:
    """Raises an AssemblyError if the tables are wrong. Its message says what is wrong, and in which row of `docs`.

    The order inside a template is verified when the template is made. This function checks that every row of q and of k
    is in one sequence, that the tiles of a sequence are cut from its own rows, that tickets have no gap, that each
    template fits its sequences, and that the tables hold the templates unchanged. With panels every row of q is in one
    panel and every row of k is in one fold. If the pack has only some panels of a problem, a row of k may be in no
    panel.
    """
    sizes, docs = assembly.sizes, assembly.docs
    fault, row = _instance_fault(docs, assembly.q_tiles, assembly.kv_tiles, sizes.numbers)
    if fault == Fault.NONE:
        columns = ((Doc.Q_ROW, Doc.Q_ROWS, sizes.rows_q), (Doc.K_ROW, Doc.K_ROWS, sizes.rows_k))
        for first, count, rows in columns if sizes.panels == 1 and not sizes.apart else columns[:1]:
            if not _covers(docs[:, first], docs[:, count], rows):
                raise AssemblyError(f"the tables of the pack are wrong: {SAID[Fault.ROWS]}, of {first.name[0].lower()}")
        wrong = fold_fault(assembly)
        if wrong is not None:
            raise AssemblyError(f"the tables of the pack are wrong: {wrong}")
        tables = assembly.bundles, assembly.chains, assembly.runs, assembly.contributors
        fault, row = _template_fault(docs, *tables, sizes.numbers)
    if fault == Fault.NONE:
        fault, row = _round_fault(assembly.rounds, docs, assembly.bundles, assembly.tickets)
    if fault != Fault.NONE:
        raise AssemblyError(f"the tables of the pack are wrong, sequence {row} of `docs`: {SAID[Fault(int(fault))]}")
    for name in _differing(assembly):
        raise AssemblyError(f"the tables of the pack are wrong: `{name}` are not those of its templates")
    unwritten = ((docs[:, Doc.Q_ROWS] == 0) & (docs[:, Doc.K_ROWS] > 0)).any()
    for name, given, needed in (
        ("cut", sizes.cut, (docs[:, Doc.PANELS] > sizes.heads_kv).any()),
        ("clears_dq", assembly.clears_dq, (assembly.contributors == 0).any()),
        ("clears_dkv", assembly.clears_dkv, unwritten),
    ):
        if needed and not given:
            raise AssemblyError(f"the tables of the pack are wrong: they need `{name}`, which is not set")


def _differing(assembly: Assembly) -> Iterator[str]:
    """The tables that are not those of the templates, one after the other."""
    templates = assembly.templates
    chains, runs = [len(each.chains) for each in templates], [len(each.runs) for each in templates]
    bundles = np.concatenate([each.bundles for each in templates])
    bundles[:, PackedBundle.FIRST_CHAIN] += _before(chains, [len(each.bundles) for each in templates])
    if not np.array_equal(bundles, assembly.bundles):
        yield "bundles"
    given = np.concatenate([each.chains for each in templates])
    given[:, PackedChain.FIRST_RUN] += _before(runs, chains)
    if not np.array_equal(given, assembly.chains):
        yield "chains"
    for name in ("runs", "contributors"):
        if not _is_joined([getattr(each, name) for each in templates], getattr(assembly, name)):
            yield name


def _is_joined(parts: list[Int32], joined: Int32) -> bool:
    """Whether a table is its parts, one after the other. Many small parts are compared at once, large ones are not
    copied."""
    if joined.nbytes < COPIED_BYTES:
        return np.array_equal(np.concatenate(parts), joined)
    begin = 0
    for part in parts:
        end = begin + len(part)
        if not np.array_equal(joined[begin:end], part):
            return False
        begin = end
    return begin == len(joined)


def _before(counts: list[int], rows: list[int]) -> Int32:
    """For each row of a joined table the sum of the counts of the templates before its own."""
    return np.repeat(np.cumsum([0, *counts[:-1]], dtype=np.int32), rows)


@compiled
def _instance_fault(docs, q_tiles, kv_tiles, numbers):  # type: ignore[no-untyped-def]
    """The first fault of rows and tiles, and its row of `docs`."""
    m, n = numbers.m, numbers.n
    q_tile, kv_tile = 0, 0
    for d in range(len(docs)):
        doc = docs[d]
        if doc.min() < 0:
            return Fault.NEGATIVE, d
        if (doc[Doc.BUNDLES] > 0) != (doc[Doc.Q_ROWS] > 0 and doc[Doc.K_ROWS] > 0):
            return Fault.IDLE, d
        if doc[Doc.Q_TILE] != q_tile or doc[Doc.KV_TILE] != kv_tile:
            return Fault.TILE_NUMBERS, d
        if doc[Doc.PANELS] != numbers.heads_q and doc[Doc.PANELS] != numbers.heads_kv:
            return Fault.PANELS, d
        for row in range(0, doc[Doc.Q_ROWS], m):
            if q_tile >= len(q_tiles):
                return Fault.TILES, d
            tile = q_tiles[q_tile]
            if tile[TileRows.FIRST] != doc[Doc.Q_ROW] + row or tile[TileRows.COUNT] != min(m, doc[Doc.Q_ROWS] - row):
                return Fault.TILE_ROWS, d
            q_tile += 1
        for row in range(0, doc[Doc.K_ROWS], n):
            if kv_tile >= len(kv_tiles):
                return Fault.TILES, d
            tile = kv_tiles[kv_tile]
            if tile[TileRows.FIRST] != doc[Doc.K_ROW] + row or tile[TileRows.COUNT] != min(n, doc[Doc.K_ROWS] - row):
                return Fault.TILE_ROWS, d
            kv_tile += 1
    if q_tile != len(q_tiles) or kv_tile != len(kv_tiles):
        return Fault.TILES, len(docs) - 1
    return Fault.NONE, 0


@compiled
def _round_fault(rounds, docs, bundles, tickets):  # type: ignore[no-untyped-def]
    """The first fault of rounds and tickets, and its row of `docs`."""
    ticket, next_bundle = 0, docs[:, Doc.BUNDLE].copy()
    for r in range(len(rounds)):
        d, begin, count = rounds[r, Round.DOC], rounds[r, Round.BUNDLE], rounds[r, Round.BUNDLES]
        if d < 0 or d >= len(docs):
            return Fault.ROUNDS, 0
        if rounds[r, Round.TICKET] != ticket:
            return Fault.TICKETS, d
        if begin != next_bundle[d] or count < 1 or begin + count > docs[d, Doc.BUNDLE] + docs[d, Doc.BUNDLES]:
            return Fault.ROUNDS, d
        last = begin - 1
        for b in range(begin, begin + count):
            reached = b + bundles[b, PackedBundle.AWAITS]
            if reached < b or reached >= begin + count or (b <= last and reached != last):
                return Fault.AWAITS, d
            last = reached
        next_bundle[d] += count
        ticket += docs[d, Doc.PANELS] * count
    for d in range(len(docs)):
        if next_bundle[d] != docs[d, Doc.BUNDLE] + docs[d, Doc.BUNDLES]:
            return Fault.ROUNDS, d
    return (Fault.NONE if ticket == tickets else Fault.TICKETS), len(docs) - 1


@compiled
def _covers(first, count, rows):  # type: ignore[no-untyped-def]
    """Whether every row is in exactly one sequence."""
    reached = 0
    for d in np.argsort(first):
        if count[d] > 0:
            if first[d] != reached:
                return False
            reached += count[d]
    return reached == rows


@compiled
def _template_fault(docs, bundles, chains, runs, contributors, numbers):  # type: ignore[no-untyped-def]
    """The first fault of a template that does not fit its sequence, and its row of `docs`."""
    m, n = numbers.m, numbers.n
    checked = np.full(
        (len(bundles) + 1, NUM_CHECKED), -1, np.int64
    )  # by first bundle: each shape of a template is checked once
    seen = np.full(len(chains) + 1, -1, np.int64)
    for d in range(len(docs)):
        doc = docs[d]
        num_q, num_kv = (doc[Doc.Q_ROWS] + m - 1) // m, (doc[Doc.K_ROWS] + n - 1) // n
        begin, count, first = doc[Doc.BUNDLE], doc[Doc.BUNDLES], doc[Doc.CONTRIBUTORS]
        if begin + count > len(bundles):
            return Fault.BUNDLES, d
        if first + num_q > len(contributors):
            return Fault.CONTRIBUTORS, d
        heads = numbers.heads_q // doc[Doc.PANELS]
        known = checked[begin]
        same = known[Checked.BUNDLES] == count and known[Checked.CONTRIBUTORS] == first
        same = same and known[Checked.Q_TILES] == num_q and known[Checked.KV_TILES] == num_kv
        if count > 0 and same and known[Checked.HEADS] == heads:
            continue
        change = np.zeros((heads, num_q + 1), np.int64)  # of the number of tasks from one q tile to the next
        chain, of_doc = -1, 0
        for b in range(begin, begin + count):
            own, number = bundles[b, PackedBundle.FIRST_CHAIN], bundles[b, PackedBundle.NUM_CHAINS]
            if b == begin:
                chain = own
            if own != chain or chain < 0 or number < 1 or chain + number > len(chains):
                return Fault.BUNDLES, d
            for c in range(chain, chain + number):
                kv = chains[c, PackedChain.KV_TILE]
                if kv < 0 or kv >= num_kv or seen[kv] == d:
                    return Fault.KV_TILES, d
                seen[kv] = d
                run, end = chains[c, PackedChain.FIRST_RUN], chains[c, PackedChain.NUM_RUNS]
                end += run
                if run < 0 or end < run or end > len(runs):
                    return Fault.RUNS, d
                for r in range(run, end):
                    head, low = runs[r, Run.HEAD], runs[r, Run.FIRST_Q]
                    step, length = runs[r, Run.STEP], runs[r, Run.COUNT]
                    high = low + step * (length - 1)
                    if min(low, high) < 0 or max(low, high) >= num_q or length < 1 or head < 0 or head >= heads:
                        return Fault.RUNS, d
                    if abs(step) == 1:
                        change[head, min(low, high)] += 1
                        change[head, max(low, high) + 1] -= 1
                        continue
                    for i in range(length):
                        change[head, low + i * step] += 1
                        change[head, low + i * step + 1] -= 1
                of_doc += 1
            chain += number
        if count > 0 and of_doc != num_kv:
            return Fault.CHAINS, d
        for head in range(heads):
            tasks = 0
            for q in range(num_q):
                tasks += change[head, q]
                if tasks != contributors[first + q]:
                    return Fault.TASKS, d
        if count > 0:
            known[Checked.BUNDLES], known[Checked.CONTRIBUTORS], known[Checked.HEADS] = count, first, heads
            known[Checked.Q_TILES], known[Checked.KV_TILES] = num_q, num_kv
    return Fault.NONE, 0
