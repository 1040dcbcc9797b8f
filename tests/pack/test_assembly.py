"""The tables of a pack: every sequence has its own tiles in its own order, and workers that draw tickets finish."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.backends.sm90.backend import Sm90Backend
from dash_attn.launch import compose
from dash_attn.order import POLICIES, applicable, looks_at_batch
from dash_attn.pack import Assembly, Doc, Pack, PackedBundle, PackedChain, assemble, check, templates
from dash_attn.plan import plan
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from dash_attn.program import Chain, Run
from dash_attn.simulate import Tickets
from dash_attn.tiling import TileShape, TileState, tile
from dash_attn.tools.cli.workload import policies_of
from tests.pack.machine import ChainEnd, PackedTask, play, ticket_steps
from tests.strategies import boundaries, document_masks, examples, shapes, windows

ORDERS = ("fa3", "spt", "descending", "search", "search:2")  # for every mask
SHAPE = TileShape(4, 8)


@st.composite
def packs(draw: st.DrawFn) -> Problem:
    """Documents, or batch entries, with any window."""
    len_q = draw(st.integers(0, 30))
    len_k = draw(st.integers(0, 30) | st.just(len_q))
    heads_kv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]))
    mask = draw(document_masks(len_q, len_k) | st.just(FULL) | st.just(CAUSAL)) & draw(st.just(FULL) | windows())
    return Problem(draw(st.integers(1, 3)), heads_kv * group, heads_kv, len_q, len_k, mask=mask)


@examples(200)
@given(packs(), shapes, st.sampled_from(ORDERS), st.booleans())
def test_every_tile_of_every_sequence_is_done_once_in_turn(
    problem: Problem, shape: TileShape, policy: str, by_head: bool
) -> None:
    made = assemble(problem, shape, policy + "@head" * by_head)
    assert made.sizes.cut == (by_head and problem.group > 1 and made.tickets > 0)
    tasks = play(made, made.co_resident)
    times = Counter((task.q_head, task.q_rows, task.k_rows, task.partial) for task in tasks)
    expected = Counter(
        (
            head,
            (each.q_row + q * shape.m, each.q_row + min((q + 1) * shape.m, each.len_q)),
            (each.k_row + kv * shape.n, each.k_row + min((kv + 1) * shape.n, each.len_k)),
            bool(state[kv, q] == TileState.PARTIAL),
        )
        for each in problem.sequences
        for state in [tile(problem.alone(each), shape).state]
        for head, kv, q in product(range(problem.heads_q), range(state.shape[0]), range(state.shape[1]))
        if state[kv, q] != TileState.EMPTY
    )
    assert times == expected
    written = Counter(task[:3] for task in tasks)
    for number, doc in enumerate(made.docs.tolist()):
        first = doc[Doc.CONTRIBUTORS]
        for q in range(-(-doc[Doc.Q_ROWS] // shape.m)):
            for head in range(problem.heads_q):
                assert written[number, head, q] == made.contributors[first + q]


@examples(200)
@given(packs(), shapes)
def test_what_no_task_writes_is_known(problem: Problem, shape: TileShape) -> None:
    made = assemble(problem, shape, "spt")
    states = [tile(problem.alone(each), shape).state for each in problem.sequences]
    assert made.clears_dq == any(state.shape[1] and not state.any(0).all() for state in states)
    assert made.clears_dkv == any(each.len_k and not each.len_q for each in problem.sequences)
    # Other rows of dK and dV are written by chains, also by those without tasks.
    for doc in made.docs.tolist():
        bundles = made.bundles[doc[Doc.BUNDLE] : doc[Doc.BUNDLE] + doc[Doc.BUNDLES]].tolist()
        chains = [chain for first, count, _ in bundles for chain in range(first, first + count)]
        expected = -(-doc[Doc.K_ROWS] // shape.n) if doc[Doc.Q_ROWS] else 0
        assert sorted(made.chains[chains, PackedChain.KV_TILE].tolist()) == list(range(expected))


@examples(100)
@given(packs(), shapes, st.sampled_from(ORDERS))
def test_each_head_of_a_sequence_has_the_order_of_its_plan(problem: Problem, shape: TileShape, policy: str) -> None:
    """The plan of a sequence has all heads, a template has one. Both run the same tasks in the same turns."""
    made = assemble(problem, shape, policy)
    tasks: dict[int, list[tuple[int, int, int, int]]] = {}
    for task in play(made, made.co_resident):
        tasks.setdefault(task.doc, []).append((task.q_head, task.q_tile, task.kv_tile, task.turn))
    by_row = {(each.q_row, each.k_row, each.len_q, each.len_k): each for each in problem.sequences}
    for number, doc in enumerate(made.docs[:, Doc.Q_ROW : Doc.Q_TILE].tolist()):
        program = plan(problem.alone(by_row[tuple(doc)]), shape, policy).program
        all_tasks = program.expand()
        kv_head, kv_tile = program.chains[all_tasks.chain][:, Chain.KV_HEAD : Chain.KV_TILE + 1].T
        head = kv_head * problem.group + all_tasks.head
        planned = np.stack([head, all_tasks.q, kv_tile, all_tasks.turn], axis=1).tolist()
        assert sorted(tasks.get(number, [])) == sorted(map(tuple, planned)), number


@examples(200)
@given(st.data(), packs(), shapes, st.sampled_from([None, 2, 8]))
def test_what_runs_tickets_says_how_many_workers_they_need(
    data: st.DataObject, problem: Problem, shape: TileShape, width: int | None
) -> None:
    pack = Pack(problem, lambda _: shape)
    name = data.draw(st.sampled_from(["auto", *policies_of(pack)]))
    is_wide = width is not None and name != "auto" and POLICIES[name].windowed
    pack = dataclasses.replace(pack, policy=f"{name}:{width}" if is_wide else name)
    needed = Sm90Backend(torch.device("cuda")).co_resident(pack)
    assert needed == assemble(problem, shape, pack.policy).co_resident == Tickets.of(pack).co_resident
    assert max(1, needed) >= CpuBackend().co_resident(pack), "a worker that draws ahead cannot go back"


def test_the_longest_sequence_is_launched_first() -> None:
    made = assemble(Problem(1, 2, 1, 60, 60, mask=documents([0, 8, 28, 28, 36, 60], causal=True)), SHAPE, "spt")
    assert made.docs[:, Doc.Q_ROWS].tolist() == [24, 20, 8, 8, 0]
    assert made.docs[:, Doc.Q_ROW].tolist() == [36, 8, 0, 28, 28]  # equals stay in their order
    assert made.rounds.tolist() == [[0, 0, 4, 3], [3, 1, 1, 3], [6, 2, 0, 1], [7, 3, 0, 1]] and made.tickets == 8
    assert made.docs[:, Doc.Q_TILE].tolist() == [0, 6, 11, 13, 15]
    assert made.docs[2, Doc.BUNDLE] == made.docs[3, Doc.BUNDLE] and len(made.chains) == 3 + 3 + 1
    assert made.q_tiles[6:11].tolist() == [[8, 4], [12, 4], [16, 4], [20, 4], [24, 4]]
    assert made.kv_tiles[3:6].tolist() == [[8, 8], [16, 8], [24, 4]]
    assert all(table.dtype == np.int32 for table in tables(made))


def tables(made: Assembly) -> list[np.ndarray]:
    names = ("docs", "rounds", "bundles", "chains", "runs", "contributors", "q_tiles", "kv_tiles")
    return [getattr(made, name) for name in names]


# ---- templates ---------------------------------------------------------------------------------------------


@examples(300)
@given(st.data(), shapes, st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_sequences_with_equal_codes_have_equal_tiles(
    data: st.DataObject, shape: TileShape, len_q: int, len_k: int, equal: bool
) -> None:
    mask = data.draw(st.sampled_from([FULL, CAUSAL]) | windows())
    if data.draw(st.booleans()):
        shape = TileShape(shape.m, shape.m * data.draw(st.integers(1, 3)))  # as kernels have them
    lengths = (len_q, len_q if equal else len_k)
    family = templates.Family(2, 64, "bfloat16", None, mask, shape, "auto")
    (code,) = family.codes(*np.array(lengths).reshape(2, 1)).tolist()
    stand_in = tile(family.problem(code), shape)
    exact = tile(Problem(1, 2, 1, *lengths, 64, mask=mask), shape)
    assert np.array_equal(stand_in.state, exact.state)
    for policy in ("auto", *applicable(exact), "spt@head"):
        programs = [compose(tiling, policy) for tiling in (stand_in, exact)]
        for name in ("tiles", "chains", "runs", "launch", "bundle_first"):
            first, second = (getattr(program, name) for program in programs)
            assert np.array_equal(first, second), (policy, name)


@pytest.mark.parametrize(
    ("mask", "lengths", "count"),
    [
        (CAUSAL, range(1, 65), 16),  # q tiles
        (FULL, range(1, 65), 16 + 8),  # and whether the last kv tile is partial
        (window(9, 0), range(1, 65), 16 + 7),  # and where the window of the last q tile begins
        (window(9, 1), range(1, 65), 16 + 8 + 7),  # and both
    ],
    ids=str,
)
def test_few_templates_stand_for_many_lengths(mask: Mask, lengths: range, count: int) -> None:
    family = templates.Family(1, 64, "bfloat16", None, mask, SHAPE, "spt")
    both = np.array(lengths)
    assert len(set(family.codes(both, both).tolist())) == count


def test_few_templates_stand_for_many_keys_before_the_queries() -> None:
    """By the q tiles before the queries, and three ways in which these keys end in a q tile."""
    family = templates.Family(1, 64, "bfloat16", None, CAUSAL, TileShape(8, 16), "spt")
    keys = np.arange(100, 164)
    codes = family.codes(np.full_like(keys, 36), keys)
    assert len(set(codes.tolist())) <= 4 * (64 // 8 + 1)


BEHIND = [CAUSAL, window(0, 0), window(5, 0), window(11, 0), window(40, 0)]
AHEAD = [window(0, 3), window(5, 1), window(11, 6), window(3, 40), window(7, None), window(None, 2), window(None, 9)]


@pytest.mark.parametrize("mask", [*BEHIND, *AHEAD], ids=str)
@pytest.mark.parametrize("shape", [TileShape(1, 4), TileShape(2, 4), TileShape(4, 4), TileShape(4, 8)], ids=str)
def test_every_short_length_has_the_tiles_of_its_code(mask: Mask, shape: TileShape) -> None:
    family = templates.Family(1, 64, "bfloat16", None, mask, shape, "spt")
    seen: dict[int, np.ndarray] = {}
    for len_q in range(1, 22):
        for len_k in {len_q, *range(1, 34)}:
            problem = Problem(1, 1, 1, len_q, len_k, 64, mask=mask)
            state = tile(problem, shape).state
            code = family.code(problem)
            assert np.array_equal(state, seen.setdefault(code, state)), (len_q, len_k)
            assert np.array_equal(state, tile(family.problem(code), shape).state), (len_q, len_k)


def test_a_known_template_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(1, 1, 1, 90, 90, dim=24, mask=documents([0, 40, 90], causal=True))
    assemble(problem, SHAPE, "spt")
    monkeypatch.setattr(templates, "plan", lambda *_: pytest.fail("planned again"))
    other = Problem(2, 4, 4, 179, 179, dim=24, mask=documents([0, 50, 89, 139, 179], causal=True))
    assert assemble(other, SHAPE, "spt").tickets == 2 * 4 * (7 + 5 + 7 + 5)


def test_the_memory_of_templates_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "KEPT_BYTES", 20_000)
    family = templates.Family(1, 64, "bfloat16", None, window(5, 1), SHAPE, "spt")
    known = templates.Templates(family)
    for length in range(1, 60):
        code = family.code(Problem(1, 1, 1, length, length))
        assert known.of(code).facts[templates.Fact.Q_TILES] == -(-length // SHAPE.m)
        assert known.of(code) is known.of(code)
        assert known._known.nbytes <= 20_000
    assert 1 < len(known._known) < 59


def test_a_sequence_with_nothing_to_do_has_the_tables_of_the_others() -> None:
    made = templates.PackedTemplate.of(plan(Problem(1, 2, 1, 20, 20, mask=CAUSAL), SHAPE).verified)
    idle = templates.PackedTemplate.idle(3)
    for name in ("bundles", "chains", "runs", "contributors", "rounds"):
        table, empty = getattr(made, name), getattr(idle, name)
        assert (empty.dtype, empty.shape[1:]) == (table.dtype, table.shape[1:]), name
        assert len(empty) == (3 if name == "contributors" else 0) < len(table)
    facts = [dict(zip(templates.Fact, each.facts, strict=True)) for each in (made, idle)]
    assert facts[0][templates.Fact.Q_TILES] == 5 and facts[0][templates.Fact.TASKS] == made.runs[:, Run.COUNT].sum()
    assert {fact: value for fact, value in facts[1].items() if value} == {
        templates.Fact.Q_TILES: 3,
        templates.Fact.BLIND: 3,
    }
    assert [column.name for column in PackedChain] == [column.name for column in Chain][Chain.KV_TILE :]


@pytest.mark.parametrize("policy", ["level", "level@head"])
def test_an_order_that_looks_at_the_batch_is_refused(policy: str) -> None:
    """The template of a pack has one kv head, and the plan of a document has all of them: they would differ."""
    problem = Problem(1, 4, 2, 60, 60, mask=documents([0, 20, 60], causal=True))
    heads = plan(Problem(1, 4, 2, 40, 40, mask=CAUSAL), SHAPE, policy).program
    assert len(np.unique(heads.chains[heads.chains[:, Chain.KV_TILE] == 0, Chain.FIRST_RUN])) > 1
    with pytest.raises(ValueError, match="orders the last heads of a batch in another way"):
        assemble(problem, SHAPE, policy)
    with pytest.raises(ValueError, match="orders the last heads of a batch in another way"):
        Pack(problem, lambda _: SHAPE, policy).require_order()


def test_a_program_whose_panels_differ_is_no_template() -> None:
    heads = plan(Problem(1, 4, 1, 40, 40, mask=CAUSAL), SHAPE, "level@head")
    with pytest.raises(ValueError, match="orders the query heads of a group in different ways"):
        templates.PackedTemplate.of(heads.verified)


def test_a_program_without_rounds_is_no_template() -> None:
    verified = plan(Problem(1, 1, 1, 40, 40, mask=CAUSAL), SHAPE).verified
    with pytest.raises(ValueError, match="launches other bundles between those that wait for each other"):
        templates.PackedTemplate.of(dataclasses.replace(verified, rounds=None))


def test_a_long_sequence_keeps_its_groups_beside_a_short_one_that_is_cut() -> None:
    problem = Problem(1, 8, 2, 320, 320, mask=documents([0, 20, 320], causal=True))
    made = assemble(problem, TileShape(1, 1))
    assert made.docs[:, Doc.Q_ROWS].tolist() == [300, 20] and made.docs[:, Doc.PANELS].tolist() == [2, 8]
    assert made.sizes.cut and (made.sizes.heads_q, made.sizes.heads_kv) == (8, 2)
    assert not assemble(problem, TileShape(1, 1), "auto@group").sizes.cut
    long, short = (plan(Problem(1, 8, 2, n, n, mask=CAUSAL), TileShape(1, 1)) for n in (300, 20))
    assert (long.program.policy, short.program.policy) == ("fold", "symmetric_shift:64@head")
    assert made.co_resident == max(long.co_resident, short.co_resident) == 10
    for workers in (10, 11, 132):
        tasks = Counter(task.q_head for task in play(made, workers))
        assert tasks == dict.fromkeys(range(8), 300 * 301 // 2 + 20 * 21 // 2)
    with pytest.raises(AssertionError, match="waits for ever"):
        play(made, 9)


def test_a_worker_that_took_two_chains_of_a_window_would_wait_for_ever() -> None:
    """Chains of a window wait for each other in a circle. A worker draws its next ticket before it has done its chain,
    and AWAITS keeps it from drawing another chain of that window."""
    made = assemble(Problem(1, 2, 2, 64, 64, mask=documents([0, 24, 64])), TileShape(8, 8), "shift:64")
    later = made.bundles[:, PackedBundle.AWAITS]
    assert later.tolist() == [2, 1, 0, 4, 3, 2, 1, 0] and made.co_resident == 5
    assert len(play(made, 5)) == 2 * (5 * 5 + 3 * 3)
    bundles = made.bundles.copy()
    bundles[:, PackedBundle.AWAITS] = 0
    with pytest.raises(AssertionError, match="waits for ever"):
        play(dataclasses.replace(made, bundles=bundles), 5)


@examples(300)
@given(st.data(), shapes, st.sampled_from([1, 2, 3]), st.integers(1, 60), st.integers(1, 60))
def test_what_a_bundle_awaits_is_the_rest_of_its_round(
    data: st.DataObject, shape: TileShape, group: int, len_q: int, len_k: int
) -> None:
    """A bundle is of the round of those that wait for it, or that it waits for, and of all between them."""
    problem = Problem(1, group, 1, len_q, len_k, mask=data.draw(st.sampled_from([FULL, CAUSAL]) | windows()))
    name = data.draw(st.sampled_from([each for each in applicable(tile(problem, shape)) if not looks_at_batch(each)]))
    width = f":{data.draw(st.integers(1, 8))}" if POLICIES[name].windowed else ""
    verified = plan(problem, shape, name + width + "@head" * data.draw(st.booleans())).verified
    made, program = templates.PackedTemplate.of(verified), verified.program
    first = program.groups[program.launch[program.bundle_first[:-1]]] == 0
    number = np.full(len(program.chains), -1)
    number[program.launch] = np.repeat(np.where(first, np.cumsum(first) - 1, -1), np.diff(program.bundle_first))
    turns: dict[int, dict[int, int]] = {}  # by dQ tile: the bundle of each turn
    tasks = program.expand()
    for chain, target, turn in zip(tasks.chain, tasks.target, tasks.turn, strict=True):
        if number[chain] >= 0:
            turns.setdefault(int(target), {})[int(turn)] = int(number[chain])
    reach = list(range(len(made.bundles)))
    for of_turn in turns.values():
        for turn in range(1, len(of_turn)):
            reach[of_turn[turn]] = max(reach[of_turn[turn]], of_turn[turn - 1])
    ends = [b for b in range(len(reach)) if max(reach[: b + 1]) == b]
    expected = [next(end for end in ends if end >= b) - b for b in range(len(reach))]
    assert made.bundles[:, PackedBundle.AWAITS].tolist() == expected


def test_rounds_of_a_sequence_are_as_far_apart_as_other_sequences_allow() -> None:
    """A chain of the second round waits for all chains of the first. Until then other sequences run."""
    problem = Problem(1, 32, 32, 200, 200, mask=documents(range(0, 201, 40)))
    made = assemble(problem, TileShape(8, 8), "shift:2")  # of 5 kv tiles: rounds of 2, 2 and 1 bundles
    last, far = dict[int, int](), list[bool]()
    for ticket, doc, _, _ in made.rounds.tolist():
        if doc in last:
            far.append(ticket - last[doc] >= 128)
        last[doc] = ticket
    assert far == [True] * 8 + [False] * 2  # nothing is left to come between the rounds of the last sequence


@examples(100)
@given(st.data(), st.sampled_from([(2, 3), (3, 2), (1, 4)]), st.sampled_from([1, 2]))
def test_tickets_of_auto_never_wait_for_ever(data: st.DataObject, heads: tuple[int, int], ratio: int) -> None:
    """Pairs in a window wait for each other, and the chains of a q head for those of the q head before it."""
    cu = data.draw(boundaries(data.draw(st.integers(20, 120)), data.draw(st.integers(1, 5))))
    kv, group = heads
    mask = documents(cu, causal=data.draw(st.booleans()))
    made = assemble(Problem(1, kv * group, kv, cu[-1], cu[-1], mask=mask), TileShape(3, 3 * ratio))
    played = play(made, made.co_resident)
    assert len(played) == kv * group * sum(
        int((tile(problem, made.sizes.shape).state != TileState.EMPTY).sum()) for problem in alone(made, mask)
    )


def alone(made: Assembly, mask: Mask) -> list[Problem]:
    """The sequences of a pack, one head each."""
    lengths = made.docs[:, [Doc.Q_ROWS, Doc.K_ROWS]].tolist()
    return [Problem(1, 1, 1, *each, mask=dataclasses.replace(mask, documents=None)) for each in lengths]


def test_q_heads_of_a_group_are_far_apart_in_the_tickets() -> None:
    made = assemble(Problem(1, 6, 2, 40, 40, mask=documents([0, 40], causal=True)), SHAPE, "spt@head")
    steps = [list(ticket_steps(made, ticket)) for ticket in range(made.tickets)]
    heads = [{step.q_head for step in each if isinstance(step, PackedTask)} for each in steps]
    assert heads == [{head} for head in (0, 3, 1, 4, 2, 5) for _ in range(5)]
    ends = [step for each in steps for step in each if isinstance(step, ChainEnd)]
    assert [(end.kv_head, end.turn) for end in ends[::5]] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_a_later_q_head_drawn_first_waits_for_ever() -> None:
    """The reader sees turns of dK and dV: with the tickets the other way round no q head ends."""
    made = assemble(Problem(1, 2, 1, 8, 8, mask=documents([0, 8], causal=True)), SHAPE, "spt@head")
    assert made.tickets == 2 and len(play(made, 1)) == 2 * 2
    assert len(play(made, 2, drawn=[1, 0])) == 2 * 2
    with pytest.raises(AssertionError, match="waits for ever"):
        play(made, 1, drawn=[1, 0])


@examples(100)
@given(st.data())
def test_check_takes_every_pack(data: st.DataObject) -> None:
    cu = data.draw(boundaries(data.draw(st.integers(0, 60)), data.draw(st.integers(1, 9))))
    check(assemble(Problem(2, 2, 1, cu[-1], cu[-1], mask=documents(cu)), SHAPE, "fa3"))
