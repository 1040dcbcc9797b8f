"""The public functions on a Hopper GPU: make gpu-test"""

from __future__ import annotations

import pytest
import torch

import dash_attn

pytestmark = pytest.mark.gpu

CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "documents": {"cu_seqlens": [0, 200, 200, 473, 1000], "causal": True},
}


@pytest.fixture(scope="module", autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.fail("asked for GPU tests, but there is no Hopper GPU")


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: object) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = dash_attn.attention(*leaves, **how)
    torch.manual_seed(1)
    dout = torch.randn(out.shape, dtype=torch.float32).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("how", CALLS.values(), ids=CALLS)
def test_attention_agrees_with_the_cpu_and_repeats(how: dict[str, object], dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1000, heads, dim).to(dtype) for heads in (4, 2, 2))
    if "cu_seqlens" not in how:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    want = gradients(q.float(), k.float(), v.float(), **how)
    first = gradients(q.cuda(), k.cuda(), v.cuda(), **how)
    for got, expected in zip(first, want, strict=True):
        assert float((got.cpu().float() - expected).norm() / expected.norm()) < 1e-2
    for _ in range(20):
        again = gradients(q.cuda(), k.cuda(), v.cuda(), **how)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_backward_leaves_a_margin_and_keeps_the_bits() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 1024, 4, 128, device="cuda").bfloat16() for _ in range(4))
    out, lse = dash_attn.attention(q, k, v, causal=True, return_lse=True)
    runs = [dash_attn.backward(dout, q, k, v, out, lse, causal=True, sm_margin=m) for m in (0, 4, 16)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    given = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    dash_attn.backward(dout, q, k, v, out, lse, causal=True, dq=given[0], dk=given[1], dv=given[2])
    assert all(torch.equal(a, b) for a, b in zip(given, runs[0], strict=True))
    with pytest.raises(ValueError, match="sm_margin"):
        dash_attn.backward(dout, q, k, v, out, lse, causal=True, sm_margin=10_000)


def test_explain_names_the_kernel() -> None:
    q, k, v = (torch.randn(1, 256, 2, 64, device="cuda").bfloat16() for _ in range(3))
    found = dash_attn.explain(q, k, v, causal=True)
    assert found.backend == "sm90" and found.deterministic
