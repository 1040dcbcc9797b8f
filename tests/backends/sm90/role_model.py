"""A role of the kernel as a generator whose barrier calls are checked against barriers.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import ClassVar

from dash_attn.backends.sm90.barriers import NamedBarrier, Role
from dash_attn.backends.sm90.cta import WARP
from tests.backends.sm90.worker_model import Cta, MBarrier

Steps = Generator[str, None, None]


class RoleModel(ABC):
    """A role with its barrier calls, which fail unless barriers.py declares them for this role."""

    role: ClassVar[Role]
    threads: ClassVar[int] = WARP

    def __init__(self, cta: Cta):
        self.cta = cta

    @abstractmethod
    def run(self) -> Steps: ...

    def start(self) -> Steps:
        yield from self.sync(NamedBarrier.CTA)
        yield from self.run()

    def used(self, use: str, name: str, index: int) -> MBarrier:
        assert (name, index) in self.cta.mbarriers, f"barrier {name}[{index}] is not declared"
        barrier = self.cta.mbarriers[name, index]
        assert self.role in getattr(barrier.spec, use), f"{name}: the {self.role.value} {use}"
        self.cta.unused.discard((use, self.role, name, index))
        return barrier

    def wait(self, name: str, index: int, parity: int) -> Steps:
        barrier = self.used("waits", name, index)
        while not barrier.passed(parity):
            yield "blocked"
        yield "step"

    def is_done(self, name: str, index: int, parity: int) -> bool:
        return self.used("waits", name, index).passed(parity)

    def arrive(self, name: str, index: int = 0) -> None:
        self.used("arrives", name, index).arrive()

    def expect(self, name: str, index: int = 0) -> None:
        """Announces bytes. In the model they land at once."""
        self.arrive(name, index)

    def sync(self, barrier: NamedBarrier) -> Steps:
        assert barrier in self.cta.named, f"barrier {barrier.name} is not declared"
        self.cta.unused.discard(barrier)
        hardware = self.cta.named[barrier]
        before = hardware.completed
        hardware.arrive(self.threads)
        while hardware.completed == before:
            yield "blocked"
        yield "step"
