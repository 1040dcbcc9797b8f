"""A 64-bit fingerprint of the bits of a tensor, computed where the tensor is.

The elements of a tensor, in the order of their indices, are bytes. Zeros fill the last of the 64-bit words that these
bytes make. The fingerprint is the sum of `mixed(word + (place + 1) * STEP)` over all words, modulo 2**64. Sums of
integers do not depend on the order of the sum, so every device gives the same value. It does not hold the shape and
the dtype: a record has these beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

# The constants of the generator splitmix64.
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Words that one operation of torch takes: temporary values stay in a CPU's cache, and are few on other devices.
CHUNK = {"cpu": 1 << 16}
LARGE_CHUNK = 1 << 22


def fingerprint(tensor: Tensor) -> int:
    """The fingerprint of one tensor. Waits for the device."""
    slots = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    add([plain(tensor)], slots, 0)
    return int(slots.item()) % 2**64


def plain(tensor: Tensor) -> Tensor:
    """The elements in the order of their indices, one after the other, without a lazy sign or conjugation."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def add(tensors: Sequence[Tensor], slots: Tensor, first: int) -> None:
    """Add the fingerprints of plain tensors of one device to `slots`, from place `first` on. Does not wait."""
    if slots.is_cuda and has_triton():
        from dash_attn.watching import kernel

        kernel.add(tensors, slots, first)
        return
    for place, tensor in enumerate(tensors, first):
        for part in _words(tensor.detach()):
            slots[place : place + 1] += _sum(*part)


@lru_cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _words(tensor: Tensor) -> list[tuple[Tensor, int]]:
    """The words of a tensor in parts, each with the place of its first word."""
    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole, chunk = data.numel() // 8, CHUNK.get(data.device.type, LARGE_CHUNK)
    words = data[: whole * 8].view(torch.int64)
    parts = [(words[begin : begin + chunk], begin) for begin in range(0, whole, chunk)]
    if data.numel() % 8:
        last = data.new_zeros(8)
        last[: data.numel() % 8] = data[whole * 8 :]
        parts.append((last.view(torch.int64), whole))
    return parts


def _sum(words: Tensor, begin: int) -> Tensor:
    mixed = words + _places(len(words), words.device)
    mixed += signed(begin * STEP)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        mixed ^= (mixed >> shift) & (2 ** (64 - shift) - 1)  # torch shifts the sign in: the mask takes it out
        mixed *= signed(factor)
    mixed ^= (mixed >> 31) & (2**33 - 1)
    return mixed.sum()


@lru_cache(maxsize=8)
def _table(size: int, device: torch.device) -> Tensor:
    return torch.arange(1, size + 1, device=device) * signed(STEP)


def _places(count: int, device: torch.device) -> Tensor:
    return _table(CHUNK.get(device.type, 1 << count.bit_length()), device)[:count]


def signed(value: int) -> int:
    """The int64 with the same bits."""
    return (value + 2**63) % 2**64 - 2**63
