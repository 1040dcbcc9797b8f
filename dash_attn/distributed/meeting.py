"""meet: the ranks compare their arguments before they exchange tensors.

Without it, ranks that disagree would wait for each other until the time limit of the group, or add parts of different
problems.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from dash_attn.distributed.ranks import Ranks

# Numbers that a rank says: whether it refuses, its queries and keys, and a digest of each argument. A rank that refuses
# says as many, so that the gather fits.
WIDTH = 24
FIRST = 3


def meet(ranks: Ranks, arguments: Mapping[str, object], rows: tuple[int, int], device: torch.device) -> list[list[int]]:
    """The numbers of queries and of keys of every rank, [queries, keys].

    ValueError on every rank if an argument is not the same on all of them. It names the argument and its values.
    It is one small gather, and the host waits for it.
    """
    said = [0, *rows, *map(_digest, arguments.values())]
    gathered = _exchange(ranks, said, device)
    if any(refuses for refuses, *_ in gathered):
        refusing = [(rank, text) for rank, text in enumerate(ranks.texts("", device)) if text]
        raise ValueError("; ".join(f"rank {rank} refuses its arguments: {text}" for rank, text in refusing))
    differ = list[str]()
    for column, (name, value) in enumerate(arguments.items(), FIRST):
        if len({numbers[column] for numbers in gathered}) > 1:
            values = dict[str, list[int]]()
            for rank, text in enumerate(ranks.texts(_brief(value), device)):
                values.setdefault(text, []).append(rank)
            differ.append(f"{name} is " + ", ".join(f"{text} on {_named(at)}" for text, at in values.items()))
    if differ:
        raise ValueError(f"the ranks of the group give different arguments: {'; '.join(differ)}")
    return [numbers[1:FIRST] for numbers in gathered]


def refuse(ranks: Ranks, error: Exception, device: torch.device) -> None:
    """Take part in `meet` without arguments, so that the other ranks do not wait: they raise the error too."""
    _exchange(ranks, [1], device)
    ranks.texts(str(error) or type(error).__name__, device)


def _exchange(ranks: Ranks, numbers: list[int], device: torch.device) -> list[list[int]]:
    assert len(numbers) <= WIDTH
    mine = torch.tensor([*numbers, *[0] * (WIDTH - len(numbers))], dtype=torch.int64, device=device)
    gathered: list[list[int]] = ranks.all_gather(mine).tolist()
    return gathered


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big", signed=True)


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:60]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _named(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
