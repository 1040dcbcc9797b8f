"""check finds tables of a pack that are wrong in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.pack import Assembly, AssemblyError, Doc, PackedBundle, PackedChain, Round, assemble, check
from dash_attn.problem import Problem, documents
from dash_attn.program import Run
from dash_attn.tiling import TileShape
from tests.pack.machine import play
from tests.strategies import examples

CU = [0, 30, 30, 41, 100, 130]  # two documents of one length, one without tokens


def made(policy: str = "spt") -> Assembly:
    return assemble(Problem(2, 4, 2, 130, 130, mask=documents(CU, causal=True)), TileShape(8, 16), policy)


def changed(policy: str = "spt", **tables: Callable[[np.ndarray], Any]) -> Assembly:
    """The pack with some tables changed. A change edits a copy in place, or gives a new table."""
    whole = made(policy)
    copies = {name: getattr(whole, name).copy() for name in tables}
    new = {name: change(copies[name]) for name, change in tables.items()}
    return replace(whole, **{name: copies[name] if new[name] is None else new[name] for name in tables})


def put(row: int, column: int, value: int) -> Callable[[np.ndarray], None]:
    def change(table: np.ndarray) -> None:
        table[row, column] = value

    return change


def add(row: int, column: int, by: int) -> Callable[[np.ndarray], None]:
    def change(table: np.ndarray) -> None:
        table[row, column] += by

    return change


def swap(*columns: int, rows: tuple[int, int] = (0, 4)) -> Callable[[np.ndarray], None]:
    def change(table: np.ndarray) -> None:
        first, second = rows
        for column in columns or range(table.shape[1]):
            table[[first, second], column] = table[[second, first], column]

    return change


def without_queries() -> Assembly:
    """The second document has keys and no queries, and the first query of the first one sees no key."""
    cu_q, cu_k = [0, 9, 9, 20], [0, 8, 16, 27]
    mask = documents(cu_q, cu_k, causal=True)
    return assemble(Problem(1, 2, 1, 20, 27, mask=mask), TileShape(1, 8), "spt@head")


def entry(place: int, by: int) -> Callable[[np.ndarray], None]:
    def change(table: np.ndarray) -> None:
        table[place] += by

    return change


def shifted(rows: range, table: np.ndarray) -> None:
    """All tiles of a sequence, moved onto those of another."""
    table[rows.start : rows.stop, 0] += 8


ROW, ROWS, TILE = Doc.Q_ROW, Doc.Q_ROWS, Doc.Q_TILE
TEMPLATE = (Doc.BUNDLE, Doc.BUNDLES, Doc.CONTRIBUTORS)
MUTATIONS: dict[str, tuple[Assembly, str]] = {
    "sequences overlap": (changed(docs=add(0, ROW, -8)), "tile is not cut from the rows"),
    "sequences and their tiles overlap": (
        changed(docs=add(0, ROW, 8), q_tiles=lambda table: shifted(range(0, 8), table)),
        "a row is in two sequences",
    ),
    "keys and their tiles overlap": (
        changed(docs=add(0, Doc.K_ROW, 8), kv_tiles=lambda table: shifted(range(0, 4), table)),
        "a row is in two sequences.*of k",
    ),
    "rows outside": (replace(made(), sizes=replace(made().sizes, rows_q=259)), "a row is in two sequences, or in none"),
    "a sequence is missing": (changed(docs=lambda docs: np.delete(docs, 0, 0)), "tiles do not follow"),
    "the last sequence is missing": (changed(docs=lambda docs: docs[:7]), "tiles are missing"),
    "a q tile is missing": (changed(q_tiles=lambda tiles: tiles[:-1]), "tiles are missing"),
    "a q tile too many": (changed(q_tiles=lambda tiles: tiles[[*range(len(tiles)), -1]]), "tiles are missing, or too"),
    "a kv tile is missing": (changed(kv_tiles=lambda tiles: np.delete(tiles, 2, 0)), "tile is not cut from the rows"),
    "a tile begins elsewhere": (changed(q_tiles=add(3, 0, 1)), "tile is not cut from the rows"),
    "a tile is too long": (changed(q_tiles=add(7, 1, 1)), "tile is not cut from the rows"),
    "a tile is too short": (changed(kv_tiles=add(0, 1, -1)), "tile is not cut from the rows"),
    "tiles swapped": (changed(q_tiles=swap(rows=(0, 1))), "tile is not cut from the rows"),
    "a sequence is shorter": (changed(docs=add(0, ROWS, -8)), "tile"),
    "wrong first tile": (changed(docs=add(1, TILE, 1)), "tiles do not follow"),
    "wrong first kv tile": (changed(docs=add(1, Doc.KV_TILE, -1)), "tiles do not follow"),
    "wrong first ticket": (changed(rounds=add(1, Round.TICKET, 1)), "tickets of a round do not follow"),
    "two rounds with one ticket": (changed(rounds=put(1, Round.TICKET, 0)), "tickets of a round do not follow"),
    "a round of no sequence": (changed(rounds=put(0, Round.DOC, 99)), "rounds are not its bundles"),
    "a round of another sequence": (changed(rounds=put(0, Round.DOC, 2)), "rounds are not its bundles"),
    "a round with too many bundles": (changed(rounds=add(0, Round.BUNDLES, 1)), "rounds are not its bundles"),
    "a round is missing": (changed(rounds=lambda rounds: rounds[:-1]), "rounds are not its bundles"),
    "a round twice": (changed(rounds=lambda rounds: rounds[[0, *range(len(rounds))]]), "tickets of a round"),
    "a bundle awaits another round": (changed(bundles=put(0, PackedBundle.AWAITS, 99)), "awaits bundles of another"),
    "a bundle awaits an earlier one": (changed(bundles=put(1, PackedBundle.AWAITS, -1)), "awaits bundles of another"),
    "a bundle awaits one that does not await it": (changed(bundles=put(3, PackedBundle.AWAITS, 2)), "or not those"),
    "a ticket less": (replace(made(), tickets=made().tickets - 1), "tickets of a round do not follow"),
    "a ticket more": (replace(made(), tickets=made().tickets + 1), "tickets of a round do not follow"),
    "a sequence without work has tickets": (changed(docs=put(8, Doc.BUNDLES, 1)), "exactly if it has queries and keys"),
    "a sequence with work has none": (changed(docs=put(7, Doc.BUNDLES, 0)), "exactly if it has queries and keys"),
    "panels of no kind": (changed(docs=put(0, Doc.PANELS, 3)), "neither kv heads nor q heads"),
    "a whole group cut": (changed(docs=put(0, Doc.PANELS, 4)), "heads of the sequence"),
    "the last whole group cut": (changed(docs=put(7, Doc.PANELS, 4)), "heads of the sequence"),
    "negative": (changed(docs=put(0, ROWS, -59)), "negative"),
    "documents swapped": (changed(docs=swap()), "tiles do not follow"),
    "documents of one length swapped": (changed(docs=swap(rows=(2, 3))), "tiles do not follow"),
    "rows of documents swapped": (changed(docs=swap(ROW, Doc.K_ROW, ROWS, Doc.K_ROWS)), "tile"),
    "rows of documents of one length swapped": (changed(docs=swap(ROW, rows=(2, 3))), "tile is not cut from the rows"),
    "templates of documents swapped": (changed(docs=swap(*TEMPLATE)), "one chain for each"),
    "orders of documents swapped": (changed(docs=swap(Doc.BUNDLE)), "template"),
    "contributors of documents swapped": (changed(docs=swap(Doc.CONTRIBUTORS)), "tasks are not the contributions"),
    "bundles outside": (changed(docs=put(0, Doc.BUNDLE, 10**6)), "bundles are outside"),
    "contributors outside": (changed(docs=put(0, Doc.CONTRIBUTORS, 10**6)), "contributors are outside"),
    "a bundle leaves a chain out": (changed(bundles=add(1, 0, 1)), "leave chains out"),
    "a bundle of no chain": (changed(bundles=put(0, 1, 0)), "leave chains out"),
    "a bundle of too many chains": (changed(bundles=put(-1, 1, 99)), "outside their table"),
    "a kv tile twice": (changed(chains=put(0, PackedChain.KV_TILE, 0)), "a kv tile twice"),
    "a kv tile that is not there": (changed(chains=put(0, PackedChain.KV_TILE, 99)), "a kv tile twice, or one that"),
    "runs outside": (changed(chains=put(0, PackedChain.NUM_RUNS, 999)), "runs outside their table"),
    "negative run": (changed(chains=put(0, PackedChain.FIRST_RUN, -1)), "runs outside their table"),
    "a q tile outside": (changed(runs=put(0, Run.FIRST_Q, 99)), "outside the q tiles"),
    "a run of no task": (changed(runs=put(0, Run.COUNT, 0)), "outside the q tiles"),
    "a head that is not there": (changed(runs=put(0, Run.HEAD, 2)), "outside the q tiles and heads"),
    "another head": (changed(runs=put(0, Run.HEAD, 1)), "tasks are not the contributions"),
    "another q tile": (changed(runs=add(1, Run.FIRST_Q, -1)), "tasks are not the contributions"),
    "a run is missing": (changed(chains=add(0, PackedChain.NUM_RUNS, -1)), "tasks are not the contributions"),
    "another turn": (changed(runs=add(0, Run.TURN, 1)), "`runs` are not those of its templates"),
    "another step of turns": (changed(runs=add(0, Run.TURN_STEP, 1)), "`runs` are not those of its templates"),
    "another mask flag": (changed(runs=put(-1, Run.PARTIAL, 2)), "`runs` are not those of its templates"),
    "a contributor more": (changed(contributors=entry(0, 1)), "tasks are not the contributions"),
    "a contributor less": (changed(contributors=entry(-1, -1)), "tasks are not the contributions"),
    "a contributor is missing": (changed(contributors=lambda table: table[:-1]), "contributors are outside"),
    "keys of a sequence are fewer": (changed(docs=add(0, Doc.K_ROWS, -16)), "tile"),
    "keys begin elsewhere": (changed(docs=add(0, Doc.K_ROW, 16)), "tile is not cut from the rows"),
    "keys of two sequences swapped": (changed(docs=swap(Doc.K_ROW, rows=(2, 3))), "tile is not cut from the rows"),
    "a sequence twice": (changed(docs=lambda docs: docs[[0, *range(len(docs))]]), "tiles do not follow"),
    # The same with cut chains, which have a panel for each q head.
    "a cut group whole": (changed("spt@head", docs=put(0, Doc.PANELS, 2)), "tasks are not the contributions"),
    "the last cut group whole": (changed("spt@head", docs=put(7, Doc.PANELS, 2)), "tasks are not the contributions"),
    "too many panels": (changed("spt@head", docs=put(0, Doc.PANELS, 8)), "neither kv heads nor q heads"),
    "a second head in a panel of one": (changed("spt@head", runs=put(0, Run.HEAD, 1)), "outside the q tiles and heads"),
    "a cut ticket less": (replace(made("spt@head"), tickets=made("spt@head").tickets - 1), "tickets of a round do not"),
    "cut is not set": (
        replace(made("spt@head"), sizes=replace(made("spt@head").sizes, cut=False)),
        "they need `cut`",
    ),
    "dQ is not cleared": (replace(without_queries(), clears_dq=False), "they need `clears_dq`"),
    "dK and dV are not cleared": (replace(without_queries(), clears_dkv=False), "they need `clears_dkv`"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_pack_is_refused(name: str) -> None:
    wrong, reason = MUTATIONS[name]
    with pytest.raises(AssemblyError, match=reason):
        check(wrong)


def test_the_right_pack_is_taken() -> None:
    check(made())
    assert made().docs[:, ROWS].tolist() == [59, 59, 30, 30, 30, 30, 11, 11, 0, 0]
    assert len(play(made(), made().co_resident)) > 0


@examples(300)
@given(st.data(), st.sampled_from(["spt", "spt@head"]))
def test_any_other_number_in_the_instances_is_refused(data: st.DataObject, policy: str) -> None:
    """No number of these tables is free. A sequence without tokens may have its rows and its template anywhere,
    and panels of either kind."""
    name = data.draw(st.sampled_from(["docs", "rounds", "q_tiles", "kv_tiles"]))
    table = getattr(made(policy), name)
    row, column = data.draw(st.integers(0, len(table) - 1)), data.draw(st.integers(0, table.shape[1] - 1))
    free = (ROW, Doc.K_ROW, Doc.BUNDLE, Doc.CONTRIBUTORS)
    if name == "docs" and not table[row, ROWS] and column in free:
        return
    value = data.draw(st.integers(-10, 300).filter(lambda value: value != table[row, column]))
    if name == "docs" and not table[row, ROWS] and column == Doc.PANELS and value == made().sizes.heads_q:
        return
    wrong = changed(policy, **{name: put(row, column, value)})
    if name == "docs" and column in (Doc.BUNDLE, Doc.CONTRIBUTORS):
        assert _is_refused(wrong) or _same_order(wrong, made(policy))
    else:
        assert _is_refused(wrong)


@examples(300)
@given(st.data(), st.sampled_from(["spt", "spt@head", "symmetric_shift:2"]))
def test_any_other_number_of_a_template_is_refused(data: st.DataObject, policy: str) -> None:
    """Also the turns, which no other check looks at."""
    name = data.draw(st.sampled_from(["bundles", "chains", "runs", "contributors"]))
    table = getattr(made(policy), name)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in table.shape)
    value = data.draw(st.integers(-10, 300).filter(lambda value: value != table[place]))
    assert _is_refused(changed(policy, **{name: lambda table: table.__setitem__(place, value)}))


def _is_refused(wrong: Assembly) -> bool:
    try:
        check(wrong)
    except AssemblyError:
        return True
    return False


def _same_order(other: Assembly, right: Assembly) -> bool:
    return play(other, other.co_resident) == play(right, right.co_resident)
