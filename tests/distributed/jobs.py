"""What the processes of the tests do. The functions are called by name, in processes of their own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn.distributed import context_parallel_attention, shard, tokens, unshard
from tests.distributed.pool import Groups

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """A problem. Packed if `cu` is given: then the batch is left out."""

    batch: int = 1
    lengths: tuple[int, int] = (48, 48)
    heads: tuple[int, int] = (4, 2)
    dim: int = 8
    dtype: torch.dtype = torch.bfloat16
    panels: int = 16
    arguments: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def packed(self) -> bool:
        return "cu_seqlens" in self.arguments

    @property
    def dim_of_tokens(self) -> int:
        return 0 if self.packed else 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of out."""
        noise = torch.Generator().manual_seed(self.seed)
        batch = () if self.packed else (self.batch,)
        sides = (0, 1, 1, 0)
        q, k, v, dout = (
            torch.randn((*batch, self.lengths[side], self.heads[side], self.dim), generator=noise).to(self.dtype)
            for side in sides
        )
        return q, k, v, dout

    def alone(self) -> list[Tensor]:
        """The results in one process."""
        q, k, v, dout = self.tensors()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = dash_attn.attention(*leaves, panels=self.panels, return_lse=True, **self.arguments)
        return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]


def apart(case: Case, group: Any, mode: str, layout: str) -> list[Tensor]:
    """The results on the ranks of a group, joined."""
    place = {"group": group, "layout": layout, "panels": case.panels}
    q, k, v, dout = (shard(x, dim=case.dim_of_tokens, **place) for x in case.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = context_parallel_attention(*leaves, mode=mode, return_lse=True, **place, **case.arguments)
    grads = torch.autograd.grad(out, leaves, dout)
    whole = [unshard(x, dim=case.dim_of_tokens, **place) for x in (out.detach(), *grads)]
    return [whole[0], unshard(lse, dim=-1, **place), *whole[1:]]


def differences(results: list[Tensor], expected: list[Tensor]) -> list[str]:
    """The names of the results whose bits differ."""
    return [name for name, a, b in zip(NAMES, results, expected, strict=True) if not same_bits(a, b)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """0 and -0 differ, and a NaN equals itself."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def equal_everywhere(groups: Groups, case: Case, sizes: tuple[int, ...], chunk_bytes: int) -> dict[str, list[str]]:
    """Compare every number of ranks, mode and layout with one process: the results that differ."""
    tokens.CHUNK_BYTES = chunk_bytes
    expected = case.alone() if 1 in groups else []
    wrong: dict[str, list[str]] = {}
    places: list[tuple[str, Any, tuple[str, ...]]] = [
        (f"{size} ranks", groups[size], ("a2a", "all_gather")) for size in sizes if size in groups
    ]
    places += [(f"mesh {shape}", mesh, ("auto",)) for shape, mesh in meshes(groups, case).items()]
    for name, group, modes in places:
        for mode in modes:
            for layout in ("zigzag", "contiguous"):
                results = apart(case, group, mode, layout)
                if expected and (differ := differences(results, expected)):
                    wrong[f"{name}, {mode}, {layout}"] = differ
    return wrong


def meshes(groups: Groups, case: Case) -> dict[tuple[int, int], DeviceMesh]:
    """Meshes over all processes, (tokens, heads), whose second dimension divides the kv heads."""
    size = max(groups)
    shapes = [(size // ways, ways) for ways in (2, 4) if size > ways and case.heads[1] % ways == 0]
    return {shape: mesh_of(shape) for shape in shapes}


@lru_cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def own_arguments(groups: Groups, calls: list[list[dict[str, Any]]], size: int) -> list[str]:
    """Each rank calls with its own arguments: the errors of this rank."""
    said = list[str]()
    if size not in groups:
        return said
    group, case = groups[size], Case()
    for arguments in calls:
        mine = dict(arguments[group.rank()])
        dtype, rows, layout = mine.pop("dtype", case.dtype), mine.pop("rows", None), mine.get("layout", "zigzag")
        q, k, v, _ = (shard(x.to(dtype), group=group, dim=1, layout=layout) for x in case.tensors())
        try:
            context_parallel_attention(q[:, :rows], k, v, group=group, **mine)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("no error")
    return said


def die_or_wait(groups: Groups, where: str) -> tuple[str, float]:
    """The last rank dies before the forward or before the backward: the error of the others, and after how long."""
    case, size = Case(arguments={"causal": True}), max(groups)
    q, k, v, dout = (shard(x, dim=1) for x in case.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dies = torch.distributed.get_rank() == size - 1
    context_parallel_attention(*leaves, mode="all_gather", causal=True)
    begin = time.monotonic()
    try:
        if dies and where == "forward":
            os._exit(1)
        out = context_parallel_attention(*leaves, mode="all_gather", causal=True)
        if dies:
            os._exit(1)
        out.backward(dout)
    except RuntimeError as error:
        assert all(x.grad is None for x in leaves)
        return type(error).__name__, time.monotonic() - begin
    return "no error", time.monotonic() - begin


def in_training(groups: Groups, way: str, mode: str) -> list[str]:
    """Gradients of one use of attention, in a way that training uses it, against the plain way."""
    case = Case(arguments={"causal": True}, heads=(4, 4))
    q, k, v, dout = (shard(x, dim=1) for x in case.tensors())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, causal=True, mode=mode)

    def gradients(function: Any, times: int = 1) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        for _ in range(times):
            out = function(*leaves)
            out.backward(dout)
        return [out.detach(), *[leaf.grad for leaf in leaves]]

    plain = gradients(attend)
    if way == "checkpoint":
        other = gradients(lambda *x: checkpoint(attend, *x, use_reentrant=False))
    elif way == "compile":
        other = gradients(torch.compile(attend, fullgraph=True, backend="aot_eager"))
    else:
        other = gradients(attend, 2)
        plain = [plain[0], *[x + x for x in plain[1:]]]
    return [name for name, a, b in zip(("out", "dq", "dk", "dv"), plain, other, strict=True) if not same_bits(a, b)]
