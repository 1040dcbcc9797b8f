"""Compares bits: which tensors differ, where first, by how much, and in how many runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NAMES = ("dq", "dk", "dv")
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """As integers: unlike numbers they tell 0 from -0, and a NaN equals itself."""
    return x.contiguous().view(WORDS[x.element_size()])


def largest(a: Tensor, b: Tensor) -> float:
    """Largest difference of two elements: 0 where all bits are equal, infinite if one of the two is not finite."""
    apart = (a.double() - b.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(apart.masked_fill(bits(a) == bits(b), 0).max())


def note(got: tuple[Tensor, ...], want: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> None:
    """Copy the elements that differ to `kept`. The host does not wait, and a CUDA graph can hold it."""
    for x, expected, differing in zip(got, want, kept, strict=True):
        if x.shape != expected.shape or x.dtype != expected.dtype:
            raise ValueError(f"{tuple(x.shape)} {x.dtype} after {tuple(expected.shape)} {expected.dtype}")
        torch.where(bits(x) != bits(expected), bits(x), bits(differing), out=bits(differing))


def in_bursts(
    results: Iterator[tuple[Tensor, ...]], want: tuple[Tensor, ...], calls: int
) -> Iterator[tuple[Tensor, ...]]:
    """One result for each `calls` results: what is wanted, with each element replaced that differs in any of them.

    Results are freed before the next call, so that it can get their memory.
    """
    want = tuple(x.contiguous() for x in want)
    while True:
        kept = tuple(x.clone() for x in want)
        for _ in range(calls):
            got = next(results, None)
            if got is None:
                return
            note(got, want, kept)
            del got
        yield kept


def differences(
    got: tuple[Tensor, ...], want: tuple[Tensor, ...], names: tuple[str, ...] = NAMES
) -> dict[str, dict[str, Any]]:
    """By tensor; empty if all bits are equal."""
    apart_by_name = {}
    for name, a, b in zip(names, got, want, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"{name} is {tuple(a.shape)} {a.dtype} after {tuple(b.shape)} {b.dtype}")
        if torch.equal(bits(a), bits(b)):
            continue
        apart = bits(a) != bits(b)
        at = int(apart.flatten().to(torch.uint8).argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), a.shape))
        apart_by_name[name] = {
            "elements": int(apart.sum()),
            "first": list(where),
            "values": [float(a[where]), float(b[where])],
            "largest": largest(a, b),
        }
    return apart_by_name


def merge(total: dict[str, dict[str, Any]], one: dict[str, dict[str, Any]]) -> None:
    """Into a sum over runs: the first coordinate stays, the largest deviation grows."""
    for name, apart in one.items():
        if name not in total:
            total[name] = {"runs": 1, **apart}
            continue
        kept = total[name]
        kept["runs"] += 1
        kept["elements"] = max(kept["elements"], apart["elements"])
        kept["largest"] = max(kept["largest"], apart["largest"])
