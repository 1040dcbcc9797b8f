"""The public functions on a Hopper GPU: make gpu-test"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dash_attn
from dash_attn.api import ops
from dash_attn.api.attention import Order
from dash_attn.api.ops import Posed
from dash_attn.cli.main import main
from dash_attn.integrations import torch_sdpa
from dash_attn.problem import CAUSAL

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
@pytest.mark.parametrize("dim", [64, 128])
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


FORWARDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "two-sided": {"window": (70, 20)},
    "documents": {"cu_seqlens": [0, 200, 200, 473, 1000], "causal": True},
}


@pytest.mark.parametrize("key", ["fa4", "cudnn", "torch"])
@pytest.mark.parametrize("how", FORWARDS.values(), ids=FORWARDS)
@pytest.mark.parametrize("lengths", [(1000, 1000), (700, 1000), (1000, 700)], ids=str)
def test_every_forward_agrees_with_the_cpu_and_repeats(
    lengths: tuple[int, int], how: dict[str, object], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASH_ATTN_FORWARD", key)
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, heads, 64).bfloat16() for n, heads in zip((*lengths, lengths[1]), (4, 2, 2), strict=True))
    if "cu_seqlens" in how:
        how = {**how, "cu_seqlens_k": [0, 100, 250, 473, lengths[1]]}
        how["cu_seqlens"] = [*how["cu_seqlens"][:-1], lengths[0]]
    else:
        q, k, v = (x.unsqueeze(0).expand(2, -1, -1, -1) for x in (q, k, v))
    on_gpu = [x.cuda() for x in (q, k, v)]
    try:
        assert dash_attn.explain(*on_gpu, **how).forward
    except NotImplementedError as refused:
        pytest.skip(str(refused))
    want, want_lse = dash_attn.attention(*(x.float() for x in (q, k, v)), return_lse=True, **how)
    first = dash_attn.attention(*on_gpu, return_lse=True, **how)
    assert float((first[0].cpu().float() - want).norm() / want.norm()) < 1e-2
    torch.testing.assert_close(first[1].cpu(), want_lse, atol=1e-2, rtol=1e-3)  # -inf where a row sees nothing
    for _ in range(10):
        again = dash_attn.attention(*on_gpu, return_lse=True, **how)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_documents_in_a_cuda_graph() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1000, 2, 64, device="cuda").bfloat16() for _ in range(3))
    how = {"cu_seqlens": [0, 200, 473, 1000], "causal": True}
    want = gradients(q, k, v, **how)  # also compiles and copies what a graph cannot
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(1)
    dout = torch.randn(q.shape, dtype=torch.float32).to(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(dash_attn.attention(*leaves, **how), leaves, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dash_attn.attention(*leaves, **how)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for _ in range(3):
        for x in found:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_boundaries_on_the_gpu_cannot_be_captured() -> None:
    q, k, v = (torch.randn(1000, 2, 64, device="cuda").bfloat16() for _ in range(3))
    cu = torch.tensor([0, 473, 1000], dtype=torch.int32, device="cuda")
    dash_attn.attention(q, k, v, cu_seqlens=cu)
    with pytest.raises(NotImplementedError, match="cu_seqlens"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        dash_attn.attention(q, k, v, cu_seqlens=cu)


def test_explain_names_the_kernel() -> None:
    q, k, v = (torch.randn(1, 256, 2, 64, device="cuda").bfloat16() for _ in range(3))
    found = dash_attn.explain(q, k, v, causal=True)
    assert found.backend == "sm90" and found.deterministic


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

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    out = (torch.compile(plain, fullgraph=True) if compile_it else plain)(*leaves)
    torch.manual_seed(1)
    dout = torch.randn(q.shape, dtype=torch.float32).to(q).transpose(1, 2)
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(found, want, strict=True))


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
    torch.manual_seed(1)
    dout = torch.randn(q.shape, dtype=torch.float32).to(q)
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


# ---- torch's machinery -------------------------------------------------------------------------------------


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 700, heads, 64, device="cuda").bfloat16() for heads in (4, 2, 2)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_opcheck() -> None:
    q, k, v = inputs()
    plain = (None, None, *Posed.of(CAUSAL, None))
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v, *plain))
    out, lse = ops.forward(q, k, v, *plain)
    operands = (torch.ones_like(out), q, k, v, out, lse, *plain, *Order("auto", True, 0))
    torch.library.opcheck(torch.ops.dash_attn.backward.default, operands)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gives_the_bits_of_eager(backend: str) -> None:
    run = torch.compile(dash_attn.attention, fullgraph=True, backend=backend)
    leaves = [x.requires_grad_() for x in inputs()]
    out = run(*leaves, causal=True)
    torch.manual_seed(1)
    dout = torch.randn(out.shape, dtype=torch.float32).to(out)
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert same(found, gradients(*inputs(), causal=True))


def test_checkpointed_by_the_operators_name() -> None:
    def keep(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = op is torch.ops.dash_attn.forward.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dash_attn.attention(q * 2, k, v, causal=True).sin()

    found = []
    for contexts in (None, partial(create_selective_checkpoint_contexts, keep)):
        leaves = [x.requires_grad_() for x in inputs()]
        chosen = {} if contexts is None else {"context_fn": contexts}
        out = checkpoint(block, *leaves, use_reentrant=False, **chosen)
        found.append([out.detach(), *torch.autograd.grad(out.float().sum(), leaves)])
    leaves = [x.requires_grad_() for x in inputs()]
    out = block(*leaves)
    want = [out.detach(), *torch.autograd.grad(out.float().sum(), leaves)]
    assert all(same(each, want) for each in found)


def test_autocast() -> None:
    leaves = [x.float().requires_grad_() for x in inputs()]
    with torch.autocast("cuda", torch.bfloat16):
        out = dash_attn.attention(*leaves, causal=True)
    torch.manual_seed(1)
    dout = torch.randn(out.shape, dtype=torch.float32).to(out)
    found = [out.detach(), *(x.bfloat16() for x in torch.autograd.grad(out, leaves, dout))]
    assert same(found, gradients(*inputs(), causal=True))


STRIDES = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    "odd rows": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "odd start": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("how", STRIDES)
def test_strides_do_not_matter(how: str) -> None:
    odd = [STRIDES[how](x) for x in inputs()]
    copies = [x.contiguous().clone() for x in odd]
    assert same(gradients(*odd, causal=True), gradients(*copies, causal=True))


def test_gradients_written_where_bulk_stores_cannot() -> None:
    q, k, v = inputs()
    out, lse = dash_attn.attention(q, k, v, causal=True, return_lse=True)
    want = dash_attn.backward(out, q, k, v, out, lse, causal=True)
    room = [STRIDES["odd start"](torch.full_like(x, float("nan"))) for x in (q, k, v)]
    dash_attn.backward(out, q, k, v, out, lse, causal=True, dq=room[0], dk=room[1], dv=room[2])
    assert same(room, list(want))


@pytest.mark.parametrize("needed", [(0,), (1, 2)])
def test_gradients_of_some(needed: tuple[int, ...]) -> None:
    every = gradients(*inputs(), causal=True)[1:]
    some = [x.requires_grad_(i in needed) for i, x in enumerate(inputs())]
    out = dash_attn.attention(*some, causal=True)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, dtype=torch.float32).to(out))
    for i, x in enumerate(some):
        assert torch.equal(x.grad, every[i]) if i in needed else x.grad is None


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0 and said["ok"]
    rows = {row["name"]: row for row in said["what runs"]}
    assert rows["backend"]["found"] == "sm90"
