"""meet: the ranks compare their calls and arguments before they exchange tensors.

Without it, ranks that disagree would wait for each other until the time limit of the group, or add parts of different
problems.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dash_attn.distributed.ranks import Ranks
from dash_attn.kept import kept

# "forward again": of a checkpoint, inside a backward.
CALLS = ("forward", "forward again", "backward", "explain", "unshard")
# Numbers that a rank says: those of Said, and a digest of each argument. A rank that refuses says as many, so that the
# gather fits.
WIDTH = 32


class Said(NamedTuple):
    """What a rank says first.

    refuses  1 if the rank refuses its arguments. Then the other numbers mean nothing
    call     the place of the call in CALLS
    forward  of a backward: the turn of its forward
    first    the number of ranks along the first dimension of the group
    second   the same for the second dimension. 0 if there is none
    """

    refuses: int = 0
    call: int = 0
    forward: int = 0
    queries: int = 0
    keys: int = 0
    first: int = 0
    second: int = 0

    @property
    def text(self) -> str:
        return f"{CALLS[self.call]}{f' of call {self.forward}' if CALLS[self.call] == 'backward' else ''}"

    @property
    def group(self) -> str:
        return f"a mesh of {self.first} x {self.second} ranks" if self.second else f"a group of {self.first} ranks"


class Met(NamedTuple):
    """The numbers of queries and of keys of every rank. `turn` is the number of the call, the same on all of them."""

    turn: int
    rows: list[tuple[int, int]]


def meet(
    ranks: Ranks,
    call: str,
    arguments: Mapping[str, object],
    rows: tuple[int, int],
    device: torch.device,
    forward: int = 0,
) -> Met:
    """ValueError on every rank if the call or an argument is not the same on all of them.

    It names the argument and its values. It is one small gather, and the host waits for it. `device` is that of the
    call's tensors, and `forward` is the turn of the forward of a backward.
    """
    device, shape = ranks.device(device), [axis.size for axis in ranks.axes]
    mine = Said(0, CALLS.index(call), forward, *rows, *shape)
    said, digests = _exchange(ranks, mine, [_digest(value) for value in arguments.values()], device)
    if any(each.refuses for each in said):
        refusing = [(rank, text) for rank, text in enumerate(ranks.texts("", device)) if text]
        raise ValueError("; ".join(f"rank {rank} refuses its arguments: {text}" for rank, text in refusing))
    if len({each.group for each in said}) > 1:
        # The ranks do not share a group in which they could exchange texts.
        raise ValueError(f"the ranks give different groups: {_listed([each.group for each in said])}")
    if len({each.text for each in said}) > 1:
        raise ValueError(
            f"the ranks of the group make different calls: {_listed([each.text for each in said])}. Every rank must "
            "make the same calls in the same order. So the loss of every rank must depend on its out: add "
            "0 * out.sum() to a loss that does not"
        )
    differ = list[str]()
    for (name, value), *column in zip(arguments.items(), *digests, strict=False):
        if len(set(column)) > 1:
            differ.append(f"{name} is {_listed(ranks.texts(_brief(value), device))}")
    if differ:
        raise ValueError(f"the ranks of the group give different arguments: {'; '.join(differ)}")
    turns = _turns.setdefault(ranks.axes[0].group, Counter())
    turns[ranks.names] += 1
    return Met(turns[ranks.names], [(each.queries, each.keys) for each in said])


def refuse(ranks: Ranks, error: Exception, *given: object) -> None:
    """Take part in `meet` without arguments, so that the other ranks do not wait: they raise the error too.

    `given` are the tensors of the call, or anything else.
    """
    device = ranks.device(*(x.device for x in given if isinstance(x, Tensor)))
    _exchange(ranks, Said(refuses=1), [], device)
    ranks.texts(str(error) or type(error).__name__, device)


# On how many calls the ranks of a group, or of the groups of a mesh, have agreed.
_turns: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, ...]]] = WeakKeyDictionary()


def _exchange(ranks: Ranks, said: Said, digests: list[int], device: torch.device) -> tuple[list[Said], list[list[int]]]:
    """What every rank says."""
    # The numbers may travel on the CPU while the tensors of the call are on a GPU.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise NotImplementedError(
            "context parallel cannot be captured in a CUDA graph, because its ranks compare their calls first and the "
            "host waits for the answer: call it outside of the capture"
        )
    numbers = [*said, *digests]
    assert len(numbers) <= WIDTH
    mine = torch.tensor([*numbers, *[0] * (WIDTH - len(numbers))], dtype=torch.int64, device=device)
    gathered = ranks.all_gather(mine).tolist()
    return [Said(*each[: len(said)]) for each in gathered], [each[len(said) :] for each in gathered]


def _digest(value: object) -> int:
    return _kept_digest(value) if isinstance(value, tuple) else _digest_of(value)


@kept(16 * 2**20)
def _kept_digest(value: tuple[object, ...]) -> int:
    """The boundaries of a pack are long, and come again in every layer."""
    return _digest_of(value)


def _digest_of(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big", signed=True)


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:60]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _listed(texts: list[str]) -> str:
    """What the ranks say, each text once: 'a on ranks 0, 1, b on rank 2'."""
    at = dict[str, list[int]]()
    for rank, text in enumerate(texts):
        at.setdefault(text, []).append(rank)
    return ", ".join(f"{text} on {_named(numbers)}" for text, numbers in at.items())


def _named(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
