"""The kernel on a Hopper GPU: make gpu-test"""

import dataclasses
import random

import pytest
import torch

from dash_attn.backends.sm90.config import FINISHES
from dash_attn.backends.sm90.launch import Grads, Inputs, backward
from dash_attn.order import applicable
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, tiles, window
from dash_attn.tiling import TileShape, tile
from tests.backends.sm90.cases import Case, config_of, errors, same, sms, tables_of

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
    "tiles": tiles([[CELLS.random() < 0.5 for _ in range(8)] for _ in range(8)], 128, 128),
}


def policies(problem: Problem) -> list[str]:
    cfg = config_of(problem)
    return applicable(tile(problem, TileShape(cfg.tile_m, cfg.tile_n)))


def check(problem: Problem, names: list[str], repeats: int = 10) -> None:
    """With both ways of finishing dQ, which have the same bits."""
    case, cfg = Case.make(problem), config_of(problem)
    want = case.exact()
    for name in names:
        tables = tables_of(problem, cfg, name, sms())
        first = case.run(cfg, tables)
        assert max(errors(first, want)) < TOLERANCE[problem.dtype], (name, errors(first, want))
        for finish in FINISHES:
            other = dataclasses.replace(cfg, finish=finish)
            assert same(case.run(other, tables), first), (name, finish)
            assert case.differing(other, tables, repeats) == 0, (name, finish)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s)))
def test_every_policy_against_float64_and_itself(size, dim, mask):
    problem = Problem(*size, dim, mask=mask)
    check(problem, policies(problem))


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
    case, cfg = Case.make(problem), dataclasses.replace(config_of(problem), finish=finish)
    tables = tables_of(problem, cfg, "auto", sms())
    *tensors, lse = case.inputs
    inputs = Inputs(*(inside_nan(t) for t in tensors), lse)
    wide = [inside_nan(torch.zeros_like(t)) for t in (inputs.q, inputs.k, inputs.v)]
    got = backward(cfg, tables, inputs, scale=problem.softmax_scale, into=Grads(*wide))
    assert max(errors(got, case.exact())) < TOLERANCE[problem.dtype]
    assert all(t._base[..., dim:].isnan().all() for t in got)
    assert same(case.run(cfg, tables), got) and case.differing(cfg, tables, 20) == 0


def inside_nan(t: torch.Tensor) -> torch.Tensor:
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 64), float("nan"))
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


@pytest.mark.parametrize("dim", [64, 128])
def test_bits_do_not_follow_placement_finish_or_split(dim):
    problem = Problem(2, 4, 4, 1024, 1024, dim, mask=CAUSAL)
    case, cfg = Case.make(problem), config_of(problem)
    results = []
    for each in (cfg, dataclasses.replace(cfg, finish="postpass"), dataclasses.replace(cfg, split=not cfg.split)):
        for workers in (sms(), sms() - 4, sms() - 16, 17):
            results.append(case.run(each, tables_of(problem, cfg, "spt", workers)))
    assert all(same(other, results[0]) for other in results[1:])


def test_bits_follow_the_order():
    problem = Problem(1, 2, 2, 2048, 2048, 128, mask=FULL)
    case, cfg = Case.make(problem), config_of(problem)
    runs = [case.run(cfg, tables_of(problem, cfg, name, sms())) for name in ("fa3", "shift", "spt")]
    assert not torch.equal(runs[0].dq, runs[1].dq) and not torch.equal(runs[0].dq, runs[2].dq)


@pytest.mark.parametrize("dim", [64, 128])
def test_control_without_turns_differs(dim):
    problem = Problem(4, 8, 8, 4096, 4096, dim, mask=FULL)
    case = Case.make(problem)
    cfg = config_of(problem, ordered=False)
    tables = tables_of(problem, cfg, "shift:32", sms())
    first = case.run(cfg, tables)
    assert any(not torch.equal(case.run(cfg, tables).dq, first.dq) for _ in range(20))


def test_too_many_workers_are_refused():
    problem = Problem(64, 8, 8, 128, 128, 128)
    case, cfg = Case.make(problem), config_of(problem)
    with pytest.raises(ValueError, match="resident workers"):
        case.run(cfg, tables_of(problem, cfg, "fa3", 512))


@pytest.mark.parametrize("gain", [8.0, 1e-2])
def test_large_and_small_magnitudes(gain):
    problem = Problem(1, 4, 4, 700, 700, 128, mask=CAUSAL)
    case, cfg = Case.make(problem, gain=gain), config_of(problem)
    got, want = case.run(cfg, tables_of(problem, cfg, "auto", sms())), case.exact()
    scale = [max(float(w.abs().max()), 1e-30) for w in want]
    assert all(float((g.double() - w).abs().max()) < 0.05 * s for g, w, s in zip(got, want, scale, strict=True))
