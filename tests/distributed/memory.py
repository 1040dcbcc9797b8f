"""What attention over ranks really allocates, and what it says to strict torch.

The functions are called by name, in processes of their own.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dash_attn.api.arguments import Arguments
from dash_attn.api.extras import Given
from dash_attn.backends import Operands
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.distributed import context_parallel_attention, explain, ops, shard, tokens
from dash_attn.distributed.attention import Sharing, terms_of
from dash_attn.distributed.explanation import RankExplanation
from dash_attn.distributed.ops import Around, Asks, Shape, agreed
from dash_attn.distributed.ranks import ranks_of
from dash_attn.distributed.tokens import Tokens
from dash_attn.prepare import prepare
from tests.distributed.jobs import Case, mesh_of
from tests.distributed.pool import Groups

# The innermost of these functions says what a tensor is for.
PURPOSES = {
    "_start": "gathered",
    "after": "gathered",
    "key_sums": "sums",
    "_summed": "sums",
    "replay": "workspace",
    "fill": "workspace of the forward",
}
PATIENCE = 10  # milliseconds


class Live(TorchDispatchMode):
    """Counts the bytes that are allocated at the same time, at most, for each purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.most = Counter[str]()
        self._alive: dict[int, tuple[StorageWeakRef, str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self._sweep()  # before the result is entered: it may have the place of a storage that is gone
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), purpose(), storage.nbytes()
        self._count()
        return result

    def _sweep(self) -> None:
        self._alive = {place: each for place, each in self._alive.items() if not each[0].expired()}

    def _count(self) -> None:
        if self._is_more():
            gc.collect()  # objects that refer to each other may keep the buffers of the panel before
            self._sweep()
            for _ in range(PATIENCE):
                if not self._is_more():
                    return
                time.sleep(1e-3)  # a thread of gloo may still hold a tensor that it has sent
                self._sweep()
            self.most |= self._now()

    def _is_more(self) -> bool:
        now = self._now()
        return any(now[name] > self.most[name] for name in now)

    def _now(self) -> Counter[str]:
        now = Counter[str]()
        for _, name, size in self._alive.values():
            now[name] += size
        return now


def purpose() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in PURPOSES:
            return PURPOSES[frame.f_code.co_name]
        frame = frame.f_back  # type: ignore[assignment]
    return "other"


def strict(groups: Groups, case: Case, mode: str, size: int) -> list[str]:
    """The errors of a backward without order on a device that has one, if all ranks are strict, and if one is."""
    said = list[str]()
    if size not in groups:
        return said
    group = groups[size]
    q, k, v, dout = (shard(x, group=group, dim=1) for x in case.tensors())
    CpuBackend.always_deterministic = False  # as on a GPU
    try:
        for ranks in (range(size), range(1)):
            out = context_parallel_attention(q.requires_grad_(), k, v, group=group, mode=mode, deterministic=False)
            torch.use_deterministic_algorithms(group.rank() in ranks)
            try:
                out.backward(dout)
            except (RuntimeError, ValueError) as error:
                said.append(str(error))
            torch.use_deterministic_algorithms(False)
    finally:
        CpuBackend.always_deterministic = True
        ops._call.cache_clear()
        prepare.cache_clear()
    return said


class Measured(NamedTuple):
    """What `explain` says, and bytes: of each purpose in forward and backward, at most, and of the results.

    `part` is the largest result that is copied into another one: that of one stage with some heads.
    """

    said: RankExplanation
    most: dict[str, int]
    results: int
    part: int


def measured(groups: Groups, case: Case, mode: str, chunk_bytes: int) -> Measured:
    """A forward and a backward of the attention over tokens. The tensors of the call are there before."""
    tokens.CHUNK_BYTES = chunk_bytes
    group = mesh_of((max(groups) // 2, 2)) if mode == "a2a+all_gather" else groups[max(groups)]
    q, k, v, dout = (shard(x, group=group, dim=1, panels=case.panels) for x in case.tensors())
    said = explain(q, k, v, group=group, mode=mode, panels=case.panels, **case.arguments)
    asked = Arguments(**case.arguments, panels=case.panels)
    terms, _ = terms_of(q, k, v, asked, Given(0.0, None, None, None), Sharing(ranks_of(group), mode, "zigzag"))
    call, _ = agreed(
        Shape.of(q, k, v, 1), (q.shape[1], k.shape[1]), Around(None, None, None, None), terms, Asks("forward")
    )
    q, dout, k, v = (heads.spread(x)() for heads, x in ((call.q, q), (call.q, dout), (call.k, k), (call.k, v)))
    gc.collect()
    gc.freeze()  # the objects of all loaded modules, which would take seconds to look at
    with Live() as live:
        out, lse = call.tokens.forward(q, k, v)
        grads = call.tokens.backward(Operands(dout, q, k, v, out, lse))
    gc.unfreeze()
    results = sum(x.nbytes for x in (out, lse, *grads))
    return Measured(said, dict(live.most), results, part_bytes(call.tokens, out))


def part_bytes(own: Tokens, out: Tensor) -> int:
    """Of the largest part of out. 0 if out comes in one part."""
    chunks = tokens.chunks_of(own.whole.problem)
    if own.is_local or (len(chunks) == 1 and len(own.stages) == 1):
        return 0
    stages = own.at_once if len(chunks) > 1 else own.stages
    rows = max(sum(end - begin for begin, end in stage.rows) for stage in stages)
    return rows * chunks[0].heads[0] * out.shape[3] * out.element_size()
