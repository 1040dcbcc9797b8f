"""Program: an order and its launch queue as read-only int32 tables. Backends, checks, models and pictures read them."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from dash_attn.lazily import cached_property

FORMAT = 1
TABLES = ("tiles", "chains", "runs", "launch", "bundle_first")  # of a Program
MOST = 2**31 - 1  # tables count in 32 bits
END_OF_CHAIN = -1  # in place of a q tile, where a cut chain adds its dK and dV


class Tile(IntEnum):
    """Columns of the table `tiles`: q tiles first_q .. first_q + count - 1 of a kv tile have one state."""

    KV_TILE = 0
    FIRST_Q = 1
    COUNT = 2
    PARTIAL = 3


class Chain(IntEnum):
    """Columns of the table `chains`: a chain's name, and its runs first_run .. first_run + num_runs - 1."""

    BATCH = 0
    KV_HEAD = 1
    KV_TILE = 2
    FIRST_RUN = 3
    NUM_RUNS = 4


class Run(IntEnum):
    """Columns of the table `runs`: visit t has q tile first_q + t * step and turn turn + t * turn_step."""

    HEAD = 0
    FIRST_Q = 1
    STEP = 2
    COUNT = 3
    TURN = 4
    TURN_STEP = 5
    PARTIAL = 6


# The columns by name, as they stand in the tables; host and device read them by the enums above.
TILE, CHAIN, RUN = (tuple(column.name.lower() for column in table) for table in (Tile, Chain, Run))
RUN_WIDTH = len(RUN) + 1  # of a run as workers read it: the columns RUN and a zero, 32 bytes, which a GPU loads at once
CHAIN_NAME = slice(Chain.BATCH, Chain.KV_TILE + 1)  # batch, kv head, kv tile: the chain without its runs
# Shape of one row of each table; a row of the lists `launch` and `bundle_first` is a number.
ROW = {"tiles": (len(TILE),), "chains": (len(CHAIN),), "runs": (len(RUN),), "launch": (), "bundle_first": ()}

Int32 = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
# How bundles go to workers: in rotation, each to the worker with the least work so far, or whichever is faster.
PlaceRule = Literal["dealt", "balanced", "faster"]
Scalar = TypeVar("Scalar", bound=np.generic)


def frozen(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """The same numbers in memory that nobody can write to.

    The memory is a bytes object. The owner of plain memory could set `writeable` again, or keep a writable view.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, bytes) and array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


@dataclass(frozen=True)
class Geometry:
    """Sizes of the planes and of their tiles.

    A panel has `group` q heads. `heads_kv` counts the panels of a sequence: its kv heads, or its q heads where each is
    a panel of its own. Then `share` neighbours have the same keys and values, and their dK and dV are summed.
    """

    batch: int
    heads_kv: int
    group: int
    len_q: int
    len_k: int
    tile_m: int
    tile_n: int
    share: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("len_q", "len_k") else 1
            try:
                number = operator.index(value)
            except TypeError:
                raise ValueError(f"{field.name} must be a whole number, got {value!r}") from None
            if not least <= number <= MOST:
                raise ValueError(f"{field.name} must be between {least} and {MOST}, got {number}")
            object.__setattr__(self, field.name, number)  # numbers of numpy print, and hash, differently
        if self.num_groups * self.num_kv > MOST:
            raise ValueError(f"{self.num_groups * self.num_kv} chains are more than a program can number")

    @property
    def num_q(self) -> int:
        return -(-self.len_q // self.tile_m)

    @property
    def num_kv(self) -> int:
        return -(-self.len_k // self.tile_n)

    @property
    def num_groups(self) -> int:
        return self.batch * self.heads_kv

    @property
    def num_targets(self) -> int:
        """dQ tiles of all planes. Each has a turnstile."""
        return self.num_groups * self.group * self.num_q


@dataclass(frozen=True, eq=False)
class Sequences:
    """Lists of chains: sequence s runs chains[first[s]:first[s+1]]. Bundles and placements both are sequences."""

    first: Int32
    chains: Int32


@dataclass(frozen=True, eq=False)
class Queue:
    """Every chain once, in the order in which workers take chains up. `bundle_first` cuts the queue into bundles, each
    of which one worker runs back to back. `place` is the rule by which bundles go to workers."""

    chains: Longs
    bundle_first: Longs
    place: PlaceRule


@dataclass(frozen=True)
class Task:
    """One task by name: the plane and tile that it visits, and its turn.

    At the end of a cut chain `q_tile` is END_OF_CHAIN: the chain adds dK and dV of its kv tile.
    """

    batch: int
    q_head: int
    q_tile: int
    kv_tile: int
    turn: int
    partial: bool = False

    def __str__(self) -> str:
        sums = "dK and dV" if self.q_tile == END_OF_CHAIN else f"q tile {self.q_tile}"
        return f"(batch {self.batch}, q head {self.q_head}, {sums}, kv tile {self.kv_tile}, turn {self.turn})"


@dataclass(frozen=True, eq=False)
class TaskArrays:
    """Every task of a program, chain by chain as in the tables. `target` numbers the dQ tile."""

    chain: Longs
    head: Longs
    q: Longs
    turn: Longs
    partial: npt.NDArray[np.bool_]
    target: Longs


@dataclass(frozen=True, eq=False)
class Program:
    """Order and launch queue of one problem.

    tiles         what must be done: runs of equal state per kv tile (columns TILE), empty tiles left out
    chains        one row a chain (columns CHAIN); chains of different heads share their runs
    runs          arithmetic runs (columns RUN); `head` counts query heads inside the chain's group
    launch        every chain once, in the order in which workers take chains up
    bundle_first  cuts `launch` into bundles; one worker runs a bundle back to back
    """

    geometry: Geometry
    policy: str
    mask: str
    place: PlaceRule
    tiles: Int32
    chains: Int32
    runs: Int32
    launch: Int32
    bundle_first: Int32

    def __post_init__(self) -> None:
        if self.place not in get_args(PlaceRule):
            raise ValueError(f"unknown place rule {self.place!r}: choose from {', '.join(get_args(PlaceRule))}")
        for name in TABLES:
            array = getattr(self, name)
            if array.dtype != np.int32:
                raise ValueError(f"program table {name} must be int32, got {array.dtype}")
            if array.ndim == 0 or array.shape[1:] != ROW[name]:
                raise ValueError(f"program table {name} has shape {array.shape}")
            object.__setattr__(self, name, frozen(array))

    def __reduce__(self) -> tuple[type[Program], tuple[Any, ...]]:
        """Copies and pickles are built anew, so that their tables are frozen too."""
        return Program, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def num_bundles(self) -> int:
        return len(self.bundle_first) - 1

    @property
    def bundles(self) -> Sequences:
        """One sequence a bundle, in launch order."""
        return Sequences(self.bundle_first, self.launch)

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in TABLES)

    @cached_property
    def task_first(self) -> Longs:
        """Task number at which each chain begins; the last entry is the number of tasks."""
        return frozen(tasks_before(self.chains, self.runs))

    @property
    def num_tasks(self) -> int:
        return int(self.task_first[-1])

    @cached_property
    def contributors(self) -> Int32:
        """How many contributions the dQ tile of each q tile receives. It is the same in every plane."""
        first, size = self.tiles[:, Tile.FIRST_Q], self.geometry.num_q + 1
        begun, ended = (np.bincount(q, minlength=size) for q in (first, first + self.tiles[:, Tile.COUNT]))
        return frozen(np.cumsum(begun - ended)[:-1].astype(np.int32))

    @cached_property
    def groups(self) -> Longs:
        """The group of each chain: its batch and kv head as one number."""
        batch, kv_head = self.chains[:, Chain.BATCH].astype(np.int64), self.chains[:, Chain.KV_HEAD]
        return frozen(batch * self.geometry.heads_kv + kv_head)

    @cached_property
    def target_base(self) -> Longs:
        """Turnstile of q tile 0 of the first query head of each chain's group."""
        return frozen(self.groups * (self.geometry.group * self.geometry.num_q))

    def runs_of(self, chains: Int32 | Longs) -> Longs:
        """The rows in `runs` of some chains, one chain after the other."""
        return runs_of(self.chains[chains])

    def expand(self) -> TaskArrays:
        """All tasks as flat arrays."""
        return expand_tasks(self.chains, self.runs, self.target_base, np.full(len(self.chains), self.geometry.num_q))

    def task(self, chain: int, run: int, offset: int) -> Task:
        """Visit `offset` of run `run` of chain `chain`, by name. After its last run a cut chain is at its end."""
        batch, kv_head, kv_tile, first, count = self.chains[chain].tolist()
        if run == first + count:
            return Task(batch, kv_head * self.geometry.group, END_OF_CHAIN, kv_tile, kv_head % self.geometry.share)
        head, q0, dq, _, t0, dt, partial = (int(x) for x in self.runs[run])
        q_head = kv_head * self.geometry.group + head
        return Task(batch, q_head, q0 + offset * dq, kv_tile, t0 + offset * dt, bool(partial))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the order. Neither the cut into runs nor the launch queue changes it."""
        sizes = {name: size for name, size in asdict(self.geometry).items() if (name, size) != ("share", 1)}
        digest = hashlib.sha256(repr((FORMAT, sorted(sizes.items()))).encode())
        orders = dict[tuple[int, int], bytes]()  # chains that share runs are hashed once
        for *name, first, count in self.chains[np.lexsort(self.chains[:, Chain.KV_TILE :: -1].T)].tolist():
            if (first, count) not in orders:
                visits = np.stack(unroll(self.runs[first : first + count]))
                orders[first, count] = hashlib.sha256(visits.tobytes()).digest()
            digest.update(np.array(name).tobytes() + orders[first, count])
        return digest.hexdigest()[:16]


def unroll(runs: Int32) -> tuple[Longs, Longs, Longs, Longs]:
    """Runs to visits: head, q tile, turn and partial of each."""
    head, q, step, count, turn, turn_step, partial = runs.T.astype(np.int64)
    return np.repeat(head, count), numbers(q, step, count), numbers(turn, turn_step, count), np.repeat(partial, count)


def numbers(first: Longs, step: Longs, count: Longs) -> Longs:
    """`count` numbers from `first` on, `step` apart: all numbers of the first run, then of the second, and so on. Every
    run has at least one number."""
    change = np.repeat(step, count)
    change[:1] = first[:1]
    change[(np.cumsum(count) - count)[1:]] = first[1:] - (first + step * (count - 1))[:-1]
    return np.cumsum(change)


def tasks_before(chains: Int32, runs: Int32) -> Longs:
    """Task number at which each chain begins, and the number of tasks."""
    return np.concatenate([[0], np.cumsum(per_chain(chains, runs[:, Run.COUNT]))])


def per_chain(chains: Int32, counts: Int32) -> Longs:
    """The sum of the counts of all runs of each chain."""
    before: Longs = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    first = chains[:, Chain.FIRST_RUN]
    sums: Longs = before[first + chains[:, Chain.NUM_RUNS]] - before[first]
    return sums


def runs_of(chains: Int32) -> Longs:
    """The rows in `runs` of some rows of `chains`, one chain after the other."""
    first, count = (chains[:, column].astype(np.int64) for column in (Chain.FIRST_RUN, Chain.NUM_RUNS))
    return np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())


def expand_tasks(chains: Int32, runs: Int32, base: Longs, num_q: Longs) -> TaskArrays:
    """The tasks of all chains. `base` numbers the dQ tile of each chain's first q head and q tile 0."""
    head, q, turn, partial = unroll(runs[runs_of(chains)])
    chain = np.repeat(np.arange(len(chains)), per_chain(chains, runs[:, Run.COUNT]))
    return TaskArrays(chain, head, q, turn, partial != 0, base[chain] + head * num_q[chain] + q)
