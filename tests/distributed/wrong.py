"""Calls that are wrong, on all ranks or on one. The functions are called by name, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from dash_attn.distributed import context_parallel_attention, explain, shard, unshard
from tests.distributed.jobs import Case
from tests.distributed.pool import Groups


def error_of(function: Callable[..., object], *arguments: Any, **others: Any) -> str:
    """The error of a call, with its type."""
    try:
        function(*arguments, **others)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def on_meshes(groups: Groups, meshes: Sequence[Any]) -> list[list[str]]:
    """For each mesh the errors of the functions that take one."""
    return [_on_mesh(DeviceMesh("cpu", ranks)) for ranks in meshes]


def _on_mesh(mesh: DeviceMesh) -> list[str]:
    q, k, v, _ = (x[:, :12] for x in Case().tensors())  # as many tokens as each of four ranks has
    return [
        error_of(shard, q, group=mesh, dim=1),
        error_of(unshard, q, group=mesh, dim=1),
        error_of(context_parallel_attention, q, k, v, group=mesh),
        error_of(explain, q, k, v, group=mesh),
    ]


def on_a_mesh_and_on_its_dimension(groups: Groups) -> list[str]:
    """The first of two ranks gives a mesh, the other one its last dimension, which has the same ranks: the errors."""
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("tokens", "heads"))
    if 2 not in groups:
        return []
    group, (q, k, v, _) = mesh["heads"] if groups[2].rank() else mesh, (x[:, :24] for x in Case().tensors())
    return [
        error_of(unshard, q, group=group, dim=1),
        error_of(context_parallel_attention, q, k, v, group=group),
        error_of(explain, q, k, v, group=group),
    ]


def on_one_rank(groups: Groups, calls: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The last of two ranks has some arguments of its own: the errors of attention and explain."""
    if 2 not in groups:
        return []
    group, (q, k, v, _) = groups[2], (x[0, :24] for x in Case().tensors())
    right = {"q": q, "k": k, "v": v, "cu_seqlens": [0, 20, 48], "group": group}
    mine = [right | (call if group.rank() else {}) for call in calls]
    return [[error_of(f, **arguments) for f in (context_parallel_attention, explain)] for arguments in mine]


def second_derivative_on_one_rank(groups: Groups, mode: str) -> list[str]:
    """The last of two ranks gives create_graph: the errors of the backward, and of a right call after it."""
    if 2 not in groups:
        return []
    group, (q, k, v, dout) = groups[2], (x[:, :24] for x in Case().tensors())
    q.requires_grad_()

    def step(create_graph: bool) -> None:
        out = context_parallel_attention(q, k, v, group=group, mode=mode)
        torch.autograd.grad(out, q, dout, create_graph=create_graph)

    return [error_of(step, group.rank() == 1), error_of(step, False)]


def unshard_on_one_rank(groups: Groups, calls: Sequence[dict[str, Any]]) -> list[str]:
    """The same for `unshard`."""
    if 2 not in groups:
        return []
    group, right = groups[2], {"x": torch.zeros(4, 4), "dim": 0}
    return [error_of(unshard, **right | (call if group.rank() else {}), group=group) for call in calls]


def shard_of_nothing(groups: Groups) -> str:
    """The error of a tensor without dimensions."""
    return error_of(shard, torch.tensor(1.0), dim=0)


def other_calls_on_one_rank(groups: Groups, mode: str) -> dict[str, list[str]]:
    """The last of two ranks leaves a backward out, makes another call, or runs two backwards in another order.

    The backwards that it leaves out are also those of checkpoints, which begin with another forward.

    For each of these: the error of this rank, and that of a right call after it.
    """
    if 2 not in groups:
        return {}
    group, (q, k, v, dout) = groups[2], (x[:, :24] for x in Case().tensors())
    is_other = group.rank() == 1

    def leaves() -> list[torch.Tensor]:
        return [x.clone().requires_grad_() for x in (q, k, v)]

    def forward_of(*x: torch.Tensor) -> torch.Tensor:
        return context_parallel_attention(*x, group=group, mode=mode, causal=True)

    def forward() -> torch.Tensor:
        return forward_of(*leaves())

    def checkpointed(is_reentrant: bool) -> torch.Tensor:
        return checkpoint(forward_of, *leaves(), use_reentrant=is_reentrant)

    def step() -> None:
        forward().backward(dout)

    def checkpointed_step() -> None:
        checkpointed(False).backward(dout)

    def after_checkpoint() -> None:
        out = checkpointed(False)
        step() if is_other else out.backward(dout)

    def after_reentrant_checkpoint() -> None:
        out = checkpointed(True)
        step() if is_other else out.backward(dout)

    def between_checkpoints() -> None:
        out = checkpointed(False)
        checkpointed_step() if is_other else out.backward(dout)

    def without_backward() -> None:
        out = forward()
        if not is_other:
            out.backward(dout)
        step()

    def explained() -> None:
        explain(q, k, v, group=group, mode=mode) if is_other else step()

    def gathered() -> None:
        unshard(q, group=group, dim=1) if is_other else step()

    def in_another_order() -> None:
        outs = [forward() for _ in range(2)]
        for out in reversed(outs) if is_other else outs:
            out.backward(dout)

    def checkpoints_in_another_order() -> None:
        outs = [checkpointed(False) for _ in range(2)]
        for out in reversed(outs) if is_other else outs:
            out.backward(dout)

    checkpoints = (checkpoints_in_another_order, after_checkpoint, after_reentrant_checkpoint, between_checkpoints)
    wrong = (without_backward, *checkpoints, explained, gathered, in_another_order)
    return {each.__name__: [error_of(each), error_of(step)] for each in wrong}
