"""Mutated programs: verify and a slow oracle agree on every one, and refusals name the tasks to blame."""

from __future__ import annotations

import copy
import dataclasses
import tracemalloc
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from dash_attn.launch import compose
from dash_attn.plan import plan
from dash_attn.problem import CAUSAL, FULL, Problem, window
from dash_attn.program import Chain, Program, Sequences
from dash_attn.tiling import TileShape, tile
from dash_attn.verify import TooFewWorkers, VerifyError, verify
from tests.strategies import examples, programs
from tests.verify.oracle import Book, Step, Visit, faults, finishes, proves_deadlock

# ---- mutations ---------------------------------------------------------------------------------------------

Mutation = Callable[[Book, np.random.Generator], None]


def pick(book: Book, rng: np.random.Generator, least: int = 1) -> list[Visit]:
    """A chain of at least so many visits."""
    long = [chain for chain in book.chains if len(chain) >= least]
    assume(long)
    return long[rng.integers(len(long))]


def visit(book: Book, rng: np.random.Generator) -> Visit:
    chain = pick(book, rng)
    return chain[rng.integers(len(chain))]


def drop_a_task(book: Book, rng: np.random.Generator) -> None:
    chain = pick(book, rng)
    del chain[rng.integers(len(chain))]


def duplicate_a_task(book: Book, rng: np.random.Generator) -> None:
    chain = pick(book, rng)
    chain.insert(int(rng.integers(len(chain) + 1)), copy.copy(chain[rng.integers(len(chain))]))


def copy_a_task_to_another_chain(book: Book, rng: np.random.Generator) -> None:
    target = book.chains[rng.integers(len(book.chains))]
    target.insert(int(rng.integers(len(target) + 1)), copy.copy(visit(book, rng)))


def visit_another_tile(book: Book, rng: np.random.Generator) -> None:
    chosen = visit(book, rng)
    chosen.q = int(rng.integers(-1, book.program.geometry.num_q + 1))


def visit_another_head(book: Book, rng: np.random.Generator) -> None:
    chosen = visit(book, rng)
    chosen.head = int(rng.integers(-1, book.program.geometry.group + 1))


def change_a_turn(book: Book, rng: np.random.Generator) -> None:
    visit(book, rng).turn += int(rng.choice([-2, -1, 1, 2]))


def swap_turns(book: Book, rng: np.random.Generator) -> None:
    """Of any two tasks: of two dQ tiles, or of one, where the turns stay a permutation and a cycle may arise."""
    a, b = visit(book, rng), visit(book, rng)
    a.turn, b.turn = b.turn, a.turn


def swap_turns_of_one_dq_tile(book: Book, rng: np.random.Generator) -> None:
    a = visit(book, rng)
    group = next(name[:2] for name, chain in zip(book.names, book.chains, strict=True) if any(v is a for v in chain))
    rivals = [
        v
        for name, chain in zip(book.names, book.chains, strict=True)
        for v in chain
        if name[:2] == group and (v.head, v.q) == (a.head, a.q) and v is not a
    ]
    assume(rivals)
    b = rivals[rng.integers(len(rivals))]
    a.turn, b.turn = b.turn, a.turn


def flip_a_mask_flag(book: Book, rng: np.random.Generator) -> None:
    chosen = visit(book, rng)
    chosen.partial = not chosen.partial


def swap_visits(book: Book, rng: np.random.Generator) -> None:
    chain = pick(book, rng, 2)
    i, j = rng.choice(len(chain), 2, replace=False)
    chain[i], chain[j] = chain[j], chain[i]


def reverse_a_chain(book: Book, rng: np.random.Generator) -> None:
    pick(book, rng, 2).reverse()


def cross_two_chains(book: Book, rng: np.random.Generator) -> None:
    """Swap visits and turns until chain a waits at tile x for chain b, and b at y for a: always a cycle."""
    pairs = [
        (a, b)
        for a, b in combinations(range(len(book.chains)), 2)
        if book.names[a][:2] == book.names[b][:2] and len(common(book.chains[a], book.chains[b])) > 1
    ]
    assume(pairs)
    a, b = (book.chains[c] for c in pairs[rng.integers(len(pairs))])
    x, y = rng.permutation(sorted(common(a, b)))[:2].tolist()
    for chain, before, after in ((a, x, y), (b, y, x)):
        i, j = (next(i for i, v in enumerate(chain) if [v.head, v.q] == spot) for spot in (before, after))
        if i > j:
            chain[i], chain[j] = chain[j], chain[i]
    for spot, early, late in ((x, b, a), (y, a, b)):
        first, second = (next(v for v in chain if [v.head, v.q] == spot) for chain in (early, late))
        first.turn, second.turn = sorted((first.turn, second.turn))


def common(a: list[Visit], b: list[Visit]) -> set[tuple[int, int]]:
    return {(v.head, v.q) for v in a} & {(v.head, v.q) for v in b}


def move_a_run(book: Book, rng: np.random.Generator) -> None:
    assume(len(book.chains) > 1)
    source = pick(book, rng)
    a = int(rng.integers(len(source)))
    b = int(rng.integers(a + 1, len(source) + 1))
    others = [chain for chain in book.chains if chain is not source]
    target = others[rng.integers(len(others))]
    at = int(rng.integers(len(target) + 1))
    target[at:at] = source[a:b]
    del source[a:b]


def exchange_chains(book: Book, rng: np.random.Generator) -> None:
    assume(len(book.chains) > 1)
    i, j = rng.choice(len(book.chains), 2, replace=False)
    book.chains[i], book.chains[j] = book.chains[j], book.chains[i]


def rename_a_chain(book: Book, rng: np.random.Generator) -> None:
    name = list(book.names[c := int(rng.integers(len(book.names)))])
    name[rng.integers(3)] += int(rng.choice([-1, 1]))
    book.names[c] = (name[0], name[1], name[2])


def drop_a_chain(book: Book, rng: np.random.Generator) -> None:
    c = int(rng.integers(len(book.chains)))
    del book.chains[c], book.names[c]
    book.launch = [x - (x > c) for x in book.launch if x != c]
    book.bundle_first = list(range(len(book.launch) + 1))


def duplicate_a_chain(book: Book, rng: np.random.Generator) -> None:
    c = int(rng.integers(len(book.chains)))
    book.names.append(book.names[c])
    book.chains.append([copy.copy(v) for v in book.chains[c]])
    book.launch.append(len(book.launch))
    book.bundle_first.append(len(book.launch))


def permute_the_launch(book: Book, rng: np.random.Generator) -> None:
    book.launch = rng.permutation(book.launch).tolist()


def launch_a_chain_twice(book: Book, rng: np.random.Generator) -> None:
    book.launch[rng.integers(len(book.launch))] = int(rng.integers(-1, len(book.launch) + 1))


def cut_other_bundles(book: Book, rng: np.random.Generator) -> None:
    n = len(book.launch)
    inner = rng.choice(np.arange(1, n), rng.integers(0, n), replace=False) if n > 1 else []
    book.bundle_first = [0, *sorted(int(x) for x in inner), n]


def cut_wrong_bundles(book: Book, rng: np.random.Generator) -> None:
    book.bundle_first[rng.integers(len(book.bundle_first))] += int(rng.choice([-1, 1]))


MUTATIONS: tuple[Mutation, ...] = (
    drop_a_task,
    duplicate_a_task,
    copy_a_task_to_another_chain,
    visit_another_tile,
    visit_another_head,
    change_a_turn,
    swap_turns,
    swap_turns_of_one_dq_tile,
    flip_a_mask_flag,
    swap_visits,
    reverse_a_chain,
    cross_two_chains,
    move_a_run,
    exchange_chains,
    rename_a_chain,
    drop_a_chain,
    duplicate_a_chain,
    permute_the_launch,
    launch_a_chain_twice,
    cut_other_bundles,
    cut_wrong_bundles,
)


# ---- agreement with the oracle -----------------------------------------------------------------------------


def agree(program: Program) -> str:
    """verify and the oracle, on one program: what they found, which must be the same."""
    book = Book.of(program)
    expected = faults(book)
    try:
        verify(program)
    except VerifyError as error:
        kinds = [kind for kind in expected if kind in str(error)]
        names = {(t.batch, t.q_head, t.q_tile, t.kv_tile) for t in error.tasks}
        if "cycle" in expected:
            assert "cycle" in str(error)
            assert proves_deadlock(error.tasks, book.sequences()), str(error)
        elif set(expected) - {"broken chain", "launch", "bundles", "range"}:
            assert kinds, f"{error} is not what is wrong: {expected}"
            assert names and names <= set.union(*(expected[kind] for kind in kinds)), str(error)
        else:
            assert expected, f"refused without a reason: {error}"
        return next(iter(expected))
    assert not expected, f"accepted in spite of {expected}"
    return "valid"


@examples(400)
@given(programs())
def test_valid_programs_are_accepted(program: Program) -> None:
    assert agree(program) == "valid"


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutation: mutation.__name__)
@examples(120)
@given(program=programs(), seed=st.integers(0, 2**32 - 1))
def test_every_mutation_that_matters_is_caught(mutate: Mutation, program: Program, seed: int) -> None:
    assume(program.num_tasks)
    book = Book.of(program)
    mutate(book, np.random.default_rng(seed))
    verdict = agree(book.close())
    event(verdict)
    assert mutate is not cross_two_chains or verdict == "cycle"


@examples(500)
@given(program=programs(), data=st.data())
def test_any_number_in_any_table(program: Program, data: st.DataObject) -> None:
    """Raw damage: whatever stands in a table, verify gives an answer, and the right one."""
    name = data.draw(st.sampled_from(["chains", "runs", "launch", "bundle_first", "tiles"]))
    table = getattr(program, name).copy()
    assume(table.size)
    number = st.integers(-2, 6) | st.sampled_from([2**31 - 1, -(2**31), 2**16])
    table.flat[data.draw(st.integers(0, table.size - 1))] = data.draw(number)
    try:
        verify(dataclasses.replace(program, **{name: table}))
    except VerifyError:
        event("refused")
        return
    event("accepted")
    assert not faults(Book.of(dataclasses.replace(program, **{name: table})))


# ---- co-residency ------------------------------------------------------------------------------------------


def test_bundles_without_tasks_count_no_workers() -> None:
    """There are more bundles than tasks here: no query sees the last kv tiles."""
    planned = plan(Problem(1, 1, 1, 4, 9, mask=window(0, 1)), TileShape(2, 1), "diagonal").program
    verified = verify(dataclasses.replace(planned, launch=planned.launch[[1, 7, 8, 2, 5, 4, 0, 3, 6]]))
    assert verified.co_resident == 2 and verified.rounds is not None
    assert verified.rounds.tolist() == [1, 2, 2, 3, 4, 4, 4, 4, 4]


@examples(300)
@given(programs())
def test_co_resident_is_exact(program: Program) -> None:
    """This number of bundles at once is enough, one fewer deadlocks, and verify says the same of workers."""
    needed, sequences = verify(program).co_resident, Book.of(program).sequences()
    event(f"needs {needed}")
    assert finishes(sequences, max(needed, 1))
    assert needed <= 1 or not finishes(sequences, needed - 1)
    for workers in range(max(needed, 1), needed + 3):
        on = verify(program).on(workers)
        assert on.workers == workers and on.co_resident == needed
        assert finishes(placed(program, on.placement), workers)
    for workers in range(needed):
        with pytest.raises(TooFewWorkers, match=f"needs {needed} co-resident workers, {workers} are there"):
            verify(program).on(workers)


@examples(300)
@given(programs(), st.booleans(), st.integers(0, 2**32 - 1))
def test_no_bundle_waits_for_a_later_round(program: Program, shuffle: bool, seed: int) -> None:
    """Rounds follow each other, and a placement that keeps the bundles of each round apart finishes."""
    rng, book = np.random.default_rng(seed), Book.of(program)
    if shuffle:
        (permute_the_launch if seed % 2 else cut_other_bundles)(book, rng)
    try:
        verified = verify(book.close())
    except VerifyError:
        assume(False)
    rounds, needed = verified.rounds, verified.co_resident
    assert finishes(book.sequences(), max(needed, 1)) and (needed <= 1 or not finishes(book.sequences(), needed - 1))
    event("no rounds" if rounds is None else f"{needed > 1}")
    if rounds is None:
        return
    assert (np.diff(rounds) >= 0).all() and (np.diff(rounds) <= 1).all() and len(rounds) == len(book.bundle_first) - 1
    round_at = {
        (total, turn): number
        for number, sequence in zip(rounds.tolist(), book.sequences(), strict=True)
        for _, turn, total in sequence
    }
    assert all(number >= round_at.get((total, turn - 1), 0) for (total, turn), number in round_at.items())
    workers = int(np.bincount(rounds).max(initial=1)) + int(rng.integers(3))
    lines: list[list[Step]] = [[] for _ in range(workers)]
    for number in np.unique(rounds):
        sequences = [sequence for r, sequence in zip(rounds, book.sequences(), strict=True) if r == number]
        for worker, sequence in zip(rng.permutation(workers), sequences, strict=False):
            lines[worker] += sequence
    assert finishes(lines, workers)


def test_panels_that_share_keys_have_rounds_if_they_are_launched_in_order() -> None:
    """The second q head adds to dK and dV after the first. If it is launched first, it waits for a later bundle."""
    program = compose(tile(Problem(1, 2, 1, 4, 4, mask=CAUSAL), TileShape(1, 1)), "spt@head")
    assert program.geometry.share == 2 and verify(program).rounds is not None
    second_first = np.concatenate([program.launch[4:], program.launch[:4]])
    assert verify(dataclasses.replace(program, launch=second_first)).rounds is None


def test_panels_that_share_keys_come_in_whole_groups() -> None:
    program = compose(tile(Problem(1, 2, 1, 4, 4, mask=CAUSAL), TileShape(1, 1)), "spt@head")
    with pytest.raises(VerifyError, match="dK and dV"):
        verify(dataclasses.replace(program, geometry=dataclasses.replace(program.geometry, share=3)))


def placed(program: Program, placement: Sequences) -> list[list[Step]]:
    """The tasks of each worker."""
    book = Book.of(program)
    book.launch, book.bundle_first = placement.chains.tolist(), placement.first.tolist()
    return book.sequences()


@examples(300)
@given(programs(), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_any_placement_is_judged_right(program: Program, workers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chains = rng.permutation(len(program.chains)).astype(np.int32)
    first = np.concatenate([[0], np.sort(rng.integers(0, len(chains) + 1, workers - 1)), [len(chains)]])
    placement = Sequences(first.astype(np.int32), chains)
    lines = placed(program, placement)
    if finishes(lines, workers):
        assert verify(program).placed(placement).workers == workers
        event("runs")
        return
    event("deadlocks")
    with pytest.raises(VerifyError, match=f"deadlock with {workers} co-resident workers") as error:
        verify(program).placed(placement)
    assert proves_deadlock(error.value.tasks, lines), str(error.value)


def test_wrong_placements() -> None:
    program = compose(tile(Problem(1, 1, 1, 4, 4), TileShape(1, 1)), "fa3")
    numbers = lambda *x: np.array(x, np.int32)  # noqa: E731
    for first, chains in [
        ((0, 2, 4), (0, 1, 2, 2)),
        ((0, 2, 4), (0, 1, 2, 9)),
        ((0, 3), (0, 1, 2)),
        ((0, 2, 3), (0, 1, 2, 3)),
        ((1, 2, 4), (0, 1, 2, 3)),
        ((0, 3, 2, 4), (0, 1, 2, 3)),
        ((0, 9, 4), (0, 1, 2, 3)),
        ((), (0, 1, 2, 3)),
    ]:
        with pytest.raises(VerifyError, match="placement"):
            verify(program).placed(Sequences(numbers(*first), numbers(*chains)))


# ---- messages ----------------------------------------------------------------------------------------------


def causal(policy: str = "fa3") -> Program:
    return compose(tile(Problem(1, 2, 1, 4, 4, mask=CAUSAL), TileShape(1, 1)), policy)


@pytest.mark.parametrize(
    ("mutate", "text"),
    [
        (lambda b: b.chains[1].pop(0), "tile missed: (batch 0, q head 0, q tile 1, kv tile 1) is not empty and no"),
        (lambda b: b.chains[1].append(b.chains[1][0]), "done twice: (batch 0, q head 0, q tile 1, kv tile 1, turn 1)"),
        (lambda b: setattr(b.chains[3][0], "q", 0), "empty tile visited: (batch 0, q head 0, q tile 0, kv tile 3"),
        (
            lambda b: setattr(b.chains[0][1], "turn", 1),
            "kv tile 0, turn 1) and (batch 0, q head 0, q tile 1, kv tile 1",
        ),
        (lambda b: setattr(b.chains[0][1], "turn", 7), "q tile 1, kv tile 0, turn 7) is outside 0..1"),
        (lambda b: b.names.__setitem__(2, (0, 0, 1)), "broken chain: (batch 0, kv head 0, kv tile 1) stands 2 times"),
    ],
)
def test_messages_name_tasks(mutate: Callable[[Book], None], text: str) -> None:
    book = Book.of(causal())
    mutate(book)
    with pytest.raises(VerifyError) as error:
        verify(book.close())
    assert text in str(error.value)


def test_a_cycle_is_told_as_a_ring() -> None:
    """Two chains, each of which waits for the second task of the other."""
    book = Book.of(compose(tile(Problem(1, 1, 1, 2, 2), TileShape(1, 1)), "fa3"))
    for chain, turns in zip(book.chains, [(1, 0), (0, 1)], strict=True):
        for v, turn in zip(chain, turns, strict=True):
            v.turn = turn
    book.chains[1].reverse()
    with pytest.raises(VerifyError) as error:
        verify(book.close())
    assert str(error.value).count("waits for") == 2 and len(set(error.value.tasks)) == 4


def test_a_bundle_that_waits_for_itself() -> None:
    program = compose(tile(Problem(1, 1, 1, 1, 2), TileShape(1, 1)), "fa3")
    backwards = dataclasses.replace(program, launch=np.array([1, 0], np.int32), bundle_first=np.array([0, 2], np.int32))
    with pytest.raises(VerifyError, match="cycle") as error:
        verify(backwards)
    assert {task.kv_tile for task in error.value.tasks} == {0, 1}, "both tasks are named"


def test_run_cuts_and_launch_order_do_not_matter_to_validity() -> None:
    program = causal()
    assert agree(Book.of(program).close()) == "valid"
    assert len(Book.of(program).close().runs) > len(program.runs)
    backwards = dataclasses.replace(program, launch=program.launch[::-1].copy())
    assert agree(backwards) == "valid" and verify(backwards).co_resident == len(program.chains)


def test_co_residency_of_the_policies() -> None:
    full = tile(Problem(1, 4, 4, 12, 12, mask=FULL), TileShape(1, 1))
    triangle = tile(Problem(1, 4, 4, 12, 12, mask=CAUSAL), TileShape(1, 1))
    needs = {name: verify(compose(full, name)).co_resident for name in ("fa3", "shift", "shift:5", "shift:1")}
    assert needs == {"fa3": 1, "shift": 12, "shift:5": 4, "shift:1": 1}
    needs = {name: verify(compose(triangle, name)).co_resident for name in ("spt", "descending", "diagonal")}
    assert needs == {"spt": 1, "descending": 1, "diagonal": 12}
    assert verify(compose(triangle, "symmetric_shift")).co_resident == 6
    assert np.diff(compose(triangle, "symmetric_shift").bundles.first).tolist() == [2] * 24


def test_a_cycle_is_named_without_unrolling_every_task() -> None:
    """A small table may stand for more tasks than fit in memory."""
    plain = compose(tile(Problem(5000, 1, 1, 64, 2, mask=FULL), TileShape(1, 1)), "fa3")
    # Chain 0 goes up, chain 1 goes down, and each has the second turn at the tile that it visits first.
    up, down = [[0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 63, 0, 0, 0]], [[0, 63, -1, 63, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0]]
    chains = plain.chains.copy()
    chains[:, Chain.FIRST_RUN], chains[:, Chain.NUM_RUNS] = 2 * chains[:, Chain.KV_TILE], 2
    crossed = dataclasses.replace(plain, chains=chains, runs=np.array(up + down, np.int32))
    with pytest.raises(VerifyError, match="the order has a cycle"):  # compiles the loops
        verify(crossed)
    again = dataclasses.replace(crossed)
    tracemalloc.start()
    try:
        with pytest.raises(VerifyError, match="the order has a cycle") as refused:
            verify(again)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {task.batch for task in refused.value.tasks} == {0} and len(refused.value.tasks) == 4
    assert peak < 8 * again.num_tasks  # less than one column of all tasks
