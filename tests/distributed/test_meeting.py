"""How ranks compare their calls: where the numbers travel, and what is computed once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dash_attn.distributed import meeting, ranks
from dash_attn.distributed.ranks import Axis, Ranks

CPU, GPU, META = torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")


@pytest.mark.parametrize(
    ("served", "places", "expected"),
    [
        ([["cpu", "cuda"]], [GPU], CPU),
        ([["cuda", "cpu"], ["cpu"]], [GPU], CPU),
        ([["cpu"]], [], CPU),
        ([["cuda"]], [GPU, CPU], GPU),
        ([["cuda"]], [CPU, META, GPU], GPU),
        ([["cpu", "cuda"], ["cuda"]], [GPU], GPU),
        ([["cuda"]], [CPU], torch.device("cuda")),
        ([["cuda"]], [], torch.device("cuda")),
    ],
)
def test_numbers_travel_on_the_cpu_if_every_group_serves_it(
    monkeypatch: pytest.MonkeyPatch, served: list[list[str]], places: list[torch.device], expected: torch.device
) -> None:
    """The groups decide, and not the tensors of a rank: all ranks must decide alike."""
    groups = [SimpleNamespace(_device_types=list(map(torch.device, kinds))) for kinds in served]
    monkeypatch.setattr(ranks, "_group", lambda name: groups[int(name)])
    axes = tuple(Axis(str(number), (0, 1), 0, 2) for number in range(len(groups)))
    assert Ranks(axes).device(*places) == expected


def test_boundaries_are_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, digest_of = list[object](), meeting._digest_of
    monkeypatch.setattr(meeting, "_digest_of", lambda value: (counted.append(value), digest_of(value))[1])
    first = meeting._digest(tuple(range(0, 50_000, 7)))
    assert first == meeting._digest(tuple(range(0, 50_000, 7)))
    assert len(counted) == 1
    assert first != meeting._digest(tuple(range(0, 50_010, 7)))


def test_values_that_are_equal_but_not_alike_have_different_digests() -> None:
    assert len({meeting._digest(value) for value in (1, True, 1.0, "1", None)}) == 5
