"""Calls that people make by accident: each is right, or an error that names the argument."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import dash_attn
from dash_attn import attention, backward, explain, flash_attn_func


def tensors(tokens: int = 64, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    noise = torch.Generator().manual_seed(0)
    return [torch.randn((2, tokens, heads, 16), generator=noise).to(dtype) for heads in (4, 2, 2)]


def packed() -> list[Tensor]:
    return [x[0] for x in tensors()]


class Sides(NamedTuple):
    left: Tensor
    right: Tensor


# ---- values that change between two calls -------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.nn.Parameter(torch.tensor(0.5))], ids=["tensor", "weight"])
def test_a_scale_that_is_a_tensor_is_refused(scale: Tensor) -> None:
    """It would have no gradient, and nobody would notice that its value changes."""
    with pytest.raises(ValueError, match=r"scale is a tensor.*multiply q by it"):
        attention(*tensors(), scale=scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["numpy", "view", "data", "list of tensors"])
def test_boundaries_on_the_cpu_are_read_at_every_call(way: str) -> None:
    """Memory may change without torch's knowledge."""
    memory = np.array([0, 20, 64], np.int32)
    cu = torch.from_numpy(memory)
    given: Any = list(cu) if way == "list of tensors" else cu
    attention(*packed(), cu_seqlens=given)
    if way == "numpy":
        memory[1] = 40
    elif way == "view":
        cu.numpy()[1] = 40
    elif way == "data":
        cu.data = torch.tensor([0, 40, 64], dtype=torch.int32)
    else:
        given[1].fill_(40)
    assert torch.equal(attention(*packed(), cu_seqlens=given), attention(*packed(), cu_seqlens=[0, 40, 64]))


def test_sides_of_a_window_in_a_named_tuple_are_read_at_every_call() -> None:
    sides = Sides(torch.tensor(5), torch.tensor(0))
    attention(*tensors(), window=sides)
    sides.left.fill_(9)
    assert torch.equal(attention(*tensors(), window=sides), attention(*tensors(), window=(9, 0)))


# ---- transforms and modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"softcap": 5.0}, {"return_lse": True}], ids=str)
def test_a_tangent_is_refused(more: dict[str, Any]) -> None:
    """The derivative would be lost without a word."""
    q, k, v = tensors()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v, **more)


def test_a_level_of_forward_mode_alone_changes_nothing() -> None:
    with forward_ad.dual_level():
        inside = attention(*tensors())
    assert torch.equal(inside, attention(*tensors()))


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_of_torch_func_are_refused(transform: str) -> None:
    q, k, v = tensors()
    calls: dict[str, Any] = {
        "grad": lambda: torch.func.grad(lambda x: attention(x, k, v).sum())(q),
        "vmap": lambda: torch.func.vmap(lambda x: attention(x, k, v))(torch.stack([q, q])),
        "jvp": lambda: torch.func.jvp(lambda x: attention(x, k, v), (q,), (q,)),
    }
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        calls[transform]()


@pytest.mark.parametrize("more", [{}, {"return_lse": True}], ids=str)
def test_batched_gradients_are_refused(more: dict[str, Any]) -> None:
    q, k, v = tensors(8)
    out = attention(q.requires_grad_(), k, v, **more)
    out = out if isinstance(out, Tensor) else out[0]
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(out, q, torch.ones(3, *out.shape), is_grads_batched=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_takes_any_scale(dynamic: bool) -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return attention(q, k, v, scale=scale)

    torch._dynamo.reset()
    run = torch.compile(scaled, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(run(*tensors(), scale), attention(*tensors(), scale=scale))


def given_backward() -> tuple[Tensor, ...]:
    q, k, v = tensors()
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    return out, q, k, v, out, lse


def test_the_backward_alone_in_compiled_code() -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda *given: tuple(backward(*given, causal=True)), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for grad, want in zip(run(*given_backward()), backward(*given_backward(), causal=True), strict=True):
            assert torch.equal(grad, want)


@pytest.mark.parametrize(
    ("rooms", "said"),
    [(lambda x: {"dk": x, "dv": x}, "the same tensor"), (lambda x: {"dsinks": x}, "dsinks was given without sinks")],
)
def test_bad_rooms_of_fake_tensors_are_named(rooms: Any, said: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in given_backward()]
        with pytest.raises(ValueError, match=said):
            backward(*fake, causal=True, **rooms(torch.empty_like(fake[2])))


def test_explain_in_compiled_code_leaves_the_graph() -> None:
    torch._dynamo.reset()
    q, k, v = tensors()
    run = torch.compile(lambda *x: explain(*x).fingerprint, backend="eager")
    assert run(q, k, v) == explain(q, k, v).fingerprint


def test_the_backward_alone_of_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in given_backward()]
        grads = backward(*fake, causal=True)
    assert [x.shape for x in grads] == [x.shape for x in fake[1:4]]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile gives up the frame that raised an error, also for other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_boundaries_of_compiled_code_are_whole_numbers() -> None:
    run = torch.compile(attention, backend="eager")
    with pytest.raises(Exception, match="cu_seqlens must be a list of whole numbers"):
        run(*packed(), cu_seqlens=[0, 20.7, 64])


@pytest.mark.usefixtures("fresh_compiler")
def test_an_error_in_compiled_code_leaves_later_calls_right() -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be"):
        torch.compile(attention, backend="eager")(*packed(), cu_seqlens=[0, 20.7, 64])
    for cells in (2, 4, 8):
        mask = dash_attn.tiles(np.tri(cells), 64 // cells, 64 // cells)
        run = torch.compile(lambda *x, mask=mask: attention(*x, mask=mask), backend="eager")
        assert torch.equal(run(*tensors()), attention(*tensors(), mask=mask))


def test_explain_follows_autocast() -> None:
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        said = explain(q, k, v)
        assert explain(q, k.bfloat16(), v) == said
    assert said == explain(*tensors(dtype=torch.bfloat16))


# ---- rooms ------------------------------------------------------------------------------------------------------


def test_a_room_whose_elements_overlap_is_refused() -> None:
    room = torch.zeros(9000).as_strided((2, 64, 4, 16), (4096, 64, 8, 1))
    with pytest.raises(ValueError, match="dq must have a place for every element"):
        backward(*given_backward(), dq=room)


def test_rooms_that_need_a_gradient() -> None:
    """They are written to as any other tensor."""
    q, k, v = tensors()
    sinks = torch.zeros(4)
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    rooms = [torch.zeros(4, requires_grad=True), torch.zeros_like(q, requires_grad=True)]
    backward(out, q, k, v, out, lse, sinks=sinks, dsinks=rooms[0], dq=rooms[1])
    assert rooms[0].any() and rooms[1].any()
    empty = [x[:, :0] for x in (k, v)]
    out, lse = attention(q, *empty, return_lse=True)
    backward(out, q, *empty, out, lse, dq=rooms[1])
    assert not rooms[1].any()


# ---- bad input --------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    *[({"scale": bad}, "scale must be a finite number") for bad in ([1.0], 1j, {}, np.array([1.0, 2.0]), True, "x")],
    *[({"scale": bad}, "scale must be a finite number") for bad in (10**400, 1e39, float("nan"), float("inf"))],
    *[({name: bad}, f"{name} must be a number") for name in ("softcap", "dropout") for bad in ("", [], torch.ones(2))],
    *[({"softcap": bad}, "softcap must be") for bad in (10**400, -(10**400), 1e-45, 3e38, -1.0, float("nan"))],
    ({"q": torch.zeros(4), "sinks": torch.zeros(4)}, r"q must be \(batch, seqlen, heads, dim\)"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=str)
def test_bad_arguments_are_named(arguments: dict[str, Any], said: str) -> None:
    given = dict(zip("qkv", tensors(), strict=True)) | arguments
    with pytest.raises(ValueError, match=said):
        attention(**given)


@pytest.mark.parametrize("seed", [torch.tensor(-1), torch.tensor([-1, 5])], ids=str)
def test_seeds_below_zero_are_named(seed: Tensor) -> None:
    with pytest.raises(ValueError, match=r"seed must be a whole number from 0 to 2\*\*63 - 1"):
        attention(*tensors(), dropout=0.5, seed=seed)


def test_numbers_of_numpy_are_numbers() -> None:
    want = attention(*tensors(), scale=0.5)
    for scale in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        assert torch.equal(attention(*tensors(), scale=scale), want)
    assert torch.equal(attention(*tensors(), scale=np.int64(2)), attention(*tensors(), scale=2))


@pytest.mark.parametrize(
    "cu",
    [
        np.array([[0, 64]]),
        np.array(64),
        [torch.tensor(0.0), torch.tensor(64.0)],
        [torch.tensor([0, 64])],
        torch.tensor([0, 64], dtype=torch.int32).to_sparse(),
    ],
    ids=str,
)
def test_bad_boundaries_are_named(cu: Any) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be"):
        attention(*packed(), cu_seqlens=cu)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": [1]}, "q must be a torch.Tensor"),
        ({"q": torch.zeros(4)}, r"q must be \(batch, seqlen, heads, dim\)"),
    ],
)
def test_q_is_checked_before_a_gradient_of_lse(change: dict[str, Any], said: str) -> None:
    names = ("dout", "q", "k", "v", "out", "lse")
    given = dict(zip(names, given_backward(), strict=True)) | change
    with pytest.raises(ValueError, match=said):
        backward(**given, dlse=given["lse"])


@pytest.mark.parametrize("dsinks", [3, [1.0], torch.zeros(4).to_sparse()], ids=str)
def test_bad_rooms_are_named(dsinks: Any) -> None:
    with pytest.raises(ValueError, match="dsinks must be a"):
        backward(*given_backward(), sinks=torch.zeros(4), dsinks=dsinks)


def test_flash_functions_check_the_same_numbers() -> None:
    with pytest.raises(ValueError, match="softcap must be a number"):
        flash_attn_func(*tensors(), softcap="")  # type: ignore[arg-type]
    assert torch.equal(flash_attn_func(*tensors(), softcap=None), dash_attn.attention(*tensors()))
