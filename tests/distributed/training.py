"""Attention over ranks as training uses it, and tensors cut and joined.

The functions are called by name, in processes of their own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dash_attn.distributed import context_parallel_attention, shard, unshard
from dash_attn.distributed.layout import LAYOUTS
from tests.distributed.jobs import Case, same_bits
from tests.distributed.pool import Groups


def in_training(groups: Groups, way: str, mode: str, size: int) -> list[str] | None:
    """Gradients of one use of attention, in a way that training uses it, against the plain way."""
    if size not in groups:
        return None
    case, group = Case(arguments={"causal": True}, heads=(4, 4)), groups[size]
    q, k, v, dout = (shard(x, group=group, dim=1) for x in case.tensors())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, group=group, causal=True, mode=mode)

    def gradients(function: Any, times: int = 1) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        for _ in range(times):
            out = function(*leaves)
            out.backward(dout if out.ndim else None)
        return [out.detach(), *[leaf.grad for leaf in leaves]]

    plain = gradients(attend)
    if way == "strides":  # inputs that are slices of one tensor, and a gradient that is one number
        plain = gradients(lambda *x: attend(*x).sum())
        other = gradients(lambda *x: attend(*torch.stack(x, 2).unbind(2)).sum())
    elif way == "late":  # the other ranks wait
        time.sleep(group.rank())
        other = gradients(attend)
    elif way == "checkpoint":
        other = gradients(lambda *x: checkpoint(attend, *x, use_reentrant=False))
    elif way == "checkpoint reentrant":
        other = gradients(lambda *x: checkpoint(attend, *x, use_reentrant=True))
    elif way == "compile checkpoint":
        recomputed = torch.compile(lambda *x: checkpoint(attend, *x, use_reentrant=False), backend="aot_eager")
        other = gradients(recomputed)
    elif way == "compile":
        other = gradients(torch.compile(attend, fullgraph=True, backend="aot_eager"))
    elif way == "inductor":

        def halved(*x: Tensor) -> Tensor:
            return attend(*x).relu() * 0.5  # inductor makes one loop of what follows, which rounds nothing

        plain, other = gradients(halved), gradients(torch.compile(halved, fullgraph=True))
    elif way == "compile dynamic":
        torch._dynamo.reset()  # it would take the code of "compile"
        other = gradients(torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True))
    elif way == "compile lse":

        def loss(*x: Tensor) -> Tensor:
            out, lse = context_parallel_attention(*x, group=group, causal=True, mode=mode, return_lse=True)
            return (out * dout).sum() + lse.square().sum()

        plain, other = gradients(loss), gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"))
    else:
        other = gradients(attend, 2)
        plain = [plain[0], *[x + x for x in plain[1:]]]
    return [name for name, a, b in zip(("out", "dq", "dk", "dv"), plain, other, strict=True) if not same_bits(a, b)]


KINDS = "bool uint8 int8 int16 uint16 int32 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2"


def shared_memory(groups: Groups) -> list[str]:
    """The cuts by `shard` whose parts lie in the memory of the whole tensor, or in more memory than they need."""
    x = torch.arange(6 * 48.0).view(6, 48)
    wrong = list[str]()
    for size, group in groups.items():
        for layout in LAYOUTS:
            for whole, dim in ((x, 1), (x.t(), 0), (x[:, 0].contiguous(), 0), (x.t().contiguous(), 0)):
                part = shard(whole, group=group, dim=dim, layout=layout)
                memory = part.untyped_storage()
                if memory.data_ptr() == whole.untyped_storage().data_ptr() or memory.nbytes() > part.nbytes:
                    wrong.append(f"{size} ranks, {layout}, {tuple(whole.shape)}")
    return wrong


def kinds_that_change(groups: Groups) -> list[str]:
    """The dtypes that do not come back from `shard` and `unshard` as they were."""
    wrong = list[str]()
    for kind in KINDS.split():
        for shape, dim in (((2, 37), -1), ((37,), 0), ((0, 3), 0), ((48, 3, 2), 0)):
            x = torch.arange(torch.Size(shape).numel()).view(shape).to(getattr(torch, kind))
            back = unshard(shard(x, dim=dim), dim=dim)
            if (back.dtype, back.shape) != (x.dtype, x.shape) or not torch.equal(
                back.flatten().view(torch.uint8), x.flatten().view(torch.uint8)
            ):
                wrong.append(f"{kind} {shape}")
    return wrong
