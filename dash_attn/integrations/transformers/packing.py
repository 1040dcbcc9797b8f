"""Padded and packed batches as documents one after another, read once in a forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dash_attn.api import calls


@dataclass(frozen=True)
class Packed:
    """Documents one after another: where their tokens are in the flattened batch (None: all, in order) and end."""

    queries: Tensor | None
    keys: Tensor | None
    cu_q: Tensor | Sequence[int]
    cu_k: Tensor | Sequence[int] | None

    @staticmethod
    def given(cu_q: Any, cu_k: Any) -> Packed:
        return Packed(None, None, *map(ends_of, (cu_q, cu_k)))


def ends_of(cu: Any) -> Any:
    """The ends of documents as attention takes them: Transformers calls them long tensors, attention takes int32.

    A long tensor is given on as its values, which all layers get from one reading. An int32 copy would be another
    tensor in every layer, and each would be read.
    """
    if not isinstance(cu, Tensor) or cu.dtype == torch.int32:
        return cu
    if cu.dtype == torch.int64 and cu.ndim == 1 and not torch.compiler.is_compiling():
        return calls.read(cu)
    return cu.int()


@dataclass(frozen=True)
class CallShape:
    """The sizes of a call, and how its mask depends on positions.

    by_position   which keys a query sees depends on where it is. Then padding goes from queries too, or they would not
                  be level with their keys. Otherwise all queries stay: the mask may be of keys from somewhere else.
    windowed      a query sees a limited number of keys on a side
    """

    batch: int
    len_q: int
    len_k: int
    by_position: bool
    windowed: bool


def take(x: Tensor, index: Tensor | None) -> Tensor:
    flat = x.flatten(0, 1)
    return flat if index is None else flat.index_select(0, index)


Value = TypeVar("Value")
LAST = 8  # answers that are kept


@dataclass(frozen=True)
class Answer(Generic[Value]):
    asked: object
    same: tuple[Callable[[Tensor | None], bool], ...]
    value: Value


class Recent(Generic[Value]):
    """The last few answers, by the tensors that they were read from.

    All layers of a model get the same tensors. To read one from a GPU is to wait for the GPU.
    """

    def __init__(self) -> None:
        self.answers: tuple[Answer[Value], ...] = ()  # replaced and never changed: other threads may be reading

    def of(self, read: Callable[[], Value], tensors: tuple[Tensor | None, ...], asked: object = None) -> Value:
        """What `read` gives for these tensors, and for everything else that it looks at: `asked`."""
        for kept in self.answers:
            if kept.asked == asked and all(same(x) for same, x in zip(kept.same, tensors, strict=True)):
                return kept.value
        value = read()
        self.answers = (Answer(asked, tuple(map(same_as, tensors)), value), *self.answers[: LAST - 1])
        return value


def same_as(x: Tensor | None) -> Callable[[Tensor | None], bool]:
    """A function that says whether a tensor is x, unchanged.

    On a CPU it compares values, because NumPy changes the memory of a tensor and torch does not count that. On a GPU
    it compares the counts of changes, because to compare values is to wait.
    """
    if x is None:
        return lambda y: y is None
    if x.device.type == "cpu":
        values, kind = x.clone(), (x.device, x.dtype)
        return lambda y: y is not None and (y.device, y.dtype) == kind and torch.equal(y, values)
    if x.is_inference():
        return lambda y: False  # such tensors do not count their changes
    reference, version = weakref.ref(x), x._version
    return lambda y: y is not None and y is reference() and y._version == version


packs: Recent[Packed | None] = Recent()
paddings: Recent[bool] = Recent()


def packed_of(number: Tensor | None, positions: Tensor | None, call: CallShape, device: torch.device) -> Packed | None:
    """What `read` gives, read once for all layers."""
    return packs.of(lambda: read(number, positions, call, device), (number, positions), (call, device))


def has_padding(number: Tensor) -> bool:
    """Whether a number is 0. On a CPU to look takes less time than to compare with earlier tensors."""
    if not calls.is_remembered(number):
        return not bool(number.all())
    return paddings.of(lambda: not bool(number.all()), (number,))


def read(number: Tensor | None, positions: Tensor | None, call: CallShape, device: torch.device) -> Packed | None:
    """None if all rows are whole sequences of their own.

    number       (batch, keys): 0 for padding, else the number of the document; None: no padding, one document a row
    positions    (batch or 1, queries): documents begin where positions start again; None: not known
    """
    if number is None and positions is None:
        return None
    batch, len_q, len_k = call.batch, call.len_q, call.len_k
    padded = number is not None
    # On the CPU, so that a GPU is waited for once and not at every step.
    number = torch.ones(batch, len_k, device="cpu").long() if number is None else number.to("cpu", torch.int64)
    if positions is not None:
        positions = positions.expand(batch, -1).cpu()
    if call.windowed:
        refuse_holes(number)
    if len_q == len_k:
        tokens = number.flatten().nonzero().flatten()
        starts, packed = _starts(tokens, number, positions)
        if packed or (call.by_position and len(tokens) < batch * len_k):
            index = _index(tokens, batch * len_q, device)
            return Packed(index, index, [0, *starts, len(tokens)], None)
    elif len_q > len_k and call.by_position and padded:
        raise ValueError(f"attention_mask is for {len_k} keys, fewer than the {len_q} queries")
    real = number[:, -len_q:] if call.by_position and padded else torch.ones(batch, len_q, device="cpu").long()
    queries = real.flatten().nonzero().flatten()
    if len_q != len_k and (int(number.max()) > 1 or _starts(queries, real, positions)[1]):
        raise NotImplementedError(
            f"several documents in a row of {len_q} queries and {len_k} keys: pass cu_seq_lens_q and cu_seq_lens_k"
        )
    if bool(number.all()):
        return None
    keys = number.flatten().nonzero().flatten()
    cu_q, cu_k = ([0, *accumulate(x.count_nonzero(1).tolist())] for x in (real, number))
    return Packed(_index(queries, batch * len_q, device), _index(keys, batch * len_k, device), cu_q, cu_k)


def refuse_holes(number: Tensor) -> None:
    """A window counts padding between tokens; with the padding taken out it would reach further."""
    real = number != 0
    after, before = real.cummax(1).values, real.flip(1).cummax(1).values.flip(1)
    if bool((after & before & ~real).any()):
        raise NotImplementedError(
            "attention_mask has padding between tokens of a row, and the model has a sliding window: "
            "use attn_implementation='sdpa', or pad at the beginning or the end only"
        )


def _index(tokens: Tensor, total: int, device: torch.device) -> Tensor | None:
    return None if len(tokens) == total else tokens.to(device)


def _starts(tokens: Tensor, number: Tensor, positions: Tensor | None) -> tuple[list[int], bool]:
    """Which of `tokens` begin a document, the first left out, and whether any does so inside a row.

    Positions that fall, or stay at the lowest of their row, begin another document. Gaps do not: padding leaves them
    too.
    """
    row = tokens // max(1, number.shape[1])
    inside = number.flatten()[tokens].diff() != 0
    if positions is not None and len(tokens):
        position = positions.flatten()[tokens]
        lowest = positions.where(number != 0, positions.max()).amin(1)
        inside |= (position.diff() < 0) | (position[1:] == lowest[row[1:]])
    next_row = row.diff() != 0
    starts = ((inside | next_row).nonzero().flatten() + 1).tolist()
    return starts, bool((inside & ~next_row).any())


# ---- while code is compiled: shapes that do not depend on values ----------------------------------------------------


@torch.library.custom_op("dash_attn::pack", mutates_args=())
def pack(
    number: Tensor | None, positions: Tensor | None, sizes: Sequence[int], by_position: bool, windowed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All queries and all keys in an order where documents are whole, and the ends of documents in either.

    Padding comes last: queries that see no key, and keys that no query sees. The ends repeat the last one up to a
    length that is known before values are.
    """
    batch, len_q, len_k = sizes
    given = next(x for x in (number, positions) if x is not None)
    call = CallShape(batch, len_q, len_k, by_position, windowed)
    packed = packed_of(number, positions, call, given.device)
    if packed is None:
        cu_q, cu_k = ([i * length for i in range(batch + 1)] for length in (len_q, len_k))
        packed = Packed(None, None, cu_q, cu_k)
    orders = [
        _everything(index, batch * length, given.device)
        for index, length in ((packed.queries, len_q), (packed.keys, len_k))
    ]
    cu_q = list(packed.cu_q)
    cu_k = list(packed.cu_q if packed.cu_k is None else packed.cu_k)
    totals, places = (batch * len_q, batch * len_k), _places(sizes)
    cu_q, cu_k = [*cu_q, totals[0]], [*cu_k, cu_k[-1]]  # queries without a key, then keys without a query
    ends = [
        torch.tensor([*cu, *[total] * (places - len(cu))], dtype=torch.int32, device="cpu")
        for cu, total in zip((cu_q, cu_k), totals, strict=True)
    ]
    return orders[0], orders[1], ends[0], ends[1]


@pack.register_fake
def _(
    number: Tensor | None, positions: Tensor | None, sizes: Sequence[int], by_position: bool, windowed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, len_q, len_k = sizes
    given = number if number is not None else positions
    assert given is not None
    orders = (torch.empty(batch * x, dtype=torch.int64, device=given.device) for x in (len_q, len_k))
    ends = (torch.empty(_places(sizes), dtype=torch.int32, device="cpu") for _ in range(2))
    return *orders, *ends  # type: ignore[return-value]


def _places(sizes: Sequence[int]) -> int:
    batch, len_q, _ = sizes
    return batch * len_q + batch + 4  # at most a document a query, one a row without a query, and the two of padding


def _everything(index: Tensor | None, total: int, device: torch.device) -> Tensor:
    every = torch.arange(total, device=device)
    if index is None:
        return every
    left = torch.ones(total, dtype=torch.bool, device=device)
    left[index] = False
    return torch.cat([index, every[left]])
