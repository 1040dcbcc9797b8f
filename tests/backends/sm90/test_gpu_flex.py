"""The forward of torch's flex_attention on a Hopper GPU, for masks that no flash kernel takes: make gpu-test"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import dash_attn
from dash_attn.backends import Gradients
from dash_attn.backends.base import Extras
from dash_attn.backends.sm90.forwards import VARIABLE, choose
from dash_attn.problem import CAUSAL, FULL, Features, Mask, Problem, intervals_by_row, tiles, window
from dash_attn.tools.bench.operands import draw
from tests.backends.sm90 import featured
from tests.backends.sm90.cases import DEVICE, errors, prepared

pytestmark = pytest.mark.gpu

CELLS = random.Random(0)
MASKS = {
    "prefix": intervals_by_row(lambda row: (0, max(row + 1, 300)), 1000),
    "chunks": intervals_by_row(lambda row: (row // 250 * 250, row // 250 * 250 + 250), 1000),
    "intervals": intervals_by_row(lambda row: (row * 7 % 500, row * 11 % 1100), 1000),  # some empty, in any order
    "tiles": tiles([[CELLS.random() < 0.5 for _ in range(8)] for _ in range(8)], 128, 128),
    "causal tiles": tiles([[CELLS.random() < 0.7 for _ in range(13)] for _ in range(25)], 40, 80) & CAUSAL,
}
# The backward takes cells that its own tiles divide: 128 x 128 at head dim 64, 64 x 128 at 128.
TRAINED = {
    **{name: (64, mask) for name, mask in MASKS.items() if name != "causal tiles"},
    "causal tiles": (64, tiles([[CELLS.random() < 0.7 for _ in range(4)] for _ in range(8)], 128, 256) & CAUSAL),
    "low tiles": (128, tiles([[CELLS.random() < 0.5 for _ in range(8)] for _ in range(16)], 64, 128)),
}
CAPPED, SINKS = Features(softcap=20.0), Features(sinks=True)
KINDS = [(64, Features()), (80, Features()), (128, Features()), (64, CAPPED), (128, SINKS)]  # each is compiled anew


def ran(problem: Problem, qkv: list[Tensor]) -> tuple[Tensor, Tensor]:
    sinks = torch.linspace(-2.0, 4.0, problem.heads_q, device=DEVICE) if problem.features.sinks else None
    return prepared(problem).run_forward(*qkv, Extras(sinks=sinks))


@pytest.mark.parametrize(("dim", "features"), KINDS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_against_float64_and_itself(mask: Mask, dim: int, features: Features) -> None:
    """Rows without keys have out = 0, and lse = -inf or the sink."""
    problem = Problem(2, 4, 2, 1000, 1000, dim, mask=mask, features=features)
    assert choose(problem).key == "flex"
    _, *qkv = draw(problem, DEVICE)
    sinks = torch.linspace(-2.0, 4.0, 4, device=DEVICE) if features.sinks else None
    want, want_lse = featured.attend(problem, *qkv, sinks)
    out, lse = ran(problem, qkv)
    assert lse.dtype == torch.float32 and lse.is_contiguous() and out.is_contiguous() and out.dtype == qkv[0].dtype
    assert float((out - want).norm() / want.norm()) < 5e-3
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-4)
    assert not out[:, ~torch.from_numpy(mask.dense(1000, 1000)).any(1)].any()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(ran(problem, qkv), (out, lse), strict=True))


@pytest.mark.parametrize("mask", [MASKS["prefix"], MASKS["tiles"]], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_batch_and_heads_change_no_bit(dim: int, mask: Mask) -> None:
    problem = Problem(1, 8, 2, 1000, 1000, dim, mask=mask)
    _, q, k, v = draw(problem, DEVICE)
    out, lse = ran(problem, [q, k, v])
    for batch in (2, 3):
        others = [torch.cat([torch.randn_like(x), *[x] * (batch - 1)]) for x in (q, k, v)]
        several = ran(replace(problem, batch=batch), others)
        assert torch.equal(several[0][-1], out[0]) and torch.equal(several[1][-1], lse[0]), batch
    fewer = ran(replace(problem, heads_q=4, heads_kv=1), [q[:, :, 4:], k[:, :, 1:], v[:, :, 1:]])
    assert torch.equal(fewer[0], out[:, :, 4:]) and torch.equal(fewer[1], lse[:, 4:])


@pytest.mark.parametrize("len_q", [1, 20, 127, 500])
def test_short_queries(len_q: int) -> None:
    """The library would take another kernel for them, whose sums follow from the number of SMs."""
    mask = intervals_by_row(lambda row: (row % 7, 700 + row), len_q)
    problem = Problem(1, 4, 2, len_q, 1300, 64, mask=mask)
    _, *qkv = draw(problem, DEVICE)
    want, want_lse = featured.attend(problem, *qkv)
    out, lse = ran(problem, qkv)
    assert float((out - want).norm() / want.norm()) < 5e-3
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-4)


def test_masks_of_a_shape_share_one_compilation() -> None:
    problem = Problem(1, 2, 2, 640, 640, 64, mask=intervals_by_row(lambda row: (0, max(row + 1, 100)), 640))
    _, *qkv = draw(problem, DEVICE)
    ran(problem, qkv)
    before = counters["stats"]["unique_graphs"]
    for end in (50, 200, 333):
        mask = intervals_by_row(lambda row, end=end: (0, max(row + 1, end)), 640)
        want, _ = featured.attend(replace(problem, mask=mask), *qkv)
        out, _ = ran(replace(problem, mask=mask), qkv)
        assert float((out - want).norm() / want.norm()) < 5e-3
    assert counters["stats"]["unique_graphs"] == before


def test_more_shapes_than_torch_compiles_a_function_for() -> None:
    for length in range(300, 1300, 100):
        problem = Problem(1, 1, 1, length, length, 64, mask=intervals_by_row(lambda row: (0, max(row + 1, 99)), length))
        out, _ = ran(problem, list(draw(problem, DEVICE)[1:]))
        assert bool(out.isfinite().all())


@pytest.mark.parametrize(("dim", "mask"), TRAINED.values(), ids=TRAINED)
def test_attention_trains_with_such_masks(dim: int, mask: Mask) -> None:
    problem = Problem(1, 4, 2, 1000, 1000, dim, mask=mask)
    dout, *qkv = draw(problem, DEVICE)
    runs = []
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = dash_attn.attention(*leaves, mask=mask)
        runs.append(Gradients(*torch.autograd.grad(out, leaves, dout)))
    assert max(errors(runs[0], featured.gradients(problem, dout, tuple(qkv)))) < 8e-3
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(100, 20)], ids=str)
def test_flex_agrees_with_the_flash_kernels(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(2, 4, 2, 700, 700, 64, mask=mask)
    _, *qkv = draw(problem, DEVICE)
    results = []
    for key in ("flex", "torch"):
        monkeypatch.setenv(VARIABLE, key)
        results.append(ran(problem, qkv))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=1e-2, rtol=1e-2)
