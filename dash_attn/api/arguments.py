"""Checks of a caller's arguments. They give a Problem, or an error that says what is expected."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dash_attn.api.border import check_order
from dash_attn.api.calls import Boundaries, read, side_of, values_of
from dash_attn.backends.variables import variable
from dash_attn.problem import CAUSAL, FULL, PLAIN, Documents, Features, Mask, Problem, window

if TYPE_CHECKING:
    from dash_attn.program import Program

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

WHOLE = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)

OLDEST_TORCH = (2, 9)
LARGEST = 2.0**120  # a scale above it leaves the range of float32, together with a factor of the kernels

asked_of_flash = variable("FLASH_ATTENTION_DETERMINISTIC")

Side = int | Tensor | None
Window = tuple[Side, Side]


USED_Q, USED_K = "seqused_q", "seqused_k"


class Words(NamedTuple):
    """The names that a function gives to its arguments, for errors."""

    cu_q: str = "cu_seqlens"
    cu_k: str = "cu_seqlens_k"
    scale: str = "scale"
    window: str = "window"


BOTH_CU = Words("cu_seqlens_q")
FLASH = BOTH_CU._replace(scale="softmax_scale", window="window_size")  # FlashAttention's words


class Arguments(NamedTuple):
    """The arguments of a call except the tensors.

    `words` are the caller's names of these arguments. `used_q` and `used_k` are FlashAttention's seqused:
    the number of leading rows of each sequence that take part. `features` is None for plain softmax; the head dim of v
    is no part of it.
    """

    causal: bool = False
    window: Window | None = None
    cu_q: Boundaries | None = None
    cu_k: Boundaries | None = None
    mask: Mask | None = None
    scale: float | None = None
    policy: str | Program = "auto"
    deterministic: bool | None = None
    sm_margin: int = 0
    words: Words = Words()
    used_q: Boundaries | None = None
    used_k: Boundaries | None = None
    panels: int = 1
    features: Features | None = None

    def key(self) -> tuple[object, ...]:
        """Everything that a check looks at, also the values of tensors.

        The key holds types too: 1 equals True and 1.0, but not every check accepts all of them.
        """
        plain: tuple[object, ...] = self
        window = self.window
        if window is not None or self.cu_q is not None or self.cu_k is not None:
            plain = (
                (*map(side_of, window), *map(type, window)) if isinstance(window, tuple) else (window, type(window)),
                values_of(self.cu_q),
                values_of(self.cu_k),
                values_of(self.used_q),
                values_of(self.used_k),
                self.causal,
                self.mask,
                self.scale,
                self.policy,
                self.deterministic,
                self.sm_margin,
                self.words,
                self.panels,
                self.features,
            )
        kinds = (type(self.causal), type(self.scale), type(self.deterministic), type(self.sm_margin), type(self.panels))
        return plain, kinds, wants_determinism(self.deterministic)


class CuSeqlens(NamedTuple):
    """cu_seqlens as the operators take them. `cu_seqlens_k` is None if keys are packed as queries are."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


def problem_of(q: Tensor, k: Tensor, v: Tensor, asked: Arguments) -> Problem:
    """The problem of a call, or an error that names the argument."""
    check_arguments(q, k, v, asked)
    scale = None if asked.scale is None else float(asked.scale)
    features = with_dim_of(v, q, asked.features or PLAIN)
    return pose(q, k, mask_of(asked) & documents_of(asked, q, k), scale, asked.panels, features)


def with_dim_of(v: Tensor, q: Tensor, features: Features) -> Features:
    """The features, with the head dim of v if it is not that of q."""
    return features if v.shape[-1] == q.shape[-1] else replace(features, dim_v=v.shape[-1])


def pose(q: Tensor, k: Tensor, mask: Mask, scale: float | None, panels: int, features: Features = PLAIN) -> Problem:
    """The problem of checked tensors. A batch without sequences becomes one sequence without tokens."""
    batch, lengths = q.shape[0] if q.ndim == 4 else 1, (q.shape[-3], k.shape[-3])
    return Problem(
        batch=max(batch, 1),
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        len_q=lengths[0] if batch else 0,
        len_k=lengths[1] if batch else 0,
        dim=q.shape[-1],
        dtype=DTYPES[q.dtype],
        scale=scale,
        mask=mask.without_rows(*lengths).without_negative_sides(*lengths) if batch else FULL,
        panels=panels,
        features=features,
    )


def check_arguments(q: Tensor, k: Tensor, v: Tensor, asked: Arguments) -> None:
    """All checks that read no values of tensors. torch.compile can trace them."""
    check_order(asked.policy, asked.panels)
    check_margin(asked.sm_margin)
    check_flag("deterministic", asked.deterministic)
    check_queries(q, asked.words.cu_q)
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be {', '.join(DTYPES.values())}; got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x)
        for what, got, expected in (
            ("number of dimensions", x.ndim, q.ndim),
            ("dtype", x.dtype, q.dtype),
            ("device", x.device, q.device),
            ("batch", x.shape[:-3], q.shape[:-3]),
        ):
            if got != expected:
                raise ValueError(f"{name} must have the {what} of q, {_plain(expected)}; got {_plain(got)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the head dim of q, {q.shape[-1]}; got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, with any head dim; got {tuple(v.shape)}")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(f"k and v must have a number of heads that divides q's {heads_q}; got {heads_kv}")
    _check_scale(asked.words.scale, asked.scale)
    _check_packing(asked, q)


def check_queries(q: Tensor, name: str = "cu_seqlens") -> None:
    """`q` must be a tensor with heads. `name` is the caller's name of the cu_seqlens."""
    check_tensor("q", q)
    if q.ndim not in (3, 4):
        raise ValueError(
            f"q must be (batch, seqlen, heads, dim), or (tokens, heads, dim) with {name}; got shape {tuple(q.shape)}"
        )


def check_like(name: str, x: Tensor, model_name: str, model: Tensor) -> None:
    """`x` must have the shape, dtype and device of `model`."""
    check_tensor(name, x)
    for what in ("shape", "dtype", "device"):
        got, expected = getattr(x, what), getattr(model, what)
        if got != expected:
            raise ValueError(f"{name} must have the {what} of {model_name}, {_plain(expected)}; got {_plain(got)}")


def check_room(name: str, x: Tensor, model_name: str, model: Tensor) -> None:
    """`x` takes a result: it must be like `model`, and no two of its elements may share memory."""
    check_like(name, x, model_name, model)
    end = 1  # elements from the first one to the last one, over the dimensions with smaller strides
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride < end:
            raise ValueError(
                f"{name} must have a place for every element, to be written to; got strides {x.stride()}, as expand() "
                "and as_strided() make them: give torch.empty_like(...), or leave it out"
            )
        end += (size - 1) * stride


def check_lse(name: str, lse: Tensor, q: Tensor) -> None:
    """`lse` must be float32, (batch, heads, seqlen) or packed (heads, tokens)."""
    check_queries(q)
    check_tensor(name, lse)
    expected = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    if tuple(lse.shape) != expected or lse.dtype != torch.float32 or lse.device != q.device:
        layout = "(batch, heads, seqlen)" if q.ndim == 4 else "(heads, tokens)"
        raise ValueError(
            f"{name} must be {layout} = {expected}, torch.float32, on {q.device}; "
            f"got {tuple(lse.shape)}, {lse.dtype}, on {lse.device}"
        )


def check_flag(name: str, flag: bool | None) -> None:
    """A flag must be a bool, because Python takes a string like "no" for true."""
    if flag is not None and not isinstance(flag, bool):
        raise ValueError(f"{name} must be True, False or None, got {flag!r}")


def check_margin(sm_margin: int) -> None:
    if not isinstance(sm_margin, int) or isinstance(sm_margin, bool) or sm_margin < 0:
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
        raise ValueError(
            f"mask must be a dash_attn Mask or None, got {type(mask).__name__}: dash_attn.from_block_mask makes one "
            "of a BlockMask of torch"
        )
    check_flag("causal", asked.causal)
    band = FULL if sides is None else _window_of(asked.words.window, sides, asked.causal)
    return (CAUSAL if asked.causal else FULL) & band & (mask or FULL)


def _window_of(name: str, sides: Window, causal: bool) -> Mask:
    if isinstance(sides, tuple | list) and len(sides) == 2:
        left, right = map(_side, sides)
        if all(side is None or isinstance(side, int) for side in (left, right)):
            # As in FlashAttention, causal sets the right side to 0, also in place of a negative one.
            return window(left, 0 if causal else right)  # type: ignore[arg-type]
    raise ValueError(
        f"{name} must be (left, right), each a whole number, as an int or a tensor without dimensions, or None for no "
        f"limit; got {sides}"
    )


def _side(given: object) -> object:
    """A tensor or a number of numpy as an int, anything else as it is."""
    if isinstance(given, np.integer):
        return int(given)
    if not isinstance(given, Tensor) or given.ndim or given.dtype not in WHOLE:
        return given
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "a side of the window is a tensor, whose value torch.compile cannot read: give an int, or call int() on "
            "the tensor outside the compiled function"
        )
    return read(given)[0]


def documents_of(asked: Arguments, q: Tensor, k: Tensor) -> Mask:
    """The packed sequences as documents, or no documents. This reads the values of cu_seqlens and seqused."""
    q_name, k_name, cu_q, cu_k = asked.words.cu_q, asked.words.cu_k, asked.cu_q, asked.cu_k
    if cu_q is None:
        return FULL
    first = _checked(q_name, cu_q, q.shape[-3])
    if cu_k is None:
        if k.shape[-3] != q.shape[-3]:
            raise ValueError(f"{k_name} is needed: there are {q.shape[-3]} queries and {k.shape[-3]} keys")
        second = first
    else:
        second = _checked(k_name, cu_k, k.shape[-3])
    if len(second) != len(first):
        raise ValueError(f"{k_name} must name as many sequences as {q_name}, {len(first) - 1}; got {len(second) - 1}")
    unused_q, unused_k = _unused(USED_Q, asked.used_q, first), _unused(USED_K, asked.used_k, second)
    if len(first) == 1:
        return Mask(documents=Documents((0, 0), (0, 0)))  # no sequences: one without tokens
    parts = Documents(first, second)
    if asked.used_q is not None or asked.used_k is not None:
        parts = parts.set_apart(unused_q, unused_k)
    return Mask(documents=parts)


def _unused(name: str, given: Boundaries | None, cu: tuple[int, ...]) -> list[int]:
    """The unused rows of each sequence."""
    lengths = [end - begin for begin, end in pairwise(cu)]
    if given is None:
        return [0 for _ in lengths]
    used = _numbers(name, given)
    if len(used) != len(lengths):
        raise ValueError(f"{name} must have one number for each of the {len(lengths)} sequences; got {len(used)}")
    for number, (count, length) in enumerate(zip(used, lengths, strict=True)):
        if not 0 <= count <= length:
            raise ValueError(
                f"{name} must be from 0 to the length of its sequence; got {count} for sequence {number} of length "
                f"{length}"
            )
    return [length - count for count, length in zip(used, lengths, strict=True)]


def traced_boundaries(asked: Arguments, device: torch.device) -> CuSeqlens:
    """cu_seqlens as tensors, with unused rows in documents of their own, as `documents_of` makes them.

    torch.compile traces this function. The operators check the values: with a number of used rows that is out of range,
    the boundaries decrease somewhere.
    """
    words = asked.words
    cu_q, cu_k = _row(words.cu_q, asked.cu_q), None if asked.cu_k is asked.cu_q else _row(words.cu_k, asked.cu_k)
    used_q, used_k = _row(USED_Q, asked.used_q), _row(USED_K, asked.used_k)
    if cu_q is None or (used_q is None and used_k is None):
        return CuSeqlens(cu_q, cu_k)
    cu_k = cu_q if cu_k is None else cu_k
    given = [x for x in (cu_q, cu_k, used_q, used_k) if x is not None]
    at = device if any(x.device == device for x in given) else given[0].device
    cu_q, cu_k = cu_q.to(at), cu_k.to(at)
    for name, used, cu in ((USED_Q, used_q, cu_q), (USED_K, used_k, cu_k)):
        if used is not None and used.shape[0] != cu.shape[0] - 1:
            raise ValueError(
                f"{name} must have one number for each of the {cu.shape[0] - 1} sequences; got {used.shape[0]}"
            )
    end_q = cu_q[1:] if used_q is None else cu_q[:-1] + used_q.to(at)
    end_k = cu_k[1:] if used_k is None else cu_k[:-1] + used_k.to(at)
    parts_q, parts_k = (end_q, cu_q[1:], cu_q[1:]), (end_k, end_k, cu_k[1:])
    return CuSeqlens(
        torch.cat([cu_q[:1], torch.stack(parts_q, 1).flatten()]),
        torch.cat([cu_k[:1], torch.stack(parts_k, 1).flatten()]),
    )


def _row(name: str, given: Boundaries | None) -> Tensor | None:
    if given is None or isinstance(given, Tensor):
        return given
    numbers = _numbers(name, given)
    if any(not 0 <= x < 2**31 for x in numbers):
        raise ValueError(f"{name} must be whole numbers from 0 to 2**31 - 1, got {given!r}")
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def _check_scale(name: str, scale: Any) -> None:
    if isinstance(scale, Tensor):
        raise ValueError(
            f"{name} is a tensor, which would get no gradient: give a number, as float() makes it, or leave {name} out "
            "and multiply q by it"
        )
    if scale is None:
        return
    is_number = isinstance(scale, int | float | np.floating | np.integer) and not isinstance(scale, bool)
    # A comparison, which torch.compile traces for a number that it does not know. It is false for NaN.
    if not is_number or not abs(scale if isinstance(scale, int) else float(scale)) <= LARGEST:
        raise ValueError(f"{name} must be a finite number from -2**120 to 2**120, or None; got {scale!r}")


def _check_packing(asked: Arguments, q: Tensor) -> None:
    q_name, k_name, cu_q, cu_k = asked.words.cu_q, asked.words.cu_k, asked.cu_q, asked.cu_k
    if cu_q is None and q.ndim == 3:
        raise ValueError(
            f"q of three dimensions, {tuple(q.shape)}, needs {q_name}: give it, or call unsqueeze(0) on the tensors of "
            "one sequence"
        )
    if cu_q is not None and q.ndim == 4 and q.shape[0] != 1:
        raise ValueError(
            f"{q_name} goes with packed (tokens, heads, dim) or (1, tokens, heads, dim) tensors, got shape "
            f"{tuple(q.shape)}: flatten batch and tokens, or leave {q_name} out"
        )
    if cu_q is None and cu_k is not None:
        raise ValueError(f"{k_name} was given without {q_name}")
    used = (USED_Q, asked.used_q), (USED_K, asked.used_k)
    for name, given in used:
        if cu_q is None and given is not None:
            raise ValueError(f"{name} was given without {q_name}")
    for name, cu in ((q_name, cu_q), (k_name, cu_k), *used):
        if isinstance(cu, Tensor):
            check_tensor(name, cu)
            if cu.ndim != 1 or cu.dtype != torch.int32:
                raise ValueError(
                    f"{name} must be one row of int32, got shape {tuple(cu.shape)}, {cu.dtype}: call .to(torch.int32)"
                )
            if cu.device not in (q.device, torch.device("cpu")):
                raise ValueError(f"{name} must be on the device of q, {q.device}, or on the CPU; got {cu.device}")


def _checked(name: str, given: Boundaries, tokens: int) -> tuple[int, ...]:
    ends = _numbers(name, given)
    begins = ends[:1] == (0,) and (len(ends) > 1 or tokens == 0)  # [0] names no sequences
    if not begins or ends[-1] != tokens or any(a > b for a, b in pairwise(ends)):
        shown = str(list(ends)) if len(ends) < 9 else f"[{', '.join(map(str, ends[:7]))}, ... {ends[-1]}]"
        raise ValueError(f"{name} must begin with 0, never decrease and end with the {tokens} tokens; got {shown}")
    return ends


def _numbers(name: str, given: Boundaries) -> tuple[int, ...]:
    if isinstance(given, Tensor):
        return read(given)
    try:
        return tuple([index(x) for x in given])
    except (TypeError, RuntimeError) as error:
        said = f"{name} must be a list of whole numbers, or a tensor of them (int32); got {given!r}"
        raise ValueError(said) from error


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if type(x) is not Tensor and hasattr(x, "to_local"):
        raise ValueError(f"{name} is a {type(x).__name__}: give the tensor of this rank, {name}.to_local()")
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
