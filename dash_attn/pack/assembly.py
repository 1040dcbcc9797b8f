"""assemble: makes the tables of a pack from templates, for a kernel whose workers draw tickets."""

from __future__ import annotations

import numpy as np

from dash_attn.jit import compiled
from dash_attn.pack.checks import check
from dash_attn.pack.folds import fold_tables
from dash_attn.pack.rounds import launch
from dash_attn.pack.tables import Assembly, Doc, Fold, PackedBundle, PackedChain, Part, Sizes, TileRows
from dash_attn.pack.templates import Fact, Family, PackedTemplate, needed_workers, templates
from dash_attn.problem import Panel, Problem, SequenceColumn
from dash_attn.program.program import MOST, Int32, Longs
from dash_attn.tiling import TileShape

TILE_COLUMNS = len(TileRows)  # compiled loops cannot count the names of an enum
NO_FOLDS = np.empty((0, len(Fold)), np.int32), np.empty((0, len(Part)), np.int32)


def assemble(
    problem: Problem, shape: TileShape, policy: str = "auto", held: tuple[Panel, ...] | None = None
) -> Assembly:
    """The checked tables of a problem. Each of its sequences, or each of its panels, is ordered by itself.

    With `held` the tables have only these panels. Their rows of q lie in a tensor that has no other rows.
    """
    family, several = Family.of(problem, shape, policy), problem.panels > 1
    known = templates(family)
    table = np.ascontiguousarray(_panels(problem, held)) if several or held is not None else problem.sequence_table
    numbers: dict[int, int] = {}  # code of a template: its number in this pack
    len_q, len_k = table[:, SequenceColumn.LEN_Q], table[:, SequenceColumn.LEN_K]
    template_of = [numbers.setdefault(code, len(numbers)) for code in family.codes(len_q, len_k).tolist()]
    used = [known.of(code) for code in numbers]
    facts = np.array([each.facts for each in used], np.int64)
    rows = problem.batch * problem.len_q if held is None else int(len_q.sum()), problem.batch * problem.len_k
    apart = held is not None
    cut = several or apart or bool((facts[:, Fact.SHARE] > 1).any())
    sizes = Sizes(shape, problem.heads_q, problem.heads_kv, *rows, cut, problem.panels, family.mask.is_full, apart)
    if max(rows) > MOST or problem.heads_q * int(facts[:, Fact.BUNDLES].max()) * len(table) > MOST:
        raise ValueError(f"{rows[0]} queries and {rows[1]} keys in a pack are more than its tables can number")
    docs, templates_of, q_tiles, kv_tiles = _instances(table, np.array(template_of), facts, sizes.numbers, len(Doc))
    rounds, tickets = launch(docs, templates_of, facts[:, Fact.ROUNDS], np.concatenate([each.rounds for each in used]))
    made = Assembly(
        sizes,
        docs,
        rounds,
        *_joined(used, facts),
        q_tiles,
        kv_tiles,
        *(fold_tables(docs, kv_tiles, shape.n) if several and not apart else NO_FOLDS),
        tickets,
        needed_workers(used),
        bool(facts[:, Fact.BLIND].any()),
        bool(((docs[:, Doc.Q_ROWS] == 0) & (docs[:, Doc.K_ROWS] > 0)).any()),
        tuple(used),
    )
    check(made)
    return made


def _panels(problem: Problem, held: tuple[Panel, ...] | None) -> Longs:
    """The rows and lengths of panels, of all of them or of those that are held."""
    table = problem.panel_table if held is None else np.array(held, np.int64)
    return table[:, : len(SequenceColumn)]


@compiled
def _instances(table, template_of, facts, numbers, width):  # type: ignore[no-untyped-def]
    """The table `docs`, the template of each row, and the tables `q_tiles` and `kv_tiles`. Sequences whose panels have
    most tasks come first."""
    m, n = numbers.m, numbers.n
    first_bundle, first_contributors = np.zeros(len(facts), np.int64), np.zeros(len(facts), np.int64)
    for t in range(1, len(facts)):
        first_bundle[t] = first_bundle[t - 1] + facts[t - 1, Fact.BUNDLES]
        first_contributors[t] = first_contributors[t - 1] + facts[t - 1, Fact.Q_TILES]
    total_q, total_kv = 0, 0
    for s in range(len(table)):
        total_q += (table[s, SequenceColumn.LEN_Q] + m - 1) // m
        total_kv += (table[s, SequenceColumn.LEN_K] + n - 1) // n
    docs = np.empty((len(table), width), np.int32)
    q_tiles, kv_tiles = np.empty((total_q, TILE_COLUMNS), np.int32), np.empty((total_kv, TILE_COLUMNS), np.int32)
    q_tile, kv_tile = 0, 0
    order = np.argsort(-facts[template_of, Fact.TASKS], kind="mergesort")  # stable
    for d in range(len(order)):
        s = order[d]
        t, doc = template_of[s], docs[d]
        q_row, len_q = table[s, SequenceColumn.Q_ROW], table[s, SequenceColumn.LEN_Q]
        k_row, len_k = table[s, SequenceColumn.K_ROW], table[s, SequenceColumn.LEN_K]
        doc[Doc.Q_TILE], doc[Doc.KV_TILE] = q_tile, kv_tile
        doc[Doc.Q_ROW], doc[Doc.K_ROW], doc[Doc.Q_ROWS], doc[Doc.K_ROWS] = q_row, k_row, len_q, len_k
        doc[Doc.BUNDLE], doc[Doc.BUNDLES] = first_bundle[t], facts[t, Fact.BUNDLES]
        doc[Doc.CONTRIBUTORS] = first_contributors[t]
        doc[Doc.PANELS] = numbers.heads_kv * max(1, facts[t, Fact.SHARE])
        for row in range(0, len_q, m):
            q_tiles[q_tile, TileRows.FIRST], q_tiles[q_tile, TileRows.COUNT] = q_row + row, min(m, len_q - row)
            q_tile += 1
        for row in range(0, len_k, n):
            kv_tiles[kv_tile, TileRows.FIRST], kv_tiles[kv_tile, TileRows.COUNT] = k_row + row, min(n, len_k - row)
            kv_tile += 1
    return docs, template_of[order], q_tiles, kv_tiles


def _before(facts: Longs, rows: Fact, of: Fact) -> Int32:
    """For each row of the joined table `of`: how many `rows` the templates before its own have."""
    counts = facts[:, rows]
    return np.repeat(counts.cumsum() - counts, facts[:, of]).astype(np.int32)


def _joined(used: list[PackedTemplate], facts: Longs) -> tuple[Int32, Int32, Int32, Int32]:
    """The tables of the templates, one after the other: bundles, chains, runs, contributors."""
    bundles = np.concatenate([each.bundles for each in used])
    chains = np.concatenate([each.chains for each in used])
    bundles[:, PackedBundle.FIRST_CHAIN] += _before(facts, Fact.CHAINS, Fact.BUNDLES)
    chains[:, PackedChain.FIRST_RUN] += _before(facts, Fact.RUNS, Fact.CHAINS)
    runs, contributors = (np.concatenate([getattr(t, name) for t in used]) for name in ("runs", "contributors"))
    return bundles, chains, runs, contributors
