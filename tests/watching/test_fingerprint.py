"""The fingerprint is a function of the values, in any memory layout, and sees every bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_attn.watching import fingerprint as by_torch
from dash_attn.watching.fingerprint import (
    CHUNK,
    FIRST,
    LARGE,
    PIECE,
    SECOND,
    STEP,
    WHOLE,
    Share,
    chosen,
    fingerprint,
)

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


GOLDEN = [12768428073419776461, 17417210499757360349, 8269164357145743572, 17685845460499712145]


def by_hand(content: bytes, reads: Callable[[int], bool] = lambda piece: True) -> int:
    """The definition, in Python's integers, over the pieces that are read."""
    content += bytes(-len(content) % 8)
    total = 0
    for place in range(len(content) // 8):
        if not reads(place // PIECE):
            continue
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


def pieces_of(share: Share, count: int) -> list[int]:
    """The pieces that are read of a tensor of `count` whole pieces, by trying: a piece is read if its bits count."""
    tensor = torch.zeros(count * PIECE, dtype=torch.int64)
    want, read = fingerprint(tensor, share), []
    for piece in range(count):
        changed = tensor.clone()
        changed[piece * PIECE + piece % PIECE] = 1
        if fingerprint(changed, share) != want:
            read.append(piece)
    return read


@pytest.fixture
def no_tensor_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_torch, "LARGE", 0)


@pytest.mark.usefixtures("no_tensor_is_small")
@pytest.mark.parametrize("one_in", [1, 2, 3, 4, 7])
def test_every_piece_is_read_in_one_of_n_steps(one_in: int) -> None:
    count = 61  # the last group is not whole
    for first in (0, 5 * one_in):
        read = [pieces_of(Share.of_step(one_in, step), count) for step in range(first, first + one_in)]
        assert sorted(piece for pieces in read for piece in pieces) == list(range(count))
        for pieces in read:  # one of each group, so every turn reads the same share
            groups = [piece // one_in for piece in pieces]
            assert groups[: count // one_in] == list(range(count // one_in))


def test_the_choice_is_mixed() -> None:
    """Neighbouring groups and far steps choose independently: columns of a matrix and some steps are not favoured."""
    share, groups = Share(4), 4096
    at = torch.tensor([chosen(group, share) % 4 for group in range(groups)])
    for stride in (1, 2, 3, 16, 64):
        pairs = torch.bincount(at[:-stride] * 4 + at[stride:], minlength=16) / (groups - stride)
        assert ((pairs - 1 / 16).abs() < 0.02).all(), stride
    turns = [Share.of_step(4, step).turn for step in range(0, 40000, 100)]
    assert min(turns.count(turn) for turn in range(4)) > 70


@pytest.mark.usefixtures("no_tensor_is_small")
@pytest.mark.parametrize("extra", [0, 1, 8, 511, 513])
def test_the_share_is_that_of_the_definition(extra: int) -> None:
    """The chosen pieces of the bytes, each word with its place in the whole tensor."""
    size = 8 * PIECE * 33 + extra
    tensor = torch.randint(256, (size,)).to(torch.uint8)
    for turn in range(4):
        read = {chosen(group, Share(4, turn)) for group in range(9)}
        assert fingerprint(tensor, Share(4, turn)) == by_hand(content(tensor), read.__contains__)
    assert fingerprint(tensor, WHOLE) == by_hand(content(tensor))


def test_more_pieces_than_a_chunk_holds() -> None:
    share = Share(2, 1)
    words = 5 * CHUNK["cpu"] + 100
    tensor = torch.randint(2**62, (words,))
    read = chosen(torch.arange(words // (2 * PIECE) + 1), share)
    want = by_hand(tensor.numpy().tobytes(), set(read.tolist()).__contains__)
    assert fingerprint(tensor, share) == want


def test_small_tensors_are_read_whole() -> None:
    small, large = (torch.randint(256, (LARGE + extra,)).to(torch.uint8) for extra in (-1, 0))
    assert fingerprint(small, Share(4, 1)) == fingerprint(small)
    assert fingerprint(large, Share(4, 1)) != fingerprint(large)


def test_values_do_not_change() -> None:
    """Records of other versions can be compared: these values are fixed."""
    tensor = torch.arange(LARGE // 8 + 1)
    assert fingerprint(tensor[:5]) == GOLDEN[0]
    assert fingerprint(tensor) == GOLDEN[1]
    assert [fingerprint(tensor, Share.of_step(4, step)) for step in (0, 1)] == GOLDEN[2:]
