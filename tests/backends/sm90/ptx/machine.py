"""Runs the CTAs of a kernel, warp by warp, in a random interleaving.

Memory, barriers and asynchronous copies behave as the manual of PTX says, and the machine makes every choice that the
manual leaves open: which warp goes on, and when a copy or a product reads its operands and writes its result. A kernel
whose bits depend on such a choice, or that needs a copy to come early, is wrong on some GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.backends.sm90.ptx.bulk import Patience
from tests.backends.sm90.ptx.decode import is_for_all, step
from tests.backends.sm90.ptx.lanes import LANES
from tests.backends.sm90.ptx.memory import Fault, Shared
from tests.backends.sm90.ptx.operands import Operands
from tests.backends.sm90.ptx.text import Text
from tests.backends.sm90.ptx.warp import ALL, Cta, Warp, World

Place = tuple[int, int, int]

MOST_STEPS = 200_000_000  # instructions of warps in a launch, far more than any test needs


@dataclass(frozen=True)
class Chance:
    """How the machine chooses.

    eagerness  the chance that a copy or product makes a step before the next warp runs. With 0 a product runs when a
               warp waits for it, and a copy makes a step only when no warp can run. A copy that no warp waits for then
               writes to global memory last
    slice      how many instructions a warp runs at most before another one has its turn
    slow       numbers of the warps that run only if no other warp and no copy can
    """

    seed: int = 0
    eagerness: float = 0.5
    slice: int = 100
    slow: tuple[int, ...] = ()


class Machine:
    def __init__(self, text: Text, params: dict[str, bytes], world: World, chance: Chance) -> None:
        self.text, self.world, self.chance = text, world, chance
        self.operands = Operands(text, params)
        self.steps = [step(self.operands, each) for each in text.instructions]
        self.for_all = [is_for_all(each.op) for each in text.instructions]
        self.polled = -1  # the progress when polls were last repeated
        self.executed = 0

    def launch(self, grid: Place, together: int, shared_bytes: int) -> None:
        """Run all CTAs of a grid, `together` of them at the same time."""
        places = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        with np.errstate(all="ignore"):
            for begin in range(0, len(places), together):
                some = places[begin : begin + together]
                self._run([warp for place in some for warp in self._warps(place, grid, shared_bytes)])

    def _warps(self, place: Place, grid: Place, shared_bytes: int) -> list[Warp]:
        count = self.text.threads // 32
        cta = Cta(place, Shared(shared_bytes, count), count)
        special = {"%laneid": LANES}
        special |= {f"%ctaid.{axis}": np.full(32, i) for axis, i in zip("xyz", place, strict=True)}
        special |= {f"%nctaid.{axis}": np.full(32, n) for axis, n in zip("xyz", grid, strict=True)}
        for number in range(count):
            Warp(self.world, cta, self.operands.registers(special | {"%tid.x": 32 * number + LANES}))
        return cta.members

    def _run(self, warps: list[Warp]) -> None:
        warps, choose, slow = list(warps), self.world.random, self.chance.slow
        while warps:
            if choose.random() < self.chance.eagerness:
                self._advance(warps)
            ready = [warp for warp in warps if warp.waits is None or warp.waits()]
            quick = [warp for warp in ready if warp.number not in slow]
            if not quick and self._advance(warps, unawaited=False):
                continue
            if not ready:
                if not (self._poll_again(warps) or self._advance(warps)):
                    raise Fault(f"the kernel hangs: {self._places(warps)}")
                continue
            warp = choose.choice(quick or ready)
            warp.waits, warp.polls = None, False
            self._slice(warp, choose.randint(1, self.chance.slice))
            if warp.is_done:
                warps.remove(warp)
        if any(not copy.may_outlive for copy in self.world.copies):
            raise Fault("a CTA ends while a copy uses its shared memory")
        while self._advance([]):
            pass

    def _advance(self, warps: list[Warp], unawaited: bool = True) -> bool:
        """One copy or product goes on. False if there is none, or only copies that no warp waits for."""
        copies = self.world.copies
        if self.chance.eagerness:
            moves: list[Callable[[], None]] = [copy.advance for copy in copies]
            moves += [warp.run_product for warp in warps if warp.products]
        else:  # products run when they are waited for
            least = min((copy.patience for copy in copies), default=Patience.NONE)
            if least is Patience.UNAWAITED and not unawaited:
                return False
            moves = [copy.advance for copy in copies if copy.patience is least]
        if not moves:
            return False
        self.world.random.choice(moves)()
        self.world.copies = [copy for copy in copies if not copy.is_done]
        self.world.progress += 1
        return True

    def _poll_again(self, warps: list[Warp]) -> bool:
        """No warp can go on. A poll may have read the value that its warp waits for, so each poll goes on once."""
        if self.polled == self.world.progress:
            return False
        self.polled = self.world.progress
        for warp in warps:
            if warp.polls:
                warp.waits = None
        return True

    def _slice(self, warp: Warp, count: int) -> None:
        for _ in range(count):
            if warp.parked:
                warp.converge(self.for_all.__getitem__)
            elif warp.lanes is not ALL and not warp.lanes.all():
                raise Fault("lanes of a warp are lost")
            self.executed += 1
            if not self.steps[warp.at](warp):
                return
        if self.executed > MOST_STEPS:
            raise Fault(f"the kernel does not end: {self._places([warp])}")

    def _places(self, warps: list[Warp]) -> str:
        """Where each warp is."""
        labels = sorted(self.text.labels.items(), key=lambda item: item[1])
        lines = []
        for warp in warps:
            before = [name for name, at in labels if at <= warp.at]
            op = self.text.instructions[warp.at].op
            lines.append(
                f"CTA {warp.cta.place[0]} warp {warp.number} at {op} after {before[-1] if before else 'the begin'}"
            )
        return "; ".join(lines)
