"""Barriers and proxy fences: where warps wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.backends.sm90.ptx.memory import Bools, Clock, Fault
from tests.backends.sm90.ptx.operands import Act, Operands, Then
from tests.backends.sm90.ptx.warp import Warp

SPURIOUS = 0.05  # how often a wait gives up, so that the kernel has to wait again


@dataclass
class Barrier:
    """An mbarrier. A phase ends when all arrivals and all announced bytes have come.

    arriving  what the warps know that have arrived in this phase and before
    arrived   what they knew when the last phase ended
    """

    arrivals: int
    missing: int
    arriving: Clock
    arrived: Clock
    nbytes: int = 0
    phase: int = 0

    def arrive(self, count: int, clock: Clock) -> None:
        clock.tell(self.arriving)
        self.missing -= count
        if self.missing < 0:
            raise Fault("more arrivals at an mbarrier than it expects")
        self._turn()

    def complete(self, nbytes: int, landed: int) -> None:
        """A copy has landed, at this time of the copies."""
        self.arriving.times[-1] = landed
        self.nbytes -= nbytes
        self._turn()

    def _turn(self) -> None:
        if self.missing == 0 and self.nbytes == 0:
            self.missing, self.phase = self.arrivals, self.phase + 1
            self.arrived.learn(self.arriving)

    def has_passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass
class NamedBarrier:
    """`arriving` and `arrived` have the same meaning as in Barrier."""

    arriving: Clock
    arrived: Clock
    waiting: int = 0  # threads
    needed: int = 0  # threads, 0 if none waits
    generation: int = 0


def init(at: Operands, op: str, where: str, count: str) -> Act:
    address, get = at.shared(where), at.get(count, np.uint32)

    def act(warp: Warp, lanes: Bools) -> Then:
        for lane in np.flatnonzero(lanes):
            arrivals, clocks = int(get(warp)[lane]), [Clock(warp.cta.warps) for _ in range(2)]
            warp.cta.barriers[int(address(warp)[lane])] = Barrier(arrivals, arrivals, *clocks)
        return Then.GO_ON

    return act


def arrive(at: Operands, op: str, to: str, where: str, count: str) -> Act:
    """With .expect_tx `count` is a number of bytes, and the arrival is one."""
    address, get, expects = at.shared(where), at.get(count, np.uint32), ".expect_tx" in op

    def act(warp: Warp, lanes: Bools) -> Then:
        for lane in np.flatnonzero(lanes):
            barrier, number = warp.cta.barrier(int(address(warp)[lane])), int(get(warp)[lane])
            if expects:
                barrier.nbytes += number
            barrier.arrive(1 if expects else number, warp.clock)
        warp.world.progress += 1
        return Then.GO_ON

    return act


def test(at: Operands, op: str, to: str, where: str, parity: str, *_: str) -> Act:
    """try_wait and test_wait. The first one waits until the phase has ended, but may give up before."""
    put, address, get, waits = at.put(to), at.shared(where), at.get(parity, np.uint32), ".try_wait" in op

    def act(warp: Warp, lanes: Bools) -> Then:
        places, parities = address(warp)[lanes], get(warp)[lanes]
        if (places != places[0]).any() or (parities != parities[0]).any():
            raise Fault("lanes of a warp wait for different phases")
        barrier, wanted = warp.cta.barrier(int(places[0])), int(parities[0])
        passed = barrier.has_passed(wanted)
        if waits and not passed:
            warp.waits = lambda: barrier.has_passed(wanted)
            return Then.AGAIN
        if waits and warp.world.random.random() < SPURIOUS:
            put(warp, lanes, np.full(32, False))
            return Then.PAUSE
        if passed:
            warp.clock.learn(barrier.arrived)
        put(warp, lanes, np.full(32, passed))
        return Then.GO_ON

    return act


def meet(at: Operands, op: str, name: str, count: str = "") -> Act:
    """bar.sync and bar.arrive. Without a count all threads of the CTA meet."""
    which, threads = at.get(name, np.uint32), at.get(count or str(at.text.threads), np.uint32)

    def act(warp: Warp, lanes: Bools) -> Then:
        if warp.awaits is not None:
            warp.clock.learn(warp.awaits.arrived)
            warp.awaits = None
            return Then.GO_ON
        clocks = [Clock(warp.cta.warps) for _ in range(2)]
        barrier = warp.cta.named.setdefault(int(which(warp)[0]), NamedBarrier(*clocks))
        mine = barrier.generation
        warp.clock.tell(barrier.arriving)
        warp.world.progress += 1
        barrier.waiting, barrier.needed = barrier.waiting + 32, barrier.needed or int(threads(warp)[0])
        if barrier.needed != int(threads(warp)[0]) or barrier.waiting > barrier.needed:
            raise Fault("warps meet at a named barrier with different numbers of threads")
        if barrier.waiting == barrier.needed:
            barrier.waiting, barrier.needed, barrier.generation = 0, 0, mine + 1
            barrier.arrived.learn(barrier.arriving)
        if ".arrive" in op:
            return Then.GO_ON
        warp.awaits, warp.waits = barrier, lambda: barrier.generation > mine
        return Then.AGAIN

    return act


def fence(at: Operands, op: str) -> Act:
    """fence.proxy.async: asynchronous reads see the stores that the warp knows of."""

    def act(warp: Warp, lanes: Bools) -> Then:
        warp.cta.shared.fence(warp.clock)
        return Then.GO_ON

    return act
