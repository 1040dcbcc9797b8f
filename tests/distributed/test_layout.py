"""Layouts put every token on one rank, and routes bring every sum to the rank that holds its keys."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_attn import attention
from dash_attn.backends import Options
from dash_attn.distributed import context_parallel_attention, explain, tokens
from dash_attn.distributed.layout import LAYOUTS, Layout, usual_panels
from dash_attn.distributed.ranks import Axis
from dash_attn.distributed.routes import Routes
from dash_attn.distributed.stages import Result, stages_of, trips
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from tests.strategies import examples


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    name, ranks = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 8))
    return Layout(name, ranks, 2 * ranks * draw(st.integers(1, 3)))


@given(layouts(), st.integers(0, 200))
@examples(100)
def test_every_token_lies_on_one_rank(layout: Layout, length: int) -> None:
    own = [rows_of(layout, length, rank) for rank in range(layout.ranks)]
    assert sorted(row for rows in own for row in rows) == list(range(length))
    assert [len(rows) for rows in own] == layout.lengths(length)
    assert [own[rank][row] for rank, rows in layout.pieces(length) for row in range(*rows)] == list(range(length))


def rows_of(layout: Layout, length: int, rank: int) -> list[int]:
    return [row for begin, end in layout.held(length, rank) for row in range(begin, end)]


def test_layouts_as_others_know_them() -> None:
    assert [Layout("zigzag", 4, 8).held(80, rank) for rank in range(4)] == [
        ((0, 10), (70, 80)),
        ((10, 20), (60, 70)),
        ((20, 30), (50, 60)),
        ((30, 50),),
    ]
    assert [Layout("contiguous", 4, 8).held(80, rank) for rank in range(4)] == [
        ((0, 20),),
        ((20, 40),),
        ((40, 60),),
        ((60, 80),),
    ]


@pytest.mark.parametrize("panels", [8, 16, 32])
def test_the_layout_of_even_tokens_does_not_depend_on_the_panels(panels: int) -> None:
    for rank in range(4):
        assert Layout("zigzag", 4, panels).held(320, rank) == Layout("zigzag", 4, 8).held(320, rank)


def test_usual_panels() -> None:
    assert [usual_panels(ranks) for ranks in (1, 2, 3, 4, 6, 8, 16, 64)] == [16, 16, 18, 16, 24, 16, 32, 128]


@pytest.mark.parametrize(
    ("name", "ranks", "panels", "message"),
    [
        ("ring", 2, 16, "layout must be one of zigzag, contiguous"),
        ("zigzag", 8, 8, "panels must be a multiple of 16 for layout 'zigzag' on 8 ranks; got 8"),
        ("contiguous", 4, 6, "panels must be a multiple of 4"),
        ("zigzag", 1, 0, "panels must be a whole number from 1"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, ranks: int, panels: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(name, ranks, panels)


def test_a_device_without_single_panels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("no kernel for single panels")

    monkeypatch.setattr(tokens, "prepare_panels", refuse)
    whole = prepare(Problem(1, 2, 2, 64, 64, mask=CAUSAL, panels=4), "auto", Options(), torch.device("cpu"))
    axis = Axis("", (0, 1), 0, 2)
    with pytest.raises(NotImplementedError, match=r"2 ranks share .* no kernel for single panels. Or use mode='a2a'"):
        tokens.Tokens(whole, axis, Layout("zigzag", 2, 4)).require_panels()


def test_arguments_are_those_of_attention() -> None:
    """An argument that attention has, and that ranks would ignore, is not accepted."""
    alone, ranked, explained = (
        dict(inspect.signature(f).parameters) for f in (attention, context_parallel_attention, explain)
    )
    own = {"group", "mode", "layout", "panels"}
    assert {name: p.default for name, p in ranked.items() if name not in own} == {
        name: alone[name].default for name in ranked if name not in own
    }
    assert {*explained, "return_lse"} == set(ranked)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    mask: Mask = draw(st.sampled_from([FULL, CAUSAL, window(5, 0), window(3, 4), window(7, None)]))
    len_q, len_k = draw(st.integers(0, 60)), draw(st.integers(0, 60))
    batch = draw(st.integers(1, 2))
    if draw(st.booleans()):
        batch, count = 1, draw(st.integers(1, 5))
        cuts = [
            sorted(draw(st.lists(st.integers(0, n), min_size=count - 1, max_size=count - 1))) for n in (len_q, len_k)
        ]
        mask &= documents([0, *cuts[0], len_q], [0, *cuts[1], len_k])
    return Problem(batch, 2, 1, len_q, len_k, mask=mask)


@given(problems(), layouts())
@examples(150)
def test_routes_bring_every_sum_to_its_keys(problem: Problem, layout: Layout) -> None:
    problem = replace(problem, panels=layout.panels)
    routes = [Routes.of(problem, layout, rank) for rank in range(layout.ranks)]
    assert sum(len(each.panels) for each in routes) == sum(panel.len_q > 0 for panel in problem.panel_list)
    # Each number stands for a key of a panel: what each rank sends, and what each rank adds.
    arrived: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, each in enumerate(routes):
        for to, addends in enumerate(each.sent):
            rows = [
                (each.panels[addend.panel].q_row, each.panels[addend.panel].k_row + row)
                for addend in addends
                for row in range(*addend.rows)
            ]
            assert len(rows) == routes[to].received[rank]
            arrived[rank, to] = rows
    contributions: dict[int, list[tuple[int, int]]] = {}
    for rank, each in enumerate(routes):
        own = [
            batch * problem.len_k + row
            for batch in range(problem.batch)
            for begin, end in layout.held(problem.len_k, rank)
            for row in range(begin, end)
        ]
        for one in each.sums:
            for addend in one.addends:
                for row in range(addend.count):
                    query, key = arrived[addend.source, rank][addend.first + row]
                    assert own[one.rows[0] + row] == key
                    contributions.setdefault(key, []).append((addend.source, query))
    expected: dict[int, list[tuple[int, int]]] = {}
    where = {
        whole(problem, layout, rank, panel.q_row): (rank, panel.q_row)
        for rank, r in enumerate(routes)
        for panel in r.panels
    }
    for panel in reversed(problem.panel_list):
        if panel.len_q:
            for key in range(panel.k_row, panel.k_row + panel.len_k):
                expected.setdefault(key, []).append(where[panel.q_row])
    assert contributions == expected


@given(problems(), layouts())
@examples(150)
def test_a_panel_starts_as_soon_as_its_keys_are_there(problem: Problem, layout: Layout) -> None:
    problem = replace(problem, panels=layout.panels)
    every, length = trips(problem, layout), problem.len_k
    assert [key for trip in every for key in range(*trip)] == list(range(length))
    started = set[int]()
    for rank in range(layout.ranks):
        panels = Routes.of(problem, layout, rank).panels
        stages = stages_of(problem, layout, rank, panels)
        assert sorted(number for stage in stages for number in stage.numbers) == list(range(len(panels)))
        queries = torch.arange(problem.batch * layout.lengths(problem.len_q)[rank])
        cut = [stage.cut(queries, 0) for stage in stages]
        result = Result(1, len(queries), 1)
        for stage, rows in zip(stages, cut, strict=True):
            result.put(stage, slice(0, 1), rows[None, :, None])
        assert torch.equal(result.whole().flatten(), queries)
        for stage, rows in zip(stages, cut, strict=True):
            there = [
                set(rows_of(layout, length, rank)) | {key for trip in every[:n] for key in range(*trip)}
                for n in range(3)
            ]
            for number, panel in zip(stage.numbers, stage.panels, strict=True):
                asked = panels[number]
                assert panel == asked._replace(q_row=panel.q_row)
                assert rows[panel.q_row : panel.q_row + panel.len_q].tolist() == list(
                    range(asked.q_row, asked.q_row + asked.len_q)
                )
                keys = {row % length for row in range(panel.k_row, panel.k_row + panel.len_k)}
                assert [keys <= some for some in there].index(True) == stage.trips
            started.add(stage.trips)
    assert len(every) == 1 or started & {0, 1}, "early keys travel alone only if a panel can start with them"


def whole(problem: Problem, layout: Layout, rank: int, row: int) -> int:
    """The row in the whole tensor of a row on a rank."""
    length = layout.lengths(problem.len_q)[rank]
    own = [x for begin, end in layout.held(problem.len_q, rank) for x in range(begin, end)]
    return row // length * problem.len_q + own[row % length]
