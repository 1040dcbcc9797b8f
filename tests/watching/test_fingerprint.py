"""The fingerprint is a function of the values, in any memory layout, and sees every bit."""

from __future__ import annotations

import struct
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_attn.watching import fingerprint as by_torch
from dash_attn.watching.fingerprint import (
    BLOCK,
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


GOLDEN = [11688120643052869853, 12841570251478397905, 3914321291853483822, 8925330270586280644]


def spread(number: int) -> int:
    number %= 2**64
    number = (number ^ (number >> 30)) * FIRST % 2**64
    number = (number ^ (number >> 27)) * SECOND % 2**64
    return number ^ (number >> 31)


KEYS = [spread((number + 1) * STEP) | 1 for number in range(32)]


def by_hand(content: bytes, share: Share = WHOLE) -> int:
    """The definition, in Python's integers."""
    if share.one_in > 1:
        groups = -(-len(content) // (PIECE * share.one_in))
        starts = [chosen(group, share) * PIECE for group in range(groups)]
        content = b"".join(content[start:][:PIECE].ljust(PIECE, b"\0") for start in starts)
    content += bytes(-len(content) % BLOCK)
    words, total = struct.unpack(f"<{len(content) // 4}I", content), 0
    for place in range(len(words) // 32):
        block, column = divmod(place, 256)
        first = block * 8192 + column * 4
        of_column = [words[first + row * 1024 + word] for row in range(8) for word in range(4)]
        sum_of = sum(word * key for word, key in zip(of_column, KEYS, strict=True))
        total += spread(sum_of + (place + 1) * STEP)
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


@pytest.mark.parametrize("extra", [-1, 0, 3, 5000])
def test_more_than_one_chunk(extra: int) -> None:
    tensor = torch.randint(256, (2 * CHUNK["cpu"] * BLOCK + extra,)).to(torch.uint8)
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


@given(st.integers(2, 300) | st.integers(BLOCK - 9, 3 * BLOCK), st.data())
def test_every_bit_counts(size: int, data: st.DataObject) -> None:
    tensor = torch.zeros(size, dtype=torch.uint8)
    bits = data.draw(st.sets(st.tuples(st.integers(0, size - 1), st.integers(0, 7)), min_size=1, max_size=4))
    changed = tensor.clone()
    for place, bit in bits:
        changed[place] ^= 1 << bit
    assert fingerprint(changed) != fingerprint(tensor)


def test_words_of_a_column_do_not_cancel_out() -> None:
    """Nor do signs of two words of a column, nor two words that change places."""
    column = torch.arange(8)[:, None] * 1024 + 77 * 4 + torch.arange(4)
    words = torch.randint(-(2**31), 2**31, (3 * 8192 + 100,)).to(torch.int32)
    pairs = list(combinations((column + 8192).flatten().tolist(), 2))
    prints = {fingerprint(words)}
    for pair in pairs:
        for change in (words[list(reversed(pair))], words[list(pair)] ^ -(2**31)):
            changed = words.clone()
            changed[list(pair)] = change
            prints.add(fingerprint(changed))
    assert len(prints) == 1 + 2 * len(pairs)
    for one, two in combinations(KEYS, 2):  # so it is for all values of the words
        assert (one + two) % 2**33 and (one - two) % 2**33


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
    want = fingerprint(torch.ones(3))
    with torch.inference_mode():
        inside = torch.ones(3)
        assert fingerprint(inside) == want
    assert fingerprint(inside) == want


def pieces_of(share: Share, count: int) -> list[int]:
    """The pieces that are read of a tensor of `count` whole pieces, by trying: a piece is read if its bits count."""
    tensor = torch.zeros(count * PIECE, dtype=torch.uint8)
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
@pytest.mark.parametrize("size", [PIECE * 33, 4 * BLOCK, 4 * BLOCK + 2 * PIECE], ids=["33 pieces", "even", "more"])
@pytest.mark.parametrize("extra", [0, 1, 8, 511, 513])
def test_the_share_is_that_of_the_definition(size: int, extra: int) -> None:
    """The piece of the last group may lie behind the end of the tensor, and be the only one of its block."""
    tensor = torch.randint(256, (size + extra,)).to(torch.uint8)
    for share in (WHOLE, *(Share(4, turn) for turn in range(4))):
        assert fingerprint(tensor, share) == by_hand(content(tensor), share)


@pytest.mark.parametrize("extra", [0, 100])
def test_more_pieces_than_a_chunk_holds(extra: int) -> None:
    tensor = torch.randint(256, (4 * CHUNK["cpu"] * BLOCK + extra,)).to(torch.uint8)
    assert fingerprint(tensor, Share(2, 1)) == by_hand(tensor.numpy().tobytes(), Share(2, 1))


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
