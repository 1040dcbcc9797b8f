"""Every forward that a Hopper GPU may have, CUDA graphs, and the operators under torch's machinery."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dash_attn
from dash_attn.api import ops
from dash_attn.api.ops import OrderArguments, Posed
from dash_attn.backends.sm90.fa4 import Fa4Forward, entry
from dash_attn.backends.sm90.forwards import VARIABLE, FlashAttention4, LibraryForward
from dash_attn.backends.sm90.packing import packing_of, unpacked
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from dash_attn.tools.bench.operands import draw

pytestmark = pytest.mark.gpu


def gradients(q: Tensor, k: Tensor, v: Tensor, **how: object) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = dash_attn.attention(*leaves, **how)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient_of(out))]


def gradient_of(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 700, heads, 64, device="cuda").bfloat16() for heads in (4, 2, 2)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


FORWARDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "two-sided": {"window": (70, 20)},
    "documents": {"cu_seqlens": [0, 200, 200, 473, 1000], "causal": True},
}


@pytest.mark.parametrize("key", ["fa4", "cudnn", "torch", "flex"])
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
    dout = gradient_of(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(dash_attn.attention(*leaves, **how), leaves, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dash_attn.attention(*leaves, **how)
        results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for _ in range(3):
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same(results, want)


def test_boundaries_on_the_gpu_are_captured_only_if_they_were_read() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1000, 2, 64, device="cuda").bfloat16() for _ in range(3))
    seen = torch.tensor([0, 473, 1000], dtype=torch.int32, device="cuda")
    want = dash_attn.attention(q, k, v, cu_seqlens=seen)
    unseen = seen.clone()
    with pytest.raises(NotImplementedError, match="cu_seqlens"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        dash_attn.attention(q, k, v, cu_seqlens=unseen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dash_attn.attention(q, k, v, cu_seqlens=seen)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def front(problem: Problem, qkv: list[Tensor]) -> list[Tensor]:
    """out and lse through FlashAttention-4's own Python front."""
    packing, how = problem.mask.documents, Fa4Forward(problem).how
    if packing is None:
        return list(entry()(*qkv, **how)[:2])
    flat, sizes = [x.flatten(0, 1) for x in qkv], packing_of(packing, problem.batch, qkv[0].device)
    return list(unpacked(problem, *entry()(*flat, **how, **sizes._asdict())[:2]))


def side_by_side(*tensors: Tensor) -> list[Tensor]:
    """Slices of one tensor, as a projection to q, k and v gives them."""
    sizes = [x.shape[2] for x in tensors]
    return list(torch.cat(tensors, 2).split(sizes, 2))


@pytest.mark.parametrize(
    "mask",
    [FULL, CAUSAL, window(100, 0), window(70, 20), documents([0, 200, 473, 700], causal=True)],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128])
def test_the_recorded_forward_has_the_bits_of_its_front(mask: Mask, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call with the same strides goes past the front, also after a call with other strides."""
    reason = FlashAttention4().missing()
    if reason is not None:
        pytest.skip(reason)
    problem = Problem(1 if mask.documents else 2, 4, 2, 700, 700, dim, mask=mask)
    monkeypatch.setenv(VARIABLE, "fa4")
    forward = LibraryForward(problem)
    for seed in range(3):  # the first round records
        plain = list(draw(problem, torch.device("cuda", 0), seed)[1:])
        for qkv in (plain, side_by_side(*plain)):
            assert same(list(forward(*qkv)), front(problem, plain)), seed
    recorded = [run._noted for run in forward._bound.values()]
    assert len(recorded) == 2 and all(recorded), "FlashAttention-4's calls are not as expected"


def test_opcheck() -> None:
    q, k, v = inputs()
    plain = (None, None, *Posed.of(CAUSAL, None)[:-1])
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v, *plain))
    out, lse = ops.forward(q, k, v, *plain)
    operands = (torch.ones_like(out), q, k, v, out, lse, *plain, *OrderArguments("auto", True, 0))
    torch.library.opcheck(torch.ops.dash_attn.backward.default, operands)


def test_checkpointed_by_the_operators_name() -> None:
    def keep(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = op is torch.ops.dash_attn.forward.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dash_attn.attention(q * 2, k, v, causal=True).sin()

    runs = []
    for contexts in (None, partial(create_selective_checkpoint_contexts, keep)):
        leaves = [x.requires_grad_() for x in inputs()]
        chosen = {} if contexts is None else {"context_fn": contexts}
        out = checkpoint(block, *leaves, use_reentrant=False, **chosen)
        runs.append([out.detach(), *torch.autograd.grad(out.float().sum(), leaves)])
    leaves = [x.requires_grad_() for x in inputs()]
    out = block(*leaves)
    want = [out.detach(), *torch.autograd.grad(out.float().sum(), leaves)]
    assert all(same(run, want) for run in runs)


@pytest.mark.parametrize("needed", [(0,), (1, 2)])
def test_gradients_of_some(needed: tuple[int, ...]) -> None:
    every = gradients(*inputs(), causal=True)[1:]
    some = [x.requires_grad_(i in needed) for i, x in enumerate(inputs())]
    out = dash_attn.attention(*some, causal=True)
    out.backward(gradient_of(out))
    for i, x in enumerate(some):
        assert torch.equal(x.grad, every[i]) if i in needed else x.grad is None


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(100, 20)], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_out_and_lse_of_a_document_are_its_own(dim: int, mask: Mask) -> None:
    """They have the same bits alone, packed with any neighbours, NaN among them, and as a batch entry."""
    lengths = [200, 333, 64, 1, 129, 1000, 256]
    cu = [0, *accumulate(lengths)]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, cu[-1], heads, dim, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    packed = [x[0] for x in dash_attn.attention(q, k, v, mask=documents(cu) & mask, return_lse=True)]
    for a, b in pairwise(cu):
        own = [x[:, a:b].contiguous() for x in (q, k, v)]
        out, lse = (x[0] for x in dash_attn.attention(*own, mask=mask, return_lse=True))
        twice = [x[1] for x in dash_attn.attention(*[torch.cat([x, x]) for x in own], mask=mask, return_lse=True)]
        poisoned = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for x, mine in zip(poisoned, own, strict=True):
            x[:, a:b] = mine
        among_nan = [x[0] for x in dash_attn.attention(*poisoned, mask=documents(cu) & mask, return_lse=True)]
        assert out.isfinite().all() and lse.isfinite().all()
        for other, rows in ((packed, slice(a, b)), (among_nan, slice(a, b)), (twice, slice(None))):
            assert torch.equal(other[0][rows], out) and torch.equal(other[1][:, rows], lse), (a, b)
