"""scaled_dot_product_attention and varlen_attn run dash_attn on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import dash_attn
from dash_attn.integrations import torch_sdpa

pytestmark = pytest.mark.gpu


def gradients(q: Tensor, k: Tensor, v: Tensor, **how: object) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = dash_attn.attention(*leaves, **how)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient_of(out))]


def gradient_of(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)


@pytest.fixture
def sdpa_is_ours() -> Iterator[None]:
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("this torch has no registry of flash kernels")
    torch_sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("dash")
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.usefixtures("sdpa_is_ours")
@pytest.mark.parametrize("key", ["fa4", "torch"])
@pytest.mark.parametrize("compile_it", [False, True])
def test_sdpa_runs_ours(compile_it: bool, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_ATTN_FORWARD", key)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1000, heads, 64, device="cuda").bfloat16() for heads in (4, 2, 2))
    try:
        want = gradients(q, k, v, causal=True)
    except NotImplementedError as refused:
        pytest.skip(str(refused))
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    out = (torch.compile(plain, fullgraph=True) if compile_it else plain)(*leaves)
    dout = gradient_of(q).transpose(1, 2)
    results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(results, want, strict=True))


@pytest.mark.usefixtures("sdpa_is_ours")
@pytest.mark.parametrize("sides", [(-1, -1), (-1, 0), (100, 0)], ids=str)
def test_varlen_attn_runs_ours(sides: tuple[int, int]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    q, k, v = (torch.randn(1000, 4, 64, device="cuda").bfloat16() for _ in range(3))
    cu = torch.tensor([0, 200, 473, 1000], dtype=torch.int32, device="cuda")
    want = gradients(q, k, v, cu_seqlens=cu, window=sides)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = varlen_attn(*leaves, cu, cu, 527, 527, window_size=sides)
    dout = gradient_of(q)
    results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert all(torch.equal(a, b) for a, b in zip(results, want, strict=True))
