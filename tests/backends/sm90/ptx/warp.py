"""The state of a launch, of its CTAs and of their warps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.backends.sm90.ptx.memory import Bools, Clock, Fault, Global, Shared

if TYPE_CHECKING:
    from tests.backends.sm90.ptx.bulk import Copy, TensorMap
    from tests.backends.sm90.ptx.meetings import Barrier, NamedBarrier

Array = Any
Condition = Callable[[], bool]
ALL = np.ones(32, np.bool_)


@dataclass
class World:
    """What all warps of a launch share.

    maps      the tensors that TMA descriptors name by number
    random    for every choice
    copies    bulk copies that are not done
    progress  counts everything that another warp could see
    """

    memory: Global
    maps: Sequence[TensorMap]
    random: Random
    copies: list[Copy] = field(default_factory=list)
    progress: int = 0

    def __post_init__(self) -> None:
        self.leader = self.random.randrange(32)  # the lane that elect.sync takes


class Cta:
    def __init__(self, place: tuple[int, int, int], shared: Shared, warps: int) -> None:
        self.place, self.shared, self.warps = place, shared, warps
        self.members: list[Warp] = []
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, NamedBarrier] = {}

    def barrier(self, address: int) -> Barrier:
        if address not in self.barriers:
            raise Fault(f"no mbarrier at shared address {address}")
        return self.barriers[address]


class Group(NamedTuple):
    """Lanes of a warp that are at the same instruction."""

    at: int
    lanes: Bools


class Product(NamedTuple):
    """The share of a warp in a product of its warpgroup."""

    group: int
    run: Callable[[], None]


@dataclass
class LaneCopies:
    """The bulk copies that one thread has issued from shared memory: the open group, and the committed groups."""

    open: list[Copy] = field(default_factory=list)
    groups: list[list[Copy]] = field(default_factory=list)


class Warp:
    """Registers hold an array with one element for each lane."""

    def __init__(self, world: World, cta: Cta, registers: list[Array]) -> None:
        self.world, self.cta, self.registers = world, cta, registers
        self.number = len(cta.members)
        cta.members.append(self)
        self.clock = Clock(cta.warps, self.number)
        self.at, self.lanes = 0, ALL  # the running lanes, and their next instruction
        self.parked: list[Group] = []  # lanes that have taken another branch
        self.waits: Condition | None = None
        self.polls = False  # it waits for another value in global memory
        self.awaits: NamedBarrier | None = None
        self.products: list[Product] = []  # not yet executed, oldest first
        self.committed = 0  # groups of products
        self.copies: dict[int, LaneCopies] = defaultdict(LaneCopies)
        self.is_done = False

    def converge(self, needs_all: Callable[[int], bool]) -> None:
        """Join lanes that are at the same instruction. Then the lanes that are farthest behind run.

        Lanes before an instruction for all lanes wait there.
        """
        joined: dict[int, Bools] = {}
        for at, lanes in [Group(self.at, self.lanes), *self.parked]:
            joined[at] = joined[at] | lanes if at in joined else lanes
        free = [at for at in sorted(joined) if len(joined) == 1 or not needs_all(at)]
        if not free:
            raise Fault("lanes of a warp wait for each other at different instructions")
        self.at, lanes = free[0], joined.pop(free[0])
        self.lanes = ALL if lanes.all() else lanes
        self.parked = [Group(at, lanes) for at, lanes in joined.items()]

    def warpgroup(self) -> list[Warp]:
        first = self.number // 4 * 4
        return self.cta.members[first : first + 4]

    def run_product(self) -> None:
        """Execute the oldest product."""
        self.products.pop(0).run()

    def finish_products(self, groups: int) -> None:
        """Execute the products of the first groups of the warp."""
        while self.products and self.products[0].group < groups:
            self.run_product()
