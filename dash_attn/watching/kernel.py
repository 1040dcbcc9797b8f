"""The fingerprint as a Triton kernel: one pass over the pieces of a tensor that are read, for CUDA devices."""

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
from dash_attn.watching.fingerprint import WHOLE, Share

WARPS = 8  # a thread for each column of a block
Numbers = tuple[int, int, int, int]  # address, size, one_in and turn of a tensor
FEW = 8  # up to this number each tensor has a launch of its own, which needs no table
# Not parameters of the kernels, so that a compiled kernel takes plain numbers only.
STEP, FIRST, SECOND, THIRD, FOURTH, ROWS, COLUMNS, WIDTH, BLOCK, PIECE = (
    tl.constexpr(getattr(fingerprint, name))
    for name in ["STEP", "FIRST", "SECOND", "THIRD", "FOURTH", "ROWS", "COLUMNS", "WIDTH", "BLOCK", "PIECE"]
)


@triton.jit
def _spread(number):  # type: ignore[no-untyped-def]
    number = (number ^ (number >> 30)) * FIRST
    number = (number ^ (number >> 27)) * SECOND
    return number ^ (number >> 31)


@triton.jit
def _chosen(group, one_in, turn):  # type: ignore[no-untyped-def]
    """The number of the piece that is read of a group. The turn is less than `one_in`."""
    mixed = group.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * THIRD
    mixed = (mixed ^ (mixed >> 13)) * FOURTH
    mixed = mixed ^ (mixed >> 16)
    at = (mixed.to(tl.int64) * one_in >> 32) + turn  # a remainder would take longer
    return group * one_in + tl.where(at >= one_in, at - one_in, at)


@triton.jit
def _products(words, row, word):  # type: ignore[no-untyped-def]
    """Words times their keys. The compiler knows the keys: the numbers of the words of a thread are constants."""
    return words.to(tl.uint64) * (_spread((word + (row * WIDTH + 1)).to(tl.uint64) * STEP) | 1)


@triton.jit
def _block(address, size, one_in, turn, number, slot):  # type: ignore[no-untyped-def]
    """Adds the sum over block `number` of the `size` bytes at `address` to the word at the address `slot`."""
    number = number.to(tl.int64)
    thread = tl.arange(0, COLUMNS)
    column, word = thread[:, None], tl.arange(0, WIDTH)[None, :]
    start = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
    sums = tl.zeros([COLUMNS, WIDTH], tl.uint64)
    if one_in == 1 and (number + 1) * BLOCK <= size:  # a thread loads 16 bytes of each row at once
        first = start + number * (BLOCK // 4) + (column * WIDTH + word)
        for row in tl.static_range(ROWS):
            sums += _products(tl.load(first + row * COLUMNS * WIDTH), row, word)
    else:  # a warp loads a piece. A place has 16 bytes; the last place, if it is not whole, is read byte by byte
        whole, lanes = size // 16, PIECE // 16
        end = tl.zeros([1, WIDTH], tl.uint32)
        for byte in tl.static_range(4):
            at = whole * 16 + word * 4 + byte
            behind = tl.load((address + at).to(tl.pointer_type(tl.uint8)), mask=at < size, other=0)
            end |= behind.to(tl.uint32) << (8 * byte)
        for row in tl.static_range(ROWS):
            group = (number * ROWS + row) * (COLUMNS // lanes) + column // lanes
            place = _chosen(group, one_in, turn) * lanes + column % lanes
            other = tl.where(place == whole, end, 0)
            words = tl.load(start + (place * WIDTH + word), mask=place < whole, other=other)
            sums += _products(words, row, word)
    columns = tl.sum(sums, 1) + (number * COLUMNS + thread + 1).to(tl.uint64) * STEP
    total = tl.sum(_spread(columns).to(tl.int64))
    tl.atomic_add(slot.to(tl.pointer_type(tl.int64)), total, sem="relaxed")


@triton.jit(do_not_specialize=["size", "one_in", "turn", "slot"])
def _one(address: tl.int64, size: tl.int64, one_in: tl.int64, turn: tl.int64, slot: tl.int64):  # type: ignore[no-untyped-def]
    # From the end: the last bytes of a new tensor are still in the L2 cache, and its first bytes are there afterwards,
    # for the operation that reads the tensor next.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    _block(address, size, one_in, turn, number, slot)


@triton.jit(do_not_specialize=["tensors", "blocks", "slot"])
def _many(tensors: tl.int64, blocks: tl.int64, slot: tl.int64):  # type: ignore[no-untyped-def]
    """`tensors` has rows of address, size and share, `blocks` has rows of tensor and number of the block in it."""
    row = blocks.to(tl.pointer_type(tl.int64)) + 2 * tl.program_id(0).to(tl.int64)
    tensor = tl.load(row)
    number = tl.load(row + 1)
    at = tensors.to(tl.pointer_type(tl.int64)) + 4 * tensor
    # Addresses in the table are multiples of 16, which the compiler cannot see.
    address = tl.multiple_of(tl.load(at), 16)
    _block(address, tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), number, slot + 8 * tensor)


_compiled: dict[tuple[int, int], Any] = {}  # by the id of a kernel, whose hash takes long, and the device


def add(tensors: Sequence[Tensor], slots: Tensor, first: int, share: Share = WHOLE) -> None:
    """Add the fingerprints of plain tensors on the device of `slots` to it, from place `first` on."""
    device = slots.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _add(tensors, slots.data_ptr() + 8 * first, share, device)
    else:
        _add(tensors, slots.data_ptr() + 8 * first, share, device)


def _add(tensors: Sequence[Tensor], slot: int, share: Share, device: int) -> None:
    if len(tensors) <= FEW:
        for tensor in tensors:
            even = _even(tensor)
            row = numbers(even, share)
            if blocks := _blocks(row):
                _launch(_one, device, blocks, (*row, slot))
            slot += 8
        return
    # Copies stay alive until everything is launched: torch reuses their memory in the order of the stream.
    tensors = [_even(tensor) for tensor in tensors]
    rows, blocks_of = _tables(tuple(numbers(tensor, share) for tensor in tensors), torch.cuda.current_stream())
    if len(blocks_of):
        _launch(_many, device, len(blocks_of), (rows.data_ptr(), blocks_of.data_ptr(), slot))


def _even(tensor: Tensor) -> Tensor:
    """A tensor that begins at a multiple of 16 bytes: a thread reads 16 bytes at once."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.detach().clone()


def numbers(tensor: Tensor, share: Share) -> Numbers:
    """What a kernel needs to know of a tensor."""
    size = tensor.nbytes
    return tensor.data_ptr(), size, *share.of(size)


def _launch(kernel: Any, device: int, blocks: int, given: tuple[int, ...]) -> None:
    """Triton looks at all arguments of every call to choose a kernel. Here every call takes the same one."""
    compiled = _compiled.get((id(kernel), device))
    if compiled is None:
        _compiled[id(kernel), device] = kernel[(blocks,)](*given, num_warps=WARPS)
    else:
        compiled[blocks, 1, 1](*given, stream=torch._C._cuda_getCurrentRawStream(device))


@lru_cache(maxsize=16)  # parameters and optimizer state stay where they are from step to step
def _tables(listed: tuple[Numbers, ...], stream: torch.cuda.Stream) -> tuple[Tensor, Tensor]:
    """The tables of `_many` on a device, for use on one stream."""
    rows, blocks = (table.pin_memory().to(stream.device, non_blocking=True) for table in tables(listed))
    return rows, blocks


def tables(listed: Sequence[Numbers]) -> tuple[Tensor, Tensor]:
    """The tables of `_many`."""
    counts = np.array([_blocks(row) for row in listed])
    tensor = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(np.array(listed, np.int64)), torch.from_numpy(np.stack([tensor, number], 1))


def _blocks(row: Numbers) -> int:
    _, size, one_in, _ = row
    return -(-size // (fingerprint.BLOCK * one_in))
