"""How ranks compare their calls, in one process: where the numbers travel, what is computed once, what is refused.

test_ranks.py has calls of several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dash_attn.distributed import context_parallel_attention, meeting, ranks
from dash_attn.distributed.meeting import meet, refuse
from dash_attn.distributed.ranks import Axis, Ranks, ranks_of

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


WAYS = [
    lambda ranks: meet(ranks, "forward", {}, (4, 4), GPU),
    lambda ranks: refuse(ranks, ValueError("refused"), torch.empty(0)),
]


@pytest.fixture
def alone() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ranks_of(None)
    dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS, ids=["meet", "refuse"])
def test_context_parallel_is_not_captured(
    way: Callable[[Ranks], object], alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group serves the CPU, so the numbers travel there, whatever device the tensors are on."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match=r"cannot be captured in a CUDA graph.*outside of the capture"):
        way(alone)


def test_a_process_without_a_gpu_asks_for_none(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    q, k, v = (torch.randn(1, 32, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    context_parallel_attention(q, k, v, causal=True).sum().backward()
    assert q.grad is not None
