"""Bits follow the order and nothing else: not threads, workers, delays, strides; and they do follow it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from dash_attn.backends import Operands
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.order import applicable
from dash_attn.pack import Planned
from dash_attn.plan import plan
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, intervals_by_row, tiles, window
from dash_attn.tiling import TileShape, tile
from tests.backends.cpu.reference import difference, operands, ordered, run

SHAPE = TileShape(16, 16)
MASKS = [
    FULL,
    CAUSAL,
    window(40, 10),
    documents([0, 30, 75, 120], causal=True),
    tiles(np.random.default_rng(1).random((8, 8)) < 0.6, 16, 16),
    intervals_by_row(lambda row: (row // 40 * 40, max(row + 1, 50)), 120),
]


def problem_with(mask: Mask, dtype: str = "float32") -> Problem:
    return Problem(1, 4, 2, 120, 120, 16, dtype, None, mask)


def plans(mask: Mask) -> list[Planned]:
    problem = problem_with(mask)
    longest = problem.alone(max(problem.sequences, key=lambda sequence: sequence.len_q))
    return [ordered(problem, SHAPE, policy) for policy in applicable(tile(longest, SHAPE))]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_any_number_of_threads_and_workers(mask: Mask) -> None:
    for planned in plans(mask):
        given = operands(planned.problem)
        first = run(planned, given, threads=1)
        for threads in range(1, 9):
            again = run(planned, given, threads=threads, workers=threads)
            assert not difference(first, again), (planned.fingerprint, threads)
        assert not difference(first, run(planned, given, threads=2, workers=CpuBackend().co_resident(planned) + 5))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_random_delays(mask: Mask) -> None:
    for planned in plans(mask):
        given = operands(planned.problem)
        first = run(planned, given, threads=1)
        for threads in (2, 8):
            again = run(planned, given, threads=threads, workers=threads, jitter=2e-3)
            assert not difference(first, again), (planned.fingerprint, threads)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str) -> None:
    problem = problem_with(CAUSAL, dtype)
    given, planned = operands(problem), plan(problem, SHAPE)
    first = run(planned, given, threads=1)
    for threads in (1, 2, 4):
        assert not difference(first, run(planned, given, threads=threads, workers=threads, jitter=1e-3))


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_other_orders_give_other_bits(mask: Mask) -> None:
    given = operands(problem_with(mask))
    results = {planned.fingerprint: run(planned, given, threads=2) for planned in plans(mask)}
    assert len(results) > 3
    for a, b in combinations(results, 2):
        assert difference(results[a], results[b])


def test_unordered_accumulation_differs() -> None:
    """The negative control: with open turnstiles the same delays change the bits."""
    planned = plan(problem_with(FULL), SHAPE)
    given = operands(planned.problem)
    how = {"threads": 8, "workers": 8, "jitter": 2e-3}
    in_order = [run(planned, given, **how) for _ in range(4)]
    unordered = [run(planned, given, order="any", **how) for _ in range(4)]
    assert not any(difference(in_order[0], other) for other in in_order[1:])
    assert any(difference(unordered[0], other) for other in unordered[1:])
    # Only the order of dQ is open: chains still add up their dK and dV one visit after the other.
    assert all(torch.equal(in_order[0].dk, x.dk) and torch.equal(in_order[0].dv, x.dv) for x in unordered)
    assert all(torch.allclose(in_order[0].dq, x.dq, atol=1e-5) for x in unordered)


def test_default_tiles() -> None:
    """Tiles large enough for a library to split a product, if it were let."""
    problem = Problem(1, 2, 1, 1100, 1100, 64, "float32", None, CAUSAL)
    given, planned = operands(problem), plan(problem, TileShape(512, 512))
    threads = torch.get_num_threads()
    try:
        first = run(planned, given, threads=1)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert not difference(first, run(planned, given, workers=count))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)


def test_strides_and_alignment_of_the_inputs() -> None:
    planned = plan(Problem(2, 4, 2, 120, 90, 16, "float32", None, FULL), SHAPE)
    given = operands(planned.problem)
    first = run(planned, given)

    def moved(x: torch.Tensor, offset: int, order: tuple[int, ...]) -> torch.Tensor:
        """The same numbers with axes in another order in memory, aligned to nothing but a float."""
        turned = x.permute(order[: x.ndim])
        room = torch.empty(x.numel() + offset)
        room[offset:] = turned.flatten()
        return room[offset:].view(turned.shape).permute(*torch.tensor(order[: x.ndim]).argsort().tolist())

    tensors = (given.dout, given.q, given.k, given.v, given.out, given.lse)
    for offset, order in ((1, (0, 1, 2, 3)), (0, (0, 2, 1, 3)), (3, (2, 1, 0, 3)), (0, (1, 2, 0, 3))):
        assert not difference(first, run(planned, Operands(*(moved(x, offset, order) for x in tensors))))
    inner = [moved(x, 1, (0, 3, 2, 1)) for x in tensors[:5]]  # tokens innermost
    assert inner[0].stride(1) == 1
    assert not difference(first, run(planned, Operands(*inner, given.lse)))


def test_uninitialised_memory_is_never_read() -> None:
    """torch fills what it allocates with NaN, the workers' buffers included."""
    for mask in (*MASKS, Mask(tiles=tiles(np.eye(8), 16, 16).tiles)):
        planned = ordered(problem_with(mask), SHAPE)
        given = operands(planned.problem)
        first = run(planned, given)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan().all()
            poisoned = run(planned, given, threads=2)
        finally:
            torch.use_deterministic_algorithms(before)
        assert all(x.isfinite().all() for x in poisoned)
        assert not difference(first, poisoned)
