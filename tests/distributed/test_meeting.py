"""The comparison of calls, in one process. test_ranks.py has calls of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from dash_attn.distributed import context_parallel_attention
from dash_attn.distributed.meeting import meet, refuse
from dash_attn.distributed.ranks import Ranks, ranks_of

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

WAYS = [
    lambda ranks, device: meet(ranks, "forward", {}, (4, 4), device),
    lambda ranks, device: refuse(ranks, ValueError("refused"), device),
]


@pytest.fixture
def alone() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ranks_of(None)
    dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS, ids=["meet", "refuse"])
def test_context_parallel_is_not_captured(
    way: Callable[[Ranks, torch.device], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match=r"cannot be captured in a CUDA graph.*outside of the capture"):
        way(Ranks(()), GPU)


def test_no_gpu_is_asked_for_tensors_on_a_cpu(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    q, k, v = (torch.randn(1, 32, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    context_parallel_attention(q, k, v, causal=True).sum().backward()
    assert q.grad is not None
