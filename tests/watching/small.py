"""A small GPT, its training loop, and faults to plant in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dash_attn
from dash_attn.watching.causes import Cause, causes
from dash_attn.watching.difference import Difference, first_difference
from dash_attn.watching.files import Record, load_run

WIDTH, TOKENS, LENGTH = 32, 19, 16
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 2, attend: Attend = attend) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.attend = heads, attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).transpose(1, 3).unbind(2)
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """`run_block` calls a block: a test may compute it again in the backward."""

    def __init__(self, layers: int = 2, width: int = WIDTH, heads: int = 2, tokens: int = TOKENS) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)
        self.run_block: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(self.norm(x))


class Shuffled(torch.autograd.Function):
    """Rows of a table. The backward adds in an order that `generator` draws, as atomics add in any order."""

    generator = torch.Generator()

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        return table[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = (saved.flatten() for saved in ctx.saved_tensors)
        order = torch.randperm(len(index), generator=Shuffled.generator)
        rows = gradient.flatten(0, -2)
        return gradient.new_zeros(ctx.shape).index_add_(0, index[order], rows[order]), None


class Scatter(nn.Embedding):
    def forward(self, index: Tensor) -> Tensor:
        return Shuffled.apply(self.weight, index)


def batch() -> Tensor:
    return torch.randint(TOKENS, (4, LENGTH + 1))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def trained(
    to: Path,
    count: int = 3,
    *,
    change: Callable[[GPT], nn.Module] = lambda model: model,
    each: Callable[[int, Tensor], Tensor] = lambda step, tokens: tokens,
    **options: Any,
) -> Record:
    """The record of a run. `change` is applied to the model and `each` to every batch."""
    torch.manual_seed(options.pop("seed", 0))
    model = change(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dash_attn.watch(model, optimizer=optimizer, to=to, **options):
        for step in range(count):
            loss_of(model, each(step, batch())).backward()
            optimizer.step()
            optimizer.zero_grad()
    (record,) = load_run(to)
    return record


def difference(a: Record, b: Record) -> tuple[Difference, list[Cause]]:
    parting = first_difference([a], [b])
    assert parting is not None, "the runs are the same"
    return parting, causes(parting, a.environment, b.environment)


def same(a: Record, b: Record) -> bool:
    return first_difference([a], [b]) is None and a.steps.keys() == b.steps.keys()
