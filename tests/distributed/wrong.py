"""Calls that are wrong, on all ranks or on one. The functions are called by name, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dash_attn.distributed import context_parallel_attention, explain, shard, unshard
from tests.distributed.jobs import Case
from tests.distributed.pool import Groups


def error_of(call: Callable[[], object]) -> str:
    """The error of a call, with its type."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def on_meshes(groups: Groups, meshes: Sequence[Any]) -> list[list[str]]:
    """For each mesh the errors of the functions that take one."""
    return [_on_mesh(DeviceMesh("cpu", ranks)) for ranks in meshes]


def _on_mesh(mesh: DeviceMesh) -> list[str]:
    q, k, v, _ = (x[:, :12] for x in Case().tensors())  # as many tokens as each of four ranks has
    return [
        error_of(lambda: shard(q, group=mesh, dim=1)),
        error_of(lambda: unshard(q, group=mesh, dim=1)),
        error_of(lambda: context_parallel_attention(q, k, v, group=mesh)),
        error_of(lambda: explain(q, k, v, group=mesh)),
    ]
