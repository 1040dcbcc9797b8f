"""The forward on CUDA, which comes from a library: the choice of the provider, and its call.

The first of PROVIDERS that is installed and takes the problem runs it, if it is in CHECKED. The variable
DASH_ATTN_FORWARD names any of them instead. It is read at every call. If the named provider cannot run the problem,
that is an error. Every provider gives out (batch, seqlen, heads, dim) and lse (batch, heads, seqlen), float32, natural
logarithm, and repeats its bits.
"""

from __future__ import annotations

import inspect
import math
from functools import lru_cache, partial
from importlib import metadata
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dash_attn.backends.base import Extras, Forward
from dash_attn.backends.variables import variable
from dash_attn.kept import kept
from dash_attn.problem import Problem

from . import flex
from .alignment import Strides, aligned
from .fa4 import Fa4Forward, entry
from .packing import Packing, packing_of, unpacked
from .tables import Uploads

VARIABLE = "DASH_ATTN_FORWARD"
named_provider = variable(VARIABLE)
OWN_FORWARD = "call dash_attn.backward with out and lse of your own forward"

Result = tuple[Tensor, Tensor]


class Provider(Protocol):
    """A library with a forward.

    `missing` says why the library cannot run on this machine, and `refuses` why it cannot run a problem. Both are None
    if it can. `bound` gives the forward of one problem, for tensors that have the same strides at every call.
    """

    key: str

    def label(self) -> str: ...

    def missing(self) -> str | None: ...

    def refuses(self, problem: Problem) -> str | None: ...

    def bound(self, problem: Problem) -> Forward: ...


class FlashAttention4:
    key = "fa4"

    def label(self) -> str:
        return f"flash-attn-4 {metadata.version('flash-attn-4')}"

    def missing(self) -> str | None:
        return _fa4_missing()

    def refuses(self, problem: Problem) -> str | None:
        # attention never asks for one: it gives the same pairs as documents.
        if _has_negative_side(problem):
            return f"negative sides are not tested, as in {problem.mask}"
        return _no_window(problem)

    def bound(self, problem: Problem) -> Forward:
        return Fa4Forward(problem)


class CuDnn:
    """cuDNN through torch. Torch passes no windows and no packed sequences, and aligns causal masks at the start."""

    key = "cudnn"

    def label(self) -> str:
        number = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
        return f"cudnn {number // 10000}.{number // 100 % 100}.{number % 100} (torch {torch.__version__})"

    def missing(self) -> str | None:
        found = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        return None if found else "this torch has no cuDNN"

    def refuses(self, problem: Problem) -> str | None:
        mask = problem.mask
        if not (mask.is_full or (mask.is_causal and problem.len_q == problem.len_k)):
            return f"torch gives cuDNN full masks and, of equal lengths, causal ones, not {_shape(problem)}"
        if min(problem.len_q, problem.len_k) == 1:
            return "cuDNN wants more than one token"
        return _has_features(problem)

    def bound(self, problem: Problem) -> Forward:
        return partial(self.run, problem)

    def run(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> Result:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, problem.mask.is_causal, False, scale=problem.softmax_scale
        )
        return out.transpose(1, 2), lse.reshape(problem.batch, problem.heads_q, problem.len_q)


class TorchFlash:
    """The flash kernel that torch is built with."""

    key = "torch"

    def label(self) -> str:
        # Another kernel may be registered in place of torch's. Ours ("dash") calls torch's own kernel here.
        active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        by = "" if active in (None, "dash") else f", {active}"
        return f"aten._flash_attention_forward (torch {torch.__version__}{by})"

    def missing(self) -> str | None:
        return None

    def refuses(self, problem: Problem) -> str | None:
        right, lengths = problem.mask.right, _lengths(problem)
        if _has_negative_side(problem):
            return f"torch's flash kernel takes negative sides for no limit, as in {problem.mask}"
        # The kernel treats a right side that is as long as the keys as no limit. That is wrong for queries whose
        # position is before the first key.
        if right and right >= max(n for _, n in lengths) and any(m > n for m, n in lengths):
            return f"torch's flash kernel drops a right side of {right} where there are more queries than keys"
        return _no_window(problem) or _has_features(problem)

    def bound(self, problem: Problem) -> Forward:
        return TorchForward(problem)


class PackedTensors(NamedTuple):
    packing: Packing
    uploads: Uploads


class TorchForward:
    """The forward of one problem with torch's flash kernel."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._packed: PackedTensors | None = None  # kept here: a captured graph reads it, and the cache may drop it

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> Result:
        problem, mask = self.problem, self.problem.mask
        how = {
            "scale": problem.softmax_scale,
            "window_size_left": -1 if mask.left is None else mask.left,
            "window_size_right": -1 if mask.right is None else mask.right,
        }
        flash = torch.ops.aten._flash_attention_forward
        if mask.documents is None:
            lengths = (problem.len_q, problem.len_k)
            out, lse, *_ = flash(q, k, v, None, None, *lengths, 0.0, mask.right == 0, False, **how)
        else:
            if self._packed is None:
                packing = packing_of(mask.documents, problem.batch, q.device)
                self._packed = PackedTensors(packing, Uploads(packing.cu_seqlens_q))
            self._packed.uploads.used()
            flat = (x if x.dim() == 3 else x.flatten(0, 1) for x in (q, k, v))
            out, lse, *_ = flash(*flat, *self._packed.packing, 0.0, mask.right == 0, False, **how)
            if q.dim() == 4:
                out, lse = unpacked(problem, out, lse)
        if has_empty_rows(problem):
            lse = lse.masked_fill(lse == math.inf, -math.inf)  # the kernel gives inf for a row without keys
        return out, lse


class Flex:
    """torch's flex_attention, which is compiled by torch. It takes every mask without documents, and every feature."""

    key = "flex"

    def label(self) -> str:
        return f"flex_attention (torch {torch.__version__})"

    def missing(self) -> str | None:
        return None if find_spec("triton") is not None else "flex_attention needs triton, which is not installed"

    def refuses(self, problem: Problem) -> str | None:
        return flex.refuses(problem)

    def bound(self, problem: Problem) -> Forward:
        return flex.FlexForward(problem)


PROVIDERS: tuple[Provider, ...] = (FlashAttention4(), CuDnn(), TorchFlash(), Flex())
# With these a sequence has the same bits alone and in a batch, and with FlashAttention-4 in a pack
# (test_gpu_forwards.py, test_gpu_flex.py). Nothing shows it for the others, so they run only if the caller names them.
CHECKED = ("fa4", "flex")


def choose(problem: Problem) -> Provider:
    """The provider of a problem, or an error that says for each provider why not."""
    return considered(problem)[0]


def described(problem: Problem) -> str:
    """The provider of a problem, and why those before it were not chosen."""
    provider, reasons = considered(problem)
    return f"{provider.label()} (not {'; '.join(reasons)})" if reasons else provider.label()


def considered(problem: Problem) -> tuple[Provider, list[str]]:
    """The provider of a problem, and why not each provider before it; or an error if there is none."""
    if problem.softmax_scale <= 0:  # the libraries take the largest score before they scale it
        raise NotImplementedError(f"scale must be above 0 for a forward on GPUs, got {problem.scale}: {OWN_FORWARD}")
    asked = named_provider()
    keys = [provider.key for provider in PROVIDERS]
    if asked and asked not in keys:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(keys)}, or not set; got {asked!r}")
    reasons: list[str] = []
    for provider in PROVIDERS:
        if asked and provider.key != asked:
            continue
        reason = provider.missing() or provider.refuses(problem)
        if reason is None and not asked and provider.key not in CHECKED:
            reason = f"only by {VARIABLE}={provider.key}, because out may change with the batch"
        if reason is None:
            return provider, reasons
        reasons.append(f"{provider.key}: {reason}")
    if asked:
        others = ", ".join(key for key in keys if key != asked)
        raise NotImplementedError(f"{VARIABLE}={asked}, but {reasons[0]}. Unset it, or choose from {others}")
    raise NotImplementedError(f"no forward on GPUs for {_shape(problem)} ({'; '.join(reasons)}): {OWN_FORWARD}")


class LibraryForward:
    """The forward of a problem. Each call chooses the provider. A row that sees no key has out = 0 and lse = -inf. With
    sinks its lse is the sink."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # By the value of DASH_ATTN_FORWARD and the strides of tensors that need no copy.
        self._bound: dict[tuple[str | None, Strides, Strides, Strides], Forward] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> Result:
        run = self._bound.get((named_provider(), q.stride(), k.stride(), v.stride()))
        if run is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
            return self._copied(aligned(q), aligned(k), aligned(v), extras)
        return run(q, k, v) if extras is None else run(q, k, v, extras)

    def _copied(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None) -> Result:
        """For strides that no call had before, and for copies of tensors with an unsuitable alignment."""
        key = (named_provider(), q.stride(), k.stride(), v.stride())
        run = self._bound.get(key)
        if run is None:
            run = self._bound[key] = choose(self.problem).bound(self.problem)
        return run(q, k, v, extras)


@kept()  # the answer is small, and the problem that it is for may be large
def has_empty_rows(problem: Problem) -> bool:
    return bool(problem.mask.unseeing(problem.len_q, problem.len_k).any())


def _no_window(problem: Problem) -> str | None:
    """What the mask has beside a window and documents."""
    if problem.mask.tiles is not None:
        return "flash kernels take no tile masks"
    return None if problem.mask.rows is None else "flash kernels take no intervals row by row"


def _has_features(problem: Problem) -> str | None:
    """Which features torch's own kernels do not have."""
    asked = [name for name in ("softcap", "sinks") if getattr(problem.features, name)]
    return f"torch's kernels have no {' and no '.join(asked)}" if asked else None


def _has_negative_side(problem: Problem) -> bool:
    return any(side is not None and side < 0 for side in (problem.mask.left, problem.mask.right))


def _lengths(problem: Problem) -> list[tuple[int, int]]:
    cu = problem.mask.documents
    if cu is None:
        return [(problem.len_q, problem.len_k)]
    return [(b - a, d - c) for (a, b), (c, d) in zip(pairwise(cu.cu_q), pairwise(cu.cu_k), strict=True)]


def _shape(problem: Problem) -> str:
    return f"{problem.mask} of {problem.len_q} queries and {problem.len_k} keys"


@lru_cache(maxsize=1)
def _fa4_missing() -> str | None:
    try:
        installed = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed (pip install 'dash-attn[cuda]')"
    try:
        taken = inspect.signature(entry()).parameters
    except Exception as error:  # its compiler's modules raise various errors if versions do not fit
        # A broken installation is an error, because another forward would change the bits.
        raise NotImplementedError(
            f"flash-attn-4 {installed} is installed and cannot be imported ({error}): mend or remove it, or set "
            f"{VARIABLE}=flex"
        ) from error
    needed = {"softmax_scale", "causal", "window_size_left", "return_lse", "seqused_k", "softcap", "learnable_sink"}
    lacking = {*needed, *Packing._fields} - set(taken)
    return f"flash-attn-4 {installed} does not take {', '.join(sorted(lacking))}" if lacking else None
