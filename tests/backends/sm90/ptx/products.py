"""Matrix products of a warpgroup (wgmma), and the moves between their fragments and shared memory.

A warp computes 16 of the 64 rows of a product by itself, so no warp waits for another here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.backends.sm90.ptx.lanes import LANES, widened
from tests.backends.sm90.ptx.memory import SHARED_BASE, Bools, Bytes, Shared
from tests.backends.sm90.ptx.operands import Act, Operands, Then, several
from tests.backends.sm90.ptx.warp import Product, Warp

Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
ROWS, STEPS = 16, 16  # rows of a warp, elements of the inner dimension


class Descriptor(NamedTuple):
    """An operand in shared memory."""

    start: int
    leading: int
    stride: int
    swizzled: bool

    @staticmethod
    def of(word: int) -> Descriptor:
        mode = word >> 62
        assert mode in (0, 1), "only no swizzle and that of 128 bytes are known here"
        assert not word >> 49 & 7, "no base offset is known here"
        fields = [(word >> at & 0x3FFF) << 4 for at in (0, 16, 32)]
        return Descriptor(*fields, mode == 1)

    def offsets(self, lines: Longs, transposed: bool) -> Longs:
        """Where the two bytes of the elements (line, step) lie in shared memory. Lines are rows or columns."""
        line, step = lines[:, None], np.arange(STEPS)[None, :]
        if not transposed:
            inner = step % 8 * 2 + step // 8 * (16 if self.swizzled else self.leading)
            at = line // 8 * self.stride + line % 8 * (128 if self.swizzled else 16) + inner
        else:
            assert self.swizzled
            at = line % 64 * 2 + line // 64 * self.leading + step % 8 * 128 + step // 8 * self.stride
        at = at + self.start
        if self.swizzled:
            at = at ^ (at >> 7 & 7) << 4
        at = at - SHARED_BASE
        return np.stack([at, at + 1], -1)


def numbers(pairs: Bytes, dtype: str) -> Floats:
    """Elements of two bytes each."""
    return np.asarray(widened(np.ascontiguousarray(pairs).view(np.uint16)[..., 0], dtype))


def fragment(registers: list[Any], dtype: str) -> Floats:
    """The left operand of a warp, (ROWS, STEPS), from four registers of two elements each."""
    out = np.empty((ROWS, STEPS), np.float32)
    for i, register in enumerate(registers):
        both = numbers(np.ascontiguousarray(register).view(np.uint8).reshape(32, 2, 2), dtype)
        for j in range(2):
            out[LANES // 4 + i % 2 * 8, LANES % 4 * 2 + j + i // 2 * 8] = both[:, j]
    return out


def places(count: int) -> tuple[Longs, Longs]:
    """Row and column of each accumulator of a lane, both (registers, 32)."""
    j = np.arange(count)[:, None]
    return LANES // 4 + j // 2 % 2 * 8, j // 4 * 8 + LANES % 4 * 2 + j % 2


def matrices(addresses: npt.NDArray[np.uint32], shared: Shared) -> Longs:
    """Word numbers (4 matrices, 8 rows, 4 words) of an ldmatrix or stmatrix: lane 8 i + r has row r of matrix i."""
    return shared.words_at(addresses, 4).reshape(4, 8, 4)


def spread(words: npt.NDArray[np.uint32], transposed: bool) -> list[npt.NDArray[np.uint32]]:
    """Four registers from four matrices. Lane l has word l % 4 of row l // 4, or transposed of column l // 4."""
    words = transpose(words) if transposed else words
    return [words[i].reshape(32) for i in range(4)]


def gathered(registers: list[Any], transposed: bool) -> npt.NDArray[np.uint32]:
    """The matrices that four registers hold."""
    words = np.stack(registers).reshape(4, 8, 4)
    return transpose(words) if transposed else words


def transpose(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Matrices of 8 rows and 8 columns of two bytes, as (4, 8, 4) words."""
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(4, 8, 8)
    return np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint32).reshape(4, 8, 4)


# ---- instructions --------------------------------------------------------------------------------------------


def product(at: Operands, op: str, *operands: str) -> Act:
    """The left operand is a descriptor, or registers. All operands are read when the product runs."""
    sums, left, right, scale, *rest = operands
    targets, dtype = [at.number(name) for name in several(sums)], op.rpartition(".")[2]
    row, column = places(len(targets))
    lines = np.arange(2 * len(targets))
    adds, word = at.get(scale, np.bool_), at.get(right, np.uint64)
    signs, (*left_trans, right_trans) = rest[:2], [x == "1" for x in rest[2:]]
    assert signs == ["1", "1"], "no operand is negated here"
    in_registers = left.startswith("{")
    sources = at.gets(left) if in_registers else [at.get(left, np.uint64)]

    def act(warp: Warp, lanes: Bools) -> Then:
        shared, rows = warp.cta.shared, warp.number % 4 * ROWS + np.arange(ROWS)
        place = None if in_registers else Descriptor.of(int(sources[0](warp)[0]))
        other, keeps, known = Descriptor.of(int(word(warp)[0])), bool(adds(warp)[0]), warp.clock.copy()

        def run() -> None:
            if place is None:
                a = fragment([source(warp) for source in sources], dtype)
            else:
                a = numbers(shared.read_async(place.offsets(rows, left_trans[0]), known), dtype)
            b = numbers(shared.read_async(other.offsets(lines, right_trans), known), dtype)
            total = (a @ b.T)[row, column]
            for i, target in enumerate(targets):
                old = warp.registers[target].view(np.float32)
                warp.registers[target] = (old + total[i] if keeps else total[i]).view(np.uint32)

        warp.products.append(Product(warp.committed, run))
        return Then.GO_ON

    return act


def commit(at: Operands, op: str) -> Act:
    def act(warp: Warp, lanes: Bools) -> Then:
        warp.committed += 1
        warp.world.progress += 1
        return Then.GO_ON

    return act


def await_groups(at: Operands, op: str, most: str) -> Act:
    """All groups but the last `most` are complete. A group is complete in all warps of the warpgroup at once."""
    count = int(most)

    def act(warp: Warp, lanes: Bools) -> Then:
        needed, members = warp.committed - count, warp.warpgroup()

        def committed() -> bool:
            return all(each.committed >= needed for each in members)

        if not committed():
            warp.waits = committed
            return Then.AGAIN
        for each in members:
            each.finish_products(needed)
        return Then.GO_ON

    return act


def load_matrices(at: Operands, op: str, to: str, of: str) -> Act:
    puts, address, transposed = at.puts(to), at.shared(of), ".trans." in op

    def act(warp: Warp, lanes: Bools) -> Then:
        shared = warp.cta.shared
        words = shared.load(matrices(address(warp), shared), warp.clock)
        for put, value in zip(puts, spread(words, transposed), strict=True):
            put(warp, lanes, value)
        return Then.GO_ON

    return act


def store_matrices(at: Operands, op: str, to: str, of: str) -> Act:
    gets, address, transposed = at.gets(of), at.shared(to), ".trans." in op

    def act(warp: Warp, lanes: Bools) -> Then:
        shared = warp.cta.shared
        words = gathered([get(warp) for get in gets], transposed)
        shared.store(matrices(address(warp), shared), words, warp.clock)
        warp.world.progress += 1
        return Then.GO_ON

    return act
