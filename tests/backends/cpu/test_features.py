"""Softcap, sinks, dropout, another head dim of v and a gradient of lse, on the CPU: right, and the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_attn.backends import Extras, Gradients, Operands, Options
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.backends.sinks import sink_gradient
from dash_attn.pack import Planned
from dash_attn.prepare import prepare
from dash_attn.problem import (
    CAUSAL,
    FULL,
    Features,
    Mask,
    Problem,
    documents,
    intervals,
    intervals_by_row,
    tiles,
    window,
)
from dash_attn.tiling import TileShape
from dash_attn.tools.bench.operands import Exact, draw, draw_extras, exact
from tests.backends.cpu.reference import CPU, DTYPES, ordered
from tests.strategies import examples, interval_masks, problems, shapes

SHAPE = TileShape(32, 64)
FEATURES = {
    "softcap": Features(softcap=1.5),
    "sinks": Features(sinks=True),
    "dropout": Features(dropout=0.3),
    "dim_v": Features(dim_v=24),
    "all": Features(2.0, True, 0.2, 40),
}
MASKS: list[tuple[Mask, int, int]] = [
    (FULL, 130, 170),
    (CAUSAL, 170, 130),  # the first queries see nothing
    (window(20, 5), 150, 150),
    (tiles([[1, 0, 1], [0, 1, 1], [1, 1, 0]], 64, 64), 150, 150),
    (intervals_by_row(lambda row: (row // 50 * 20, max(row + 1, 60)), 150), 150, 150),
    (documents([0, 40, 40, 131, 150], [0, 30, 60, 60, 150], causal=True), 150, 150),
]
# Errors relative to the largest number. Inputs and results are rounded to the dtype, sums are float32.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def run(planned: Planned, drawn: tuple[Tensor, ...], extras: Extras, **config: object) -> list[Tensor]:
    """Forward and backward of a plan, into tensors full of NaN."""
    problem = planned.problem
    out, lse = prepare(problem, "auto", Options(), CPU).forward(*drawn[1:], extras)
    operands = Operands(*drawn, out, lse)
    into = Gradients(*(torch.full_like(x, math.nan) for x in drawn[1:]))
    CpuBackend().backward(planned, Options(kernel=tuple(config.items())))(operands, into, extras)
    sums = [sink_gradient(operands.dout, out, lse, extras)] if problem.features.sinks else []
    return [out, lse, *into, *sums]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def bits(x: Tensor) -> Tensor:
    return x.flatten().contiguous().view(torch.int16)


def wanted(problem: Problem, drawn: tuple[Tensor, ...], extras: Extras) -> list[Tensor]:
    result: Exact = exact(problem, *drawn, extras=extras)
    return [x for x in result if x is not None]


def check(problem: Problem, shape: TileShape = SHAPE, policy: str = "auto") -> None:
    drawn, extras = draw(problem, CPU), draw_extras(problem, CPU)
    got = run(ordered(problem, shape, policy), drawn, extras, threads=2)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")[: len(got)]
    for name, mine, want in zip(names, got, wanted(problem, drawn, extras), strict=True):
        assert mine.shape == want.shape and mine.dtype == (torch.float32 if "s" in name else DTYPES[problem.dtype])
        blind = want == -math.inf
        assert torch.equal(mine == -math.inf, blind), name
        error = (mine.double() - want).masked_fill(blind, 0.0).abs().max() if want.numel() else torch.zeros(())
        size = max(1.0, float(want.masked_fill(blind, 0.0).abs().max())) if want.numel() else 1.0
        assert error <= TOLERANCE[problem.dtype] * size, (name, float(error), size)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The reference has small tensors, on which threads lose time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize(("mask", "len_q", "len_k"), MASKS, ids=lambda value: str(value))
def test_masks(mask: Mask, len_q: int, len_k: int, features: Features) -> None:
    check(Problem(2, 4, 2, len_q, len_k, 32, "float32", None, mask, features=features))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_dtypes(features: Features, dtype: str) -> None:
    check(Problem(1, 4, 2, 150, 130, 32, dtype, None, CAUSAL, features=features))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_panels(features: Features) -> None:
    check(Problem(2, 4, 2, 150, 170, 32, "float32", None, CAUSAL, 3, features))
    pack = documents([0, 60, 61, 150], [0, 0, 70, 170]) & window(40, 3)
    check(Problem(1, 4, 1, 150, 170, 32, "float32", 0.3, pack, 4, features))


def test_longer_than_a_tile() -> None:
    problem = Problem(1, 2, 1, 530, 1100, 16, "float32", None, CAUSAL, features=FEATURES["all"])
    check(problem, TileShape(256, 256), "descending@head")


@st.composite
def any_features(draw: st.DrawFn) -> Features:
    softcap, dropout = draw(st.sampled_from([0.0, 0.5, 30.0])), draw(st.sampled_from([0.0, 0.01, 0.5, 0.95]))
    return Features(softcap, draw(st.booleans()), dropout, draw(st.none() | st.integers(1, 20)))


@given(problems(packed=True) | problems(), any_features(), shapes, st.data())
@examples(40)
def test_any_problem(problem: Problem, features: Features, shape: TileShape, data: st.DataObject) -> None:
    mask, panels = problem.mask, 1
    if data.draw(st.booleans()):
        panels = data.draw(st.integers(1, 4))
        mask = mask.without_negative_sides(problem.len_q, problem.len_k)
    elif not problem.is_packed:
        mask &= data.draw(interval_masks(problem.len_q, problem.len_k))
    problem = replace(problem, dim=8, dtype="float32", mask=mask, panels=panels, features=features)
    check(problem, shape)
    drawn, extras, planned = draw(problem, CPU), draw_extras(problem, CPU), ordered(problem, shape)
    first = run(planned, drawn, extras, threads=1)
    assert same(first, run(planned, drawn, extras, threads=3, jitter=1e-4))


# ---- bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_threads_and_layouts(features: Features) -> None:
    problem = Problem(2, 4, 2, 150, 170, 32, "float32", None, CAUSAL, features=features)
    drawn, extras, planned = draw(problem, CPU), draw_extras(problem, CPU), ordered(problem, SHAPE)
    first, before = run(planned, drawn, extras, threads=1), torch.get_num_threads()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            assert same(first, run(planned, drawn, extras, threads=threads, jitter=1e-4))
    finally:
        torch.set_num_threads(before)
    turned = tuple(x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0) for x in drawn)
    around = extras._replace(dlse=extras.dlse.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    assert turned[0].stride() != drawn[0].stride()
    assert same(first, run(planned, turned, around))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(30, 4)], ids=str)
def test_bits_belong_to_the_sequence(mask: Mask, features: Features) -> None:
    """Alone, in a batch and in a pack, with the same seed and with a stranger's NaN beside it."""
    problem = Problem(3, 4, 2, 90, 110, 16, "float32", None, mask, features=features)
    drawn, extras = draw(problem, CPU), draw_extras(problem, CPU)
    seeds = torch.tensor([5, 2**40, 77]) if features.dropout else None
    extras = extras._replace(seed=seeds)
    batch = run(ordered(problem, SHAPE), drawn, extras)
    flat = tuple(x.flatten(0, 1).unsqueeze(0) for x in drawn)
    dlse = extras.dlse.transpose(0, 1).flatten(1).unsqueeze(0)
    cut = documents([0, 90, 180, 270], [0, 110, 220, 330])
    packed = replace(problem, batch=1, len_q=270, len_k=330, mask=mask & cut)
    pack = run(ordered(packed, SHAPE), flat, extras._replace(dlse=dlse))
    for b in range(3):
        own = extras._replace(seed=None if seeds is None else seeds[b : b + 1], dlse=extras.dlse[b : b + 1])
        alone = run(ordered(replace(problem, batch=1), SHAPE), tuple(x[b : b + 1] for x in drawn), own)
        assert same(alone[:5], [x[b : b + 1] for x in batch[:5]])
        rows = [slice(b * n, b * n + n) for n in (90, 90, 90, 110, 110)]
        parts = [x[:, :, r] if x is pack[1] else x[:, r] for x, r in zip(pack[:5], rows, strict=True)]
        assert same(alone[:5], [x.contiguous() for x in parts])
        if seeds is not None:
            number = extras._replace(seed=torch.tensor(int(seeds[b])), dlse=extras.dlse[b : b + 1])
            single = run(ordered(replace(problem, batch=1), SHAPE), tuple(x[b : b + 1] for x in drawn), number)
            assert same(alone, single)


def test_one_seed_is_another_for_each_sequence() -> None:
    """Sequence i of a call has the bits that it has alone with seed + i * 2**32."""
    problem = Problem(2, 2, 2, 60, 60, 16, "float32", None, CAUSAL, features=Features(dropout=0.4))
    drawn = tuple(torch.cat([x[:1]] * 2) for x in draw(problem, CPU))
    both = run(ordered(problem, SHAPE), drawn, Extras(seed=torch.tensor(3)))
    assert not torch.equal(both[0][0], both[0][1])
    for b in range(2):
        one = replace(problem, batch=1)
        alone = run(ordered(one, SHAPE), tuple(x[:1] for x in drawn), Extras(seed=torch.tensor(3 + b * 2**32)))
        assert same(alone, [x[b : b + 1] for x in both])


@pytest.mark.parametrize("features", [FEATURES["softcap"], FEATURES["sinks"], FEATURES["all"]], ids=str)
def test_panels_change_only_the_order(features: Features) -> None:
    """The weights that dropout keeps follow the sequence: out has the bits of the whole sequence."""
    whole = Problem(1, 2, 1, 512, 512, 16, "float32", None, FULL, features=features)
    drawn, extras = draw(whole, CPU), draw_extras(whole, CPU)
    first = run(ordered(whole, SHAPE), drawn, extras)
    cut = run(ordered(replace(whole, panels=2), SHAPE), drawn, extras)
    assert same(first[:2], cut[:2])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, cut, strict=True))


def test_dlse_of_zeros_changes_nothing() -> None:
    problem = Problem(1, 2, 1, 100, 100, 16, "float32", None, CAUSAL)
    drawn, planned = draw(problem, CPU), ordered(problem, SHAPE)
    plain = run(planned, drawn, Extras())
    assert same(plain, run(planned, drawn, Extras(dlse=torch.zeros(1, 2, 100))))
    assert not same(plain, run(planned, drawn, Extras(dlse=torch.ones(1, 2, 100))))


def test_other_seeds_and_other_sinks_have_other_bits() -> None:
    """The control: what the seed and the sinks are for."""
    problem = Problem(1, 2, 1, 100, 100, 16, "float32", None, CAUSAL, features=Features(sinks=True, dropout=0.1))
    drawn, planned = draw(problem, CPU), ordered(problem, SHAPE)
    extras = Extras(torch.zeros(2), torch.tensor(1))
    first = run(planned, drawn, extras)
    assert same(first, run(planned, drawn, extras))
    for other in (extras._replace(seed=torch.tensor(2)), extras._replace(sinks=torch.ones(2))):
        again = run(planned, drawn, other)
        assert not any(torch.equal(a, b) for a, b in zip(first[2:], again[2:], strict=True))


# ---- rows that see no key ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-2.0, 0.5, -math.inf])
def test_a_row_without_keys_has_its_sink(value: float) -> None:
    pack = documents([0, 50, 90], [0, 0, 60])
    for mask, len_k in ((CAUSAL, 60), (pack, 60), (FULL, 0)):
        problem = Problem(1, 2, 1, 90, len_k, 16, "float32", None, mask, features=Features(sinks=True))
        drawn, extras = draw(problem, CPU), Extras(torch.full((2,), value), None, torch.ones(1, 2, 90))
        prepared = prepare(problem, "auto", Options(), CPU)
        out, lse = prepared.forward(*drawn[1:], extras)
        grads = prepared.backward(Operands(*drawn, out, lse), None, extras)
        blind = slice(0, {CAUSAL: 30, pack: 50, FULL: 90}[mask])
        assert not out[:, blind].any() and not grads.dq[:, blind].any()
        assert torch.allclose(lse[:, :, blind], torch.tensor(value))
        sums = sink_gradient(drawn.dout, out, lse, extras)
        weight = torch.exp(torch.tensor(value) - lse).nan_to_num(0.0)
        terms = weight * (1 - (out * drawn.dout).sum(-1).transpose(1, 2))
        assert torch.allclose(sums, terms.sum((0, 2)), atol=1e-4)


NO_KEYS: list[tuple[Mask, list[int]]] = [  # with the rows of 10 that see none of 10 keys
    (window(None, -4), [0, 1, 2, 3]),
    (intervals([0, 3] * 5, [7, 3] * 5), [1, 3, 5, 7, 9]),
    (intervals([0] * 6 + [5] * 4, [5] * 6 + [10] * 4) & tiles([[1, 1], [1, 0]], 5, 5), [6, 7, 8, 9]),
]


@pytest.mark.parametrize("features", [Features(), FEATURES["all"]], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("mask", "rows"), NO_KEYS, ids=lambda value: str(value))
def test_gradients_of_rows_without_keys_reach_no_key(
    mask: Mask, rows: list[int], value: float, features: Features
) -> None:
    problem = Problem(1, 2, 1, 10, 10, 8, "float32", None, mask, features=features)
    drawn, extras = draw(problem, CPU), draw_extras(problem, CPU)
    prepared = prepare(problem, "auto", Options(), CPU)
    out, lse = prepared.forward(*drawn[1:], extras)
    assert not out[:, rows].any()
    want = prepared.backward(Operands(*drawn, out, lse), None, extras)
    assert extras.dlse is not None
    dlse, dout = extras.dlse.clone(), drawn.dout.clone()
    dlse[:, :, rows] = dout[:, rows] = value
    got = prepared.backward(Operands(dout, *drawn[1:], out, lse), None, extras._replace(dlse=dlse))
    assert same(list(got), list(want))


# ---- what is refused ---------------------------------------------------------------------------------------


def test_sinks_and_seeds_are_not_forgotten() -> None:
    problem = Problem(1, 2, 1, 20, 20, 16, "float32", None, CAUSAL, features=Features(dropout=0.5))
    with pytest.raises(ValueError, match="the problem has sinks or dropout"):
        prepare(problem, "auto", Options(), CPU).forward(*draw(problem, CPU)[1:])
