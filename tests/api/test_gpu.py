"""The public functions on a Hopper GPU: make gpu-test"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn.api import calls
from dash_attn.api.arguments import Arguments
from dash_attn.api.autograd import prepared_for
from dash_attn.backends.sm90.tables import _copying
from dash_attn.kept import bytes_of
from dash_attn.plan import Plan
from dash_attn.prepare import Prepared, prepare
from dash_attn.program import save
from dash_attn.tools.bench.host import CASES, measure_host

pytestmark = pytest.mark.gpu

CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "documents": {"cu_seqlens": [0, 200, 200, 473, 1000], "causal": True},
}


def results(function: Callable[..., Tensor], *inputs: Tensor, **how: object) -> list[Tensor]:
    """out and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves, **how)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def gradients(q: Tensor, k: Tensor, v: Tensor, **how: object) -> list[Tensor]:
    return results(dash_attn.attention, q, k, v, **how)


def tensors(*sizes: int, heads: tuple[int, int] = (4, 2), dim: int = 64, dtype: torch.dtype = torch.bfloat16):
    """q, k and v on the GPU, (*sizes, heads, dim)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*sizes, n, dim) for n in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(got: list[Tensor], want: list[Tensor], limit: float = 1e-2) -> bool:
    pairs = [(a.detach().double().cpu(), b.detach().double().cpu()) for a, b in zip(got, want, strict=True)]
    return all(bool((a - b).norm() <= limit * b.norm()) for a, b in pairs)


def in_float32(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """torch's plain attention over (batch, seqlen, heads, dim)."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


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
    said = dash_attn.explain(q, k, v, causal=True)
    assert said.backend == "sm90" and said.deterministic


# ---- calls written for FlashAttention ------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_func(causal: bool) -> None:
    inputs = tensors(2, 700)
    got = results(dash_attn.flash_attn_func, *inputs, causal=causal)
    assert close(got, results(in_float32, *inputs, causal=causal))
    out, lse, rest = dash_attn.flash_attn_func(*inputs, causal=causal, return_attn_probs=True)
    scores = inputs[0].float().transpose(1, 2) @ inputs[1].float().transpose(1, 2).repeat_interleave(2, 1).mT / 8
    if causal:
        scores.masked_fill_(torch.ones(700, 700, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    assert torch.equal(out, got[0]) and rest is None and lse.dtype == torch.float32
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_flash_attn_varlen_func(on_gpu: bool) -> None:
    inputs, ends = tensors(1000), [0, 200, 200, 473, 1000]
    cu = torch.tensor(ends, dtype=torch.int32, device="cuda" if on_gpu else "cpu")

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [[x[None, a:b] for x in (q, k, v)] for a, b in pairwise(ends) if b > a]
        return torch.cat([in_float32(*part, causal=True)[0] for part in parts])

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 527, 527, causal=True)

    assert close(results(packed, *inputs), results(one_by_one, *inputs))


def test_rows_and_sequences_without_keys() -> None:
    """out 0, log-sum-exp -inf, gradients 0: as on the CPU."""
    q, (_, k, v) = tensors(2, 500)[0], tensors(2, 200)
    out, lse = dash_attn.attention(q, k, v, causal=True, return_lse=True)
    assert not bool(out[:, :300].any()) and bool((lse[..., :300] == -torch.inf).all())
    assert bool(torch.isfinite(lse[..., 300:]).all())
    got = results(dash_attn.attention, q, k, v, causal=True)
    assert close(got, gradients(*(x.cpu().float() for x in (q, k, v)), causal=True))
    assert not bool(got[1][:, :300].any())


@pytest.mark.parametrize("how", [{"causal": True}, {"window_size": (60, 7)}, {"window_size": (60, -7)}], ids=str)
def test_unused_rows_take_no_part(how: dict[str, object]) -> None:
    """As if the unused rows were not there, although they are NaN, in dout too."""
    cu_q, cu_k, used_q, used_k = [0, 300, 500, 700], [0, 200, 600, 700], [300, 77, 130], [130, 399, 0]
    keep_q, keep_k = (
        torch.cat([torch.arange(a, a + n) for a, n in zip(cu[:-1], used, strict=True)]).cuda()
        for cu, used in ((cu_q, used_q), (cu_k, used_k))
    )
    inputs, dout = tensors(700), tensors(700)[0] * 2
    spoiled = [torch.full_like(x, float("nan")) for x in (*inputs, dout)]
    for x, y, keep in zip(spoiled, (*inputs, dout), (keep_q, keep_k, keep_k, keep_q), strict=True):
        x[keep] = y[keep]

    def run(cu: tuple[list[int], list[int]], given: list[Tensor], **used: list[int]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        out, lse, _ = dash_attn.flash_attn_varlen_func(*leaves, *cu, return_attn_probs=True, **used, **how)
        return [out.detach(), lse.T, *torch.autograd.grad(out, leaves, given[3])]

    short = [x[keep] for x, keep in zip((*inputs, dout), (keep_q, keep_k, keep_k, keep_q), strict=True)]
    packed = [[0, *torch.tensor(used).cumsum(0).tolist()] for used in (used_q, used_k)]
    wanted = run((packed[0], packed[1]), short)
    for used in ({"seqused_q": used_q, "seqused_k": used_k},) * 2:
        got = run((cu_q, cu_k), spoiled, **used)
        for x, want, keep, empty in zip(
            got, wanted, (keep_q, keep_q, keep_q, keep_k, keep_k), (0, -torch.inf, 0, 0, 0), strict=True
        ):
            rest = torch.ones(len(x), dtype=torch.bool, device="cuda").index_fill(0, keep, False)
            assert torch.equal(x[keep], want) and bool((x[rest] == empty).all())


@pytest.mark.parametrize("window", [(None, -70), (-70, None), (200, -3), (-3, 200), (-9, 3)], ids=str)
@pytest.mark.parametrize("lengths", [(500, 500), (300, 500), (500, 300)], ids=str)
def test_negative_window_sides(lengths: tuple[int, int], window: tuple[int | None, int | None]) -> None:
    q, (_, k, v) = tensors(2, lengths[0])[0], tensors(2, lengths[1])
    got = results(dash_attn.attention, q, k, v, window=window)
    assert close(got, gradients(*(x.cpu().float() for x in (q, k, v)), window=window))
    sides = tuple(None if side is None else torch.tensor(side, device="cuda") for side in window)
    again = results(dash_attn.attention, q, k, v, window=sides)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_no_sequences() -> None:
    inputs = [x[:0] for x in tensors(2, 100)]
    out, *grads = gradients(*inputs, causal=True)
    assert [x.shape for x in (out, *grads)] == [inputs[0].shape, *(x.shape for x in inputs)]


@pytest.mark.parametrize(("len_q", "len_k"), [(0, 100), (100, 0), (0, 0)])
def test_no_tokens(len_q: int, len_k: int) -> None:
    q, (_, k, v) = tensors(2, len_q)[0], tensors(2, len_k)
    out, *grads = gradients(q, k, v)
    assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape, v.shape]
    assert not any(bool(x.any()) for x in (out, *grads))


# ---- torch's machinery ---------------------------------------------------------------------------------------


def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dash_attn.attention(q * 2, k, v, causal=True).sin()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gives_the_bits_of_eager(backend: str) -> None:
    torch._dynamo.reset()
    run = torch.compile(dash_attn.attention, fullgraph=True, backend=backend)
    inputs, packed = tensors(2, 512), tensors(700)
    for given, how in (
        (inputs, {"causal": True}),
        (inputs, {"window": (100, 0)}),
        (packed, {"cu_seqlens": torch.tensor([0, 300, 700], dtype=torch.int32, device="cuda"), "causal": True}),
    ):
        assert same(results(run, *given, **how), gradients(*given, **how))
    torch._dynamo.reset()


def test_compiled_block() -> None:
    torch._dynamo.reset()
    run = torch.compile(block, fullgraph=True, backend="aot_eager")
    inputs = tensors(2, 512)
    assert same(results(run, *inputs), results(block, *inputs))
    torch._dynamo.reset()


def test_checkpointing() -> None:
    def saving(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(block, q, k, v, use_reentrant=False)

    inputs = tensors(2, 512)
    assert same(results(saving, *inputs), results(block, *inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    inputs = tensors(2, 512, dtype=torch.float32)
    with torch.autocast("cuda", dtype):
        got = results(dash_attn.attention, *inputs, causal=True)
    want = gradients(*(x.to(dtype) for x in inputs), causal=True)
    assert [x.dtype for x in got] == [dtype, *[torch.float32] * 3]
    assert same([x.to(dtype) for x in got], want)


def strided(x: Tensor, how: str) -> Tensor:
    if how == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "every second":
        return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]
    if how == "off by one":  # contiguous, but where no bulk load may begin
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if how == "part of a row":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x[:1].expand(2, -1, -1, -1)


@pytest.mark.parametrize("how", ["heads first", "every second", "off by one", "part of a row", "expanded"])
def test_strides_do_not_matter(how: str) -> None:
    inputs = [strided(x, how) for x in tensors(2, 300)]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
    assert same(gradients(*inputs, causal=True), gradients(*copies, causal=True))
    q, k, v = copies
    out, lse = dash_attn.attention(q, k, v, causal=True, return_lse=True)
    want = dash_attn.backward(q, q, k, v, out, lse, causal=True)
    if how == "expanded":
        return
    given = [strided(torch.full_like(x, float("nan")), how) for x in (q, k, v)]
    dash_attn.backward(inputs[0], *inputs, strided(out, how), lse, causal=True, dq=given[0], dk=given[1], dv=given[2])
    assert same(given, list(want))


def test_a_gradient_that_is_one_number() -> None:
    """out.sum() hands down a gradient whose every stride is 0."""
    leaves = [x.requires_grad_() for x in tensors(2, 300)]
    got = torch.autograd.grad(dash_attn.attention(*leaves, causal=True).sum(), leaves)
    out = dash_attn.attention(*leaves, causal=True)
    assert same(list(got), list(torch.autograd.grad(out, leaves, torch.ones_like(out))))


# ---- streams, graphs and what is read from the GPU -----------------------------------------------------------

SEEN = {
    "causal": {"causal": True},
    "documents": {"cu_seqlens": [0, 200, 473, 1000], "causal": True},
}
EVERY_SEEN = pytest.mark.parametrize("how", SEEN.values(), ids=SEEN)


def inputs_for(how: dict[str, object]) -> list[Tensor]:
    return tensors(1000) if "cu_seqlens" in how else tensors(1, 1000)


def forget() -> None:
    """The next call of any problem is its first. What a CUDA graph needs is kept."""
    calls._seen.clear()
    prepare.cache_clear()
    gc.collect()


def fill_freed_memory() -> None:
    """Memory that was given back holds other bytes, whichever stream it belongs to."""
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), _copying(torch.device("cuda", 0))):
        with torch.cuda.stream(stream):
            blocks = [torch.full((2**bits,), 255, dtype=torch.uint8, device="cuda") for bits in range(9, 23)]
            blocks += [torch.full((2**bits,), 255, dtype=torch.uint8, device="cuda") for bits in [9, 12, 15] * 100]
            del blocks
    torch.cuda.synchronize()


@EVERY_SEEN
def test_a_graph_outlives_what_is_prepared_after_it(how: dict[str, object]) -> None:
    """A replay reads the tables of the captured problem, which no later problem may take the place of."""
    inputs = inputs_for(how)
    want = gradients(*inputs, **how)
    leaves = [x.detach().requires_grad_() for x in inputs]
    dout = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(1)).to(want[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = dash_attn.attention(*leaves, **how)
        captured = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    q, k, v = tensors(1000)
    for end in range(1, 301):
        other = prepared_for(q, k, v, Arguments(causal=True, cu_q=[0, end, 1000]))
        other.forward(q, k, v)
        _ = other.run_backward
    forget()
    fill_freed_memory()
    for _ in range(3):
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, want)


@EVERY_SEEN
def test_tables_on_the_gpu_count(how: dict[str, object]) -> None:
    """The caches count the tables that a backward has uploaded."""
    forget()
    inputs = inputs_for(how)
    gradients(*inputs, **how)
    (ready,) = [entry.value for entry in prepare.cache._entries.values()]
    launch = getattr(ready.run_backward, "launch", ready.run_backward)
    assert prepare.cache.nbytes > launch.tables.runs.untyped_storage().nbytes() > 0
    assert prepare.cache.nbytes >= bytes_of(ready)


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """A function after whose call torch raises an error wherever the host would wait for the GPU."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@EVERY_SEEN
def test_a_problem_seen_before_waits_for_nothing(how: dict[str, object], no_waiting: Callable[[], None]) -> None:
    """cu_seqlens on the GPU are read at the first call with that tensor, and then known."""
    inputs = inputs_for(how)
    if "cu_seqlens" in how:
        how = {**how, "cu_seqlens": torch.tensor(how["cu_seqlens"], dtype=torch.int32, device="cuda")}
    want = gradients(*inputs, **how)
    leaves = [x.detach().requires_grad_() for x in inputs]
    dout = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(1)).to(want[0])
    unread = how["cu_seqlens"].clone() if "cu_seqlens" in how else None
    no_waiting()
    out = dash_attn.attention(*leaves, **how)
    got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    if unread is not None:  # the control: a tensor that was not read yet has to be waited for
        with pytest.raises(RuntimeError, match="synchronizing"):
            dash_attn.attention(*leaves, **{**how, "cu_seqlens": unread})
    torch.cuda.set_sync_debug_mode("default")
    assert same(got, want)


@EVERY_SEEN
def test_the_first_call_on_a_side_stream(how: dict[str, object]) -> None:
    """Tables are uploaded, and the forward is recorded, on a stream that is not the default one."""
    inputs = inputs_for(how)
    forget()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = gradients(*inputs, **how)
        second = gradients(*inputs, **how)
    torch.cuda.current_stream().wait_stream(side)
    assert same(first, second)
    assert same(first, gradients(*inputs, **how))
    forget()
    assert same(first, gradients(*inputs, **how))


# ---- determinism and its price -------------------------------------------------------------------------------


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield monkeypatch
    torch.use_deterministic_algorithms(False)


def test_determinism_is_read_at_the_call(flags: pytest.MonkeyPatch) -> None:
    ran, original = [], Prepared.backward

    def spy(prepared: Prepared, *given: object) -> object:
        ran.append(prepared.run_backward.cfg.ordered)
        return original(prepared, *given)

    flags.setattr(Prepared, "backward", spy)
    inputs = tensors(1, 300)
    want = gradients(*inputs, causal=True)

    def ordered(**how: bool) -> bool:
        ran.clear()
        assert close(gradients(*inputs, causal=True, **how), want)
        (answer,) = ran
        return answer

    assert ordered() and not ordered(deterministic=False)
    flags.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    assert not ordered() and ordered(deterministic=True)
    for warn_only in (False, True):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        assert ordered()
        assert same(gradients(*inputs, causal=True), want)  # torch fills what is not initialised with NaN by now


@pytest.mark.alone
def test_host_time() -> None:
    """Forward and backward under autograd of a small problem seen before: what the host does until the call returns.

    Other work of the machine makes the host slower, never faster: the best of three measurements counts.
    """
    rows = [row for _ in range(3) for row in measure_host(torch.device("cuda", 0), CASES[:1])]
    row = min(rows, key=lambda row: row["us"]["attention"]["median"])
    ours, ratio = row["us"]["attention"]["median"], row["ratio"]
    assert not any(each["failed"] for each in rows)
    assert ours <= 300 and ratio <= 1.3, f"{ours:.0f} us, {ratio:.2f} times as long as torch"


@pytest.mark.parametrize("policy", ["symmetric_shift", "spt", "spt@head"])
def test_a_program_from_a_file_gives_the_bits_of_its_policy(policy: str, tmp_path: Path) -> None:
    q, k, v = tensors(2, 1000)
    planned = prepared_for(q, k, v, Arguments(causal=True, policy=policy)).plan
    assert isinstance(planned, Plan)
    save(planned.program, tmp_path / "program.npz")
    program = dash_attn.load(tmp_path / "program.npz")
    run = [gradients(q, k, v, causal=True, policy=given) for given in (policy, program)]
    assert same(*run)
    with pytest.raises(ValueError, match="its len_q is 1000, the problem's is 900"):
        gradients(q[:, :900], k[:, :900], v[:, :900], causal=True, policy=program)
