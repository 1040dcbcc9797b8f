"""One worker of the kernel as the model of its roles sees it: chains, the task ring, barriers and buffers.

Barriers and their arrival counts come from the kernel's own tables in barriers.py. Buffers hold labels instead of data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dash_attn.backends.sm90.barriers import NAMED_BARRIER_THREADS, MBarrierSpec, NamedBarrier, mbarriers
from dash_attn.backends.sm90.config import KernelConfig
from dash_attn.backends.sm90.cta import CHAINS_IN_FLIGHT, RING, STAGES


class Task(NamedTuple):
    tile: object  # names the dQ tile
    turn: int
    last: bool  # the last contribution to the tile


class Chain(NamedTuple):
    name: object
    tasks: list[Task]
    target: object = None  # names the dK and dV tile of a cut chain
    turn: int = 0  # of a cut chain at its target


class Entry(NamedTuple):
    """An entry of the task ring."""

    kind: str  # "task", "grad" or "end"
    chain: int = 0
    task: Task | None = None
    begins: bool = False
    ends: bool = False
    part: int = 0  # of a cut chain's end
    target: object = None
    turn: int = 0

    @property
    def fetches(self) -> bool:
        """The slot receives a partial sum first."""
        return self.task is not None and self.task.last and self.task.turn > 0


class MBarrier:
    """Counts arrivals. A complete phase flips the parity that waits see."""

    def __init__(self, spec: MBarrierSpec):
        self.spec, self.left, self.completed = spec, spec.arrivals, 0

    def arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.left, self.completed = self.spec.arrivals, self.completed + 1

    def passed(self, parity: int) -> bool:
        """As mbarrier.try_wait.parity: true unless the phase of that parity is the one running."""
        return self.completed % 2 != parity


class HardwareBarrier:
    """Counts threads. All of them go on when the last one has come."""

    def __init__(self, threads: int):
        self.threads, self.waiting, self.completed = threads, 0, 0

    def arrive(self, threads: int) -> None:
        self.waiting += threads
        assert self.waiting <= self.threads, "more threads than the barrier counts"
        if self.waiting == self.threads:
            self.waiting, self.completed = 0, self.completed + 1


class Cta:
    """One worker. All workers share `counters`: the turns that each dQ tile, or half of one, has taken."""

    def __init__(
        self,
        cfg: KernelConfig,
        chains: list[Chain],
        counters: dict[object, int],
        *,
        specs: Iterable[MBarrierSpec] | None = None,
        threads: Mapping[NamedBarrier, int] = NAMED_BARRIER_THREADS,
        ring: int = RING,
    ):
        self.cfg, self.counters = cfg, counters
        self.chains = chains  # of a pack: a list that all workers share and take chains from
        specs = mbarriers(cfg.delta_in_product, cfg.cut) if specs is None else specs
        self.mbarriers = {(spec.name, i): MBarrier(spec) for spec in specs for i in range(spec.count)}
        self.named = {barrier: HardwareBarrier(count) for barrier, count in threads.items()}
        self.unused: set[object] = {
            *(
                (use, role, *at)
                for use in ("arrives", "waits")
                for at, barrier in self.mbarriers.items()
                for role in getattr(barrier.spec, use)
            ),
            *self.named,
        }
        self.ring: list[tuple[int, Entry] | None] = [None] * ring
        self.info: list[tuple[int, int] | None] = [None] * CHAINS_IN_FLIGHT  # chain, and its number of tasks
        self.q: list[object] = [None] * STAGES
        self.do: list[object] = [None] * STAGES
        self.delta: list[object] = [None] * STAGES  # as it is loaded
        self.k: object = None
        self.v: object = None
        self.ds: dict[tuple[int, int], object] = {}  # by stage, and by the warpgroup that wrote the columns
        self.last_rows: dict[tuple[int, int], object] = {}  # of dS, where delta lies before; dK never does
        self.slots: dict[int, object] = {}  # by number of the half
