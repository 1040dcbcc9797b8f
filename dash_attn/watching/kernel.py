"""The fingerprint as a Triton kernel: one pass over the bytes of a tensor, for CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dash_attn.watching import fingerprint

BLOCK = 4096  # words that one program reads
WARPS = 8
FEW = 8  # up to this number each tensor has a launch of its own, which needs no table
STEP, FIRST, SECOND = (tl.constexpr(value) for value in (fingerprint.STEP, fingerprint.FIRST, fingerprint.SECOND))


@triton.jit
def _mixed(words, place):  # type: ignore[no-untyped-def]
    mixed = words + (place.to(tl.uint64) + 1) * STEP
    mixed = (mixed ^ (mixed >> 30)) * FIRST
    mixed = (mixed ^ (mixed >> 27)) * SECOND
    return mixed ^ (mixed >> 31)


@triton.jit
def _block(address, size, number, slot, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds the sum over block `number` of the `size` bytes at `address` to `slot`."""
    whole = size // 8
    place = number.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < whole
    words = tl.load(address.to(tl.pointer_type(tl.uint64)) + place, mask=inside, other=0)
    total = tl.sum(tl.where(inside, _mixed(words, place), 0).to(tl.int64))
    if (number == whole // BLOCK) & (size % 8 != 0):
        lane = tl.arange(0, 8)
        at = whole * 8 + lane
        last = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=at < size, other=0).to(tl.int64)
        word = tl.sum(last << (8 * lane.to(tl.int64)))
        total += _mixed(word.to(tl.uint64), whole).to(tl.int64)
    tl.atomic_add(slot, total, sem="relaxed")


@triton.jit(do_not_specialize=["size", "slot"])
def _one(address, size, slots, slot, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    _block(address, size, tl.program_id(0), slots + slot, BLOCK)


@triton.jit(do_not_specialize=["first"])
def _many(tensors, blocks, slots, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """`tensors` has rows of address and size, `blocks` has rows of tensor and number of the block in it."""
    row = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks + 2 * row)
    number = tl.load(blocks + 2 * row + 1)
    address = tl.load(tensors + 2 * tensor)
    size = tl.load(tensors + 2 * tensor + 1)
    _block(address, size, number, slots + first + tensor, BLOCK)


def add(tensors: Sequence[Tensor], slots: Tensor, first: int) -> None:
    """Add the fingerprints of plain tensors on the device of `slots` to it, from place `first` on."""
    # Words are read as words, so each must stand at a multiple of 8 bytes.
    tensors = [tensor if tensor.data_ptr() % 16 == 0 else tensor.detach().clone() for tensor in tensors]
    with torch.cuda.device(slots.device):
        listed = tuple((tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors)
        if len(listed) <= FEW:
            for slot, (address, size) in enumerate(listed, first):
                if size:
                    _one[(_blocks(size),)](address, size, slots, slot, BLOCK=BLOCK, num_warps=WARPS)
            return
        addresses, blocks = _tables(listed, torch.cuda.current_stream())
        if len(blocks):
            _many[(len(blocks),)](addresses, blocks, slots, first, BLOCK=BLOCK, num_warps=WARPS)


@lru_cache(maxsize=16)  # parameters and optimizer state stay where they are from step to step
def _tables(listed: tuple[tuple[int, int], ...], stream: torch.cuda.Stream) -> tuple[Tensor, Tensor]:
    """The tables of `_many`, for use on one stream."""
    counts = np.array([_blocks(size) for _, size in listed])
    tensor = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
    tables = torch.tensor(listed, dtype=torch.int64), torch.from_numpy(np.stack([tensor, number], 1))
    addresses, blocks = (table.pin_memory().to(stream.device, non_blocking=True) for table in tables)
    return addresses, blocks


def _blocks(size: int) -> int:
    return -(-size // (8 * BLOCK))
