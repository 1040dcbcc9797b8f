"""softcap, sinks, dropout, seeds, another head dim of v and the gradient of lse, as users meet them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dash_attn.api import attention, backward, flash_attn_varlen_func, ops
from dash_attn.api.arguments import Arguments
from dash_attn.api.autograd import prepared_for
from dash_attn.api.explain import explain
from dash_attn.api.extras import drawn_seed
from dash_attn.api.ops import OrderArguments, Posed
from dash_attn.backends import Extras
from dash_attn.backends.dropout import kept, row_words
from dash_attn.problem import CAUSAL, FULL, Features, Problem, documents, intervals_by_row, window
from dash_attn.tools.bench.operands import exact

LENGTH = 70
CU = torch.tensor([0, 30, LENGTH], dtype=torch.int32)
CALLS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "dropout": {"dropout": 0.3, "seed": 5},
    "all": {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "dropout": 0.2, "seed": [7, 2**50]},
}


def leaves(*, packed: bool = False, dim_v: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    batch = () if packed else (2,)
    shapes = [(*batch, LENGTH, heads, dim) for heads, dim in ((4, 16), (2, 16), (2, dim_v))]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def results(function: Callable[..., Any], inputs: list[Tensor], **arguments: Any) -> list[Tensor]:
    """out, lse, and the gradients of the inputs and the sinks, from gradients of out and of lse."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    if "sinks" in arguments:
        arguments["sinks"] = arguments["sinks"].detach().requires_grad_()
        inputs.append(arguments["sinks"])
    out, lse = function(*inputs[:3], return_lse=True, **arguments)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator) for x in (out, lse)]
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), inputs, grads)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- autograd ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dim_v", [16, 24])
def test_against_float64(call: dict[str, Any], dim_v: int) -> None:
    q, k, v = leaves(dim_v=dim_v)
    got = results(attention, [q, k, v], causal=True, **call)
    generator = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator) for x in got[:2])
    sinks, seed = call.get("sinks"), call.get("seed")
    features = Features(call.get("softcap", 0.0), sinks is not None, call.get("dropout", 0.0), dim_v)
    problem = Problem(2, 4, 2, LENGTH, LENGTH, 16, "float32", None, CAUSAL, features=features)
    extras = Extras(sinks, None if seed is None else torch.tensor(seed), dlse)
    wanted = exact(problem, dout, q.detach(), k.detach(), v.detach(), extras=extras)
    for mine, want in zip(got, [x for x in wanted if x is not None], strict=True):
        assert torch.allclose(mine.double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("needed", ["out", "lse"])
def test_a_gradient_of_one_result(needed: str) -> None:
    """The other one has gradient zero, whatever is given or left out."""
    inputs = leaves()
    out, lse = attention(*inputs, return_lse=True, causal=True)
    one, other = (out, lse) if needed == "out" else (lse, out)
    first = torch.autograd.grad(one.sum(), inputs, retain_graph=True)
    again = torch.autograd.grad(one.sum() + (other * 0.0).sum(), inputs)
    assert same(list(first), list(again))
    if needed == "lse":
        scores = torch.einsum("bmhd,bnhd->bhmn", inputs[0], inputs[1].repeat_interleave(2, 2)) / 4
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        wanted = torch.autograd.grad(scores.masked_fill(hidden, -math.inf).logsumexp(-1).sum(), inputs[:2])
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, wanted, strict=False))
        assert not first[2].any()


def test_a_gradient_of_lse_in_rows_without_keys_is_dropped() -> None:
    """The derivative of logaddexp(-inf, -inf) is NaN."""
    q, k, v = (torch.randn(1, seqlen, 1, 8, requires_grad=True) for seqlen in (10, 4, 4))
    _, lse = attention(q, k, v, causal=True, return_lse=True)
    grads = torch.autograd.grad(torch.logaddexp(lse, torch.full_like(lse, -math.inf))[..., 6:].sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads) and grads[1].any() and not grads[0][:, :6].any()


def test_sinks_alone_can_need_a_gradient() -> None:
    sinks = torch.zeros(4, requires_grad=True)
    out = attention(*(x.detach() for x in leaves()), sinks=sinks)
    (grad,) = torch.autograd.grad(out.sum(), sinks)
    assert grad.isfinite().all() and grad.any()


def test_sinks_of_another_dtype_and_autocast() -> None:
    inputs, sinks = leaves(), torch.tensor([0.5, -1.0, 2.0, 0.0])
    half = sinks.bfloat16().requires_grad_()
    out = attention(*inputs, sinks=half)
    assert torch.equal(out, attention(*inputs, sinks=sinks))
    assert torch.autograd.grad(out.sum(), half)[0].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        got = attention(*inputs, sinks=sinks, softcap=2.0)
    assert torch.equal(got, attention(*(x.bfloat16() for x in inputs), sinks=sinks, softcap=2.0))


@pytest.mark.parametrize("through", ["sinks", "dlse"])
def test_second_derivative_is_refused(through: str) -> None:
    inputs, sinks = leaves(), torch.zeros(4, requires_grad=True)
    out, lse = attention(*inputs, sinks=sinks, return_lse=True)
    dlse = torch.ones_like(lse, requires_grad=True)
    (grad,) = torch.autograd.grad((out, lse), sinks, (torch.ones_like(out), dlse), create_graph=True)
    with pytest.raises(NotImplementedError, match="once, not twice"):
        torch.autograd.grad(grad.sum(), sinks if through == "sinks" else dlse)


def test_plain_arguments_are_the_plain_problem() -> None:
    """Not another prepared problem, not other bits."""
    inputs = leaves()
    plain = results(attention, inputs)
    assert same(plain, results(attention, inputs, softcap=0.0, dropout=0.0, seed=3))
    features = prepared_for(*inputs, Arguments()).problem.features
    assert features == Features() and explain(*inputs).features == "none"


def test_explain_names_the_features() -> None:
    q, k, v = leaves(dim_v=8)
    said = explain(q, k, v, softcap=2.0, sinks=torch.zeros(4), dropout=0.5)
    assert said.features == "softcap 2.0, sinks, dropout 0.5, head dim 8 of v"
    assert said.identity != explain(q, k, v).identity
    assert said.fingerprint == explain(q, k, v).fingerprint  # the order is the same


# ---- packed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("panels", [1, 3])
def test_packed(call: dict[str, Any], panels: int) -> None:
    inputs = leaves(packed=True, dim_v=8)
    got = results(attention, inputs, cu_seqlens=CU, causal=True, panels=panels, **call)
    assert got[0].shape == (LENGTH, 4, 8) and got[1].shape == (4, LENGTH)
    if panels == 1:
        for number, (a, b) in enumerate(((0, 30), (30, LENGTH))):
            own = dict(call)
            if "seed" in call:
                own["seed"] = call["seed"][number] if isinstance(call["seed"], list) else call["seed"] + number * 2**32
            alone = attention(*(x[None, a:b] for x in inputs), causal=True, **own)
            assert torch.equal(alone[0], got[0][a:b])


def test_features_beside_unused_rows() -> None:
    """Unused rows of packed sequences see no key: out is 0, and lse is the sink."""
    inputs, sinks = leaves(packed=True), torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse, _ = flash_attn_varlen_func(
        *inputs, CU, CU, seqused_q=[20, 40], softcap=2.0, learnable_sink=sinks, return_attn_probs=True
    )
    assert not out[20:30].any() and torch.equal(lse[:, 20:30], sinks[:, None].expand(4, 10))
    assert out[30:].any()


# ---- seeds -------------------------------------------------------------------------------------------------


def test_the_seed_comes_from_torchs_generator() -> None:
    inputs = leaves()
    torch.manual_seed(4)
    first, second = (attention(*inputs, dropout=0.5) for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(first, attention(*inputs, dropout=0.5)) and not torch.equal(first, second)
    state = torch.get_rng_state()
    attention(*inputs, softcap=2.0)
    attention(*inputs, dropout=0.5, seed=1)
    assert torch.equal(state, torch.get_rng_state())


PIECES: dict[str, dict[str, Any]] = {
    "negative right side": {"window": (10, -3)},
    "negative left side": {"window": (-4, 20)},
    "chunks": {"mask": intervals_by_row(lambda row: (row // 20 * 20, row + 1), LENGTH)},
    "chunks in panels": {"mask": intervals_by_row(lambda row: (row // 20 * 20, row + 1), LENGTH), "panels": 2},
    "documents": {"mask": documents([0, 30, LENGTH]), "window": (10, -3)},
}


def by_hand(inputs: list[Tensor], dense: np.ndarray, ends: list[int], seeds: list[int]) -> list[Tensor]:
    """out and gradients in float64. Dropout counts rows and keys in the sequences, which `ends` cut each entry into.

    It is independent of the reference `exact`, which asks the Problem where sequences begin. Only the draws are shared.
    """
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 16**-0.5
    p = scores.masked_fill(~torch.from_numpy(dense), -math.inf).softmax(-1).nan_to_num()
    keep = torch.zeros_like(p)
    for number, seed in enumerate(seeds):
        entry, place = divmod(number, len(ends) - 1)
        part = slice(ends[place], ends[place + 1])
        places = np.arange(part.stop - part.start, dtype=np.uint32)
        for head in range(4):
            words = row_words(seed, head, 0, len(places))
            keep[entry, head, part, part] = torch.from_numpy(kept(words, places, 0.3) / 0.7)
    out = (p * keep @ v.repeat_interleave(2, 1)).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), inputs)]


@pytest.mark.parametrize("call", PIECES.values(), ids=PIECES)
def test_seeds_follow_the_sequences_of_the_caller(call: dict[str, Any]) -> None:
    """A sequence that is split inside counts its rows and keys as it does whole."""
    inputs = leaves()
    mask = call.get("mask", FULL) & window(*call.get("window", (None, None)))
    ends = [0, 30, LENGTH] if mask.documents else [0, LENGTH]
    assert explain(*inputs, **call).sequences == 2 * (len(ends) - 1)
    for seed in (7, list(range(3, 2 * len(ends) + 1))):
        seeds = seed if isinstance(seed, list) else [seed + number * 2**32 for number in range(2 * len(ends) - 2)]
        out = attention(*inputs, dropout=0.3, seed=seed, **call)
        got = [out.detach(), *torch.autograd.grad(out.sin().sum(), inputs)]
        want = by_hand(inputs, mask.dense(LENGTH, LENGTH), ends, seeds)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=f"one for each of the {2 * len(ends) - 2} sequences; got 1 numbers"):
        attention(*inputs, dropout=0.3, seed=[1], **call)


@pytest.mark.parametrize("call", PIECES.values(), ids=PIECES)
def test_a_batch_entry_has_the_bits_that_it_has_alone(call: dict[str, Any]) -> None:
    inputs, count = leaves(), 2 if "window" in call and "mask" in call else 1
    both = attention(*inputs, dropout=0.3, seed=7, **call)
    alone = attention(*(x[1:] for x in inputs), dropout=0.3, seed=7 + count * 2**32, **call)
    assert torch.equal(both[1:], alone)


def unused(inputs: list[Tensor], seed: int = 3, **call: Any) -> Tensor:
    torch.manual_seed(seed)
    out: Tensor = flash_attn_varlen_func(*inputs, CU, CU, dropout_p=0.3, **call)
    return out


def test_unused_rows_of_a_neighbour_change_no_seed() -> None:
    inputs = leaves(packed=True)
    want = unused(inputs)
    for used in ({"seqused_q": [20, 40]}, {"seqused_k": [30, 40]}, {"seqused_q": [0, 40], "seqused_k": [5, 40]}):
        assert torch.equal(unused(inputs, **used)[30:], want[30:])
    torch.manual_seed(3)
    first = attention(*(x[:20] for x in inputs), cu_seqlens=[0, 20], dropout=0.3, seed=drawn_seed())
    assert torch.equal(unused(inputs, seqused_q=[20, 40], seqused_k=[20, 40])[:20], first)


def test_dropout_on_average_changes_nothing() -> None:
    inputs = [x.detach() for x in leaves()]
    plain = attention(*inputs)
    outs = torch.stack([attention(*inputs, dropout=0.3, seed=seed) for seed in range(300)])
    spread = outs.std(0) / 300**0.5
    assert ((outs.mean(0) - plain).abs() / spread).mean() < 1.0  # the mean of a normal distribution's size is 0.8


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_dropout(reentrant: bool) -> None:
    inputs = leaves()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, dropout=0.4).sin()

    torch.manual_seed(2)
    want = torch.autograd.grad(block(*inputs).sum(), inputs)
    torch.manual_seed(2)
    out = checkpoint(block, *inputs, use_reentrant=reentrant)
    torch.rand(3)  # something else draws in between
    out.sum().backward()
    assert same(list(want), [x.grad for x in inputs])


# ---- operators ---------------------------------------------------------------------------------------------


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    torch._dynamo.reset()
    yield partial(torch.compile, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("cu", [None, CU], ids=["batch", "packed"])
def test_compiled_gives_the_bits_of_eager(
    call: dict[str, Any], cu: Tensor | None, compiled: Callable[..., Any]
) -> None:
    inputs = leaves(packed=cu is not None, dim_v=24)
    arguments = {**call, "cu_seqlens": cu, "causal": True}
    assert same(results(attention, inputs, **arguments), results(compiled(attention), inputs, **arguments))


@pytest.mark.parametrize("call", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("seed", [7, [3, 4]], ids=str)
def test_pieces_have_the_same_seeds_everywhere(
    call: dict[str, Any], seed: int | list[int], compiled: Callable[..., Any]
) -> None:
    """Compiled, and where a dispatch mode looks at the operators."""
    inputs, arguments = leaves(), {**call, "dropout": 0.3, "seed": seed}
    if "window" in call and "mask" in call and isinstance(seed, list):
        arguments["seed"] = seed * 2
    want = results(attention, inputs, **arguments)
    assert same(want, results(compiled(attention), inputs, **arguments))
    with FlopCounterMode(display=False):
        assert same(want, results(attention, inputs, **arguments))


@pytest.mark.parametrize("window", [(-1, -1), (20, -2)], ids=str)
def test_unused_rows_have_the_same_seeds_everywhere(window: tuple[int, int], compiled: Callable[..., Any]) -> None:
    inputs, used = leaves(packed=True), torch.tensor([20, 40], dtype=torch.int32)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call: dict[str, Any] = {"seqused_q": used, "seqused_k": used, "window_size": window}
        out: Tensor = flash_attn_varlen_func(q, k, v, CU, CU, dropout_p=0.3, **call)
        return out

    def bits(function: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), inputs)]

    want = bits(run)
    assert same(want, bits(compiled(run)))
    with FlopCounterMode(display=False):
        assert same(want, bits(run))


def test_compiled_seeds_change_without_compiling_again(compiled: Callable[..., Any]) -> None:
    inputs, run = leaves(), compiled(attention)
    for number, seed in enumerate((1, 2, 3)):
        got = results(run, inputs, dropout=0.3, seed=torch.tensor(seed))
        assert same(got, results(attention, inputs, dropout=0.3, seed=seed))
        if number == 0:
            torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.error_on_recompile = False


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_dropout_draws_a_seed_at_each_call(compiled: Callable[..., Any], backend: str) -> None:
    inputs, run = leaves(), compiled(attention, backend=backend)
    torch.manual_seed(6)
    first, second = (results(run, inputs, dropout=0.3) for _ in range(2))
    torch.manual_seed(6)
    assert same(first, results(run, inputs, dropout=0.3)) and not torch.equal(first[0], second[0])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_opcheck(call: dict[str, Any]) -> None:
    q, k, v = (x.detach() for x in leaves(dim_v=24))
    sinks, seed = call.get("sinks"), call.get("seed")
    around = (sinks, None if seed is None else torch.tensor(seed), call.get("softcap", 0.0), call.get("dropout", 0.0))
    plain = (None, None, *Posed.of(CAUSAL, None)[:-1])
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v, *plain, 1, "", *around))
    out, lse = ops.forward(q, k, v, *plain, 1, "", *around)
    operands = (torch.ones_like(out), q, k, v, out, lse, *plain, *OrderArguments("auto", True, 0), "", *around, lse)
    torch.library.opcheck(torch.ops.dash_attn.backward.default, operands)
    if sinks is not None:
        for dlse in (None, lse):
            given = (torch.ones_like(out), out, lse, sinks, dlse)
            torch.library.opcheck(torch.ops.dash_attn.sink_gradient.default, given)


# ---- backward ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("packed", [False, True])
def test_backward_has_the_bits_of_autograd(call: dict[str, Any], packed: bool) -> None:
    inputs = leaves(packed=packed, dim_v=24)
    arguments = {**call, **({"cu_seqlens": CU} if packed else {})}
    out, lse, *grads = results(attention, inputs, **arguments)
    generator = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator) for x in (out, lse))
    cu = {"cu_seqlens_q": CU} if packed else {}
    dsinks = torch.empty(4) if "sinks" in call else None
    got = backward(dout, *(x.detach() for x in inputs), out, lse, dlse=dlse, dsinks=dsinks, **cu, **call)
    assert same([*got, *([] if dsinks is None else [dsinks])], grads)


def test_rooms_of_sinks_share_no_memory() -> None:
    q, k, v = (x.detach() for x in leaves())
    sinks = torch.zeros(4)
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    with pytest.raises(ValueError, match="dsinks and sinks share memory"):
        backward(out, q, k, v, out, lse, sinks=sinks, dsinks=sinks)
