"""Ranks as threads of one process have the bits of one call. tests/backends/sm90/test_gpu_held.py has them on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dash_attn.distributed.ranks import Ranks
from dash_attn.tiling import TileShape
from tests.distributed.jobs import Case, differences
from tests.distributed.threads import Grid, apart, on_ranks
from tests.distributed.tiles import tiled

PLACES: list[tuple[Grid, str]] = [((size,), mode) for size in (1, 2, 4, 8) for mode in ("all_gather", "a2a")]
PLACES += [((size // 2, 2), "a2a+all_gather") for size in (2, 4, 8)]

ALONE, TOGETHER = 1, 2**30  # bytes of a chunk: each kv head is gathered by itself, or all of them together

# 16 ranges of 11 tokens, in tiles of 4 x 16: sums have several addends.
CAUSAL = Case(lengths=(176, 176), heads=(4, 2), arguments={"causal": True})
PACK = [0, 5, 44, 54, 54, 150, 176]
CASES = {
    "causal": CAUSAL,
    "two sequences, lse": replace(CAUSAL, batch=2, with_lse=True, dtype=torch.bfloat16),
    "unequal lengths": replace(CAUSAL, lengths=(130, 176), arguments={"window": (40, 0)}),
    "pack": replace(CAUSAL, arguments={"causal": True, "cu_seqlens": PACK}),
    "features": replace(
        CAUSAL,
        heads=(8, 4),
        arguments={"causal": True, "softcap": 2.0, "sinks": torch.linspace(-1, 2, 8), "dropout": 0.2, "seed": 3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_in_threads_have_the_bits_of_one_process(name: str) -> None:
    case = CASES[name]
    with tiled(TileShape(4, 16)):
        expected = case.alone()
        for grid, mode in PLACES:
            for layout, chunk_bytes in (("zigzag", ALONE), ("zigzag", TOGETHER), ("contiguous", ALONE)):
                results = apart(case, grid, mode, layout, chunk_bytes)
                assert differences(results, expected) == [], (grid, mode, layout, chunk_bytes)


def test_other_panels_have_other_bits() -> None:
    """The control: the comparison above can fail."""
    expected = CAUSAL.alone()
    assert {"dk", "dv"} <= set(differences(apart(replace(CAUSAL, panels=8), (4,), "all_gather"), expected))


def test_an_error_of_one_rank_ends_all_threads() -> None:
    def job(ranks: Ranks) -> None:
        if ranks.number == 2:
            raise ValueError("no memory")
        ranks.all_gather(torch.zeros(3))

    with pytest.raises(ValueError, match="no memory"):
        on_ranks((4,), job)


def test_what_has_not_arrived_is_no_number() -> None:
    def job(ranks: Ranks) -> list[bool]:
        (axis,) = ranks.axes
        arrival = axis.all_gather(torch.full((3,), float(ranks.number)))
        seen = [cell.cell_contents for cell in arrival.__closure__ or ()]
        (early,) = [x.clone() for x in seen if isinstance(x, torch.Tensor)]
        return [bool(early.isnan().all()), arrival().tolist() == [[0.0] * 3, [1.0] * 3]]

    assert on_ranks((2,), job) == [[True, True]] * 2
