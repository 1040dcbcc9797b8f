"""Global and shared memory. Every access is checked: outside of a tensor, misaligned, or not yet fenced is an error."""

from __future__ import annotations

import ctypes
from bisect import bisect_right

import numpy as np
import numpy.typing as npt
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.int64]

SHARED_BASE = 1 << 10  # where the dynamic shared memory begins, so that address 0 is not valid
POISON = 0xFF  # bytes that nobody has written: NaN as a number, and no valid row or count as an integer


class Fault(RuntimeError):
    """The kernel did what it must not do on a GPU."""


class Global:
    """The tensors of a launch, at their addresses on the host."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._rooms: list[Bytes] = []

    def add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if not size or start in self._starts:
            return
        room = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._rooms.insert(at, room)

    def room(self, address: int, size: int) -> Bytes:
        """`size` bytes at an address, all in one tensor."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address + size > self._starts[at] + len(self._rooms[at]):
            raise Fault(f"{size} bytes at global address {address:#x} are not in a tensor")
        if address % min(size, 16):
            raise Fault(f"{size} bytes at global address {address:#x} are misaligned")
        offset = address - self._starts[at]
        return self._rooms[at][offset : offset + size]

    def load(self, addresses: Longs, size: int, lanes: Bools) -> Bytes:
        """(32, size). Inactive lanes have zeros."""
        out = np.zeros((len(addresses), size), np.uint8)
        for lane in np.flatnonzero(lanes):
            out[lane] = self.room(int(addresses[lane]), size)
        return out

    def store(self, addresses: Longs, values: Bytes, lanes: Bools) -> None:
        for lane in np.flatnonzero(lanes):
            self.room(int(addresses[lane]), values.shape[1])[:] = values[lane]


class Clock:
    """What a warp knows of the others: the time of each warp up to which its loads and stores have happened before.

    A warp's own time passes when it arrives at a barrier. Whoever waits there learns what all that arrived know.
    """

    def __init__(self, warps: int, warp: int = -1) -> None:
        """That of a warp, or of a barrier."""
        self.times, self.warp = np.zeros(warps, np.int64), warp
        if warp >= 0:
            self.times[warp] = 1

    def learn(self, other: Clock) -> None:
        np.maximum(self.times, other.times, out=self.times)

    def tell(self, barrier: Clock) -> None:
        barrier.learn(self)
        self.times[self.warp] += 1


class Shared:
    """The shared memory of a CTA.

    A warp reads a word, or stores to it, only if it knows of the stores before; and it stores only if it knows of the
    reads before. Asynchronous reads see plain stores after a proxy fence, of the storing warp or of a warp that knows
    of the stores.
    """

    def __init__(self, size: int, warps: int) -> None:
        self.bytes = np.full(size, POISON, np.uint8)
        self._words = self.bytes.view(np.uint32)
        self._storing = np.full(size // 4, -1, np.int8)  # the warp that has stored the word, -1 if a copy has
        self._stored = np.zeros(size // 4, np.int64)  # when it did
        self._unfenced = np.zeros(size // 4, np.bool_)
        self._read = np.zeros((warps, size // 4), np.int64)  # when each warp last did

    def words_at(self, addresses: npt.NDArray[np.uint32], count: int) -> Words:
        """The numbers of `count` words at each address, (lanes, count)."""
        offsets = addresses.astype(np.int64) - SHARED_BASE
        if (offsets % (4 * count)).any() or (offsets < 0).any() or (offsets + 4 * count > len(self.bytes)).any():
            raise Fault(f"{count} words at shared addresses {offsets.tolist()} are misaligned or outside")
        return np.asarray(offsets[:, None] // 4 + np.arange(count))

    def load(self, words: Words, clock: Clock) -> npt.NDArray[np.uint32]:
        self._know_stores(words, clock)
        self._read[clock.warp, words] = clock.times[clock.warp]
        return np.asarray(self._words[words])

    def store(self, words: Words, values: npt.NDArray[np.uint32], clock: Clock) -> None:
        self._know_stores(words, clock)
        unknown = self._read[:, words.ravel()].max(1, initial=0) > clock.times
        unknown[clock.warp] = False
        if unknown.any():
            raise Fault(f"warp {clock.warp} stores what warp {unknown.argmax()} may not have read yet")
        self._words[words] = values
        self._storing[words], self._stored[words] = clock.warp, clock.times[clock.warp]
        self._unfenced[words] = True

    def fence(self, clock: Clock) -> None:
        stored = np.flatnonzero(self._unfenced)
        self._unfenced[stored[self._stored[stored] <= clock.times[self._storing[stored]]]] = False

    def read_async(self, offsets: Words) -> Bytes:
        """Bytes as TMA and products read them."""
        unfenced = self._unfenced[offsets // 4]
        if unfenced.any():
            where = offsets[unfenced]
            raise Fault(
                f"an asynchronous read of the bytes {where.min()} to {where.max()} of shared memory finds a store of "
                f"warp {self._storing[where // 4].max()} without a proxy fence"
            )
        return np.asarray(self.bytes[offsets])

    def write_async(self, offsets: Words, values: Bytes | int) -> None:
        self.bytes[offsets] = values
        self._storing[offsets // 4], self._unfenced[offsets // 4] = -1, False

    def _know_stores(self, words: Words, clock: Clock) -> None:
        storing = self._storing[words]
        others = (storing >= 0) & (storing != clock.warp)
        if others.any() and (self._stored[words][others] > clock.times[storing[others]]).any():
            raise Fault(f"warp {clock.warp} meets a store of warp {storing[others].max()} without a barrier between")
