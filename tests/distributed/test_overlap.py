"""What the ranks wait for, and what they compute meanwhile: docs/distributed.md says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn.backends import Operands, Options
from dash_attn.distributed import tokens
from dash_attn.distributed.layout import Layout
from dash_attn.distributed.tokens import Tokens
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, Problem

CPU = torch.device("cpu")


@dataclass
class Links:
    """The first of two ranks, without the second: it gets zeros. The order of all that happens is written down."""

    log: list[str] = field(default_factory=list)
    size: int = 2
    number: int = 0
    is_part: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def all_gather(self, x: Tensor) -> Any:
        return self._under_way("keys", torch.stack([x, torch.zeros_like(x)]))

    def exchange(self, sent: Tensor, sizes: list[int], expected: list[int]) -> Any:
        return self._under_way("sums", sent.new_zeros(sum(expected)))

    def _under_way(self, name: str, parts: Tensor) -> Any:
        name = f"{name} {self.counts.setdefault(name, 0)}"
        self.counts[name.split()[0]] += 1
        self.log.append(f"start {name}")

        def arrival() -> Tensor:
            self.log.append(f"wait {name}")
            return parts

        return arrival


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Links:
    """Each kv head is gathered by itself."""
    links, held_of = Links(), Tokens._held

    def watched(self: Tokens, chunk: tokens.Chunk) -> Any:
        held = held_of(self, chunk)

        class Watched:
            fold = staticmethod(held.fold)

            def __getattr__(self, name: str) -> Any:
                links.log.append(f"compute {chunk.k.start}")
                return getattr(held, name)

        return Watched()

    monkeypatch.setattr(tokens, "CHUNK_BYTES", 1)
    monkeypatch.setattr(Tokens, "_held", watched)
    return links


def operands(heads: int) -> Operands:
    noise = torch.Generator().manual_seed(0)
    q = torch.randn((1, 32, heads, 8), generator=noise)
    return Operands(q, q, q, q, q, torch.zeros(1, heads, 32))


def on_two(heads: int, links: Links) -> Tokens:
    problem = Problem(1, heads, heads, 64, 64, 8, "float32", mask=CAUSAL, panels=4)
    return Tokens(prepare(problem, "auto", Options(), CPU), links, Layout("zigzag", 2, 4))  # type: ignore[arg-type]


def test_the_next_heads_travel_while_a_rank_computes(links: Links) -> None:
    on_two(3, links).forward(*operands(3)[1:4])
    assert links.log == [
        *("start keys 0", "start keys 1", "wait keys 0", "compute 0"),
        *("start keys 2", "wait keys 1", "compute 1"),
        *("wait keys 2", "compute 2"),
    ]


def test_the_sums_of_the_heads_before_travel_while_a_rank_computes(links: Links) -> None:
    on_two(3, links).backward(operands(3))
    assert links.log == [
        *("start keys 0", "start keys 1", "wait keys 0", "compute 0", "start sums 0"),
        *("start keys 2", "wait keys 1", "compute 1", "wait sums 0", "start sums 1"),
        *("wait keys 2", "compute 2", "wait sums 1", "start sums 2", "wait sums 2"),
    ]


def test_with_one_kv_head_nothing_overlaps(links: Links) -> None:
    on_two(1, links).backward(operands(1))
    assert links.log == ["start keys 0", "wait keys 0", "compute 0", "start sums 0", "wait sums 0"]
