"""The kernel on a Hopper GPU: make gpu-test"""

import random

import pytest
import torch

from dash_attn.backends import Gradients, Operands
from dash_attn.backends.sm90.config import FINISHES
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, intervals_by_row, tiles, window
from tests.backends.sm90.cases import Case, errors, policies, prepared, same, sms

pytestmark = pytest.mark.gpu

TOLERANCE = {"bfloat16": 8e-3, "float16": 1.2e-3}  # rounding of the inputs' type, with room for sums over keys
SIZES = [  # batch, q heads, kv heads, queries, keys
    (2, 4, 4, 512, 512),
    (1, 4, 2, 1000, 777),
    (1, 2, 2, 300, 1100),
    (1, 1, 1, 1, 1),
    (1, 1, 1, 1, 300),
    (3, 64, 8, 384, 640),
    (1, 8, 1, 129, 65),
    (40, 8, 8, 256, 256),
]
CELLS = random.Random(0)
MASKS = {
    "window": window(200, 30),
    "left window": window(64, 0),
    "documents": documents([0, 100, 100, 471, 480, 1000]),
    "causal documents": documents([0, 100, 471, 480, 1000], causal=True),
    "uneven documents": documents([0, 0, 300, 1000], [0, 400, 500, 1000], causal=True),
    "prefix": intervals_by_row(lambda row: (0, max(row + 1, 300)), 1000),
    "intervals": intervals_by_row(lambda row: (row * 7 % 500, row * 11 % 1100), 1000),  # some empty, in any order
    "tiles": tiles([[CELLS.random() < 0.5 for _ in range(8)] for _ in range(8)], 128, 128),
}


def check(problem: Problem, names: list[str], repeats: int = 10) -> None:
    """With both ways of finishing dQ, which have the same bits."""
    case = Case.make(problem)
    for name in names:
        first = case.run(prepared(problem, name))
        off = errors(first, case.want)
        assert max(off) < TOLERANCE[problem.dtype], (name, off)
        for finish in FINISHES:
            other = prepared(problem, name, finish=finish)
            assert same(case.run(other), first), (name, finish)
            assert case.differing(other, repeats) == 0, (name, finish)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s)))
def test_every_policy_against_float64_and_itself(size, dim, mask):
    problem = Problem(*size, dim, mask=mask)
    check(problem, policies(problem))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(200, 30)], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("size", [(2, 6, 2, 700, 700), (1, 8, 1, 129, 1000), (1, 16, 4, 1024, 1024)], ids=str)
def test_heads_ordered_by_themselves(size, dim, mask):
    problem = Problem(*size, dim, mask=mask)
    check(problem, [f"{name}@head" for name in ("auto", "fa3")])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask: Mask, dim, dtype):
    problem = Problem(1, 4, 2, 1000, 1000, dim, dtype, mask=mask)
    check(problem, ["auto", "fa3"])


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, MASKS["window"]], ids=str)
@pytest.mark.parametrize("dim", [8, 40, 72, 80, 96, 120])
def test_other_head_dims(dim, mask, finish):
    """Columns past the end are not read and not written: all tensors are views into wider ones full of NaN."""
    problem = Problem(2, 4, 2, 700, 600, dim, mask=mask)
    case, ready = Case.make(problem), prepared(problem, finish=finish)
    *tensors, lse = case.operands
    operands = Operands(*(inside_nan(t) for t in tensors), lse)
    wide = Gradients(*(inside_nan(torch.zeros_like(t)) for t in operands.qkv))
    got = ready.backward(operands, wide)
    assert max(errors(got, case.want)) < TOLERANCE[problem.dtype]
    assert all(t._base[..., dim:].isnan().all() for t in got)
    assert same(case.run(ready), got) and case.differing(ready, 20) == 0


def inside_nan(t: torch.Tensor) -> torch.Tensor:
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 64), float("nan"))
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


@pytest.mark.parametrize("dim", [64, 128])
def test_bits_do_not_follow_placement_finish_or_split(dim):
    problem = Problem(2, 4, 4, 1024, 1024, dim, mask=CAUSAL)
    case, split = Case.make(problem), prepared(problem).run_backward.cfg.split
    results = []
    for kernel in ({}, {"finish": "postpass"}, {"split": not split}):
        for workers in (sms(), sms() - 4, sms() - 16, 17):
            results.append(case.run(prepared(problem, "spt", workers, **kernel)))
    assert all(same(other, results[0]) for other in results[1:])


def test_bits_follow_the_order():
    problem = Problem(1, 2, 2, 2048, 2048, 128, mask=FULL)
    case = Case.make(problem)
    runs = [case.run(prepared(problem, name)) for name in ("fa3", "shift", "spt")]
    assert not torch.equal(runs[0].dq, runs[1].dq) and not torch.equal(runs[0].dq, runs[2].dq)


@pytest.mark.parametrize("dim", [64, 128])
def test_control_without_turns_differs(dim):
    problem = Problem(4, 8, 8, 4096, 4096, dim, mask=FULL)
    case, ready = Case.make(problem), prepared(problem, "shift:32", ordered=False)
    assert not ready.run_backward.cfg.ordered
    first = case.run(ready)
    assert any(not torch.equal(case.run(ready).dq, first.dq) for _ in range(20))


def test_too_many_workers_are_refused():
    with pytest.raises(ValueError, match="sm_margin must be at least 0"):
        prepared(Problem(64, 8, 8, 128, 128, 128), "fa3", workers=512)


@pytest.mark.parametrize("gain", [8.0, 1e-2])
def test_large_and_small_magnitudes(gain):
    problem = Problem(1, 4, 4, 700, 700, 128, mask=CAUSAL)
    case = Case.make(problem, gain=gain)
    got, want = case.run(prepared(problem)), case.want
    scale = [max(float(w.abs().max()), 1e-30) for w in want]
    assert all(float((g.double() - w).abs().max()) < 0.05 * s for g, w, s in zip(got, want, scale, strict=True))
