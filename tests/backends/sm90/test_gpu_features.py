"""Softcap, sinks and the gradient of lse on a Hopper GPU: against float64 and FlashAttention-4, and bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from dash_attn import attention
from dash_attn.backends import Gradients, Operands
from dash_attn.backends.base import Extras
from dash_attn.backends.sinks import sink_gradient
from dash_attn.backends.sm90.config import FINISHES
from dash_attn.backends.sm90.forwards import VARIABLE, FlashAttention4, LibraryForward
from dash_attn.problem import CAUSAL, FULL, Features, Mask, Problem, documents, intervals_by_row, window
from dash_attn.tools.bench.operands import draw, exact
from tests.backends.sm90 import featured
from tests.backends.sm90.cases import DEVICE, Case, check_replays, errors, prepared, room, same, sms

pytestmark = pytest.mark.gpu

CAP = 20.0
CAPPED, SINKS = Features(softcap=CAP), Features(sinks=True)
# The approximate tanh changes a score by up to 2^-11 of its size, and so a weight by up to 1 % at this cap.
TOLERANCE, CAPPED_TOLERANCE = 8e-3, 2e-2
MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "window": window(200, 30),
    "intervals": intervals_by_row(lambda row: (row * 7 % 500, row * 11 % 1100), 1000),  # some are empty
    "documents": documents([0, 100, 471, 480, 1000], causal=True),
}
LENGTHS = [300, 1, 128, 64, 777, 129, 500, 0, 63]
SHAPES = {"d128 grouped": (4, 2, 128), "d64": (4, 4, 64), "d80 one kv head": (4, 1, 80)}  # heads_q, heads_kv, dim


def run(problem: Problem, operands: Operands, extras: Extras | None = None, **kernel: object) -> Gradients:
    """One backward, with gradients full of NaN before it."""
    into = room(operands)
    for x in into:
        x.fill_(float("nan"))
    prepared(problem, **kernel).run_backward(operands, into, extras)
    return into


def repeats(problem: Problem, operands: Operands, extras: Extras | None, first: Gradients, times: int = 20) -> bool:
    return all(same(run(problem, operands, extras), first) for _ in range(times))


def drawn_sinks(problem: Problem) -> Tensor | None:
    if not problem.features.sinks:
        return None
    return torch.linspace(-2.0, 4.0, problem.heads_q, device=DEVICE)


def made(problem: Problem, seed: int = 0, gain: float = 1.0) -> tuple[Operands, Extras]:
    """Inputs with out and lse in float64, rounded; a gradient of lse, and sinks if the problem has them."""
    dout, *qkv = draw(problem, DEVICE, seed, gain)
    sinks = drawn_sinks(problem)
    out, lse = featured.attend(problem, *qkv, sinks)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return Operands(dout, *qkv, out.to(dout.dtype), lse.float()), Extras(sinks=sinks, dlse=dlse)


def worst(problem: Problem, operands: Operands, extras: Extras, got: Gradients) -> float:
    return max(errors(got, featured.gradients(problem, operands.dout, operands.qkv, extras)))


def part(operands: Operands, extras: Extras, a: int, b: int) -> tuple[Operands, Extras]:
    *tensors, lse = operands
    assert extras.dlse is not None
    own = Operands(*(x[:, a:b].contiguous() for x in tensors), lse[:, :, a:b].contiguous())
    return own, extras._replace(dlse=extras.dlse[:, :, a:b])


# ---- the gradient of lse -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gradient_of_lse(mask: Mask, dim: int) -> None:
    problem = Problem(2, 4, 2, 1000, 1000, dim, mask=mask)
    operands, extras = made(problem)
    first = run(problem, operands, extras)
    assert worst(problem, operands, extras, first) < TOLERANCE and repeats(problem, operands, extras, first)
    plain = run(problem, operands)
    assert not torch.equal(plain.dq, first.dq) and torch.equal(plain.dv, first.dv), "dV does not depend on it"
    zeros = Extras(dlse=torch.zeros_like(operands.lse))
    assert same(run(problem, operands, zeros), plain)
    for finish in FINISHES:
        assert same(run(problem, operands, extras, finish=finish), first)


def test_gradient_of_lse_of_rows_without_keys_is_dropped() -> None:
    problem = Problem(1, 4, 4, 900, 300, 128, mask=CAUSAL)
    operands, extras = made(problem)
    want = run(problem, operands, extras)
    assert extras.dlse is not None and bool((operands.lse == -torch.inf).any())
    poisoned = extras.dlse.masked_fill(operands.lse == -torch.inf, float("nan"))
    assert same(run(problem, operands, Extras(dlse=poisoned)), want) and all(bool(x.isfinite().all()) for x in want)


@pytest.mark.parametrize("panels", [1, 3])
def test_gradient_of_lse_in_panels_and_heads_ordered_by_themselves(panels: int) -> None:
    problem = Problem(1, 6, 2, 700, 700, 128, mask=CAUSAL, panels=panels)
    operands, extras = made(problem)
    into = room(operands)
    prepared(problem, "auto@head").run_backward(operands, into, extras)
    assert worst(problem, operands, extras, into) < TOLERANCE


# ---- all features: a sequence has its bits in every pack ---------------------------------------------------------


@pytest.mark.parametrize("features", [Features(), CAPPED, SINKS], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("mask", [CAUSAL, FULL, window(100, 20)], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_sequence_has_the_bits_that_it_has_alone(shape, mask: Mask, features: Features) -> None:
    heads_q, heads_kv, dim = shape
    cu = [0, *accumulate(LENGTHS)]
    packed = Problem(1, heads_q, heads_kv, cu[-1], cu[-1], dim, mask=mask & documents(cu), features=features)
    operands, extras = made(packed)
    grads = run(packed, operands, extras)
    assert worst(packed, operands, extras, grads) < CAPPED_TOLERANCE
    assert repeats(packed, operands, extras, grads, 5)
    for a, b in pairwise(cu):
        if a < b:
            alone = Problem(1, heads_q, heads_kv, b - a, b - a, dim, mask=mask, features=features)
            got = run(alone, *part(operands, extras, a, b))
            assert same(got, Gradients(*(x[:, a:b] for x in grads))), (a, b)


@pytest.mark.parametrize("features", [CAPPED, SINKS], ids=["softcap", "sinks"])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(100, 20)], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_out_and_lse_of_a_document_are_its_own(dim: int, mask: Mask, features: Features) -> None:
    """FlashAttention-4 gives them the same bits alone, packed, and as a batch entry."""
    cu = [0, *accumulate([200, 333, 64, 1, 129, 256])]
    packed = Problem(1, 8, 2, cu[-1], cu[-1], dim, mask=mask & documents(cu), features=features)
    _, *qkv = draw(packed, DEVICE)
    extras = Extras(sinks=drawn_sinks(packed))
    out, lse = prepared(packed).run_forward(*qkv, extras)
    for a, b in pairwise(cu):
        own = [x[:, a:b].contiguous() for x in qkv]
        alone = Problem(1, 8, 2, b - a, b - a, dim, mask=mask, features=features)
        mine = prepared(alone).run_forward(*own, extras)
        twice = prepared(replace(alone, batch=2)).run_forward(*(torch.cat([x, x]) for x in own), extras)
        assert torch.equal(mine[0], out[:, a:b]) and torch.equal(mine[1], lse[:, :, a:b]), (a, b)
        assert torch.equal(mine[0][0], twice[0][1]) and torch.equal(mine[1][0], twice[1][1]), (a, b)


# ---- sinks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["fa4", "flex"])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(200, 0)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_sinks_in_both_directions(dim: int, mask: Mask, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lse includes the sink, and the backward needs nothing else. A sink far above all scores is right too."""
    monkeypatch.setenv(VARIABLE, provider)
    problem = Problem(2, 4, 2, 700, 600, dim, mask=mask, features=SINKS)  # a causal mask hides all keys of 100 rows
    dout, *qkv = draw(problem, DEVICE)
    forward = prepared(problem).run_forward
    for sinks in (torch.tensor([0.0, 3.0, -5.0, 7.0]), torch.tensor([0.0, 120.0, -120.0, 300.0])):
        extras = Extras(sinks=sinks.to(DEVICE))
        want, want_lse = featured.attend(problem, *qkv, extras.sinks)
        out, lse = forward(*qkv, extras)
        assert float((out - want).norm() / want.norm()) < 5e-3
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(forward(*qkv, extras), (out, lse), strict=True))
        operands = Operands(dout, *qkv, out, lse.contiguous())
        grads = run(problem, operands)
        assert worst(problem, operands, extras, grads) < TOLERANCE


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("mask", [CAUSAL, FULL, documents([0, 200, 473, 700], causal=True)], ids=str)
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_the_gradient_of_sinks(dim: int, mask: Mask, with_dlse: bool) -> None:
    """Against float64; the same bits at every run, in poisoned memory, and with either way of finishing dQ."""
    problem = Problem(3, 4, 2, 700, 600 if mask is CAUSAL else 700, dim, mask=mask, features=SINKS)
    operands, extras = made(problem)
    extras = extras if with_dlse else extras._replace(dlse=None)
    assert extras.sinks is not None
    want = exact(problem, *operands[:4], extras=extras).dsinks
    assert want is not None
    sums = []
    for number in range(20):
        dsinks = torch.full_like(extras.sinks, float("nan"))
        ready = prepared(problem, finish=FINISHES[number % 2])
        ready.run_backward(operands, room(operands), extras._replace(dsinks=dsinks))
        sums.append(dsinks)
    assert all(torch.equal(each, sums[0]) for each in sums)
    torch.testing.assert_close(sums[0].double(), want, rtol=5e-3, atol=5e-3 * float(want.abs().max()))
    by_torch = sink_gradient(operands.dout, operands.out, operands.lse, extras)
    torch.testing.assert_close(sums[0], by_torch, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_the_gradient_of_sinks_under_autograd() -> None:
    problem = Problem(1, 64, 8, 2048, 2048, 64, mask=CAUSAL, features=SINKS)
    dout, *qkv = draw(problem, DEVICE)
    sinks = torch.linspace(-3, 3, 64, device=DEVICE).bfloat16().requires_grad_()
    leaves = [x.requires_grad_() for x in qkv]
    first, second = (
        torch.autograd.grad(attention(*leaves, causal=True, sinks=sinks), [*leaves, sinks], dout) for _ in range(2)
    )
    want = exact(problem, dout, *(x.detach() for x in qkv), extras=Extras(sinks.detach().float())).dsinks
    assert want is not None and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(first[3].double(), want, rtol=2e-2, atol=1e-2 * float(want.abs().max()))


@pytest.mark.parametrize("mask", [CAUSAL, documents([0, 200, 473, 700], causal=True)], ids=str)
def test_recorded_sinks_are_those_of_the_call(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls go past FlashAttention-4's front, and each has its own sinks."""
    if (reason := FlashAttention4().missing()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv(VARIABLE, "fa4")
    problem = Problem(1, 4, 2, 700, 700, 64, mask=mask, features=SINKS)
    forward, fresh = LibraryForward(problem), LibraryForward(problem)
    _, *qkv = draw(problem, DEVICE)
    for seed in range(3):
        extras = Extras(sinks=torch.randn(4, generator=torch.Generator().manual_seed(seed)).to(DEVICE))
        got, want = forward(*qkv, extras), fresh(*qkv, extras)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        fresh = LibraryForward(problem)
    assert all(bound._noted for bound in forward._bound.values()), "FlashAttention-4's calls are not as expected"


# ---- softcap -------------------------------------------------------------------------------------------------


def fa4_gradients(problem: Problem, operands: Operands) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    dout, q, k, v, out, lse = operands
    how = {"softmax_scale": problem.softmax_scale, "causal": problem.mask.is_causal, "softcap": CAP}
    return Gradients(*_flash_attn_bwd(q, k, v, out, dout, lse, **how)[:3])


@pytest.mark.parametrize("gain", [1.0, 3.0])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_softcap_is_as_exact_as_that_of_a_peer(dim: int, mask: Mask, gain: float) -> None:
    """With a gain of 3 the scores have a deviation of 9, so that the cap of 20 bends many of them."""
    if (reason := FlashAttention4().missing()) is not None:
        pytest.skip(reason)
    problem = Problem(2, 4, 4, 1024, 1024, dim, mask=mask, features=CAPPED)
    dout, *qkv = draw(problem, DEVICE, gain=gain)
    out, lse = prepared(problem).run_forward(*qkv)
    operands = Operands(dout, *qkv, out, lse)
    want = featured.gradients(problem, dout, tuple(qkv))
    ours, theirs = (errors(x, want) for x in (run(problem, operands), fa4_gradients(problem, operands)))
    assert all(a <= 1.1 * b + 1e-4 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [40, 64, 96, 128])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_softcap(mask: Mask, dim: int, dtype: str) -> None:
    """Poisoned buffers, both ways of finishing dQ, fewer SMs, and repeats."""
    problem = Problem(1, 4, 2, 1000, 1000, dim, dtype, mask=mask, features=CAPPED)
    operands, _ = made(problem, gain=2.0)
    case = Case(problem, operands, featured.gradients(problem, operands.dout, operands.qkv))
    first = case.run(prepared(problem))
    assert max(errors(first, case.want)) < CAPPED_TOLERANCE
    for finish in FINISHES:
        other = prepared(problem, finish=finish)
        assert same(case.run(other), first) and case.differing(other, 10) == 0, finish
    assert same(case.run(prepared(problem, "auto", sms() - 60)), first)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_large_cap_is_no_cap(dim: int) -> None:
    """tanh of small numbers is nearly the identity, up to the instruction's error."""
    plain = Problem(1, 4, 4, 512, 512, dim, mask=CAUSAL)
    operands, _ = made(plain)
    got, want = run(replace(plain, features=Features(softcap=1e4)), operands), run(plain, operands)
    assert max(errors(got, Gradients(*(x.double() for x in want)))) < CAPPED_TOLERANCE


@pytest.mark.parametrize("policy", ["auto", "auto@head", "auto@group", "fa3"])
@pytest.mark.parametrize("dim", [64, 128])
def test_softcap_in_cut_chains_and_panels(dim: int, policy: str) -> None:
    for panels in (1, 3):
        problem = Problem(1, 6, 2, 700, 700, dim, mask=CAUSAL, features=CAPPED, panels=panels)
        operands, _ = made(problem)
        case = Case(problem, operands, featured.gradients(problem, operands.dout, operands.qkv))
        ready = prepared(problem, policy)
        assert max(errors(case.run(ready), case.want)) < CAPPED_TOLERANCE and case.differing(ready, 20) == 0


def test_softcap_with_the_other_features() -> None:
    problem = Problem(1, 4, 2, 700, 700, 64, mask=CAUSAL, features=Features(softcap=CAP, sinks=True))
    operands, extras = made(problem)
    first = run(problem, operands, extras)
    assert worst(problem, operands, extras, first) < CAPPED_TOLERANCE and repeats(problem, operands, extras, first)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_long_sequence_with_softcap_repeats(dim: int) -> None:
    problem = Problem(1, 8, 2, 8192, 8192, dim, mask=CAUSAL, features=CAPPED)
    dout, *qkv = draw(problem, DEVICE)
    operands = Operands(dout, *qkv, *prepared(problem).run_forward(*qkv))
    case = Case(problem, operands, Gradients(*qkv))
    assert all(bool(x.isfinite().all()) for x in case.run(prepared(problem)))
    assert case.differing(prepared(problem), 100) == 0


def test_a_graph_with_softcap() -> None:
    check_replays(Problem(1, 4, 2, 1000, 1000, 64, mask=CAUSAL, features=CAPPED))
