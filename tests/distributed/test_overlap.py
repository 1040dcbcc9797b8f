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
from dash_attn.distributed.stages import Stage
from dash_attn.distributed.tokens import Tokens
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents

CPU = torch.device("cpu")


@dataclass
class Links:
    """One of four ranks, without the others, which send zeros. The order of all that happens is written down."""

    log: list[str] = field(default_factory=list)
    size: int = 4
    number: int = 0
    is_part: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def all_gather(self, x: Tensor) -> Any:
        return self._under_way("keys", torch.stack([x, *[torch.zeros_like(x)] * 3]))

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

    def watched(self: Tokens, chunk: tokens.Chunk, stage: Stage) -> Any:
        held = held_of(self, chunk, stage)

        class Watched:
            fold = staticmethod(held.fold)

            def __getattr__(self, name: str) -> Any:
                links.log.append(f"head {chunk.k.start} panels {', '.join(map(str, stage.numbers))}")
                return getattr(held, name)

        return Watched()

    monkeypatch.setattr(tokens, "CHUNK_BYTES", 1)
    monkeypatch.setattr(Tokens, "_held", watched)
    return links


def operands(heads: int) -> Operands:
    noise = torch.Generator().manual_seed(0)
    q = torch.randn((1, 16, heads, 8), generator=noise)
    return Operands(q, q, q, q, q, torch.zeros(1, heads, 16))


def on_four(heads: int, links: Links, layout: str = "zigzag", mask: Mask = CAUSAL) -> Tokens:
    problem = Problem(1, heads, heads, 64, 64, 8, "float32", mask=mask, panels=8)
    return Tokens(prepare(problem, "auto", Options(), CPU), links, Layout(layout, 4, 8))  # type: ignore[arg-type]


# Each rank has an early and a late panel. Early keys travel first.
FIRST = ("head 0 panels 0", "wait keys 0", "wait keys 1", "head 0 panels 1")  # its early panel sees its own keys alone
SECOND = ("wait keys 0", "head 0 panels 0", "wait keys 1", "head 0 panels 1")
LAST = ("wait keys 0", "head 0 panels 0, 1", "wait keys 1")  # it has the first of the late keys


@pytest.mark.parametrize(("rank", "first"), [(0, FIRST), (1, SECOND), (2, SECOND), (3, LAST)])
def test_panels_start_when_their_keys_are_there(links: Links, rank: int, first: tuple[str, ...]) -> None:
    links.number = rank
    on_four(3, links).forward(*operands(3).qkv)
    assert links.log == [
        *("start keys 0", "start keys 1", "start keys 2", "start keys 3", *first),
        *("start keys 4", "start keys 5", "wait keys 2", "wait keys 3", "head 1 panels 0, 1"),
        *("wait keys 4", "wait keys 5", "head 2 panels 0, 1"),
    ]


def test_the_sums_of_the_heads_before_travel_while_a_rank_computes(links: Links) -> None:
    on_four(3, links).backward(operands(3))
    assert links.log == [
        *("start keys 0", "start keys 1", "start keys 2", "start keys 3", *FIRST, "start sums 0"),
        *("start keys 4", "start keys 5", "wait keys 2", "wait keys 3", "head 1 panels 0, 1"),
        *("wait sums 0", "start sums 1", "wait keys 4", "wait keys 5", "head 2 panels 0, 1"),
        *("wait sums 1", "start sums 2", "wait sums 2"),
    ]


def test_with_one_kv_head_late_keys_travel_while_a_rank_computes(links: Links) -> None:
    links.number = 1
    on_four(1, links).backward(operands(1))
    assert links.log == ["start keys 0", "start keys 1", *SECOND, "start sums 0", "wait sums 0"]


@pytest.mark.parametrize(("layout", "mask"), [("zigzag", FULL), ("contiguous", CAUSAL)])
def test_keys_travel_together_if_no_panel_could_start_early(links: Links, layout: str, mask: Mask) -> None:
    """The last rank of the layout `contiguous` has most to compute, and waits for all keys."""
    links.number = 3
    on_four(1, links, layout, mask).forward(*operands(1).qkv)
    assert links.log == ["start keys 0", "wait keys 0", "head 0 panels 0, 1"]


def test_documents_on_one_rank_wait_for_no_keys(links: Links) -> None:
    """Two documents lie on the first rank whole. The third lies on all ranks."""
    on_four(1, links, mask=documents([0, 3, 8, 64])).forward(*operands(1).qkv)
    assert links.log == [
        *("start keys 0", "start keys 1", "head 0 panels 0, 1", "wait keys 0", "wait keys 1", "head 0 panels 2")
    ]
