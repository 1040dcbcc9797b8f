"""attention and backward as users meet them: autograd, packed sequences, dtypes, explicit gradients."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from dash_attn.api import attention, backward
from dash_attn.api.explain import explain, explanation
from dash_attn.backends import Options
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, intervals, intervals_by_row, tiles, window
from dash_attn.tiling import TileShape
from dash_attn.tools.bench.operands import exact
from tests.backends.cpu.reference import CPU, DTYPES, difference, error


def qkv(*lengths: int, heads: tuple[int, int] = (4, 2), dim: int = 16, dtype: str = "float32") -> list[Tensor]:
    """(1, length, heads, dim) for one length or for queries and keys; leaves that require gradients."""
    torch.manual_seed(0)
    len_q, len_k = lengths if len(lengths) == 2 else (*lengths, *lengths)
    shapes = [(2, len_q, heads[0], dim), (2, len_k, heads[1], dim), (2, len_k, heads[1], dim)]
    return [torch.randn(shape).to(DTYPES[dtype]).requires_grad_() for shape in shapes]


def posed(q: Tensor, k: Tensor, mask: Mask, scale: float | None = None) -> Problem:
    dtype = str(q.dtype).removeprefix("torch.")
    return Problem(*q.shape[:1], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], dtype, scale, mask)


PREFIX = intervals_by_row(lambda row: (row % 5, max(row - 19, 40)), 300)
BLANK = intervals([9] * 300, [0] * 300)  # no query sees a key
CALLS = [
    ({}, FULL),
    ({"causal": True}, CAUSAL),
    ({"window": (50, 3)}, window(50, 3)),
    ({"window": (-1, 10)}, window(None, 10)),
    ({"window": (None, None)}, FULL),
    ({"window": (None, -30)}, Mask(None, -30)),
    ({"window": (-30, None)}, Mask(-30, None)),
    ({"window": (50, -3)}, Mask(50, -3)),
    ({"window": (-3, 50)}, Mask(-3, 50)),
    ({"window": (-50, 3)}, FULL),
    ({"mask": Mask(-50, 3)}, Mask(-50, 3)),
    ({"window": (-2, -1)}, FULL),
    ({"causal": True, "window": (7, -3)}, window(7, 0)),
    ({"causal": True, "window": (-3, -3)}, CAUSAL),
    ({"window": (torch.tensor(50), torch.tensor(3, dtype=torch.int32))}, window(50, 3)),
    ({"causal": True, "window": (50, 10)}, window(50, 0)),
    ({"mask": tiles([[1, 0], [1, 1]], 256, 256)}, tiles([[1, 0], [1, 1]], 256, 256)),
    ({"mask": tiles([[1, 0], [1, 1]], 256, 256), "causal": True}, tiles([[1, 0], [1, 1]], 256, 256) & CAUSAL),
    ({"mask": PREFIX}, PREFIX),
    ({"mask": PREFIX, "window": (30, 60)}, PREFIX & window(30, 60)),
    ({"mask": BLANK}, BLANK),
    ({"causal": True, "scale": 0.1, "policy": "descending"}, CAUSAL),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("arguments", "mask"), CALLS, ids=str)
def test_autograd(arguments: dict[str, object], mask: Mask, dtype: str) -> None:
    tensors = qkv(300, 280, dtype=dtype)
    out, lse = attention(*tensors, return_lse=True, **arguments)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, dout)
    expected = exact(posed(tensors[0], tensors[1], mask, arguments.get("scale")), dout, *(x.detach() for x in tensors))
    limit = 4 * torch.finfo(DTYPES[dtype]).eps
    assert error(out.detach(), expected.out) < limit
    assert error(lse.nan_to_num(neginf=0), expected.lse.nan_to_num(neginf=0)) < limit
    for got, want in zip(grads, expected.gradients, strict=True):
        assert got.dtype == DTYPES[dtype]
        assert error(got, want) < limit * max(1.0, float(want.abs().max()))
    direct = backward(dout, *(x.detach() for x in tensors), out.detach(), lse, **arguments)
    assert not difference(grads, direct)


WHOLE = [
    (intervals_by_row(lambda row: (0, row + 1), 300), {"causal": True}),
    (intervals_by_row(lambda row: (0, 500), 300), {"panels": 2}),
    (intervals_by_row(lambda row: (row - 40, row + 8), 300), {"window": (40, 7), "panels": 2}),
    (intervals_by_row(lambda row: (row // 100 * 100, row + 1), 300), {"mask": documents([0, 100, 200, 300]) & CAUSAL}),
]


@pytest.mark.parametrize(("mask", "plain"), WHOLE, ids=str)
def test_intervals_that_are_a_plain_mask_have_its_bits(mask: Mask, plain: dict[str, object]) -> None:
    tensors = qkv(300, 300)
    given = {"panels": plain.get("panels", 1), "mask": mask}
    runs = [attention(*tensors, **how) for how in (given, plain)]
    grads = [torch.autograd.grad(out, tensors, torch.ones_like(out)) for out in runs]
    assert torch.equal(*runs) and not difference(*grads)


def test_numerical_derivative() -> None:
    """Also twice the same bits: gradcheck runs the backward again and allows no difference."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 6, heads, 4, requires_grad=True) for heads in (2, 1, 1)]
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(
            lambda *x: attention(*x, causal=True), tensors, eps=1e-2, atol=3e-3, rtol=1e-2, nondet_tol=0.0
        )


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2), ()])
def test_gradients_of_some(needed: tuple[int, ...]) -> None:
    tensors = qkv(100)
    every = torch.autograd.grad(attention(*tensors, causal=True).square().sum(), tensors)
    some = [x.detach().requires_grad_(i in needed) for i, x in enumerate(tensors)]
    out = attention(*some, causal=True)
    assert out.requires_grad == bool(needed)
    if needed:
        out.square().sum().backward()
    for i, x in enumerate(some):
        assert torch.equal(x.grad, every[i]) if i in needed else x.grad is None


def test_no_grad() -> None:
    with torch.no_grad():
        assert not attention(*qkv(50)).requires_grad


@pytest.mark.parametrize("through", ["inputs", "dout"])
def test_second_derivative_is_refused(through: str) -> None:
    tensors = qkv(50)
    out = attention(*tensors)
    dout = torch.randn_like(out, requires_grad=through == "dout")
    (dq,) = torch.autograd.grad(out, tensors[0], dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="once, not twice"):
        torch.autograd.grad(dq.sum(), tensors[0] if through == "inputs" else dout)


def test_strided_inputs_and_broadcast_gradient() -> None:
    packed = torch.randn(2, 90, 3, 4, 16, requires_grad=True)  # one projection for all three
    attention(*packed.unbind(2), causal=True).sum().backward()
    copies = [x.detach().clone().requires_grad_() for x in packed.unbind(2)]
    attention(*copies, causal=True).sum().backward()
    assert torch.equal(packed.grad, torch.stack([x.grad for x in copies], 2))


def test_training_repeats_bit_for_bit() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.merge = nn.Linear(32, 96), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).unbind(2)
            return self.merge(attention(q, k, v, causal=True).flatten(2))

    def train() -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Model(), torch.randn(2, 300, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [x.detach() for x in model.parameters()]

    first, second = train(), train()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- packed sequences --------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("cu_q", "cu_k"), [([0, 70, 70, 200], None), ([0, 70, 70, 200], [0, 40, 90, 150])])
def test_packed(cu_q: list[int], cu_k: list[int] | None, causal: bool) -> None:
    tensors = [x[0].detach().requires_grad_() for x in qkv(200, cu_k[-1] if cu_k else 200)]
    out, lse = attention(*tensors, cu_seqlens=cu_q, cu_seqlens_k=cu_k, causal=causal, return_lse=True)
    assert out.shape == tensors[0].shape and lse.shape == (4, 200) and lse.dtype == torch.float32
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, dout)
    mask = documents(cu_q, cu_k, causal=causal)
    expected = exact(posed(*(x[None] for x in tensors[:2]), mask), *(x.detach()[None] for x in (dout, *tensors)))
    for got, want in zip((out.detach(), *grads), (expected.out, *expected.gradients), strict=True):
        assert error(got, want[0]) < 1e-6
    # One sequence at a time is the same attention.
    for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_k or cu_q), strict=True):
        q, k, v = (x[None].detach() for x in (tensors[0][a:b], tensors[1][c:d], tensors[2][c:d]))
        assert torch.allclose(attention(q, k, v, causal=causal)[0], out[a:b], atol=1e-5)
    direct = backward(
        dout,
        *(x.detach() for x in tensors),
        out.detach(),
        lse,
        causal=causal,
        cu_seqlens_q=torch.tensor(cu_q, dtype=torch.int32),
        cu_seqlens_k=None if cu_k is None else torch.tensor(cu_k, dtype=torch.int32),
    )
    assert not difference(grads, direct)


@pytest.mark.parametrize(("len_q", "len_k"), [(0, 40), (40, 0), (0, 0)])
def test_no_tokens(len_q: int, len_k: int) -> None:
    tensors = qkv(len_q, len_k)
    out, lse = attention(*tensors, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert all(grad.shape == x.shape and not grad.any() for grad, x in zip(grads, tensors, strict=True))


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (3, 0)}, {"mask": tiles([[1]], 8, 8)}], ids=str)
def test_no_sequences(how: dict[str, object]) -> None:
    tensors = [x[:0].detach().requires_grad_() for x in qkv(8)]
    out, lse = attention(*tensors, return_lse=True, **how)
    assert out.shape == (0, 8, 4, 16) and lse.shape == (0, 4, 8) and lse.dtype == torch.float32
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    direct = backward(out.detach(), *(x.detach() for x in (*tensors, out)), lse, **how)
    assert [x.shape for x in grads] == [x.shape for x in direct] == [x.shape for x in tensors]


@pytest.mark.parametrize("cu", [[0], [0, 0], [0, 0, 0], torch.tensor([0], dtype=torch.int32)], ids=str)
def test_packs_without_tokens(cu: list[int] | Tensor) -> None:
    tensors = [x[0, :0].detach().requires_grad_() for x in qkv(8)]
    out, lse = attention(*tensors, cu_seqlens=cu, cu_seqlens_k=cu, causal=True, return_lse=True)
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0)
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert [x.shape for x in grads] == [x.shape for x in tensors]


LAYOUTS = [([0, 0, 1, 2, 130, 131, 300], [0, 5, 5, 6, 50, 260, 290]), ([0, 1, 1, 300], [0, 1, 1, 300])]


@pytest.mark.parametrize(
    "how", [{"causal": True}, {"window": (9, 4)}, {"window": (40, -7)}, {"window": (-7, 40)}], ids=str
)
@pytest.mark.parametrize(("cu_q", "cu_k"), LAYOUTS)
def test_documents_of_any_length(cu_q: list[int], cu_k: list[int], how: dict[str, object]) -> None:
    """Lengths 0 and 1, more queries than keys and more keys than queries; windows count inside each document."""
    tensors = [x[0].detach().requires_grad_() for x in qkv(cu_q[-1], cu_k[-1])]
    out, lse = attention(*tensors, cu_seqlens=cu_q, cu_seqlens_k=cu_k, return_lse=True, **how)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, dout)
    mask = documents(cu_q, cu_k) & (CAUSAL if "causal" in how else Mask(*how["window"]))
    expected = exact(posed(*(x[None] for x in tensors[:2]), mask), *(x.detach()[None] for x in (dout, *tensors)))
    assert torch.equal(lse.isinf(), expected.lse[0].isinf())
    assert error(lse.nan_to_num(neginf=0), expected.lse[0].nan_to_num(neginf=0)) < 1e-6
    for got, want in zip((out.detach(), *grads), (expected.out, *expected.gradients), strict=True):
        assert error(got, want[0]) < 1e-6


# ---- backward ----------------------------------------------------------------------------------------------


def test_backward_writes_what_it_is_given() -> None:
    tensors = [x.detach() for x in qkv(150)]
    out, lse = attention(*tensors, causal=True, return_lse=True)
    dout = torch.randn_like(out)
    fresh = backward(dout, *tensors, out, lse, causal=True)
    room = torch.full((2, 150, 9, 16), math.nan)
    dq, dk = room[:, :, :4], room[:, :, 5:7]
    given = backward(dout, *tensors, out, lse, causal=True, dq=dq, dk=dk)
    assert given.dq is dq and given.dk is dk
    assert not difference(fresh, given)
    assert room[:, :, 4].isnan().all() and room[:, :, 7:].isnan().all()


def test_backward_ignores_a_margin_on_the_cpu() -> None:
    tensors = [x.detach() for x in qkv(60)]
    out, lse = attention(*tensors, return_lse=True)
    assert not difference(backward(out, *tensors, out, lse), backward(out, *tensors, out, lse, sm_margin=8))


# ---- explain -----------------------------------------------------------------------------------------------


def test_explain() -> None:
    tensors = qkv(600)
    said = explain(*tensors, causal=True)
    assert (said.backend, said.mask, str(said.tile), said.deterministic) == ("cpu", "causal", "256x256", True)
    assert said.policy == "symmetric_shift:64@head" and said.reason.startswith("chosen by auto")
    assert said.co_resident <= said.workers and said.workspace_bytes > said.kv_sum_bytes
    assert said.kv_sum_bytes == sum(2 * 4 * x.numel() for x in tensors[1:])  # float32, for two heads of q to one of k
    other = explain(*tensors, causal=True, policy="fa3")
    assert other.policy == "fa3" and other.reason.startswith("asked for") and other.kv_sum_bytes == 0
    assert other.fingerprint != said.fingerprint
    lines = str(said).splitlines()
    assert lines[0].split() == ["backend", "cpu"]
    assert any(line.split() == ["fingerprint", said.fingerprint] for line in lines)


def test_identity_names_what_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv(600)
    said = explain(*tensors, causal=True)
    assert said == explain(*tensors, causal=True, seed=3, return_lse=True)
    same = [explain(*(x + 1 for x in tensors), causal=True), explain(*tensors, window=(None, 0))]
    others = [
        explain(*tensors),
        explain(*tensors, causal=True, scale=0.1),
        explain(*tensors, causal=True, policy="fa3"),
        explain(*(x.bfloat16() for x in tensors), causal=True),
        explain(*(x[:1] for x in tensors), causal=True),
    ]
    monkeypatch.setattr(torch, "__version__", "0")
    others.append(explain(*tensors, causal=True))
    assert all(other.identity == said.identity for other in same)
    assert len({said.identity, *(other.identity for other in others)}) == 1 + len(others)
    assert f"torch {torch.__version__}" in others[-1].software


@pytest.mark.parametrize("part", ["name", "software", "forward_provider", "tile_shape", "deterministic"])
def test_identity_covers_what_computes(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone: the backend, its code and machine, the forward's library, the tiles, whether the order is kept."""
    ready = prepare(Problem(1, 4, 2, 600, 600, 8, "float32"), "fa3", Options(), CPU)
    said = explanation(ready).identity
    if part == "name":
        monkeypatch.setattr(CpuBackend, "name", "other")
    elif part == "tile_shape":
        monkeypatch.setattr(CpuBackend, "tile_shape", lambda *_: TileShape(128, 256))
    elif part == "deterministic":
        monkeypatch.setattr(CpuBackend, "always_deterministic", False)
        ready = prepare(ready.problem, "fa3", Options(deterministic=False), CPU)
    else:
        monkeypatch.setattr(CpuBackend, part, lambda *_: "other")
    assert explanation(ready).identity != said


def test_identity_leaves_out_workers_and_names() -> None:
    """Both policies have one order."""
    tensors, threads = qkv(1000), torch.get_num_threads()
    one = explain(*tensors, causal=True, policy="spt")
    other = explain(*tensors, causal=True, policy="diagonal")
    assert one.policy != other.policy and one.identity == other.identity
    torch.set_num_threads(threads + 5)
    try:
        more = explain(*tensors, causal=True, policy="spt")
    finally:
        torch.set_num_threads(threads)
    assert more.workers != one.workers and more.identity == one.identity


def test_fingerprint_covers_the_order_of_the_whole_call() -> None:
    """Not the scale or the data type, which are inputs."""
    tensors = qkv(600)
    said = explain(*tensors, causal=True).fingerprint
    assert said == explain(*tensors, causal=True, scale=0.1).fingerprint
    assert said == explain(*(x.bfloat16() for x in tensors), causal=True).fingerprint
    assert said != explain(*(x[:1] for x in tensors), causal=True).fingerprint
    assert said != explain(*(x[:, :500] for x in tensors), causal=True).fingerprint


def test_a_pack_in_which_no_sequence_has_both_queries_and_keys() -> None:
    q, k, v = (torch.randn(n, 2, 16, requires_grad=True) for n in (5, 7, 7))
    how = {"cu_seqlens": [0, 5, 5], "cu_seqlens_k": [0, 0, 7]}
    out, lse = attention(q, k, v, **how, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not out.any() and lse.eq(-torch.inf).all() and not any(grad.any() for grad in grads)
    problem = Problem(1, 2, 2, 5, 7, 16, "float32", mask=documents([0, 5, 5], [0, 0, 7]))
    assert prepare(problem, "auto", Options(), torch.device("cpu")).is_empty, "there is no task to launch"
