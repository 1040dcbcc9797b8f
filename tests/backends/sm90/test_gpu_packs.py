"""Bits belong to the sequence, on the GPU: alone, in any pack, batch or set of heads, on any number of SMs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

from dash_attn.backends import Gradients, Operands
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from dash_attn.tools.bench.operands import draw, exact
from tests.backends.sm90.cases import DEVICE, Case, check_replays, errors, prepared, same, sms

pytestmark = pytest.mark.gpu

LENGTHS = [300, 1, 128, 64, 777, 129, 500, 0, 63, 1000]
SHAPES = {  # heads_q, heads_kv, dim
    "d128 grouped": (4, 2, 128),
    "d64": (4, 4, 64),
    "d64 grouped by 3": (6, 2, 64),
    "d80 one kv head": (4, 1, 80),
}
MASKS = {"causal": CAUSAL, "full": FULL, "window": window(100, 20)}
POLICIES = {"causal": ["auto", "auto@group", "symmetric_shift:8"], "full": ["auto", "spt@head"], "window": ["auto"]}


def cu_of(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def rows(operands: Operands, a: int, b: int) -> Operands:
    dout, q, k, v, out, lse = operands
    return Operands(*(x[:, a:b].contiguous() for x in (dout, q, k, v, out)), lse[:, :, a:b].contiguous())


def joined(parts: list[Operands]) -> Operands:
    *tensors, lse = zip(*parts, strict=True)
    return Operands(*(torch.cat(x, 1) for x in tensors), torch.cat(lse, 2))


def posed(shape: tuple[int, int, int], lengths: list[int], mask: Mask) -> Problem:
    heads_q, heads_kv, dim = shape
    return Problem(1, heads_q, heads_kv, sum(lengths), sum(lengths), dim, mask=mask & documents(cu_of(lengths)))


def bits_of(problem: Problem, operands: Operands, policy: str, **kernel: object) -> Gradients:
    return Case(problem, operands, Gradients(*operands.qkv)).run(prepared(problem, policy, **kernel))


def part(grads: Gradients, a: int, b: int) -> Gradients:
    return Gradients(*(x[:, a:b] for x in grads))


@pytest.mark.parametrize("finish", ["last", "postpass"])
@pytest.mark.parametrize(("kind", "policy"), [(k, p) for k, policies in POLICIES.items() for p in policies])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_sequence_has_the_bits_that_it_has_alone(shape, kind: str, policy: str, finish: str) -> None:
    mask, problem = MASKS[kind], posed(shape, LENGTHS, MASKS[kind])
    case = Case.make(problem)
    ready = prepared(problem, policy, finish=finish)
    packed = case.run(ready)
    assert max(errors(packed, case.want)) < 8e-3
    assert same(packed, case.run(prepared(problem, policy, sms() - 60, finish=finish))), "fewer SMs"
    assert case.differing(ready, 20) == 0
    for a, b in pairwise(cu_of(LENGTHS)):
        if a == b:
            continue
        single = Problem(1, *shape[:2], b - a, b - a, shape[2], mask=mask)
        mine = rows(case.operands, a, b)
        assert same(part(packed, a, b), bits_of(single, mine, policy, finish=finish)), "the kernel of one sequence"
        assert same(part(packed, a, b), bits_of(posed(shape, [b - a], mask), mine, policy, finish=finish)), (
            "a pack of one"
        )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_neighbours_and_places_change_nothing(shape, mask: Mask) -> None:
    """Another place in another pack, between neighbours that are not numbers, and with half of the kv heads."""
    mine, other = Case.make(posed(shape, [700], mask)), Case.make(posed(shape, [333], mask), seed=1)
    alone = mine.run(prepared(mine.problem))
    poisoned = Operands(*(torch.full_like(x, float("nan")) for x in other.operands))
    for lengths in ([333, 700], [700, 333], [333, 333, 700, 333]):
        parts = [mine.operands if length == 700 else poisoned for length in lengths]
        at = sum(lengths[: lengths.index(700)])
        packed = bits_of(posed(shape, lengths, mask), joined(parts), "auto")
        assert same(part(packed, at, at + 700), alone), lengths
    batched = replace(mine.problem, batch=3)
    several = Operands(*(torch.cat([x] * 3) for x in mine.operands))
    grads = prepared(batched).backward(several)
    assert all(same(Gradients(*(x[i : i + 1] for x in grads)), alone) for i in range(3))
    heads_q, heads_kv, dim = shape
    if heads_kv > 1:
        fewer = posed((heads_q // heads_kv, 1, dim), [700], mask)
        dout, q, k, v, out, lse = mine.operands
        q_heads = slice(heads_q - heads_q // heads_kv, heads_q)
        subset = Operands(
            *(x[:, :, q_heads] for x in (dout, q)), *(x[:, :, -1:] for x in (k, v)), out[:, :, q_heads], lse[:, q_heads]
        )
        got = bits_of(fewer, Operands(*(x.contiguous() for x in subset)), "auto")
        assert same(got, Gradients(alone.dq[:, :, q_heads], alone.dk[:, :, -1:], alone.dv[:, :, -1:]))


def test_another_order_is_noticed() -> None:
    """The control: the comparison sees bits that another order gives."""
    problem = posed(SHAPES["d128 grouped"], [700, 300], CAUSAL)
    case = Case.make(problem)
    assert not same(case.run(prepared(problem, "spt")), case.run(prepared(problem, "fa3")))


def test_many_sequences_and_heads() -> None:
    """More tickets than SMs many times over, lengths without end."""
    lengths = [1 + 37 * i % 411 for i in range(300)]
    problem = posed((16, 4, 128), lengths, CAUSAL)
    case = Case.make(problem)
    assert max(errors(case.run(prepared(problem)), case.want)) < 8e-3 and case.differing(prepared(problem), 100) == 0


def test_unequal_lengths_and_empty_sides() -> None:
    q, k = [100, 0, 300, 50, 200], [400, 30, 100, 0, 350]
    mask = CAUSAL & documents(cu_of(q), cu_of(k))
    problem = Problem(1, 4, 2, sum(q), sum(k), 128, mask=mask)
    case = Case.make(problem)
    grads = case.run(prepared(problem))
    assert max(errors(grads, case.want)) < 8e-3 and torch.isfinite(torch.cat([x.flatten() for x in grads])).all()
    assert grads.dk[:, 400:430].eq(0).all() and grads.dq[:, 400:450].eq(0).all()


def test_whole_groups_beside_cut_ones() -> None:
    """A document of 256 kv tiles keeps its groups whole, the others are cut by q head: one kernel runs both."""
    shape, lengths = (4, 1, 64), [700, 33000, 64]
    problem = posed(shape, lengths, CAUSAL)
    drawn = draw(problem, DEVICE)
    operands = Operands(*drawn, *prepared(problem).forward(*drawn[1:]))
    packed = bits_of(problem, operands, "auto")
    assert {plan.program.geometry.share for plan in prepared(problem).plan.plans.values()} == {1, 4}
    for a, b in pairwise(cu_of(lengths)):
        single, mine = posed(shape, [b - a], CAUSAL), rows(operands, a, b)
        assert same(part(packed, a, b), bits_of(single, mine, "auto"))
        if b - a < 1000:
            assert max(errors(part(packed, a, b), exact(single, *mine[:4]).gradients)) < 8e-3


@pytest.mark.parametrize("shape", [(4, 2, 128), (4, 4, 64)], ids=str)
def test_documents_after_long_prefixes(shape: tuple[int, int, int]) -> None:
    """Most keys stand before the queries, and their chains rotate in windows: several rounds of one sequence."""
    q, k = [130, 700, 64], [3000, 4100, 2900]
    heads_q, heads_kv, dim = shape
    problem = Problem(1, heads_q, heads_kv, sum(q), sum(k), dim, mask=CAUSAL & documents(cu_of(q), cu_of(k)))
    case = Case.make(problem)
    ready = prepared(problem)
    grads = case.run(ready)
    assert max(errors(grads, case.want)) < 8e-3 and case.differing(ready, 100) == 0
    assert same(grads, case.run(prepared(problem, "auto", sms() - 60))), "fewer SMs"
    for (a, b), (c, d) in zip(pairwise(cu_of(q)), pairwise(cu_of(k)), strict=True):
        dout, queries, keys, values, out, lse = case.operands
        single = Problem(1, heads_q, heads_kv, b - a, d - c, dim, mask=CAUSAL)
        parts = (dout[:, a:b], queries[:, a:b], keys[:, c:d], values[:, c:d], out[:, a:b], lse[:, :, a:b])
        alone = bits_of(single, Operands(*(x.contiguous() for x in parts)), "auto")
        assert same(Gradients(grads.dq[:, a:b], grads.dk[:, c:d], grads.dv[:, c:d]), alone)


def test_a_graph_of_a_pack() -> None:
    check_replays(posed((4, 2, 128), [300, 500, 224], CAUSAL))
