"""torch's registry of flash kernels: bookkeeping, and the operators, put in place for CPU tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from dash_attn.api import attention, gradients
from dash_attn.integrations import torch_sdpa
from dash_attn.kept import Kept

SDPA = torch.ops.aten._scaled_dot_product_flash_attention
CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@pytest.fixture
def active() -> Iterator[None]:
    torch_sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("dash")
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """As an activation does for CUDA."""
    handle = torch_sdpa.install("CPU")
    yield
    handle.remove()


def qkv(*, dtype: torch.dtype = torch.float32, len_k: int = 100) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 100, 4, 16), (2, len_k, 2, 16), (2, len_k, 2, 16)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- the registry ------------------------------------------------------------------------------------------


def has_kernel(name: str, key: str = "CUDA") -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a torch without CUDA kernels")
def test_activate_and_restore() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch_sdpa.register()
    torch_sdpa.register()
    assert "dash" in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() is None and not has_kernel("_flash_attention_forward")
    names = ["_flash_attention_forward", "_flash_attention_backward"]
    names += ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]
    for _ in range(2):
        torch.nn.attention.activate_flash_attention_impl("dash")
        assert torch.nn.attention.current_flash_attention_impl() == "dash"
        assert all(has_kernel(name) for name in names)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        torch.nn.attention.restore_flash_attention_impl()
        assert torch.nn.attention.current_flash_attention_impl() is None
        assert not any(has_kernel(name) for name in names)
        assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_a_torch_without_a_registry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(NotImplementedError, match=r"has no registry.*flash_attn_func") as caught:
        torch_sdpa.register()
    assert torch.__version__ in str(caught.value)


# ---- calls with CPU tensors --------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)


def by_torch(causal: bool, function: Any = plain) -> list[Tensor]:
    """out and gradients of torch's function, heads second to last as ours are."""
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in qkv()]
    out = function(*leaves, is_causal=causal)
    return [x.transpose(1, 2) for x in (out, *torch.autograd.grad(out.square().sum(), leaves))]


@pytest.mark.parametrize("compile_it", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_of_cpu_tensors_is_ours_while_active(causal: bool, compile_it: bool, request: Any) -> None:
    before = by_torch(causal)
    request.getfixturevalue("active")
    leaves = qkv()
    out = attention(*leaves, causal=causal)
    want = [out, *torch.autograd.grad(out.square().sum(), leaves)]
    assert same(
        by_torch(causal, torch.compile(plain, fullgraph=True, backend="aot_eager") if compile_it else plain), want
    )
    assert not same(before, want)
    torch.nn.attention.restore_flash_attention_impl()
    assert same(by_torch(causal), before)
    torch.nn.attention.activate_flash_attention_impl("dash")


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("heads_first", [False, True])
def test_outputs_of_cpu_tensors_are_as_torch_compile_expects_them(heads_first: bool) -> None:
    inputs = [x.detach().transpose(1, 2) for x in qkv()]
    if heads_first:
        inputs = [x.contiguous() for x in inputs]
    out, lse = CPU(*inputs)
    grads = CPU_BACKWARD(out, *inputs, out, lse, 0.0, False)
    fakes = [x.to("meta") for x in inputs]
    fake_out, fake_lse = CPU(*fakes)
    fake_grads = CPU_BACKWARD(fake_out, *fakes, fake_out, fake_lse, 0.0, False)
    for got, expected in zip((out, lse, *grads), (fake_out, fake_lse, *fake_grads), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())


@pytest.mark.usefixtures("active")
def test_calls_of_cpu_tensors_that_are_refused() -> None:
    q, k, v = (x.detach().transpose(1, 2) for x in qkv(len_k=60))
    with pytest.raises(NotImplementedError, match=r"attn_mask was given.*restore_flash_attention_impl"):
        plain(q, k, v, attn_mask=torch.ones(100, 60, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="is_causal with 100 queries and 60 keys"):
        plain(q, k, v, is_causal=True)
    assert plain(q, k, v).shape == q.shape


# ---- the operators -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.1}], ids=str)
def test_sdpa(arguments: dict[str, Any], heads_first: bool) -> None:
    leaves = qkv()
    want, want_lse = attention(
        *leaves, causal=arguments.get("is_causal", False), scale=arguments.get("scale"), return_lse=True
    )
    grads = torch.autograd.grad(want.square().sum(), leaves)
    given = [x.detach().transpose(1, 2) for x in leaves]
    if heads_first:
        given = [x.contiguous() for x in given]
    given = [x.requires_grad_() for x in given]
    out, lse, *_ = SDPA(*given, **arguments)
    assert out.stride() == given[0].stride()
    found = torch.autograd.grad(out.square().sum(), given)
    assert all(x.stride() == y.stride() for x, y in zip(found, given, strict=True))
    assert same((out.transpose(1, 2), lse), (want, want_lse))
    assert same((x.transpose(1, 2) for x in found), grads)


@pytest.mark.usefixtures("on_cpu")
def test_outputs_are_as_torch_compile_expects_them() -> None:
    inputs = [x.detach().transpose(1, 2) for x in qkv()]
    real, fake = SDPA(*inputs), SDPA(*(x.to("meta") for x in inputs))
    for got, expected in zip(real, fake, strict=True):
        if isinstance(expected, Tensor):
            assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())
        else:
            assert got == expected


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("sides", [(-1, -1), (-1, 0), (7, 0), (7, 3)], ids=str)
def test_varlen_attn(sides: tuple[int, int]) -> None:
    leaves = [x[0].detach().requires_grad_() for x in qkv()]
    cu = torch.tensor([0, 30, 30, 100], dtype=torch.int32)
    want, want_lse = attention(*leaves, cu_seqlens=cu, window=sides, return_lse=True)
    out, lse = varlen_attn(*leaves, cu, cu, 70, 70, window_size=sides, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert same((out, lse), (want, want_lse))
    grads = torch.autograd.grad(want.square().sum(), leaves)
    assert same(torch.autograd.grad(out.square().sum(), leaves), grads)


@pytest.mark.usefixtures("on_cpu")
def test_out_and_lse_from_elsewhere() -> None:
    """As context-parallel callers do: one part of the keys, with out and lse of all of them."""
    q, k, v = (x.detach() for x in qkv())
    out, lse = attention(q, k, v, return_lse=True)
    first = [x.transpose(1, 2) for x in (out, q, k[:, :60], v[:, :60], out)]
    second = [x.transpose(1, 2) for x in (out, q, k[:, 60:], v[:, 60:], out)]
    rest = (None, None, 100, 60, 0.0, False, torch.empty(0), torch.empty(0))
    parts = [torch.ops.aten._scaled_dot_product_flash_attention_backward(*x, lse, *rest) for x in (first, second)]
    whole = torch.autograd.grad(attention(*(leaves := qkv())), leaves, out)
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0].transpose(1, 2))
    torch.testing.assert_close(torch.cat([p[1] for p in parts], 2), whole[1].transpose(1, 2))


@pytest.mark.usefixtures("on_cpu")
def test_what_there_is_no_kernel_for_is_refused() -> None:
    q, k, v = (x.detach() for x in qkv())
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    with pytest.raises(NotImplementedError, match=r"dropout_p was given.*restore_flash_attention_impl"):
        SDPA(*heads_first, 0.1)
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        SDPA(*heads_first, return_debug_mask=True)
    flash = torch.ops.aten._flash_attention_forward
    with pytest.raises(NotImplementedError, match="alibi_slopes was given"):
        flash(q, k, v, None, None, 100, 100, 0.0, False, False, alibi_slopes=torch.ones(4))
    with pytest.raises(ValueError, match="divides q's 3"):
        SDPA(heads_first[0][:, :3], *heads_first[1:])
    assert flash(q, k, v, None, None, 100, 100, 0.0, False, False, num_splits=4)[0].shape == q.shape


@pytest.mark.usefixtures("on_cpu")
def test_determinism_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = gradients.Options
    monkeypatch.setattr("dash_attn.api.calls._seen", Kept())
    monkeypatch.setattr(gradients, "Options", lambda *how: asked.append(how[0]) or real(*how))
    for value in ("1", "0"):
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", value)
        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in qkv()]
        SDPA(*leaves)[0].sum().backward()
    assert asked == [True, False]


def test_a_forward_by_torchs_own_kernel_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from another thread, where checkpointing runs a forward again."""
    calls = []

    def torchs(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        calls.append(q.shape)
        nothing = torch.empty(0)
        return q.clone(), q.new_zeros(q.shape[0], q.shape[2], q.shape[1]), nothing, nothing, nothing

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, None, None, 9, 9, 0.0, False, False)
        return out, lse

    prepared = SimpleNamespace(forward=forward)
    monkeypatch.setattr(torch_sdpa, "prepared_for", lambda *_: prepared)
    q, k, v = (x.detach().transpose(1, 2) for x in qkv())
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", torchs, "CPU")
        handle = torch_sdpa.install("CPU")
        SDPA(q, k, v)
        thread = threading.Thread(target=SDPA, args=(q, k, v))
        thread.start()
        thread.join()
        assert len(calls) == 2
        handle.remove()
        torch.ops.aten._flash_attention_forward(q, k, v, None, None, 9, 9, 0.0, False, False)
        assert len(calls) == 3
