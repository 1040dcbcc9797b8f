"""Sinks, softcap, dropout and seeds of a call: the features of its problem, and the tensors beside q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dash_attn.api.arguments import DTYPES, Arguments, check_queries, check_tensor
from dash_attn.backends import Extras
from dash_attn.backends.dropout import SEED, SEEDS, later
from dash_attn.problem import Features

Seed = int | Sequence[int] | Tensor
LARGEST = 2**1023
NUMBERS = (int, float)


class Given(NamedTuple):
    """What the caller gives. `name` is the caller's name of the sinks."""

    softcap: float | None
    dropout: float | None
    sinks: Tensor | None
    seed: Seed | None
    name: str = "sinks"

    @property
    def is_plain(self) -> bool:
        return is_plain(self.softcap, self.dropout, self.sinks)

    def features(self) -> Features:
        """The features of the problem, apart from the head dim of v."""
        numbers: dict[str, object] = {"softcap": self.softcap, "dropout": self.dropout}
        for name, number in numbers.items():
            if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
                raise ValueError(f"{name} must be a number, got {number!r}")
            if isinstance(number, int) and abs(number) > LARGEST:
                raise ValueError(f"{name} must be a number that a float can hold, got {number!r}")
        return Features(float(self.softcap or 0), self.sinks is not None, float(self.dropout or 0))

    def extras(self, q: Tensor) -> Extras:
        """The checked tensors. Without a seed, dropout draws one."""
        sinks = self.sinks
        if sinks is not None:
            check_tensor(self.name, sinks)
            check_queries(q)
            if tuple(sinks.shape) != (q.shape[-2],) or sinks.dtype not in DTYPES or sinks.device != q.device:
                raise ValueError(
                    f"{self.name} must have one number for each of the {q.shape[-2]} heads of q, "
                    f"{', '.join(DTYPES.values())}, on {q.device}; got {tuple(sinks.shape)}, {sinks.dtype}, on "
                    f"{sinks.device}"
                )
            sinks = sinks.to(torch.float32)
        seed = (drawn_seed() if self.seed is None else seed_of(self.seed)) if self.dropout else None
        return Extras(sinks, seed)


def is_plain(softcap: float | None, dropout: float | None, sinks: Tensor | None) -> bool:
    """No softcap, dropout or sinks. What is no number is not plain: `Given.features` refuses it."""
    return sinks is None and _is_off(softcap) and _is_off(dropout)


def _is_off(number: float | None) -> bool:
    return number is None or (isinstance(number, NUMBERS) and not number)


def drawn_seed() -> Tensor:
    """One number from torch's default generator on the CPU. torch.manual_seed sets it, checkpointing restores it."""
    return torch.randint(SEEDS - 1, (), dtype=torch.int64, device="cpu")


def seed_of(seed: Seed) -> Tensor:
    """The seed, or the seeds of all sequences, as int64 on the CPU."""
    if isinstance(seed, Tensor):
        if seed.ndim > 1 or seed.dtype != torch.int64:
            raise ValueError(
                f"seed must be int64, without dimensions or one number for each sequence; got shape "
                f"{tuple(seed.shape)}, {seed.dtype}"
            )
        return seed
    numbers = [seed] if isinstance(seed, int) else list(seed) if isinstance(seed, Sequence) else [None]
    if not all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < SEEDS for x in numbers):
        raise ValueError(f"{SEED}; got {seed!r}")
    return torch.tensor(seed, dtype=torch.int64, device="cpu")


def traced_extras(extras: Extras | None, asked: Arguments) -> Extras | None:
    """The extras, with seeds for the documents that `traced_boundaries` makes: three of each sequence if it has unused
    rows. The first of them holds all its weights."""
    if extras is None or extras.seed is None or asked.cu_q is None or (asked.used_q is None and asked.used_k is None):
        return extras
    assert extras.seed.ndim == 0  # FlashAttention's functions, which have unused rows, draw it
    number = torch.arange(len(asked.cu_q) - 1, device=extras.seed.device)
    return extras._replace(seed=later(extras.seed, number).repeat_interleave(3))
