"""The operators under torch's machinery: opcheck, torch.compile, checkpointing, autocast, strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dash_attn.api import attention, calls, flash_attn_func, flash_attn_varlen_func, ops
from dash_attn.api.ops import OrderArguments, Posed
from dash_attn.kept import Kept
from dash_attn.problem import CAUSAL, FULL, Mask, documents, intervals_by_row, tiles, window

LENGTH = 300
CELLS = tiles([[1, 0], [1, 1]], 256, 256)
PREFIX = intervals_by_row(lambda row: (0, max(row + 1, 90)), LENGTH)


def tensors(*, packed: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    batch = () if packed else (2,)
    return [torch.randn(*batch, LENGTH, heads, 16, dtype=dtype) for heads in (4, 2, 2)]


def results(function: Callable[..., Any], inputs: list[Tensor], **arguments: object) -> list[Tensor]:
    """out and the gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves, **arguments)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.randn_like(out))]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- the operators alone -----------------------------------------------------------------------------------

MASKS = [
    FULL,
    CAUSAL,
    window(20, 0),
    window(20, -3),
    window(-3, None),
    CELLS,
    CELLS & CAUSAL,
    PREFIX & CELLS,
    documents([0, 100, LENGTH], [0, 50, LENGTH], causal=True),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_mask_survives_the_plain_values(mask: Mask) -> None:
    assert Posed.of(mask, 0.5).mask() == mask


@pytest.mark.parametrize(
    ("mask", "cu"),
    [(CAUSAL, None), (CELLS, None), (PREFIX, None), (CAUSAL, torch.tensor([0, 100, LENGTH], dtype=torch.int32))],
    ids=["dense", "tiles", "intervals", "packed"],
)
def test_opcheck(mask: Mask, cu: Tensor | None) -> None:
    q, k, v = (x[:1] for x in tensors())
    *plain, rows = (cu, cu, *Posed.of(mask, None))
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v, *plain, 1, rows))
    out, lse = ops.forward(q, k, v, *plain, 1, rows)
    operands = (torch.ones_like(out), q, k, v, out, lse, *plain, *OrderArguments("auto", True, 0), rows)
    torch.library.opcheck(torch.ops.dash_attn.backward.default, operands)


def test_names_and_schemas_are_stable() -> None:
    """Checkpointing policies, exported graphs and profiles of others hold them."""
    posed = "SymInt left, SymInt right, SymInt[] documents, str tiles, float? scale"
    last = 'SymInt panels=1, str rows="", Tensor? sinks=None, Tensor? seed=None, float softcap=0., float dropout=0.'
    cu = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
    assert str(torch.ops.dash_attn.forward.default._schema) == (
        f"dash_attn::forward(Tensor q, Tensor k, Tensor v, {cu}, {posed}, {last}) -> (Tensor, Tensor)"
    )
    assert str(torch.ops.dash_attn.backward.default._schema) == (
        f"dash_attn::backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {cu}, {posed}, "
        f"str policy, bool? deterministic, SymInt sm_margin, {last}, Tensor? dlse=None) -> "
        "(Tensor, Tensor, Tensor, Tensor)"
    )
    assert str(torch.ops.dash_attn.sink_gradient.default._schema) == (
        "dash_attn::sink_gradient(Tensor dout, Tensor out, Tensor lse, Tensor sinks, Tensor? dlse) -> Tensor"
    )


def test_an_operator_alone_does_not_pretend_to_have_a_gradient() -> None:
    out, _ = ops.forward(*(x.requires_grad_() for x in tensors()), None, None, *Posed.of(FULL, None)[:-1])
    with pytest.raises(RuntimeError, match=r"dash_attn.*no autograd formula"):
        out.sum().backward()


# ---- torch.compile -----------------------------------------------------------------------------------------


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    torch._dynamo.reset()
    yield partial(torch.compile, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


CU = torch.tensor([0, 100, LENGTH], dtype=torch.int32)
USED = torch.tensor([70, 150], dtype=torch.int32)
COMPILED: list[tuple[Callable[..., Any], bool, dict[str, object]]] = [
    (attention, False, {}),
    (attention, False, {"window": (20, -1), "policy": "descending", "deterministic": True}),
    (attention, False, {"mask": CELLS, "causal": True, "scale": 0.1}),
    (attention, False, {"mask": PREFIX, "window": (200, 100)}),
    (attention, False, {"causal": True, "panels": 3}),
    (attention, True, {"cu_seqlens": [0, 100, LENGTH]}),
    (attention, True, {"cu_seqlens": CU, "panels": 2}),
    (attention, True, {"cu_seqlens": CU, "cu_seqlens_k": [0, 50, LENGTH], "mask": documents([0, 200, LENGTH])}),
    (attention, False, {"window": (20, -3)}),
    (attention, True, {"cu_seqlens": CU, "window": (-3, 20)}),
    (flash_attn_func, False, {"causal": True}),
    (flash_attn_varlen_func, True, {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "seqused_q": USED, "seqused_k": [3, 0]}),
    (flash_attn_varlen_func, True, {"cu_seqlens_q": [0, 9, LENGTH], "cu_seqlens_k": CU, "seqused_k": USED}),
    (flash_attn_varlen_func, True, {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 200, "max_seqlen_k": 200}),
]


@pytest.mark.parametrize(("function", "packed", "arguments"), COMPILED, ids=lambda value: None)
def test_compiled_gives_the_bits_of_eager(
    compiled: Callable[..., Any], function: Callable[..., Any], packed: bool, arguments: dict[str, object]
) -> None:
    inputs = tensors(packed=packed)
    assert same(results(function, inputs, **arguments), results(compiled(function), inputs, **arguments))


def test_the_default_backend(compiled: Callable[..., Any]) -> None:
    run = compiled(attention, backend="inductor")
    assert same(results(run, tensors(), causal=True), results(attention, tensors(), causal=True))


def test_one_tensor_for_all(compiled: Callable[..., Any]) -> None:
    def alone(x: Tensor) -> Tensor:
        return attention(x, x, x, causal=True)

    found, want = results(compiled(alone), tensors()[:1]), results(alone, tensors()[:1])
    assert torch.equal(found[0], want[0])
    assert torch.allclose(found[1], want[1], atol=1e-5)  # dq, dk and dv are added up by torch, in an order of its own


def test_boundaries_change_without_compiling_again(compiled: Callable[..., Any]) -> None:
    inputs, run = tensors(packed=True), compiled(attention)
    for cu in (CU, torch.tensor([0, 7, LENGTH], dtype=torch.int32)):
        with torch.compiler.set_stance("fail_on_recompile") if cu is not CU else nullcontext():
            found = results(run, inputs, cu_seqlens=cu)
        assert same(found, results(attention, inputs, cu_seqlens=cu))
    with pytest.raises(ValueError, match=r"cu_seqlens_q must begin with 0.*\[0, 7, 8\]"):
        run(*inputs, cu_seqlens=torch.tensor([0, 7, 8], dtype=torch.int32))


def test_used_rows_change_without_compiling_again(compiled: Callable[..., Any]) -> None:
    inputs, run = tensors(packed=True), compiled(flash_attn_varlen_func)
    how: dict[str, Any] = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "causal": True}
    for used in (USED, torch.tensor([0, 3], dtype=torch.int32)):
        with torch.compiler.set_stance("fail_on_recompile") if used is not USED else nullcontext():
            got = results(run, inputs, **how, seqused_k=used)
        assert same(got, results(flash_attn_varlen_func, inputs, **how, seqused_k=used))
    for wrong in ([101, 3], [-1, 3]):
        with pytest.raises(ValueError, match="never decrease"):
            run(*inputs, **how, seqused_k=torch.tensor(wrong, dtype=torch.int32))
    with pytest.raises(Exception, match="seqused_k must have one number for each of the 2 sequences; got 3"):
        run(*inputs, **how, seqused_k=torch.tensor([1, 2, 3], dtype=torch.int32))


def test_a_window_side_without_a_value_is_refused(compiled: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="a side of the window is a tensor"):
        compiled(attention)(*tensors(), window=(torch.tensor(3), 0))


def test_compiled_without_sequences(compiled: Callable[..., Any]) -> None:
    inputs = [x[:0] for x in tensors()]
    assert [x.shape for x in results(compiled(attention), inputs, causal=True)] == [
        inputs[0].shape,
        *(x.shape for x in inputs),
    ]


def test_bad_arguments_are_named_in_compiled_code(compiled: Callable[..., Any]) -> None:
    q, k, v = tensors()
    with pytest.raises(Exception, match="k and v must have a number of heads that divides"):
        compiled(attention)(q[:, :, :3], k, v)


def test_determinism_is_read_when_compiled_code_runs(
    compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = [], ops.Options
    monkeypatch.setattr(calls, "_seen", Kept())
    monkeypatch.setattr(ops, "Options", lambda *how: asked.append(how[0]) or real(*how))
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    run = compiled(attention)
    results(run, tensors())
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    results(run, tensors())
    assert asked == [True, True, False, False]  # forward and backward


@pytest.mark.parametrize("needed", [(0,), (1, 2)])
def test_compiled_gradients_of_some(compiled: Callable[..., Any], needed: tuple[int, ...]) -> None:
    every = results(attention, tensors(), causal=True)[1:]
    some = [x.requires_grad_(i in needed) for i, x in enumerate(tensors())]
    out = compiled(attention)(*some, causal=True)
    torch.manual_seed(1)
    out.backward(torch.randn_like(out))
    for i, x in enumerate(some):
        assert torch.equal(x.grad, every[i]) if i in needed else x.grad is None


def test_compiled_second_derivative_is_refused(compiled: Callable[..., Any]) -> None:
    leaves = [x.requires_grad_() for x in tensors()]
    (dq,) = torch.autograd.grad(compiled(attention)(*leaves).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dq.square().sum().backward()


def test_dynamic_lengths(compiled: Callable[..., Any]) -> None:
    run = compiled(attention, dynamic=True)
    for length in (LENGTH, 128, 40):
        inputs = [x[:, :length] for x in tensors()]
        assert same(results(run, inputs, causal=True), results(attention, inputs, causal=True))


# ---- checkpointing -----------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """How often the forward operator ran."""

    runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += func is torch.ops.dash_attn.forward.default
        return func(*args, **kwargs or {})


def keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op is torch.ops.dash_attn.forward.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("selective", "runs"), [(False, 2), (True, 1)])
def test_checkpoint(selective: bool, runs: int, compiled: Callable[..., Any]) -> None:
    chosen: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, keep_attention)} if selective else {}
    )

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, causal=True).sin()

    def saving(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(block, q, k, v, use_reentrant=False, **chosen)

    want = results(block, tensors())
    with Count() as count:
        assert same(results(saving, tensors()), want)
    assert count.runs == runs
    assert same(results(compiled(saving), tensors()), want)


# ---- autocast and strides ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backward_too", [False, True])
def test_autocast(backward_too: bool) -> None:
    """Inputs are rounded to autocast's dtype, whatever mixture they come in; nothing inside is."""
    q, k, v = tensors()
    leaves = [x.requires_grad_() for x in (q, k, v.bfloat16())]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*leaves, causal=True)
        torch.manual_seed(1)
        dout = torch.randn_like(out)
        if backward_too:
            out.backward(dout)
    if not backward_too:
        out.backward(dout)
    want = results(attention, [x.detach().bfloat16() for x in leaves], causal=True)
    assert [x.grad.dtype for x in leaves] == [torch.float32, torch.float32, torch.bfloat16]
    assert same([out.detach(), *(x.grad.bfloat16() for x in leaves)], want)


def strided(x: Tensor, how: str) -> Tensor:
    if how == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "every second":
        return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]
    return x[:1].expand(2, -1, -1, -1)


@pytest.mark.parametrize("how", ["heads first", "every second", "expanded"])
@pytest.mark.parametrize("compile_it", [False, True])
def test_strides_do_not_matter(how: str, compile_it: bool, compiled: Callable[..., Any]) -> None:
    inputs = [strided(x, how) for x in tensors()]
    assert not any(x.is_contiguous() for x in inputs)
    function = compiled(attention) if compile_it else attention
    copies = [x.contiguous() for x in inputs]
    assert same(results(function, inputs, causal=True), results(attention, copies, causal=True))
