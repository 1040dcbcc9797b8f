"""Timeline: what ran where and when. One type for simulated and for measured events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROLES = ("compute", "reduce", "stall")
COMPUTE, REDUCE, STALL = range(3)

Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TaskNames:
    """The name of each task: its plane, its tile and its turn.

    `batch` is the number of the sequence, and `word` says what a sequence is: a batch entry or a document. `target`
    numbers the sum that the task adds to. At the end of a cut chain the q tile is -1: the chain adds its dK and dV.
    """

    batch: Longs
    q_head: Longs
    q_tile: Longs
    kv_tile: Longs
    turn: Longs
    target: Longs
    word: str

    def only(self, tasks: Longs) -> TaskNames:
        """The names of some tasks."""
        columns = (self.batch, self.q_head, self.q_tile, self.kv_tile, self.turn, self.target)
        batch, q_head, q_tile, kv_tile, turn, target = (column[tasks] for column in columns)
        return TaskNames(batch, q_head, q_tile, kv_tile, turn, target, self.word)

    def text(self, task: int) -> str:
        """Short name of one task."""
        tile = "dK dV" if self.q_tile[task] < 0 else f"q {self.q_tile[task]}"
        return (
            f"{self.word} {self.batch[task]} head {self.q_head[task]} {tile} "
            f"kv {self.kv_tile[task]} turn {self.turn[task]}"
        )


@dataclass(frozen=True)
class Event:
    """One stretch of one task in one role on one worker."""

    worker: int
    role: str
    task: int
    begin: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Events as parallel arrays: event i is role[i] of task[i] on worker[i], from begin[i] to end[i] in `unit`s.

    `overlapping`: the reduction of a task runs beside the compute of the next task (dQ writer warps).
    """

    title: str
    unit: str
    workers: int
    names: TaskNames
    worker: Longs
    role: Longs
    task: Longs
    begin: Floats
    end: Floats
    overlapping: bool = False

    @property
    def makespan(self) -> float:
        return float(self.end.max(initial=0.0))

    def total(self, role: str) -> float:
        """Time summed over all events of a role."""
        chosen = self.role == ROLES.index(role)
        return float((self.end[chosen] - self.begin[chosen]).sum())

    def __len__(self) -> int:
        return len(self.begin)

    def __iter__(self) -> Iterator[Event]:
        columns = (self.worker, self.role, self.task, self.begin, self.end)
        for worker, role, task, begin, end in zip(*(c.tolist() for c in columns), strict=True):
            yield Event(worker, ROLES[role], task, begin, end)


def events(
    worker: Longs, times: Iterable[Floats], computing: int | None = None
) -> tuple[Longs, Longs, Longs, Floats, Floats]:
    """The columns of a Timeline in which every task computes, waits if its turn has not come, and adds.

    `worker` has an entry per task. So has each of the five `times`: compute begins, compute ends, the contribution is
    ready, its turn has come, it is added. If `computing` is given, the tasks from this number on only wait and add.
    """
    begin, end, ready, granted, landed = times
    task, waited = np.arange(len(worker)), granted > ready
    parts = [
        (COMPUTE, task[:computing], begin[:computing], end[:computing]),
        (REDUCE, task, granted, landed),
        (STALL, task[waited], ready[waited], granted[waited]),
    ]
    return (
        np.concatenate([worker[t] for _, t, _, _ in parts]),
        np.concatenate([np.full(len(t), role) for role, t, _, _ in parts]),
        np.concatenate([t for _, t, _, _ in parts]),
        np.concatenate([b for _, _, b, _ in parts]),
        np.concatenate([e for _, _, _, e in parts]),
    )
