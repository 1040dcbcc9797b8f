"""Panels on the CPU, the reference: what a panel gives follows from the panel alone, and the fold has one order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_attn import attention, backward, explain
from dash_attn.backends import Gradients, KeySums, Operands, Options
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.backends.cpu.backward import CpuConfig
from dash_attn.backends.cpu.packed import fold
from dash_attn.pack import Pack
from dash_attn.plan import plan
from dash_attn.prepare import prepare, prepare_panels
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from dash_attn.tiling import TileShape
from dash_attn.tools.bench.operands import exact
from tests.backends.cpu.reference import CPU, DTYPES, difference, error, operands, ordered, run
from tests.problem.test_panels import any_problem
from tests.strategies import examples, shapes

SHAPE = TileShape(8, 16)
TYPES = ["float32", "float32", "bfloat16"]  # float32 shows the order of additions more often
MASKS = [CAUSAL, FULL, window(20, 0), window(20, 6), window(20, None)]


def rows(given_: Operands, q: slice, k: slice) -> Operands:
    dout, queries, keys, values, out, lse = given_
    return Operands(dout[:, q], queries[:, q], keys[:, k], values[:, k], out[:, q], lse[:, :, q])


def part(grads: Gradients, q: slice, k: slice) -> tuple[Tensor, ...]:
    return grads.dq[:, q], grads.dk[:, k], grads.dv[:, k]


@examples(80)
@given(any_problem, shapes, st.integers(2, 6), st.sampled_from(sorted(DTYPES)), st.data())
def test_any_problem_against_float64(
    problem: Problem, shape: TileShape, panels: int, dtype: str, data: st.DataObject
) -> None:
    """The errors are those of the problem that is not cut. The bits are the same for any number of threads."""
    problem = replace(problem, dim=8, dtype=dtype)
    cut = replace(problem, panels=panels)
    policy = data.draw(st.sampled_from(["auto", "fa3", "spt", "auto@group", "descending@head"]))
    given_, planned = operands(problem), ordered(cut, shape, policy)
    whole, got = run(ordered(problem, shape, policy), given_, threads=2), run(planned, given_, threads=1)
    unit = torch.finfo(DTYPES[dtype]).eps
    for mine, one, want in zip(got, whole, exact(problem, *given_[:4]).gradients, strict=True):
        size = max(1.0, float(want.abs().max())) if want.numel() else 0.0
        assert mine.dtype == DTYPES[dtype] and error(mine, want) <= 1.5 * error(one, want) + 4 * unit * size
    assert not difference(got, run(planned, given_, workers=3, threads=3, jitter=1e-4))


@examples(60)
@given(any_problem, shapes, st.integers(2, 6), st.sampled_from(["auto", "fa3", "spt@head"]), st.sampled_from(TYPES))
def test_the_whole_is_the_fold_of_its_panels(
    problem: Problem, shape: TileShape, panels: int, policy: str, dtype: str
) -> None:
    """dK and dV by hand: each panel in a problem of its own, in fp32, from the last one to the first."""
    cut = replace(problem, dim=8, dtype=dtype, panels=panels)
    given_ = operands(cut)
    got = run(ordered(cut, shape, policy), given_, threads=2)
    dk, dv = (torch.zeros(x.shape) for x in (got.dk, got.dv))
    dq = torch.zeros_like(got.dq)
    for panel in reversed(cut.panel_list):
        if not (panel.len_q and panel.len_k):
            continue
        (entry, q_row), (_, k_row) = divmod(panel.q_row, cut.len_q), divmod(panel.k_row, cut.len_k)
        one = Operands(*(x[entry : entry + 1] for x in given_))
        q, k = slice(q_row, q_row + panel.len_q), slice(k_row, k_row + panel.len_k)
        mine = rows(one, q, k)
        into = Gradients(dq[entry : entry + 1, q], *(torch.empty(x.shape) for x in mine[2:4]))
        alone = plan(cut.alone(panel), shape, policy)
        CpuBackend().backward(alone, Options())(mine, into)
        for total, grad in ((dk, into.dk), (dv, into.dv)):
            total[entry, k] += grad[0]
    # A sum that begins with 0 has the bits of one that begins with its first part, but for the sign of zeros.
    assert all(torch.equal(a, b) for a, b in zip(got, (dq, dk.to(dq.dtype), dv.to(dq.dtype)), strict=True))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_one_panel_is_no_cut(mask: Mask, heads: tuple[int, int]) -> None:
    q = torch.randn(2, 300, heads[0], 16, requires_grad=True)
    k, v = (torch.randn(2, 310, heads[1], 16, requires_grad=True) for _ in range(2))
    results = []
    for how in ({}, {"panels": 1}):
        out, lse = attention(q, k, v, mask=mask, return_lse=True, **how)
        results.append((out, lse, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert explain(q, k, v, mask=mask).identity == explain(q, k, v, mask=mask, panels=1).identity
    assert explain(q, k, v, mask=mask).identity != explain(q, k, v, mask=mask, panels=2).identity


def test_another_cut_has_other_bits() -> None:
    q, k, v = (torch.randn(1, 700, 2, 16) for _ in range(3))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    one, two, three = (backward(out, q, k, v, out, lse, causal=True, panels=panels) for panels in (1, 2, 3))
    assert difference(one, two) and difference(two, three)
    assert len({explain(q, k, v, causal=True, panels=panels).fingerprint for panels in (1, 2, 3)}) == 3


@pytest.mark.parametrize("lengths", [(700, 700), (300, 700), (600, 400)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("panels", "policy"), [(3, "auto"), (8, "auto@group")])
def test_a_panel_is_a_call_with_its_keys(
    lengths: tuple[int, int], dtype: torch.dtype, panels: int, policy: str
) -> None:
    """What a rank computes: out and dQ of queries [a, b) from the keys that they see."""
    len_q, len_k = lengths
    q, dout = (torch.randn(1, len_q, 4, 32).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, len_k, 2, 32).to(dtype) for _ in range(2))
    out, lse = attention(q, k, v, causal=True, panels=panels, return_lse=True)
    dq = backward(dout, q, k, v, out, lse, causal=True, panels=panels).dq
    size = -(-len_q // panels)
    for a in range(0, len_q, size):
        b = min(a + size, len_q)
        end = max(0, len_k - len_q + b)
        mine = (x[:, :end] for x in (k, v))
        part_out, part_lse = attention(q[:, a:b], *mine, causal=True, return_lse=True)
        assert torch.equal(part_out, out[:, a:b]) and torch.equal(part_lse, lse[:, :, a:b])
        mine = (x[:, :end] for x in (k, v))
        grads = backward(dout[:, a:b], q[:, a:b], *mine, part_out, part_lse, causal=True, policy=policy)
        assert torch.equal(grads.dq, dq[:, a:b])


@examples(60)
@given(st.integers(2, 5), st.sampled_from(MASKS), st.sampled_from(["auto", "fa3", "spt@head"]), st.data())
def test_bits_belong_to_the_panels(panels: int, mask: Mask, policy: str, data: st.DataObject) -> None:
    """In a batch, beside neighbours with other numbers or none, and with fewer heads."""
    group = data.draw(st.sampled_from([1, 2]))
    length = data.draw(st.integers(1, 20 * panels))
    size = -(-length // panels)
    alone = Problem(1, 2 * group, 2, length, length, 8, "float32", None, mask, panels)
    given_ = operands(alone)
    expected = run(ordered(alone, SHAPE, policy), given_)

    other = operands(alone, seed=1)
    batched = Operands(*(torch.cat([b, a]) for a, b in zip(given_, other, strict=True)))
    got = run(ordered(replace(alone, batch=2), SHAPE, policy), batched)
    assert not difference(Gradients(*(x[1:] for x in got)), expected)

    kept = data.draw(st.integers(0, 1))
    heads, one = slice(kept * group, (kept + 1) * group), slice(kept, kept + 1)
    fewer = Operands(*(x[:, :, heads] for x in given_[:2]), *(x[:, :, one] for x in given_[2:4]), *given_[4:])
    fewer = fewer._replace(out=given_.out[:, :, heads], lse=given_.lse[:, heads])
    got = run(ordered(replace(alone, heads_q=group, heads_kv=1), SHAPE, policy), fewer)
    assert not difference(got, Gradients(expected.dq[:, :, heads], *(x[:, :, one] for x in expected[1:])))

    # Neighbours before and behind it, of lengths that leave the cuts inside the sequence where they are.
    before, behind = (data.draw(st.integers(0, 2)) * size for _ in range(2))
    behind += -length % size
    total, ranges = before + length + behind, (before + length + behind) // size
    pack = replace(
        alone, len_q=total, len_k=total, panels=ranges, mask=mask & documents([0, before, before + length, total])
    )
    poisoned = Operands(*(torch.full((1, total, *x.shape[2:]), math.nan) for x in given_[:5]), torch.empty(0))
    poisoned = poisoned._replace(lse=torch.full((1, 2 * group, total), math.nan))
    here = slice(before, before + length)
    for x, mine in zip(poisoned[:5], given_[:5], strict=True):
        x[:, here] = mine
    poisoned.lse[:, :, here] = given_.lse
    got = run(ordered(pack, SHAPE, policy), poisoned)
    assert not difference(Gradients(*part(got, here, here)), expected)


@pytest.mark.parametrize(
    ("ends", "document", "panels", "alone"),
    [([0, 80, 280, 360], 1, 9, 5), ([0, 80, 110, 320], 1, 8, 1), ([0, 3, 36, 37, 320], 1, 8, 1)],
    ids=["five of nine ranges", "within a range", "within a range, beside others"],
)
@pytest.mark.parametrize("mask", [CAUSAL, FULL, window(30, 0)], ids=str)
def test_auto_does_not_look_at_the_ranges_of_a_call(
    ends: list[int], document: int, panels: int, alone: int, mask: Mask
) -> None:
    """A document in a call of many ranges, of 40 tokens each, against itself in as many ranges as it has there.

    The control: grouped heads in another order show in dK and dV.
    """
    pack = Problem(1, 4, 2, ends[-1], ends[-1], 16, "float32", None, mask & documents(ends), panels)
    here = slice(*ends[document : document + 2])
    length = here.stop - here.start
    own = Problem(1, 4, 2, length, length, 16, "float32", None, mask, alone)
    whole = operands(pack)
    mine = rows(whole, here, here)
    out, lse = CpuBackend().forward(own)(*mine.qkv)
    assert torch.equal(mine.out, out) and torch.equal(mine.lse, lse)
    expected = run(ordered(own, SHAPE), mine)
    assert not difference(Gradients(*part(run(ordered(pack, SHAPE), whole), here, here)), expected)
    other = part(run(ordered(pack, SHAPE, "auto@group"), whole), here, here)
    assert not torch.equal(other[1], expected.dk) and not torch.equal(other[2], expected.dv)


@examples(40)
@given(any_problem, st.integers(1, 6), st.data())
def test_ranks_that_hold_panels(problem: Problem, panels: int, data: st.DataObject) -> None:
    """Each rank has the rows of its panels and the keys that they see. The sums are folded elsewhere."""
    cut = replace(problem, batch=1, dim=8, dtype="bfloat16", panels=panels)
    prepared = prepare(cut, "auto", Options(), CPU)
    drawn = operands(cut)
    out, lse = prepared.forward(*drawn.qkv)
    given_ = drawn._replace(out=out, lse=lse)
    expected = prepared.backward(given_)
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(cut.panel_list), max_size=len(cut.panel_list)))
    sums: dict[int, list[KeySums]] = {}
    parts: dict[int, KeySums] = {}
    for rank in range(3):
        mine = [i for i, owner in enumerate(owners) if owner == rank]
        if not mine:
            continue
        held, index = [], list[int]()
        for panel in (cut.panel_list[i] for i in mine):
            held.append(panel._replace(q_row=len(index)))
            index += range(panel.q_row, panel.q_row + panel.len_q)
        local = Operands(
            *(x[:, index] for x in given_[:2]), given_.k, given_.v, given_.out[:, index], given_.lse[:, :, index]
        )
        ready = prepare_panels(cut, tuple(held), "auto", Options(), CPU)
        out, lse = ready.forward(*local.qkv)
        assert torch.equal(out, local.out) and torch.equal(lse, local.lse)
        partials = ready.backward(local)
        assert torch.equal(partials.dq, expected.dq[:, index])
        assert all(x.dtype == torch.float32 for each in partials.sums for x in each)
        parts.update(zip(mine, partials.sums, strict=True))
    for i in reversed(range(len(cut.panel_list))):
        sums.setdefault(cut.panel_list[i].sequence, []).append(parts[i])
    for number, each in sums.items():
        sequence = cut.sequences[number]
        keys = slice(sequence.k_row, sequence.k_row + sequence.len_k)
        got = KeySums(*(torch.empty_like(x[:, keys]) for x in expected[1:]))
        ready.fold(each, got)
        assert torch.equal(got.dk, expected.dk[:, keys]) and torch.equal(got.dv, expected.dv[:, keys])


def test_the_order_of_the_fold_shows() -> None:
    """The control: the first panel first gives other bits, and so does rounding in between."""
    problem = Problem(1, 2, 2, 300, 300, 16, "float32", None, FULL, 3)
    given_ = operands(problem)
    expected = run(ordered(problem, SHAPE), given_)
    pack = Pack(problem, lambda _: SHAPE)
    backend = CpuBackend().held(replace(pack, held=problem.panel_list), Options())
    for order, equal in (((2, 1, 0), True), ((0, 1, 2), False), ((2, 0, 1), False)):
        sums, got = backend.backward(given_).sums, KeySums(*(torch.empty_like(x) for x in expected[1:]))
        fold([sums[i] for i in order], got, CpuConfig().thread_count())
        assert torch.equal(got.dk, expected.dk) is equal, order


def test_denormal_numbers_are_kept() -> None:
    tiny = KeySums(*(torch.full((1, 4, 1, 8), 1e-40) for _ in range(2)))
    into = KeySums(*(torch.empty(1, 4, 1, 8) for _ in range(2)))
    flushes = torch.set_flush_denormal(True)
    try:
        fold([tiny, KeySums(*(x.clone() for x in tiny))], into, 1)
    finally:
        torch.set_flush_denormal(False)
    assert flushes and (into.dk.double() > 1.9e-40).all()


def test_explain_counts_panels_and_their_memory() -> None:
    q, k = torch.zeros(2, 700, 4, 64), torch.zeros(2, 700, 2, 64)
    one, three = explain(q, k, k, causal=True), explain(q, k, k, causal=True, panels=3)
    assert (one.sequences, one.panels) == (2, 2) and (three.sequences, three.panels, three.templates) == (2, 6, 3)
    assert one.fingerprint != three.fingerprint
    sums = 2 * 2 * 700 * 2 * 64 * 4  # dK and dV, of the sequence and of a panel, in fp32
    alone = prepare(Problem(1, 4, 2, 232, 700, 64, "float32", None, CAUSAL), "auto", Options(), CPU)
    assert three.workspace_bytes == sums + max(
        CpuBackend().workspace_bytes(each) for each in prepare(_problem(3), "auto", Options(), CPU).plan.plans.values()
    )
    assert three.workspace_bytes >= sums + CpuBackend().workspace_bytes(alone.plan)


def _problem(panels: int) -> Problem:
    return Problem(2, 4, 2, 700, 700, 64, "float32", None, CAUSAL, panels)
