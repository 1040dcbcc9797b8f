"""The fingerprint is a function of the values, in any memory layout, and sees every bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_attn.watching.fingerprint import CHUNK, FIRST, SECOND, STEP, fingerprint

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


def by_hand(content: bytes) -> int:
    """The definition, in Python's integers."""
    content += bytes(-len(content) % 8)
    total = 0
    for place in range(len(content) // 8):
        mixed = (int.from_bytes(content[8 * place : 8 * place + 8], "little") + (place + 1) * STEP) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * FIRST % 2**64
        mixed = (mixed ^ (mixed >> 27)) * SECOND % 2**64
        total += mixed ^ (mixed >> 31)
    return total % 2**64


def content(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(-90, 90, shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (3, 0), (5, 3), (2, 3, 9)], ids=str)
def test_every_dtype_and_size(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some(dtype, *shape)
    assert fingerprint(tensor) == by_hand(content(tensor))


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_more_than_one_chunk(extra: int) -> None:
    words = 2 * CHUNK["cpu"] + extra
    tensor = torch.randint(256, (8 * words + 3,)).to(torch.uint8)
    assert fingerprint(tensor) == by_hand(tensor.numpy().tobytes())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layout_in_memory_does_not_matter(dtype: torch.dtype) -> None:
    tensor = some(dtype, 6, 5, 4, 3)
    want = fingerprint(tensor)
    wide = some(dtype, 6, 5, 4, 8)
    wide[..., 2:5] = tensor
    shifted = some(dtype, tensor.numel() + 1)
    shifted[1:] = tensor.flatten()
    same = {
        "transposed": tensor.transpose(0, 2).contiguous().transpose(0, 2),
        "channels last": tensor.contiguous(memory_format=torch.channels_last),
        "a slice": wide[..., 2:5],
        "an odd offset": shifted[1:].view(tensor.shape),
        "a parameter's view": tensor.clone().as_strided(tensor.shape, tensor.stride()),
    }
    assert {name: fingerprint(each) for name, each in same.items()} == dict.fromkeys(same, want)


def test_lazy_conjugates_and_signs() -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    assert fingerprint(tensor.conj()) == fingerprint(tensor.conj().resolve_conj()) != fingerprint(tensor)
    assert fingerprint(tensor.conj().imag) == fingerprint(-tensor.imag)


@given(st.integers(2, 300), st.data())
def test_every_bit_counts(size: int, data: st.DataObject) -> None:
    tensor = torch.zeros(size, dtype=torch.uint8)
    bits = data.draw(st.sets(st.tuples(st.integers(0, size - 1), st.integers(0, 7)), min_size=1, max_size=4))
    changed = tensor.clone()
    for place, bit in bits:
        changed[place] ^= 1 << bit
    assert fingerprint(changed) != fingerprint(tensor)


def test_what_equals_as_numbers_may_differ() -> None:
    zeros = torch.zeros(64, dtype=torch.bfloat16)
    prints = {fingerprint(zeros)}
    for first in range(0, 64, 3):
        for second in range(first, 64, 5):
            negative = zeros.clone()
            negative[[first, second]] = -0.0
            prints.add(fingerprint(negative))
    assert len(prints) == 1 + sum(len(range(first, 64, 5)) for first in range(0, 64, 3))
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint(quiet[:1]) != fingerprint(quiet[1:])


def test_the_order_of_elements_counts() -> None:
    tensor = torch.randn(4096)
    prints = {fingerprint(tensor.roll(shift)) for shift in range(0, 4096, 64)}
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    assert len(prints | {fingerprint(swapped)}) == 65


def test_gradients_stay_out_of_it() -> None:
    tensor = torch.randn(6, 4, requires_grad=True)
    assert fingerprint(tensor) == fingerprint(tensor.t().t()) == fingerprint(tensor.detach())
    with torch.inference_mode():
        assert fingerprint(torch.ones(3)) == fingerprint(torch.ones(3))
