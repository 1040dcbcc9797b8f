"""Command-line words -> values: masks, tile grids, models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm

from dash_attn.launch import compose
from dash_attn.order import parse
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from dash_attn.program import Program
from dash_attn.simulate import Machine, Model, Paper
from dash_attn.tiling import TileShape, Tiling, tile


@dataclass(frozen=True)
class Workload:
    """What the shared options say. Tile counts give a square problem cut that finely, unless lengths are given."""

    mask: str = "full"
    q_tiles: int = 8
    kv_tiles: int = 8
    heads: int = 1
    kv_heads: int | None = None
    batch: int = 1
    seqlen: int | None = None
    tile: str = "64x128"

    def tiling(self) -> Tiling:
        """Cut into tiles."""
        if self.seqlen is not None:
            shape, length = parse_tile(self.tile), self.seqlen
        else:
            if self.q_tiles < 1 or self.kv_tiles < 1:
                raise ValueError(f"--q-tiles and --kv-tiles must be at least 1, got {self.q_tiles} and {self.kv_tiles}")
            # Twice the least common length: a diagonal tile is then partial, as it is in a real problem.
            length = 2 * lcm(self.q_tiles, self.kv_tiles)
            shape = TileShape(length // self.q_tiles, length // self.kv_tiles)
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        return tile(Problem(self.batch, self.heads, kv_heads, length, length, mask=parse_mask(self.mask)), shape)

    def program(self, policy: str, width: int | None = None) -> Program:
        """Order it; a width given apart goes with the policy's name."""
        choice = parse(policy)
        return compose(self.tiling(), choice if width is None else replace(choice, width=width))


def parse_mask(text: str) -> Mask:
    """full, causal, window:LEFT,RIGHT, documents:LENGTH,..., causal-documents:LENGTH,..."""
    kind, _, rest = text.partition(":")
    try:
        numbers = [int(x) for x in rest.split(",")] if rest else []
    except ValueError:
        raise ValueError(f"--mask {text!r}: expected whole numbers after ':'") from None
    if kind in ("full", "causal") and not rest:
        return FULL if kind == "full" else CAUSAL
    if kind == "window" and len(numbers) == 2:
        return window(*numbers)
    if kind in ("documents", "causal-documents") and numbers:
        return documents([0, *accumulate(numbers)], causal=kind.startswith("causal"))
    raise ValueError(
        f"--mask {text!r}: choose full, causal, window:LEFT,RIGHT, documents:LENGTH,... or causal-documents:LENGTH,..."
    )


def parse_tile(text: str) -> TileShape:
    """'64x128'."""
    rows, _, columns = text.partition("x")
    if not (rows.isdigit() and columns.isdigit()):
        raise ValueError(f"--tile {text!r}: expected QUERIESxKEYS, for example 64x128")
    return TileShape(int(rows), int(columns))


def parse_model(name: str, compute: float | None, reduce: float | None) -> Model:
    """The named model, with its compute and reduce times replaced where given."""
    models: dict[str, Callable[[], Model]] = {
        "paper": Paper,
        "machine": Machine,
        "h200": Machine.h200,
        "h200:64": lambda: Machine.h200(64),
    }
    if name not in models:
        raise ValueError(f"--model {name!r}: choose from {', '.join(models)}")
    base = models[name]()
    model = replace(
        base,
        compute=base.compute if compute is None else compute,
        reduce=base.reduce if reduce is None else reduce,
    )
    if model.compute <= 0 or model.reduce < 0:
        raise ValueError("--compute must be positive and --reduce not negative")
    return model
