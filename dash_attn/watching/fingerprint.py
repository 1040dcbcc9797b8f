"""A 64-bit fingerprint of the bits of a tensor, computed where the tensor is.

The elements of a tensor, in the order of their indices, are bytes. They make little-endian words of 32 bits. Zeros fill
the last block of 8192 words. A block has 8 rows of 256 columns of 4 words. A column is the sum of its 32 words, each
times its key. The fingerprint is the sum of `spread(column + (place + 1) * STEP)` over all columns. All sums are modulo
2**64. They do not depend on the order, so every device gives the same value. The fingerprint does not hold the shape
and the dtype: a record has these beside it.

Of a large tensor a share may be read: one in n pieces of 512 bytes. n pieces that follow each other are a group, and a
hash of the number of the group chooses one of them. The choice moves on with the turn, which the number of the step
gives. So n turns read every piece once, and two runs read the same pieces in the same step. The chosen pieces, one
after the other, are then the bytes of the words. A piece or a part of it behind the end of the tensor is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

# The constants of the generator splitmix64.
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# A block is what one program of a GPU reads. A thread reads a column, 16 bytes of each row, and mixes only their sum.
# So two tensors that differ only in the highest bits of words of one column are alike more often than others.
ROWS, COLUMNS, WIDTH = 8, 256, 4
ROW = 4 * COLUMNS * WIDTH  # bytes
BLOCK = ROWS * ROW
# Blocks that one operation of torch takes: temporary values stay in a CPU's cache, and are few on other devices.
CHUNK = {"cpu": 16}
LARGE_CHUNK = 512
PIECE = 512  # bytes that are read or left out together: four lines of a GPU's cache
LARGE = 1 << 20  # bytes: smaller tensors are read whole
# The constants of the finalizer of MurmurHash3, which mixes 32 bits.
THIRD, FOURTH = 0x85EBCA6B, 0xC2B2AE35
Number = TypeVar("Number", int, Tensor)


class Share(NamedTuple):
    """What is read of large tensors: in each group of `one_in` pieces, the piece that the turn chooses."""

    one_in: int = 1
    turn: int = 0

    @staticmethod
    def of_step(one_in: int, step: int) -> Share:
        """Steps 0 to n - 1 read every piece once, so do steps n to 2n - 1, and so on. Which of them comes first is
        mixed: else a run that records every hundredth step would always read the same pieces."""
        return Share(one_in, (step + mixed(step // one_in)) % one_in)

    def of(self, size: int) -> Share:
        """What is read of a tensor of `size` bytes."""
        return self if size >= LARGE else WHOLE


WHOLE = Share()


def fingerprint(tensor: Tensor, share: Share = WHOLE) -> int:
    """The fingerprint of one tensor. Waits for the device."""
    slots = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    add([plain(tensor)], slots, 0, share)
    return int(slots.item()) % 2**64


def plain(tensor: Tensor) -> Tensor:
    """The elements in the order of their indices, one after the other, without a lazy sign or conjugation."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def add(tensors: Sequence[Tensor], slots: Tensor, first: int, share: Share = WHOLE) -> None:
    """Add the fingerprints of plain tensors of one device to `slots`, from place `first` on. Does not wait."""
    if slots.is_cuda and has_triton():
        _by_triton()(tensors, slots, first, share)
        return
    for place, tensor in enumerate(tensors, first):
        if tensor.numel():
            for columns in _columns(tensor.detach(), share.of(tensor.nbytes)):
                slots[place : place + 1] += spread(columns).sum()


@lru_cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache
def _by_triton() -> Callable[[Sequence[Tensor], Tensor, int, Share], None]:
    from dash_attn.watching import kernel

    return kernel.add


def mixed(number: Number) -> Number:
    """32 bits, each of which depends on all of the lower 32 bits of the number."""
    low = 2**32 - 1
    number = number & low
    number = (number ^ (number >> 16)) * THIRD & low
    number = (number ^ (number >> 13)) * FOURTH & low
    return number ^ (number >> 16)


def chosen(group: Number, share: Share) -> Number:
    """The number of the piece that is read of a group."""
    first = (mixed(group) * share.one_in) >> 32
    return group * share.one_in + (first + share.turn) % share.one_in


def _columns(tensor: Tensor, share: Share) -> Iterator[Tensor]:
    """`column + (place + 1) * STEP` for all columns, in parts."""
    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()
    first = 1
    for part in _parts(data, share):
        rows = min(ROWS, -(-part.numel() // ROW))  # rows of zeros behind them add nothing
        if missing := -part.numel() % (rows * ROW):
            part = pad(part, (0, missing))
        words = part.view(torch.int32).to(torch.int64).view(-1, rows, COLUMNS, WIDTH)
        words &= 2**32 - 1
        words *= _keys(words.device)[:rows]
        columns = words.sum(1).sum(2).flatten()
        yield columns + torch.arange(first, first + len(columns), device=data.device) * signed(STEP)
        first += len(columns)


def _parts(data: Tensor, share: Share) -> Iterator[Tensor]:
    """The bytes that are read, in parts of whole blocks. Zeros are missing at the end of the last part."""
    most = CHUNK.get(data.device.type, LARGE_CHUNK) * BLOCK
    if share.one_in == 1:
        yield from data.split(most)  # type: ignore[no-untyped-call]
        return
    # Nothing here depends on values that a device has: the host knows which piece of the last group is read.
    last = (data.numel() - 1) // (PIECE * share.one_in)
    end = data[chosen(last, share) * PIECE :][:PIECE]
    pieces = data[: data.numel() // PIECE * PIECE].view(-1, PIECE)
    for begin in range(0, last + 1, most // PIECE):
        behind = begin + most // PIECE
        numbers = chosen(torch.arange(begin, min(behind, last), device=data.device), share)
        part = pieces.index_select(0, numbers).flatten()
        yield part if behind <= last else torch.cat([part, pad(end, (0, PIECE - len(end)))])


@lru_cache(maxsize=8)
def _keys(device: torch.device) -> Tensor:
    """The keys of the words of a column. They are odd: a change of one word is never lost. They have 64 bits and words
    have 32: if words had 64 bits too, changes of the highest bits of two words would cancel out."""
    numbers = torch.arange(1, ROWS * WIDTH + 1, device=device) * signed(STEP)
    return (spread(numbers) | 1).view(ROWS, 1, WIDTH)


def spread(number: Number) -> Number:
    """The finalizer of splitmix64, modulo 2**64."""
    number = (number ^ (number >> 30 & 2**34 - 1)) * signed(FIRST)  # torch shifts the sign in: the mask takes it out
    number = (number ^ (number >> 27 & 2**37 - 1)) * signed(SECOND)
    return number ^ (number >> 31 & 2**33 - 1)


def signed(value: int) -> int:
    """The int64 with the same bits."""
    return (value + 2**63) % 2**64 - 2**63
