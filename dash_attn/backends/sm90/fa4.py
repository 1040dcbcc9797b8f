"""The forward of FlashAttention-4, without the host time of its Python front end.

The front end chooses a tile, builds a key and looks up the compiled kernel. That takes 100 us at every call, and the
result follows from the problem, the shapes and the strides. So the first call uses the front end, and this file records
the compiled kernel and its arguments. Later calls pass new tensors to the recorded kernel. If the record is not what
this file expects, every call uses the front end.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_attn.backends.base import Extras
from dash_attn.problem import Documents, Problem

from .alignment import maker
from .cache import side_kernel
from .config import DTYPE_OF, KernelConfig
from .packing import RoomyPacking, packing_of, rows_without_keys, spread_of, unpacked
from .tables import Uploads, uploaded

TENSORS = 5  # leading arguments of a compiled kernel: q, k, v, out, lse


class Noted(NamedTuple):
    """A compiled kernel, and the arguments after the tensors, which are the same at every call.

    The sinks are an exception. They are given at every call, and stand between `others` and `behind`.
    """

    kernel: Callable[..., Any]
    others: tuple[Any, ...]
    make: Callable[[Tensor], Tensor]  # makes `out` like q
    behind: tuple[Any, ...] = ()


class Fa4Forward:
    """The forward of one problem, for tensors that have the same strides at every call."""

    def __init__(self, problem: Problem) -> None:
        mask = problem.mask
        self.problem = problem
        self.how: dict[str, Any] = {
            "softmax_scale": problem.softmax_scale,
            "causal": mask.right == 0,
            "window_size_left": mask.left,
            "window_size_right": None if mask.right == 0 else mask.right,
            "return_lse": True,
        }
        if problem.features.softcap:
            self.how["softcap"] = problem.features.softcap
        self._has_sinks = problem.features.sinks
        self._marks = blind_rows(problem) if self._has_sinks else None
        self._blind: Uploads | None = None  # these marks on the device
        packed, tokens = mask.documents is not None, problem.batch * problem.len_q
        shape = (problem.heads_q, tokens) if packed else (problem.batch, problem.heads_q, problem.len_q)
        self.lse_layout = shape, torch.empty(shape, device="meta").stride()
        self._packed: PackedForward | None = None
        self._noted: Noted | None = None
        self._can_record = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
        sinks = sinks_of(extras) if self._has_sinks else None
        documents = self.problem.mask.documents
        if documents is None:
            return self._run(q, k, v) if sinks is None else self._repaired(*self._run(q, k, v, sinks), sinks)
        packed = self._packed
        if packed is None:
            packed = self._packed = PackedForward.of(self.problem, documents, q.device)
        packed.uploads.used()
        has_batch = q.dim() == 4
        if has_batch:
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        if packed.roomy is not None:
            k, v = packed.copies(k, v)
        out, lse = self._run(q, k, v, sinks)
        blind = packed.blind
        if blind is not None:  # the kernel multiplies one tile of masked keys for them, wherever it lies
            out.masked_fill_(blind, 0.0)
            lse.masked_fill_(blind.flatten(), -math.inf)
        if sinks is not None:
            out, lse = self._repaired(out, lse, sinks)
        return unpacked(self.problem, out, lse) if has_batch else (out, lse)

    def _repaired(self, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        """lse of rows for which the kernel has none: that of the sink alone.

        The kernel sums exponentials relative to the largest score of a key. Where the sink is 89 above that score, the
        sum is infinite, and so is lse. The keys have no weight there, and out is 0. For a row without keys the kernel
        rounds the sink. A rank may call no kernel for such a row, and lse has the same bits there.
        """
        replaced = lse == math.inf
        if self._marks is not None:
            if self._blind is None:
                self._blind = Uploads(uploaded(self._marks, lse.device))
            self._blind.used()
            replaced.logical_or_(*self._blind.tensors)
        return out, torch.where(replaced, sinks[:, None], lse)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        noted = self._noted
        if noted is None:
            return self._through_front(q, k, v, sinks)
        out, lse = noted.make(q), torch.empty_strided(*self.lse_layout, dtype=torch.float32, device=q.device)
        if sinks is None:
            noted.kernel(q, k, v, out, lse, *noted.others)
        else:
            noted.kernel(q, k, v, out, lse, *noted.others, sinks.contiguous(), *noted.behind)
        return out, lse

    def _through_front(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        how = self.how if self._packed is None else self.how | self._packed.how
        if sinks is not None:
            how = how | {"learnable_sink": sinks.contiguous()}
        if not self._can_record or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            out, lse, *_ = entry()(q, k, v, **how)
            return out, lse
        with Recorder() as recorder:
            out, lse, *_ = entry()(q, k, v, **how)
        self._noted, self._can_record = recorder.note((q, k, v, out, lse), how), False
        return out, lse


def sinks_of(extras: Extras | None) -> Tensor:
    if extras is None or extras.sinks is None:
        raise ValueError("the problem has sinks, and the call has none")
    return extras.sinks


def blind_rows(problem: Problem) -> Tensor | None:
    """Marks of the queries without keys: of one sequence, or of all rows of a batch of packs. None if there is none."""
    marks = torch.from_numpy(problem.mask.unseeing(problem.len_q, problem.len_k))
    if not marks.any():
        return None
    return marks.repeat(problem.batch) if problem.is_packed else marks


class PackedForward(NamedTuple):
    """What the forward of packed documents needs beside the tensors.

    how      arguments of the library
    uploads  the tensors of `how`, `blind` and `roomy`
    blind    marks of the queries without keys, or None
    roomy    room for whole tiles of keys, or None if keys need none
    kernel   copies k and v to that room
    """

    how: dict[str, Any]
    uploads: Uploads
    blind: Tensor | None
    roomy: RoomyPacking | None
    kernel: Callable[..., Any] | None

    @staticmethod
    def of(problem: Problem, documents: Documents, device: torch.device) -> PackedForward:
        blind = rows_without_keys(documents, problem.batch, device)
        roomy = spread_of(documents, problem.batch, keys_of_a_tile(problem), device)
        if roomy is None:
            packing = packing_of(documents, problem.batch, device)
            return PackedForward(packing._asdict(), Uploads(packing.cu_seqlens_q, blind), blind, None, None)
        kernel = side_kernel("spread", KernelConfig(problem.dim, DTYPE_OF[problem.dtype], packed=True))
        how = roomy.packing._asdict() | {"seqused_k": roomy.seqused_k}
        return PackedForward(how, Uploads(roomy.pieces, blind), blind, roomy, kernel)

    def copies(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v in their room. Their rows are (tokens, heads, dim)."""
        assert self.roomy is not None and self.kernel is not None
        shape = (self.roomy.rows, *k.shape[1:])
        copies = (k.new_empty(shape), v.new_empty(shape))
        self.kernel((k, v), copies, self.roomy.pieces)
        return copies


def keys_of_a_tile(problem: Problem) -> int:
    """Keys that a tile of the library's kernel has."""
    return 144 if 64 < problem.dim <= 96 and replace(problem.mask, documents=None).is_full else 128


class Recorder:
    """Replaces the front end's table of compiled kernels, and records which kernels this thread calls, and how."""

    _lock = threading.Lock()

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __enter__(self) -> Recorder:
        self._lock.acquire()
        self._thread, self._table = threading.get_ident(), getattr(entry(), "compile_cache", None)
        if self._table is not None:
            entry().compile_cache = self  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        if self._table is not None:
            entry().compile_cache = self._table  # type: ignore[attr-defined]
        self._lock.release()

    def __contains__(self, key: object) -> bool:
        return key in self._table  # type: ignore[operator]

    def __setitem__(self, key: object, kernel: Any) -> None:
        self._table[key] = kernel  # type: ignore[index]

    def __getitem__(self, key: object) -> Callable[..., Any]:
        kernel: Callable[..., Any] = self._table[key]  # type: ignore[index]
        if threading.get_ident() != self._thread:
            return kernel

        def noting(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((kernel, (args, kwargs)))
            return kernel(*args, **kwargs)

        return noting

    def note(self, tensors: tuple[Tensor, ...], how: dict[str, Any]) -> Noted | None:
        """The recorded kernel, or None if the record is not as expected.

        Expected is one call, with these tensors first, then plain values and tensors of the caller. A tensor that the
        front end has made cannot be reused on another stream.
        """
        if len(self.calls) != 1:
            return None
        kernel, (args, kwargs) = self.calls[0]
        others, callers = args[TENSORS:], {id(value) for value in how.values()}
        sinks = how.get("learnable_sink")
        at = [i for i, x in enumerate(others) if sinks is not None and x is sinks]
        if len(at) != (sinks is not None):
            return None
        expected = (
            not kwargs
            and all(_is(given, x) for given, x in zip(args, tensors, strict=False))
            and all(x.is_contiguous() for x in tensors[3:])
            and not any(isinstance(x, Tensor) and id(x) not in callers for x in others)
        )
        if not expected or len(args) <= TENSORS:
            return None
        end = at[0] if at else len(others)
        return Noted(kernel, others[:end], maker(tensors[0]), others[end + 1 :])


def _is(given: object, x: Tensor) -> bool:
    """Whether an argument is a view of the whole tensor."""
    return (
        isinstance(given, Tensor)
        and (given.data_ptr(), given.shape, given.stride()) == (x.data_ptr(), x.shape, x.stride())
        and given.dtype == x.dtype
    )


@lru_cache(maxsize=1)
def entry() -> Callable[..., Any]:
    function: Callable[..., Any] = import_module("flash_attn.cute.interface")._flash_attn_fwd
    return function
