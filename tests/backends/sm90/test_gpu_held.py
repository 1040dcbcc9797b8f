"""The panels of ranks on the GPU: computed one rank after the other in one process, and by processes that share it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from dash_attn.backends import Extras, Gradients, KeySums, Operands, Options
from dash_attn.distributed.layout import Layout
from dash_attn.distributed.routes import Routes
from dash_attn.prepare import prepare_panels
from dash_attn.problem import CAUSAL, FULL, Features, Mask, Problem, documents, window
from dash_attn.tools.bench.audit.audit import AuditSettings, Subject, audit
from dash_attn.tools.bench.audit.ranks import spots_of
from dash_attn.tools.bench.audit.targets import CONTROL
from dash_attn.tools.bench.operands import draw
from tests.backends.sm90.cases import DEVICE, Case, prepared, same
from tests.distributed import jobs
from tests.distributed.pool import Pool

pytestmark = pytest.mark.gpu

SHAPES = {"d128 grouped": (4, 2, 128), "d64": (4, 4, 64), "d80 one kv head": (4, 1, 80)}  # heads_q, heads_kv, dim
MASKS = {"causal": CAUSAL, "full": FULL, "window": window(100, 0)}


def joined(x: Tensor) -> Tensor:
    return x.flatten(0, 1).unsqueeze(0)


def lse_of(lse: Tensor, rows: Tensor) -> Tensor:
    """Some rows of lse, the sequences of a batch one after the other: (1, heads, rows)."""
    return lse[:, :, rows].transpose(0, 1).flatten(1).unsqueeze(0)


def on_ranks(
    case: Case, layout: Layout, policy: str = "auto", extras: Extras | None = None
) -> tuple[Tensor, Tensor, Gradients]:
    """out, lse and gradients, from the panels of each rank. The sums of dK and dV are passed by hand."""
    given = Extras() if extras is None else extras
    problem, (dout, q, k, v, out, lse) = case.problem, case.operands
    results = [torch.full_like(x, float("nan")) for x in (out, lse, q, k, v)]
    new_out, new_lse, dq, dk, dv = results
    sums, routes = list[tuple[KeySums, ...]](), [Routes.of(problem, layout, rank) for rank in range(layout.ranks)]
    for rank, route in enumerate(routes):
        held = prepare_panels(problem, route.panels, policy, Options(), DEVICE)
        rows = torch.cat([torch.arange(*each, device=DEVICE) for each in layout.held(problem.len_q, rank)])
        mine = [joined(x[:, rows]) for x in (dout, q, out)]
        own_lse = lse_of(lse, rows)
        dlse = None if given.dlse is None else lse_of(given.dlse, rows)
        got, got_lse = held.forward(mine[1], joined(k), joined(v), extras)
        shape = (problem.batch, len(rows))
        new_out[:, rows] = got.view(*shape, *got.shape[2:])
        new_lse[:, :, rows] = got_lse.view(-1, *shape).transpose(0, 1)
        own = Operands(mine[0], mine[1], joined(k), joined(v), mine[2], own_lse)
        partials = held.backward(own, None if extras is None else Extras(sinks=given.sinks, dlse=dlse))
        dq[:, rows] = partials.dq.view(*shape, *q.shape[2:])
        sums.append(tuple(KeySums(*(x.clone() for x in each)) for each in partials.sums))
    for rank, route in enumerate(routes):
        rows = torch.cat([torch.arange(*each, device=DEVICE) for each in layout.held(problem.len_k, rank)])
        into = KeySums(
            *(torch.zeros((problem.batch, len(rows), *k.shape[2:]), dtype=k.dtype, device=DEVICE) for _ in "kv")
        )
        flat = KeySums(*map(joined, into))
        come = {  # the rows that travel to this rank, from each of the others
            source: [torch.cat([sums[source][p.panel][i][:, slice(*p.rows)] for p in sent], 1) for i in (0, 1)]
            for source, sent in enumerate(route.sent[rank] for route in routes)
            if sent
        }
        for each in route.sums:
            parts = [KeySums(*(x[:, p.first : p.first + p.count] for x in come[p.source])) for p in each.addends]
            held.fold(parts, KeySums(*(x[:, slice(*each.rows)] for x in flat)))
        dk[:, rows], dv[:, rows] = into
    return new_out, new_lse, Gradients(dq, dk, dv)


@pytest.mark.parametrize("layout", [Layout("zigzag", 2, 8), Layout("contiguous", 4, 8)], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_panels_of_ranks_have_the_bits_of_one_call(shape, mask: Mask, layout: Layout) -> None:
    heads_q, heads_kv, dim = shape
    for batch, len_q, len_k in ((1, 1000, 1000), (2, 513, 513), (1, 700, 1100), (1, 900, 500)):
        problem = Problem(batch, heads_q, heads_kv, len_q, len_k, dim, mask=mask, panels=8)
        case = Case.make(problem)
        out, lse = prepared(problem).forward(*case.operands.qkv)
        case = Case(problem, Operands(*case.operands[:4], out, lse), case.want)
        got_out, got_lse, grads = on_ranks(case, layout)
        assert torch.equal(got_out, out) and torch.equal(got_lse, lse), (batch, len_q, len_k)
        assert same(grads, case.run(prepared(problem))), (batch, len_q, len_k)


def on_one(problem: Problem, with_lse: bool) -> tuple[Case, Extras, Gradients]:
    """Operands with the forward's own out and lse, sinks and a gradient of lse, and the gradients of one call."""
    drawn = draw(problem, DEVICE, gain=2.0)
    sinks = torch.linspace(-2.0, 4.0, problem.heads_q, device=DEVICE) if problem.features.sinks else None
    out, lse = prepared(problem).forward(*drawn[1:], Extras(sinks=sinks))
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) if with_lse else None
    case = Case(problem, Operands(*drawn, out, lse), Gradients(*drawn[1:]))
    extras = Extras(sinks=sinks, dlse=dlse)
    return case, extras, prepared(problem).backward(case.operands, None, extras)


FEATURES = {
    "softcap": (Features(softcap=20.0), False),
    "sinks": (Features(sinks=True), False),
    "gradient of lse": (Features(), True),
    "all": (Features(softcap=20.0, sinks=True), True),
}


@pytest.mark.parametrize("layout", [Layout("zigzag", 2, 8), Layout("contiguous", 4, 8)], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("features", "with_lse"), FEATURES.values(), ids=FEATURES)
def test_panels_of_ranks_with_features(
    features: Features, with_lse: bool, dim: int, mask: Mask, layout: Layout
) -> None:
    """Of 900 queries and 500 keys, a causal mask hides all keys of 400 queries, and so of whole panels."""
    for batch, len_q, len_k in ((2, 513, 513), (1, 700, 1100), (1, 900, 500)):
        problem = Problem(batch, 4, 2, len_q, len_k, dim, mask=mask, panels=8, features=features)
        case, extras, want = on_one(problem, with_lse)
        out, lse, grads = on_ranks(case, layout, extras=extras)
        assert torch.equal(out, case.operands.out) and torch.equal(lse, case.operands.lse), (batch, len_q, len_k)
        assert same(grads, want), (batch, len_q, len_k)
        if with_lse:
            plain = prepared(problem).backward(case.operands, None, extras._replace(dlse=None))
            assert not torch.equal(plain.dq, want.dq) and not torch.equal(plain.dk, want.dk), "the gradient counts"


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("features", "with_lse"), FEATURES.values(), ids=FEATURES)
def test_packs_with_features(features: Features, with_lse: bool, dim: int) -> None:
    cu = [0, *accumulate([130, 7, 0, 300, 64, 499])]
    mask = CAUSAL & documents(cu)
    problem = Problem(1, 4, 2, cu[-1], cu[-1], dim, mask=mask, panels=8, features=features)
    case, extras, want = on_one(problem, with_lse)
    out, lse, grads = on_ranks(case, Layout("zigzag", 4, 8), extras=extras)
    assert torch.equal(out, case.operands.out) and torch.equal(lse, case.operands.lse)
    assert same(grads, want)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [8192, 32768, 131072])
def test_long_sequences_on_any_number_of_ranks(length: int, ranks: int) -> None:
    problem = Problem(1, 4, 2, length, length, 128, mask=CAUSAL, panels=16)
    drawn = draw(problem, DEVICE)
    out, lse = prepared(problem).forward(*drawn[1:])
    case = Case(problem, Operands(*drawn, out, lse), Gradients(*drawn[1:]))
    got_out, got_lse, grads = on_ranks(case, Layout("zigzag", ranks, 16))
    assert torch.equal(got_out, out) and torch.equal(got_lse, lse)
    assert same(grads, case.run(prepared(problem)))


@pytest.mark.parametrize("policy", ["auto", "spt"])
def test_packs(policy: str) -> None:
    lengths = [130, 7, 0, 300, 64, 499]
    cu = [0, *accumulate(lengths)]
    problem = Problem(1, 4, 2, cu[-1], cu[-1], 128, mask=CAUSAL & documents(cu), panels=8)
    case = Case.make(problem)
    out, lse = prepared(problem, policy).forward(*case.operands.qkv)
    case = Case(problem, Operands(*case.operands[:4], out, lse), case.want)
    got_out, got_lse, grads = on_ranks(case, Layout("zigzag", 4, 8), policy)
    assert torch.equal(got_out, out) and torch.equal(got_lse, lse)
    assert same(grads, case.run(prepared(problem, policy)))


def test_another_order_of_the_sums_is_noticed() -> None:
    """The control: the first addend has all rows, so it stays the first, and the others are turned round."""
    problem = Problem(1, 4, 2, 1000, 1000, 128, mask=CAUSAL, panels=8)
    case = Case.make(problem)
    held = prepare_panels(problem, problem.panel_list, "auto", Options(), DEVICE)
    sums = held.backward(case.operands).sums[::-1]
    results = []
    for order in (sums, (sums[0], *sums[:0:-1])):
        into = KeySums(torch.empty_like(case.operands.k), torch.empty_like(case.operands.v))
        held.fold((KeySums(*(x.clone() for x in each)) for each in order), into)
        results.append(into)
    whole = case.run(prepared(problem))
    assert torch.equal(results[0].dk, whole.dk) and torch.equal(results[0].dv, whole.dv)
    assert not torch.equal(results[1].dk, whole.dk)


@pytest.mark.alone
def test_an_audit_of_processes_that_share_the_gpu() -> None:
    """Ranks with a group of gloo, or of NCCL if there are GPUs enough, in every mode and layout."""
    how = AuditSettings("cuda", tuple(spots_of((1, 2))), invariance=True, ranks=(1, 2))
    report = audit([Subject("one", Problem(1, 4, 2, 1000, 1000, 128, mask=CAUSAL))], ["ours", CONTROL], how)
    assert report["ok"], [(entry["stressor"], entry["status"], entry["why"]) for entry in report["entries"]]


SHARED = {
    "causal": jobs.Case(lengths=(1024, 1024), heads=(8, 4), arguments={"causal": True}),
    "two kv heads": jobs.Case(lengths=(1024, 1024), heads=(4, 2), arguments={"causal": True}),
    "one kv head": jobs.Case(lengths=(1024, 1024), heads=(4, 1), arguments={"causal": True}),
    "pack": jobs.Case(
        lengths=(1024, 1024), heads=(4, 4), arguments={"causal": True, "cu_seqlens": [0, 90, 90, 515, 1024]}
    ),
}


@pytest.mark.alone
def test_processes_that_share_the_gpu() -> None:
    """1, 2 and 4 ranks, in every mode and layout, on a mesh too. Gloo carries the tensors, each kv head by itself.

    The processes start once and run all cases: their start takes longer than the cases.
    """
    pool = Pool(4, 200.0)  # seconds: a rank compiles kernels while others wait for it
    try:
        for name, case in SHARED.items():
            on_gpu = replace(case, dim=128, dtype=torch.bfloat16, device="cuda")
            assert pool.run(jobs.equal_everywhere, on_gpu, (1, 2, 4), 1)[0] == {}, name
    finally:
        pool.close()
