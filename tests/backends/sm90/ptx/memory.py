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
NEVER = 1 << 60  # later than any time
POISON = 0xFF  # bytes that nobody has written: NaN as a number, and no valid row or count as an integer


class Fault(RuntimeError):
    """The kernel did what it must not do on a GPU."""


class Global:
    """The tensors of a launch, at their addresses on the host. Some are parts of one storage."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._rooms: list[Bytes] = []

    def add(self, x: Tensor) -> None:
        if not x.numel():
            return
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        start, size = x.data_ptr(), (1 + last) * x.element_size()
        room = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._rooms.insert(at, room)

    def room(self, address: int, size: int) -> Bytes:
        """`size` bytes at an address, all in one tensor."""
        at = bisect_right(self._starts, address) - 1
        while at >= 0 and address + size > self._starts[at] + len(self._rooms[at]):
            at -= 1
        if at < 0:
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
    """What a warp knows of each other warp: it knows everything that this warp did up to this time.

    A warp's own time passes when it arrives at a barrier. Whoever waits there learns what all that arrived know. The
    last time is that of the copies into shared memory: the number of those that have landed.
    """

    def __init__(self, warps: int, warp: int = -1) -> None:
        """The clock of a warp, or of a barrier if `warp` is -1."""
        self.times, self.warp = np.zeros(warps + 1, np.int64), warp
        if warp >= 0:
            self.times[warp] = 1

    def learn(self, other: Clock) -> None:
        np.maximum(self.times, other.times, out=self.times)

    def copy(self) -> Clock:
        other = Clock(len(self.times) - 1, self.warp)
        other.times[:] = self.times
        return other

    def tell(self, barrier: Clock) -> None:
        barrier.learn(self)
        self.times[self.warp] += 1


class Shared:
    """The shared memory of a CTA.

    A warp may read or store a word only if it knows of every earlier store to it. It may store only if it also knows of
    every earlier read. It knows of a copy into shared memory if it has waited for the copy's mbarrier. An asynchronous
    read needs a proxy fence after a plain store. The storing warp may fence, or any warp that knows of the store.
    """

    def __init__(self, size: int, warps: int) -> None:
        self.bytes = np.full(size, POISON, np.uint8)
        self._words = self.bytes.view(np.uint32)
        self._storing = np.full(size // 4, -1, np.int8)  # the warp that has stored the word, or `warps` for a copy
        self._stored = np.zeros(size // 4, np.int64)  # the time of that store
        self._unfenced = np.zeros(size // 4, np.bool_)
        self._read = np.zeros((warps, size // 4), np.int64)  # when each warp last did
        self._warps, self._landed = warps, 0  # copies that have

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
        if np.unique(words).size < words.size:
            raise Fault(f"lanes of warp {clock.warp} store to the same word")
        self._know_stores(words, clock)
        self._know_reads(words, clock)
        self._words[words] = values
        self._storing[words], self._stored[words] = clock.warp, clock.times[clock.warp]
        self._unfenced[words] = True

    def fence(self, clock: Clock) -> None:
        stored = np.flatnonzero(self._unfenced)
        self._unfenced[stored[self._stored[stored] <= clock.times[self._storing[stored]]]] = False

    def read_async(self, offsets: Words, known: Clock) -> Bytes:
        """Bytes as TMA and products read them. `known` is what their warp knew when it issued them."""
        self._know_stores(np.unique(offsets // 4), known)
        unfenced = self._unfenced[offsets // 4]
        if unfenced.any():
            where = offsets[unfenced]
            raise Fault(
                f"an asynchronous read of the bytes {where.min()} to {where.max()} of shared memory finds a store of "
                f"warp {self._storing[where // 4].max()} without a proxy fence"
            )
        return np.asarray(self.bytes[offsets])

    def announce(self, offsets: Words, clock: Clock) -> None:
        """A warp issues a copy that will write these bytes. From now on they hold no value."""
        words = np.unique(offsets // 4)
        self._know_stores(words, clock)
        self._know_reads(words, clock)
        if self._unfenced[words].any():
            raise Fault(f"a copy of warp {clock.warp} overwrites a store without a proxy fence")
        self.bytes[offsets] = POISON
        self._storing[words], self._stored[words] = self._warps, NEVER

    def land(self, offsets: Words, values: Bytes) -> int:
        """The copy writes. Returns the time of the copies."""
        self._landed += 1
        self.bytes[offsets] = values
        self._stored[offsets // 4] = self._landed
        return self._landed

    def _know_reads(self, words: Words, clock: Clock) -> None:
        unknown = self._read[:, words.ravel()].max(1, initial=0) > clock.times[: self._warps]
        unknown[clock.warp] = False
        if unknown.any():
            raise Fault(f"warp {clock.warp} stores what warp {unknown.argmax()} may not have read yet")

    def _know_stores(self, words: Words, clock: Clock) -> None:
        storing = self._storing[words]
        others = (storing >= 0) & (storing != clock.warp)
        unknown = storing[others][self._stored[words][others] > clock.times[storing[others]]]
        if unknown.size:
            source = "copy" if unknown.max() == self._warps else f"store of warp {unknown.max()}"
            raise Fault(f"warp {clock.warp} meets a {source} without a barrier between")
