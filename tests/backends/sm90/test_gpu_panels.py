"""Panels on the GPU: against float64, and bits over repeats, SMs, batch, neighbours, heads and single panels."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from dash_attn import attention, backward
from dash_attn.backends import Gradients, Operands
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from tests.backends.sm90.cases import DEVICE, Case, check_replays, errors, prepared, same, sms

pytestmark = pytest.mark.gpu

SHAPES = {  # heads_q, heads_kv, dim
    "d128 grouped": (4, 2, 128),
    "d64": (4, 4, 64),
    "d64 grouped by 3": (6, 2, 64),
    "d80 one kv head": (4, 1, 80),
}
MASKS = {"causal": CAUSAL, "full": FULL, "window": window(100, 0)}
POLICIES = ("auto", "auto@group", "spt")


def rows(operands: Operands, q: slice, k: slice) -> Operands:
    dout, queries, keys, values, out, lse = operands
    parts = (dout[:, q], queries[:, q], keys[:, k], values[:, k], out[:, q], lse[:, :, q])
    return Operands(*(x.contiguous() for x in parts))


def bits_of(problem: Problem, operands: Operands, policy: str = "auto", **kernel: object) -> Gradients:
    return Case(problem, operands, Gradients(*operands.qkv)).run(prepared(problem, policy, **kernel))


@pytest.mark.parametrize("finish", ["last", "postpass"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_panels_against_float64_and_themselves(shape, mask: Mask, policy: str, finish: str) -> None:
    heads_q, heads_kv, dim = shape
    for len_q, len_k, panels in ((1000, 1000, 3), (700, 1100, 4), (900, 500, 5), (513, 513, 2)):
        problem = Problem(1, heads_q, heads_kv, len_q, len_k, dim, mask=mask, panels=panels)
        case, ready = Case.make(problem), prepared(problem, policy, finish=finish)
        grads = case.run(ready)
        assert max(errors(grads, case.want)) < 8e-3, (len_q, len_k, panels)
        assert same(grads, case.run(prepared(problem, policy, sms() - 60, finish=finish))), "fewer SMs"
        assert case.differing(ready, 20) == 0


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_dq_of_a_panel_is_that_of_a_call_with_its_keys(shape, mask: Mask) -> None:
    """And where a key is seen by one panel only, so are dK and dV. Others are sums over panels, in fp32."""
    heads_q, heads_kv, dim = shape
    problem = Problem(1, heads_q, heads_kv, 1000, 1100, dim, mask=mask, panels=3)
    case = Case.make(problem)
    grads = case.run(prepared(problem))
    sums = [torch.zeros(x.shape, dtype=torch.float64, device=DEVICE) for x in grads[1:]]
    before = 0
    for panel in problem.panel_list:
        q, k = slice(panel.q_row, panel.q_row + panel.len_q), slice(0, panel.len_k)
        alone = bits_of(problem.alone(panel), rows(case.operands, q, k))
        assert torch.equal(alone.dq, grads.dq[:, q])
        for total, grad in zip(sums, alone[1:], strict=True):
            total[:, k] += grad.double()
        before = panel.len_k if panel is not problem.panel_list[-1] else before
    last = slice(before, 1100)  # only the last panel sees these keys
    assert torch.equal(alone.dk[:, last], grads.dk[:, last]) and torch.equal(alone.dv[:, last], grads.dv[:, last])
    assert max(errors(Gradients(grads.dq, *grads[1:]), Gradients(grads.dq.double(), *sums))) < 8e-3


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_neighbours_batch_and_heads_change_nothing(shape, mask: Mask) -> None:
    heads_q, heads_kv, dim = shape
    mine = Problem(1, heads_q, heads_kv, 600, 600, dim, mask=mask, panels=3)
    case = Case.make(mine)
    alone = case.run(prepared(mine))
    several = Operands(*(torch.cat([torch.full_like(x, float("nan")), x]) for x in case.operands))
    grads = prepared(replace(mine, batch=2)).backward(several)
    assert same(Gradients(*(x[1:] for x in grads)), alone), "beside a batch entry that is no number"
    for lengths in ([200, 600], [600, 400], [400, 600, 200]):  # multiples of the range
        cu, at = [0, *accumulate(lengths)], sum(lengths[: lengths.index(600)])
        pack = replace(mine, len_q=cu[-1], len_k=cu[-1], mask=mask & documents(cu), panels=cu[-1] // 200)
        poisoned = [x.new_full((1, cu[-1], *x.shape[2:]), float("nan")) for x in case.operands[:5]]
        lse = case.operands.lse.new_full((1, heads_q, cu[-1]), float("nan"))
        for x, part in zip(poisoned, case.operands[:5], strict=True):
            x[:, at : at + 600] = part
        lse[:, :, at : at + 600] = case.operands.lse
        packed = bits_of(pack, Operands(*poisoned, lse))
        assert same(Gradients(*(x[:, at : at + 600] for x in packed)), alone), lengths
    if heads_kv > 1:
        group = heads_q // heads_kv
        dout, q, k, v, out, lse = case.operands
        queries = slice(heads_q - group, heads_q)
        subset = (
            dout[:, :, queries],
            q[:, :, queries],
            k[:, :, -1:],
            v[:, :, -1:],
            out[:, :, queries],
            lse[:, queries],
        )
        got = bits_of(replace(mine, heads_q=group, heads_kv=1), Operands(*(x.contiguous() for x in subset)))
        assert same(got, Gradients(alone.dq[:, :, queries], alone.dk[:, :, -1:], alone.dv[:, :, -1:]))


def test_another_cut_is_noticed() -> None:
    """The control: the comparison sees the bits of another cut."""
    problem = Problem(1, 4, 2, 1000, 1000, 128, mask=CAUSAL, panels=3)
    case = Case.make(problem)
    cuts = [case.run(prepared(replace(problem, panels=panels))) for panels in (1, 2, 3)]
    assert not any(same(a, b) for i, a in enumerate(cuts) for b in cuts[:i])


def test_a_long_sequence_repeats() -> None:
    problem = Problem(1, 8, 2, 16384, 16384, 128, mask=CAUSAL, panels=8)
    case = Case.make(problem)
    assert max(errors(case.run(prepared(problem)), case.want)) < 8e-3 and case.differing(prepared(problem), 100) == 0


def test_more_queries_than_keys_and_empty_sides() -> None:
    q, k = [100, 0, 300, 50, 200], [400, 30, 100, 0, 350]
    mask = CAUSAL & documents([0, *accumulate(q)], [0, *accumulate(k)])
    problem = Problem(1, 4, 2, sum(q), sum(k), 128, mask=mask, panels=5)
    case = Case.make(problem)
    grads = case.run(prepared(problem))
    assert max(errors(grads, case.want)) < 8e-3
    assert grads.dk[:, 400:430].eq(0).all() and grads.dq[:, 400:450].eq(0).all()


def test_a_graph() -> None:
    check_replays(Problem(1, 4, 2, 1000, 1000, 128, mask=CAUSAL, panels=4))


def test_attention_takes_panels() -> None:
    q = torch.randn(2, 700, 4, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 700, 2, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out, lse = attention(q, k, v, causal=True, panels=3, return_lse=True)
    whole = attention(q, k, v, causal=True)
    assert torch.equal(out, whole), "the forward runs over the whole sequence"
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    plain = [x.detach() for x in (q, k, v, out)]
    assert same(Gradients(*grads), backward(dout, *plain, lse, causal=True, panels=3))
