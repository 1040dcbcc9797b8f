"""The fingerprint as a Triton kernel: one pass over the bytes of a tensor, for CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dash_attn.watching import fingerprint

BLOCK = 4096  # words that one program reads
WARPS = 8
FEW = 8  # up to this number each tensor has a launch of its own, which needs no table
# Not parameters of the kernels, so that a compiled kernel takes plain numbers only.
STEP, FIRST, SECOND, WORDS = (
    tl.constexpr(value) for value in (fingerprint.STEP, fingerprint.FIRST, fingerprint.SECOND, BLOCK)
)


@triton.jit
def _mixed(words, place):  # type: ignore[no-untyped-def]
    mixed = words + (place.to(tl.uint64) + 1) * STEP
    mixed = (mixed ^ (mixed >> 30)) * FIRST
    mixed = (mixed ^ (mixed >> 27)) * SECOND
    return mixed ^ (mixed >> 31)


@triton.jit
def _block(address, size, number, slot):  # type: ignore[no-untyped-def]
    """Adds the sum over block `number` of the `size` bytes at `address` to the word at the address `slot`."""
    whole = size // 8
    number = number.to(tl.int64)
    place = number * WORDS + tl.arange(0, WORDS)
    pointers = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16) + place
    if (number + 1) * WORDS <= whole:  # without a mask, a thread loads 16 bytes at once
        total = tl.sum(_mixed(tl.load(pointers), place).to(tl.int64))
    else:
        inside = place < whole
        words = tl.load(pointers, mask=inside, other=0)
        total = tl.sum(tl.where(inside, _mixed(words, place), 0).to(tl.int64))
        if size % 8 != 0:
            lane = tl.arange(0, 8)
            at = whole * 8 + lane
            last = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=at < size, other=0).to(tl.int64)
            word = tl.sum(last << (8 * lane.to(tl.int64)))
            total += _mixed(word.to(tl.uint64), whole).to(tl.int64)
    tl.atomic_add(slot.to(tl.pointer_type(tl.int64)), total, sem="relaxed")


@triton.jit(do_not_specialize=["size", "slot"])
def _one(address: tl.int64, size: tl.int64, slot: tl.int64):  # type: ignore[no-untyped-def]
    # From the end: the last bytes of a new tensor are still in the L2 cache, and its first bytes are there afterwards,
    # for the operation that reads the tensor next.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    _block(address, size, number, slot)


@triton.jit(do_not_specialize=["tensors", "blocks", "slot"])
def _many(tensors: tl.int64, blocks: tl.int64, slot: tl.int64):  # type: ignore[no-untyped-def]
    """`tensors` has rows of address and size, `blocks` has rows of tensor and number of the block in it."""
    row = blocks.to(tl.pointer_type(tl.int64)) + 2 * tl.program_id(0).to(tl.int64)
    tensor = tl.load(row)
    number = tl.load(row + 1)
    at = tensors.to(tl.pointer_type(tl.int64)) + 2 * tensor
    # Addresses in the table are multiples of 16, which the compiler cannot see.
    _block(tl.multiple_of(tl.load(at), 16), tl.load(at + 1), number, slot + 8 * tensor)


_compiled: dict[tuple[int, int], Any] = {}  # by the id of a kernel, whose hash takes long, and the device


def add(tensors: Sequence[Tensor], slots: Tensor, first: int) -> None:
    """Add the fingerprints of plain tensors on the device of `slots` to it, from place `first` on."""
    device = slots.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _add(tensors, slots, first, device)
    else:
        _add(tensors, slots, first, device)


def _add(tensors: Sequence[Tensor], slots: Tensor, first: int, device: int) -> None:
    # Words are read as words, two at a time, so a tensor must begin at a multiple of 16 bytes. Copies stay alive
    # until everything is launched: torch reuses their memory in the order of the stream.
    tensors = [tensor if tensor.data_ptr() % 16 == 0 else tensor.detach().clone() for tensor in tensors]
    slot = slots.data_ptr() + 8 * first
    if len(tensors) <= FEW:
        for place, tensor in enumerate(tensors):
            if size := tensor.nbytes:
                _launch(_one, device, _blocks(size), (tensor.data_ptr(), size, slot + 8 * place))
        return
    listed = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    addresses, blocks = _tables(listed, torch.cuda.current_stream())
    if len(blocks):
        _launch(_many, device, len(blocks), (addresses.data_ptr(), blocks.data_ptr(), slot))


def _launch(kernel: Any, device: int, blocks: int, numbers: tuple[int, ...]) -> None:
    """Triton looks at all arguments of every call to choose a kernel. Here every call takes the same one."""
    compiled = _compiled.get((id(kernel), device))
    if compiled is None:
        _compiled[id(kernel), device] = kernel[(blocks,)](*numbers, num_warps=WARPS)
    else:
        compiled[blocks, 1, 1](*numbers)


@lru_cache(maxsize=16)  # parameters and optimizer state stay where they are from step to step
def _tables(listed: tuple[tuple[int, int], ...], stream: torch.cuda.Stream) -> tuple[Tensor, Tensor]:
    """The tables of `_many` on a device, for use on one stream."""
    addresses, blocks = (table.pin_memory().to(stream.device, non_blocking=True) for table in rows(listed))
    return addresses, blocks


def rows(listed: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The tables of `_many` for addresses and sizes."""
    counts = np.array([_blocks(size) for _, size in listed])
    tensor = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
    return torch.tensor(listed, dtype=torch.int64), torch.from_numpy(np.stack([tensor, number], 1))


def _blocks(size: int) -> int:
    return -(-size // (8 * BLOCK))
