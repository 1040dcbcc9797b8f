"""Two models of time: the paper's, and one of the machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib.resources import files

from dash_attn.program import Costs

H200_SMS = 132  # of an H100 too


@dataclass(frozen=True)
class Paper:
    """A task computes, then its worker waits for the turn and adds. Handing a turn over is free."""

    compute: float = 1.0
    reduce: float = 0.25

    unit = "units"
    name = "paper"

    def costs(self) -> Costs:
        return Costs(compute=self.compute, reduce=self.reduce)


@dataclass(frozen=True)
class Machine:
    """A Hopper SM, in microseconds: dQ writer warps add from `depth` buffers while the next task computes.

    The defaults are an H200 with head dim 128 and tiles of 64x128.

    compute   the five products of a task
    reduce    the bulk add of one contribution (32 KB), with all SMs adding
    handoff   from the end of an add until the next contributor sees the turn
    prologue  the begin of a chain
    epilogue  the end of a chain
    partial   the additional time of a task with an element mask
    depth     the number of dQ buffers
    writers   the number of warps that add from the buffers
    store     the time for which dV of a chain takes a buffer and a writer. 0: dV takes neither
    fetch     the time in which the last contributor of a dQ tile, after its turn, reads the sum back to finish it. 0: a
              kernel of its own finishes dQ
    first     the time of a first contribution, as a share of `reduce`. It is stored, not added
    jitter    standard deviation of the length of tasks, as a share of `compute`. The same tasks are long each time
    """

    compute: float = 2.0
    reduce: float = 1.15
    handoff: float = 0.58
    prologue: float = 2.5
    epilogue: float = 2.5
    partial: float = 0.2
    depth: int = 2
    writers: int = 2
    store: float = 0.0
    fetch: float = 0.0
    first: float = 1.0
    jitter: float = 0.0

    unit = "us"
    name = "machine"

    def __post_init__(self) -> None:
        for name in ("depth", "writers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.jitter <= 0.5:
            raise ValueError(f"jitter must be between 0 and 0.5, got {self.jitter}: tasks would take no time or less")

    @staticmethod
    def h200(dim: int = 128, last_finishes: bool = False) -> Machine:
        """Fitted to an H200 by `dash-attn calibrate`, with tiles of 64x128 (head dim 128) or 128x128 (head dim 64).

        With `last_finishes` the last contributor of a dQ tile finishes it, as in the kernel for few keys.
        """
        fitted = json.loads(files("dash_attn.simulate").joinpath("h200.json").read_text(encoding="utf-8"))
        if str(dim) not in fitted:
            raise ValueError(f"no fitted machine for head dim {dim}: choose from {', '.join(fitted)}")
        machine = Machine(**fitted[str(dim)]["machine"])
        return machine if last_finishes else replace(machine, fetch=0.0)

    def costs(self) -> Costs:
        return Costs(**asdict(self))


Model = Paper | Machine
