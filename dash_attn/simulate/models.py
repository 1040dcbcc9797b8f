"""Two models of time: the paper's, and one of the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dash_attn.program import Costs


@dataclass(frozen=True)
class Paper:
    """A task is `compute`, then `reduce`, both on its worker, which waits for the turn; handing over is free."""

    compute: float = 1.0
    reduce: float = 0.25

    unit = "units"
    name = "paper"

    def costs(self) -> Costs:
        return Costs(compute=self.compute, reduce=self.reduce)


@dataclass(frozen=True)
class Machine:
    """A Hopper SM, in microseconds: dQ writer warps add from `depth` buffers while the next task computes.

    Defaults: head dim 128, 64x128 tiles on an H200. 2.0 us a task; 32 KB bulk add 1.15 us with all SMs adding;
    flag hand-over 0.58 us; prologue and epilogue of a chain about 5 us together; two writers, two buffers.
    `partial` is what the mask adds to a task.
    """

    compute: float = 2.0
    reduce: float = 1.15
    handoff: float = 0.58
    prologue: float = 2.5
    epilogue: float = 2.5
    partial: float = 0.2
    depth: int = 2
    writers: int = 2

    unit = "us"
    name = "machine"

    def __post_init__(self) -> None:
        for name in ("depth", "writers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def costs(self) -> Costs:
        return Costs(**asdict(self))


Model = Paper | Machine
