"""Compares bits: which tensors differ, where first, by how much, and in how many runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAMES = ("dq", "dk", "dv")
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """As integers: unlike numbers they tell 0 from -0, and a NaN equals itself."""
    return x.contiguous().view(WORDS[x.element_size()])


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
            "largest": float((a.double() - b.double()).abs().nan_to_num(nan=float("inf")).max()),
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
