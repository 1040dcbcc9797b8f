"""Panels in the tables of a pack: every panel has its own tiles and sums, and the folds add them in one order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.backends import Options
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.pack import Assembly, AssemblyError, Doc, Fold, Pack, Part, assemble, check
from dash_attn.problem import CAUSAL, FULL, Problem, documents, window
from dash_attn.tiling import TileShape, TileState, tile
from tests.backends.cpu.reference import operands
from tests.pack.machine import play
from tests.strategies import document_masks, examples, shapes

SHAPE = TileShape(8, 16)


@st.composite
def cut_problems(draw: st.DrawFn) -> Problem:
    """Documents or batch entries, with masks whose panels are aligned at their ends."""
    len_q = draw(st.integers(0, 40))
    len_k = draw(st.integers(0, 40) | st.just(len_q))
    heads_kv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    plain = draw(st.sampled_from([FULL, CAUSAL, window(7, 0)]))
    packed = draw(st.booleans())
    mask = plain & replace(draw(document_masks(len_q, len_k)), right=plain.right) if packed else plain
    return Problem(
        draw(st.integers(1, 2)), heads_kv * group, heads_kv, len_q, len_k, 8, "bfloat16", None, mask, draw(panels)
    )


panels = st.integers(2, 6)


@examples(150)
@given(cut_problems(), shapes, st.sampled_from(["auto", "fa3", "spt@head"]))
def test_every_tile_of_every_panel_is_done_once(problem: Problem, shape: TileShape, policy: str) -> None:
    made = assemble(problem, shape, policy)
    assert made.sizes.cut
    times = Counter((task.q_head, task.q_rows, task.k_rows) for task in play(made, made.co_resident))
    expected = Counter(
        (
            head,
            (each.q_row + q * shape.m, each.q_row + min((q + 1) * shape.m, each.len_q)),
            (each.k_row + kv * shape.n, each.k_row + min((kv + 1) * shape.n, each.len_k)),
        )
        for each in problem.panel_list
        for state in [tile(problem.alone(each), shape).state]
        for kv, q in zip(*(state != TileState.EMPTY).nonzero(), strict=True)
        for head in range(problem.heads_q)
    )
    assert times == expected


def folded(made: Assembly, sums: np.ndarray, rows: int) -> np.ndarray:
    """What the last kernel does, row by row: `sums` are (kv tiles, rows of a tile, ...) in float32."""
    grad = np.full((rows, *sums.shape[2:]), np.nan, np.float32)
    for fold in made.folds.tolist():
        first, *others = made.parts[fold[Fold.PART] : fold[Fold.PART] + fold[Fold.PARTS]].tolist()
        total = sums[first[Part.KV_TILE]].copy()
        for part in others:
            total[: part[Part.K_ROWS]] += sums[part[Part.KV_TILE], : part[Part.K_ROWS]]
        grad[fold[Fold.K_ROW] : fold[Fold.K_ROW] + fold[Fold.K_ROWS]] = total[: fold[Fold.K_ROWS]]
    return grad


@examples(80)
@given(cut_problems(), shapes)
def test_the_tables_fold_as_the_cpu_does(problem: Problem, shape: TileShape) -> None:
    """The sums of each panel from the CPU, at their places in the fp32 sums of a kernel. Other places hold NaN."""
    made = assemble(problem, shape)
    backend, pack = CpuBackend(), Pack(problem, CpuBackend().tile_shape)
    given_ = operands(problem)
    expected = backend.backward(pack, Options())(given_)
    queries = given_._replace(**{name: getattr(given_, name).flatten(0, 1)[None] for name in ("dout", "q", "out")})
    flat = queries._replace(
        k=given_.k.flatten(0, 1)[None],
        v=given_.v.flatten(0, 1)[None],
        lse=given_.lse.transpose(0, 1).flatten(1, 2)[None],
    )
    partials = backend.held(replace(pack, held=problem.panel_list), Options()).backward(flat)
    by_panel = dict(zip(problem.panel_list, partials.sums, strict=True))
    for name in ("dk", "dv"):
        sums = np.full((len(made.kv_tiles), shape.n, *given_.k.shape[2:]), np.nan, np.float32)
        for panel, each in by_panel.items():
            (doc,) = [
                doc
                for doc in made.docs.tolist()
                if tuple(doc[Doc.Q_ROW : Doc.Q_TILE]) == panel[:4] and (panel.len_q or panel.len_k)
            ] or [None]
            for t in range(0 if doc is None else -(-panel.len_k // shape.n)):
                rows = getattr(each, name)[0, t * shape.n : (t + 1) * shape.n].numpy()
                sums[doc[Doc.KV_TILE] + t, : len(rows)] = rows
        got = torch.from_numpy(folded(made, sums, problem.batch * problem.len_k)).bfloat16()
        assert torch.equal(got, getattr(expected, name).flatten(0, 1)), name


# ---- wrong tables ------------------------------------------------------------------------------------------


def made() -> Assembly:
    """Documents of 40 and 60 tokens; the second is cut once, at row 50, and by the last range at 75."""
    problem = Problem(1, 4, 2, 100, 100, mask=documents([0, 40, 100], causal=True), panels=4)
    return assemble(problem, SHAPE, "spt")


def changed(**tables: Callable[[np.ndarray], None]) -> Assembly:
    copies = {name: getattr(made(), name).copy() for name in tables}
    for name, change in tables.items():
        change(copies[name])
    return replace(made(), **copies)


def swapped(table: np.ndarray) -> None:
    """The first two parts of the first fold that has several."""
    first = int(next(fold[Fold.PART] for fold in made().folds if fold[Fold.PARTS] > 1))
    table[[first, first + 1]] = table[[first + 1, first]]


def put(row: int, column: int, value: int) -> Callable[[np.ndarray], None]:
    def change(table: np.ndarray) -> None:
        table[row, column] = value

    return change


WRONG = {
    "another order": (changed(parts=swapped), "first part of a fold|order from the last queries"),
    "a part twice": (changed(parts=lambda parts: put(1, Part.KV_TILE, parts[0, 0])(parts)), "in two folds, or in none"),
    "rows of a part": (changed(parts=put(0, Part.K_ROWS, 3)), "not the rows of its kv tile"),
    "rows of a fold": (changed(folds=put(0, Fold.K_ROWS, 3)), "first part of a fold has not all"),
    "a fold elsewhere": (changed(folds=put(0, Fold.K_ROW, 8)), "in the fold of another tile"),
    "a part less": (changed(folds=put(0, Fold.PARTS, 0)), "parts of a fold do not follow"),
    "folds without panels": (replace(made(), sizes=replace(made().sizes, panels=1)), "of k|folds without panels"),
    "all keys": (replace(made(), sizes=replace(made().sizes, all_keys=True)), "not those that its queries see"),
    "a fold is missing": (replace(made(), folds=made().folds[:-1]), "do not follow"),
    "a key is missing": (replace(made(), sizes=replace(made().sizes, rows_k=101)), "a row of k is in two folds"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folds_are_refused(name: str) -> None:
    check(made())
    wrong, reason = WRONG[name]
    with pytest.raises(AssemblyError, match=reason):
        check(wrong)


def test_parts_in_another_order_of_equal_rows_are_refused() -> None:
    """The rows of all parts of this fold are equal, so only the order is wrong."""
    full = assemble(Problem(1, 1, 1, 64, 32, panels=2), SHAPE)
    parts = full.parts.copy()
    parts[[0, 1]] = parts[[1, 0]]
    with pytest.raises(AssemblyError, match="order from the last queries to the first"):
        check(replace(full, parts=parts))


@examples(300)
@given(st.data())
def test_any_other_number_is_refused(data: st.DataObject) -> None:
    """No number of these tables is free. Equal templates may stand for each other."""
    name = data.draw(st.sampled_from(["docs", "q_tiles", "kv_tiles", "folds", "parts"]))
    table = getattr(made(), name)
    row, column = data.draw(st.integers(0, len(table) - 1)), data.draw(st.integers(0, table.shape[1] - 1))
    value = data.draw(st.integers(-10, 130).filter(lambda value: value != table[row, column]))
    if name == "docs" and column in (Doc.BUNDLE, Doc.CONTRIBUTORS):
        return
    with pytest.raises(AssemblyError):
        check(changed(**{name: put(row, column, value)}))


def test_keys_after_the_query_have_no_tables() -> None:
    with pytest.raises(AssemblyError, match="not those that its queries see"):
        assemble(Problem(1, 1, 1, 64, 64, mask=window(20, 6), panels=2), SHAPE)
