"""Checks of a caller's arguments. They give a Problem, or an error that says what is expected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from dash_attn.api.calls import Boundaries, read, values_of
from dash_attn.backends.variables import variable
from dash_attn.order import POLICIES, parse
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

OLDEST_TORCH = (2, 9)

asked_of_flash = variable("FLASH_ATTENTION_DETERMINISTIC")

Window = tuple[int | None, int | None]


FLASH_NAMES = ("cu_seqlens_q", "cu_seqlens_k")  # FlashAttention's words for the cu_seqlens


class Arguments(NamedTuple):
    """The arguments of a call except the tensors. `names` are the caller's names of the two cu_seqlens arguments."""

    causal: bool = False
    window: Window | None = None
    cu_q: Boundaries | None = None
    cu_k: Boundaries | None = None
    mask: Mask | None = None
    scale: float | None = None
    policy: str = "auto"
    deterministic: bool | None = None
    sm_margin: int = 0
    names: tuple[str, str] = ("cu_seqlens", "cu_seqlens_k")

    def key(self) -> tuple[object, ...]:
        """Everything that a check looks at, also the values of cu_seqlens.

        The key holds types too: 1 equals True and 1.0, but not every check accepts all of them.
        """
        causal, window, cu_q, cu_k, mask, scale, policy, deterministic, sm_margin, names = self
        plain: tuple[object, ...] = self
        if window is not None or cu_q is not None or cu_k is not None:
            sides = (*window, *map(type, window)) if type(window) is tuple else (window, type(window))
            cu = (values_of(cu_q), values_of(cu_k))
            plain = (causal, sides, *cu, mask, scale, policy, deterministic, sm_margin, names)
        kinds = (type(causal), type(scale), type(deterministic), type(sm_margin))
        return plain, kinds, wants_determinism(deterministic)


def problem_of(q: Tensor, k: Tensor, v: Tensor, asked: Arguments) -> Problem:
    """The problem of a call, or an error that names the argument."""
    check_arguments(q, k, v, asked)
    return Problem(
        batch=q.shape[0] if q.ndim == 4 else 1,
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        len_q=q.shape[-3],
        len_k=k.shape[-3],
        dim=q.shape[-1],
        dtype=DTYPES[q.dtype],
        scale=None if asked.scale is None else float(asked.scale),
        mask=mask_of(asked) & documents_of(asked, q, k),
    )


def check_arguments(q: Tensor, k: Tensor, v: Tensor, asked: Arguments) -> None:
    """All checks that read no values of tensors. torch.compile can trace them."""
    check_policy(asked.policy)
    check_margin(asked.sm_margin)
    check_flag("deterministic", asked.deterministic)
    _check_tensor("q", q)
    if q.ndim not in (3, 4):
        raise ValueError(
            f"q must be (batch, seqlen, heads, dim), or (tokens, heads, dim) with {asked.names[0]}; "
            f"got shape {tuple(q.shape)}"
        )
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be {', '.join(DTYPES.values())}; got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        _check_tensor(name, x)
        for what, got, expected in (
            ("number of dimensions", x.ndim, q.ndim),
            ("dtype", x.dtype, q.dtype),
            ("device", x.device, q.device),
            ("head dim", x.shape[-1], q.shape[-1]),
            ("batch", x.shape[:-3], q.shape[:-3]),
        ):
            if got != expected:
                raise ValueError(f"{name} must have the {what} of q, {_plain(expected)}; got {_plain(got)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}; got {tuple(v.shape)}")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(f"k and v must have a number of heads that divides q's {heads_q}; got {heads_kv}")
    _check_scale(asked.scale)
    _check_packing(asked, q)


def check_like(name: str, x: Tensor, model_name: str, model: Tensor) -> None:
    """`x` must have the shape, dtype and device of `model`."""
    _check_tensor(name, x)
    for what in ("shape", "dtype", "device"):
        got, expected = getattr(x, what), getattr(model, what)
        if got != expected:
            raise ValueError(f"{name} must have the {what} of {model_name}, {_plain(expected)}; got {_plain(got)}")


def check_room(name: str, x: Tensor, model_name: str, model: Tensor) -> None:
    """`x` takes a result: it must be like `model`, and no two of its elements may share memory."""
    check_like(name, x, model_name, model)
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(
            f"{name} must have a place for every element, to be written to; got strides {x.stride()}, as expand() "
            "makes them: give torch.empty_like(...), or leave it out"
        )


def check_lse(lse: Tensor, q: Tensor) -> None:
    """`lse` must be float32, (batch, heads, seqlen) or packed (heads, tokens)."""
    _check_tensor("lse", lse)
    expected = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    if tuple(lse.shape) != expected or lse.dtype != torch.float32 or lse.device != q.device:
        layout = "(batch, heads, seqlen)" if q.ndim == 4 else "(heads, tokens)"
        raise ValueError(
            f"lse must be {layout} = {expected}, torch.float32, on {q.device}; "
            f"got {tuple(lse.shape)}, {lse.dtype}, on {lse.device}"
        )


def check_policy(policy: str) -> None:
    """The policy must have a known name. Whether it fits the mask is checked when the problem is ordered."""
    if not isinstance(policy, str) or parse(policy).policy not in ("auto", *POLICIES):
        named = f"auto, {', '.join(POLICIES)}, or 'name:width'"
        raise ValueError(f"policy must be {named}, each with '@head' behind it or not, or auto@group; got {policy!r}")


def check_flag(name: str, flag: bool | None) -> None:
    """A flag must be a bool, because Python takes a string like "no" for true."""
    if flag is not None and not isinstance(flag, bool):
        raise ValueError(f"{name} must be True, False or None, got {flag!r}")


def check_margin(sm_margin: int) -> None:
    if not isinstance(sm_margin, int) or sm_margin < 0:
        raise ValueError(f"sm_margin must be a whole number from 0, got {sm_margin!r}")


def wants_determinism(deterministic: bool | None) -> bool:
    """The argument if given, else what torch or the environment asks for, else yes. It is read at every call."""
    if deterministic is not None:
        return deterministic
    return torch.are_deterministic_algorithms_enabled() or asked_of_flash() != "0"


def mask_of(asked: Arguments) -> Mask:
    """The mask without the packed sequences."""
    mask, sides = asked.mask, asked.window
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(f"mask must be a dash_attn Mask or None, got {type(mask).__name__}")
    check_flag("causal", asked.causal)
    total = (CAUSAL if asked.causal else FULL) & (mask or FULL)
    if sides is None:
        return total
    if (
        not isinstance(sides, tuple | list)
        or len(sides) != 2
        or any(side is not None and (not isinstance(side, int) or side < -1) for side in sides)
    ):
        raise ValueError(
            f"window must be (left, right), each a whole number from 0, or -1 or None for no limit; got {sides}"
        )
    return total & window(*sides)


def documents_of(asked: Arguments, q: Tensor, k: Tensor) -> Mask:
    """The packed sequences as documents, or no documents. This reads the values of cu_seqlens."""
    (q_name, k_name), cu_q, cu_k = asked.names, asked.cu_q, asked.cu_k
    if cu_q is None:
        return FULL
    first = _checked(q_name, cu_q, q.shape[-3])
    if cu_k is None:
        if k.shape[-3] != q.shape[-3]:
            raise ValueError(f"{k_name} is needed: there are {q.shape[-3]} queries and {k.shape[-3]} keys")
        return documents(first)
    second = _checked(k_name, cu_k, k.shape[-3])
    if len(second) != len(first):
        raise ValueError(f"{k_name} must name as many sequences as {q_name}, {len(first) - 1}; got {len(second) - 1}")
    return documents(first, second)


def _check_scale(scale: Any) -> None:
    if scale is not None and (isinstance(scale, str) or not math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")


def _check_packing(asked: Arguments, q: Tensor) -> None:
    (q_name, k_name), cu_q, cu_k = asked.names, asked.cu_q, asked.cu_k
    if (cu_q is None) != (q.ndim == 4) and q.shape[:-3] != (1,):
        raise ValueError(
            f"{q_name} goes with packed (tokens, heads, dim) or (1, tokens, heads, dim) tensors and three dimensions "
            f"with it; got {q_name}{'=None' if cu_q is None else ''} and shape {tuple(q.shape)}"
        )
    if cu_q is None and cu_k is not None:
        raise ValueError(f"{k_name} was given without {q_name}")
    for name, cu in ((q_name, cu_q), (k_name, cu_k)):
        if isinstance(cu, Tensor):
            if cu.ndim != 1 or cu.dtype != torch.int32:
                raise ValueError(f"{name} must be one row of int32, got shape {tuple(cu.shape)}, {cu.dtype}")
            if cu.device not in (q.device, torch.device("cpu")):
                raise ValueError(f"{name} must be on the device of q, {q.device}, or on the CPU; got {cu.device}")


def _checked(name: str, given: Boundaries, tokens: int) -> tuple[int, ...]:
    if isinstance(given, Tensor):
        ends = read(given)
    else:
        ends = tuple(given) if isinstance(given, Iterable) else ()
        if not ends or not all(isinstance(x, SupportsIndex) for x in ends):
            raise ValueError(f"{name} must be a list of whole numbers, or a tensor of them (int32); got {given!r}")
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or any(a > b for a, b in pairwise(ends)):
        shown = str(list(ends)) if len(ends) < 9 else f"[{', '.join(map(str, ends[:7]))}, ... {ends[-1]}]"
        raise ValueError(f"{name} must begin with 0, never decrease and end with the {tokens} tokens; got {shown}")
    return ends


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else x.layout
        raise ValueError(f"{name} must be a dense tensor, with sequences of different lengths packed; got {kind}")


def check_torch(version: str) -> None:
    """Older versions of torch cannot declare the operators."""
    if tuple(int(x) for x in version.split(".")[:2]) < OLDEST_TORCH:
        least = ".".join(map(str, OLDEST_TORCH))
        raise NotImplementedError(f"torch {version} is too old: dash_attn needs {least} or later; pip install -U torch")


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


check_torch(torch.__version__)
