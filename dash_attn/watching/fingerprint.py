"""A 64-bit fingerprint of the bits of a tensor, computed where the tensor is.

The elements of a tensor, in the order of their indices, are bytes. Zeros fill the last of the 64-bit words that these
bytes make. The fingerprint is the sum of `mixed(word + (place + 1) * STEP)` over all words, modulo 2**64. Sums of
integers do not depend on the order of the sum, so every device gives the same value. It does not hold the shape and
the dtype: a record has these beside it.

Of a large tensor a share may be read: one in n pieces of 512 bytes. n pieces that follow each other are a group, and a
hash of the number of the group chooses one of them. The choice moves on with the turn, which the number of the step
gives. So n turns read every piece once, and two runs read the same pieces in the same step. The sum is then over the
words of these pieces, each with its place in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# The constants of the generator splitmix64.
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Words that one operation of torch takes: temporary values stay in a CPU's cache, and are few on other devices.
CHUNK = {"cpu": 1 << 16}
LARGE_CHUNK = 1 << 22
PIECE = 64  # words that are read or left out together: four lines of a GPU's cache
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
        for placed in _placed(tensor.detach(), share.of(tensor.nbytes)):
            slots[place : place + 1] += _sum(placed)


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


def _placed(tensor: Tensor, share: Share) -> Iterator[Tensor]:
    """`word + (place + 1) * STEP` for the words that are read, in parts."""
    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    full = data.numel() // (8 * PIECE)  # pieces
    words = data[: full * 8 * PIECE].view(torch.int64)
    most = CHUNK.get(data.device.type, LARGE_CHUNK)
    if share.one_in == 1:
        for begin in range(0, len(words), most):
            part = words[begin : begin + most]
            yield part + _places(len(part), part.device) + signed(begin * STEP)
        last = full
    else:
        # Nothing here depends on values that a device has: the host knows which piece of the last group is read.
        pieces, groups = words.view(-1, PIECE), full // share.one_in
        numbers = chosen(torch.arange(groups, device=data.device), share)
        last = chosen(groups, share)
        if last < full:
            numbers = torch.cat([numbers, torch.full((1,), last, device=data.device)])
        for begin in range(0, len(numbers), most // PIECE):
            part = numbers[begin : begin + most // PIECE]
            yield pieces[part] + (part * signed(PIECE * STEP))[:, None] + _places(PIECE, part.device)
    if last == full and (rest := data[full * 8 * PIECE :]).numel():
        padded = rest.new_zeros(-(-rest.numel() // 8) * 8)
        padded[: rest.numel()] = rest
        end = padded.view(torch.int64)
        yield end + _places(len(end), end.device) + signed(full * PIECE * STEP)


def _sum(placed: Tensor) -> Tensor:
    """The sum of the words after mixing. Overwrites them."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        placed ^= (placed >> shift) & (2 ** (64 - shift) - 1)  # torch shifts the sign in: the mask takes it out
        placed *= signed(factor)
    placed ^= (placed >> 31) & (2**33 - 1)
    return placed.sum()


@lru_cache(maxsize=8)
def _table(size: int, device: torch.device) -> Tensor:
    return torch.arange(1, size + 1, device=device) * signed(STEP)


def _places(count: int, device: torch.device) -> Tensor:
    return _table(CHUNK.get(device.type, 1 << count.bit_length()), device)[:count]


def signed(value: int) -> int:
    """The int64 with the same bits."""
    return (value + 2**63) % 2**64 - 2**63
