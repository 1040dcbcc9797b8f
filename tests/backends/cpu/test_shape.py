"""The tile shape of a tile mask."""

from __future__ import annotations

import math
import resource

import pytest
import torch

import dash_attn
from dash_attn.backends.cpu.shape import tile_shape
from dash_attn.problem import Problem, tiles
from dash_attn.tiling import TileShape


def shape_of(cell: int, length: int) -> TileShape:
    cells = -(-length // cell)
    return tile_shape(Problem(1, 1, 1, length, length, 16, mask=tiles([[1] * cells] * cells, cell, cell)))


def of_one_head(mask: dash_attn.Mask, tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 1, 8, requires_grad=True) for _ in range(3))
    out = dash_attn.attention(q, k, v, mask=mask)
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]


@pytest.mark.parametrize("cell", [50021, 65537, 30000001, 2**31 - 1])
@pytest.mark.parametrize("tokens", [8, 300])
def test_a_cell_larger_than_the_sequence_costs_no_memory(cell: int, tokens: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = of_one_head(tiles([[1]], cell, cell), tokens)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB
    assert all(torch.equal(a, b) for a, b in zip(got, of_one_head(dash_attn.FULL, tokens), strict=True))


@pytest.mark.parametrize(("cell", "length"), [(64, 50), (100, 100), (293, 290), (1021, 1000), (600, 590), (265, 530)])
def test_a_cell_with_a_near_divisor_is_tiled_by_it(cell: int, length: int) -> None:
    """Another tile would have other bits."""
    divisors = [d for d in range(1, cell + 1) if cell % d == 0]
    near = min(divisors, key=lambda divisor: abs(math.log(divisor / 256)))
    assert shape_of(cell, length) == TileShape(near, near)


def test_a_cell_without_a_near_divisor_is_tiled_as_no_cell() -> None:
    assert shape_of(2053, 2000) == shape_of(131074, 2000) == TileShape(256, 256)
    assert shape_of(2053, 2053) == TileShape(512, 512)
    assert shape_of(2053, 3000) == TileShape(2053, 2053)  # of two cells
