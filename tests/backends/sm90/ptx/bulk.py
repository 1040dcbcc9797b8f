"""Copies that run beside the threads: TMA tiles, bulk copies, and sums in global memory.

A copy reads its source and writes its target at any time between its issue and the wait for it. The machine chooses.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.backends.sm90.ptx.memory import SHARED_BASE, Bools, Bytes, Fault
from tests.backends.sm90.ptx.operands import PARAMETERS, Act, Operands, Then, several
from tests.backends.sm90.ptx.warp import Warp

Longs = npt.NDArray[np.int64]


class TensorMap(NamedTuple):
    """What a TMA descriptor says. Sizes and strides count elements of two bytes, the fastest dimension first."""

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, int]  # columns, rows

    @property
    def nbytes(self) -> int:
        return 2 * self.box[0] * self.box[1]

    def offsets(self, shared: int) -> Longs:
        """Where the bytes of the box lie in shared memory, (rows, bytes of a row): swizzled by 128 bytes."""
        assert self.box[0] == 64 and (shared - SHARED_BASE) % 128 == 0
        at = shared + np.arange(self.box[1])[:, None] * 128 + np.arange(128)
        return np.asarray((at ^ (at >> 7 & 7) << 4) - SHARED_BASE)


class TileRow(NamedTuple):
    """A row of a tile that lies in the tensor."""

    number: int
    address: int
    nbytes: int


class Tile(NamedTuple):
    tensor: TensorMap
    at: tuple[int, ...]  # its first element

    def rows(self) -> list[TileRow]:
        """Those that lie in the tensor. The first dimension may end inside of the tile."""
        (column, row, *others), tensor = self.at, self.tensor
        assert column >= 0
        width = min(tensor.box[0], tensor.sizes[0] - column)
        if width <= 0 or any(not 0 <= i < n for i, n in zip(others, tensor.sizes[2:], strict=True)):
            return []
        begin = column + sum(i * s for i, s in zip(others, tensor.strides[2:], strict=True))
        return [
            TileRow(i, tensor.base + 2 * (begin + (row + i) * tensor.strides[1]), 2 * width)
            for i in range(tensor.box[1])
            if 0 <= row + i < tensor.sizes[1]
        ]


class Patience(IntEnum):
    """How long a copy can put off its next step. The last one writes to global memory, and no warp waits for it."""

    NONE = 0
    AWAITED = 1
    UNAWAITED = 2


@dataclass
class Copy:
    """A copy in two steps: it reads its source, then writes its target. A load has only the second step."""

    read: Callable[[], None] | None
    write: Callable[[], None]
    has_read: bool = False
    is_awaited: bool = False  # a warp waits until it is done
    is_done: bool = False

    @property
    def patience(self) -> Patience:
        if not self.has_read:
            return Patience.NONE
        return Patience.AWAITED if self.is_awaited else Patience.UNAWAITED

    @property
    def may_outlive(self) -> bool:
        """Whether the CTA may end before the copy is done: the copy uses its shared memory no longer."""
        return self.read is not None and self.has_read

    def advance(self) -> None:
        if self.read is not None and not self.has_read:
            self.read()
            self.has_read = True
        else:
            self.write()
            self.is_done = True


def line(shared: int, count: int) -> Longs:
    """Bytes of shared memory that lie one after the other."""
    offset = shared - SHARED_BASE
    if offset % 16 or count % 16 or offset < 0:
        raise Fault(f"a bulk copy of {count} bytes at shared address {shared} is misaligned or outside")
    return np.asarray(np.arange(count) + offset)


def load_tile(warp: Warp, tile: Tile, shared: int, barrier: int) -> Copy:
    memory, cta, clock = warp.world.memory, warp.cta, warp.clock
    offsets = tile.tensor.offsets(shared)
    cta.shared.announce(offsets, clock)

    def write() -> None:
        box = np.zeros(offsets.shape, np.uint8)
        for row in tile.rows():
            box[row.number, : row.nbytes] = memory.room(row.address, row.nbytes)
        cta.barrier(barrier).complete(tile.tensor.nbytes, cta.shared.land(offsets, box))

    return Copy(None, write)


def store_tile(warp: Warp, tile: Tile, shared: int) -> Copy:
    memory, cta, known = warp.world.memory, warp.cta, warp.clock.copy()
    offsets, held = tile.tensor.offsets(shared), list[Bytes]()

    def read() -> None:
        held.append(cta.shared.read_async(offsets, known))

    def write() -> None:
        for row in tile.rows():
            memory.room(row.address, row.nbytes)[:] = held[0][row.number, : row.nbytes]

    return Copy(read, write)


def load_bytes(warp: Warp, shared: int, address: int, count: int, barrier: int) -> Copy:
    memory, cta, clock = warp.world.memory, warp.cta, warp.clock
    offsets = line(shared, count)
    cta.shared.announce(offsets, clock)

    def write() -> None:
        cta.barrier(barrier).complete(count, cta.shared.land(offsets, memory.room(address, count)))

    return Copy(None, write)


def store_bytes(warp: Warp, address: int, shared: int, count: int, adds: bool) -> Copy:
    """Copies, or adds float32 numbers. The sums of one copy do not depend on each other."""
    memory, cta, known = warp.world.memory, warp.cta, warp.clock.copy()
    offsets, held = line(shared, count), list[Bytes]()

    def read() -> None:
        held.append(cta.shared.read_async(offsets, known))

    def write() -> None:
        room = memory.room(address, count)
        if adds:
            room.view(np.float32)[:] += held[0].view(np.float32)
        else:
            room[:] = held[0]

    return Copy(read, write)


# ---- instructions --------------------------------------------------------------------------------------------


def copy(at: Operands, op: str, to: str, of: str, count: str, barrier: str = "") -> Act:
    """Bytes that lie one after the other."""
    if barrier:
        shared, address, nbytes, meeting = (
            at.shared(to),
            at.address(of, np.uint64),
            at.get(count, np.uint32),
            at.shared(barrier),
        )

        def load(warp: Warp, lanes: Bools) -> Then:
            world = warp.world
            for lane in np.flatnonzero(lanes):
                given = [int(get(warp)[lane]) for get in (shared, address, nbytes, meeting)]
                world.copies.append(load_bytes(warp, *given))
            return Then.GO_ON

        return load
    adds, address, shared, nbytes = (
        "cp.reduce" in op,
        at.address(to, np.uint64),
        at.shared(of),
        at.get(count, np.uint32),
    )

    def store(warp: Warp, lanes: Bools) -> Then:
        for lane in np.flatnonzero(lanes):
            given = [int(get(warp)[lane]) for get in (address, shared, nbytes)]
            issue(warp, int(lane), store_bytes(warp, *given, adds))
        return Then.GO_ON

    return store


def copy_tile(at: Operands, op: str, to: str, of: str, *rest: str) -> Act:
    """TMA. The bytes of a descriptor are the number of its map."""
    loads = ".shared::cta.global" in op
    inside, outside = (to, of) if loads else (of, to)
    found = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*(\{.*\})\s*\]", outside)
    assert found is not None
    which, shared = at.get(found[1], np.uint64), at.shared(inside)
    coords = [at.get(name, np.int32) for name in several(found[2])]
    meeting = at.shared(rest[0]) if loads else None

    def act(warp: Warp, lanes: Bools) -> Then:
        world = warp.world
        for lane in np.flatnonzero(lanes):
            (number,) = struct.unpack_from("<q", at.bytes, int(which(warp)[lane]) - PARAMETERS)
            tensor, place = world.maps[number], tuple(int(get(warp)[lane]) for get in coords)
            room = int(shared(warp)[lane])
            if meeting is not None:
                barrier = int(meeting(warp)[lane])
                world.copies.append(load_tile(warp, Tile(tensor, place), room, barrier))
            else:
                issue(warp, int(lane), store_tile(warp, Tile(tensor, place), room))
        return Then.GO_ON

    return act


def issue(warp: Warp, lane: int, each: Copy) -> None:
    warp.copies[lane].open.append(each)
    warp.world.copies.append(each)


def commit(at: Operands, op: str) -> Act:
    def act(warp: Warp, lanes: Bools) -> Then:
        for lane in np.flatnonzero(lanes):
            held = warp.copies[int(lane)]
            held.groups.append(held.open)
            held.open = []
        return Then.GO_ON

    return act


def await_groups(at: Operands, op: str, most: str) -> Act:
    """All copies but those of the last groups are done. With .read they have read their source."""
    reads, count = op.endswith(".read"), int(most)

    def act(warp: Warp, lanes: Bools) -> Then:
        groups = [warp.copies[int(lane)].groups for lane in np.flatnonzero(lanes)]
        old = [each for mine in groups for group in mine[: max(0, len(mine) - count)] for each in group]

        def finished() -> bool:
            return all(each.is_done or (reads and each.has_read) for each in old)

        if not finished():
            for each in old:
                each.is_awaited = not reads
            warp.waits = finished
            return Then.AGAIN
        if not reads:
            for mine in groups:
                del mine[: max(0, len(mine) - count)]
        return Then.GO_ON

    return act
