"""Small tiles on the CPU: the panels of a short sequence have several tiles, so their sums have an order.

The functions are called by name, in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.distributed import ops, tokens
from dash_attn.kept import _growing_caches
from dash_attn.prepare import prepare, prepare_panels
from dash_attn.tiling import TileShape
from tests.distributed.pool import Groups


@contextmanager
def tiled(shape: TileShape) -> Iterator[None]:
    """Backwards on the CPU have tiles of this shape, in this process."""
    usual = CpuBackend.tile_shape
    CpuBackend.tile_shape = lambda self, problem: shape  # type: ignore[method-assign]
    forget()
    try:
        yield
    finally:
        CpuBackend.tile_shape = usual  # type: ignore[method-assign]
        forget()


def forget() -> None:
    """What is kept has been planned with the tiles of its time."""
    for cache in tuple(_growing_caches):
        cache.clear()


def with_tiles(groups: Groups, shape: TileShape, job: Callable[..., Any], *arguments: object) -> Any:
    """Another job, with tiles of this shape."""
    with tiled(shape):
        return job(groups, *arguments)


@contextmanager
def disordered(policy: str) -> Iterator[None]:
    """On this rank `auto` is this policy: for the whole sequences that a rank holds, and for single panels."""

    def instead(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: make(*(policy if x == "auto" else x for x in given))

    ops._call.cache_clear()
    ops.prepare, tokens.prepare_panels = instead(prepare), instead(prepare_panels)  # type: ignore[assignment]
    try:
        yield
    finally:
        ops.prepare, tokens.prepare_panels = prepare, prepare_panels
        ops._call.cache_clear()
