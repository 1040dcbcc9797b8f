"""A placed Program, or the tables of a pack, as int32 tensors on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dash_attn.pack import Assembly, Round
from dash_attn.program import RUN, RUN_WIDTH, Program, Sequences

from .config import MOST_TURNS

NO_LIMIT = 1 << 29  # tokens that a window without a limit reaches


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """The tables of a verified and placed Program that the kernel reads: int32, contiguous."""

    chains: Tensor  # [C, len(CHAIN)] columns CHAIN
    runs: Tensor  # [R, RUN_WIDTH] columns RUN, and zeros
    worker_first: Tensor  # [W + 1]
    worker_chains: Tensor  # [C]
    contributors: Tensor  # [n_q]
    empty_q_tiles: bool = False  # some q tile has no contributor, so the kernel does not write its dQ
    row_lo: Tensor | None = None  # [Sq] for mask "interval"
    row_hi: Tensor | None = None

    n_q: ClassVar[None] = None  # tiles follow from the lengths of the tensors
    n_kv: ClassVar[None] = None
    q_tiles: ClassVar[tuple[()]] = ()
    kv_tiles: ClassVar[tuple[()]] = ()
    facts: ClassVar[tuple[()]] = ()
    clears_dkv: ClassVar[bool] = False
    folds: ClassVar[bool] = False

    @property
    def workers(self) -> int:
        return self.worker_first.numel() - 1

    @property
    def clears_dq(self) -> bool:
        return self.empty_q_tiles

    @property
    def program(self) -> tuple[Tensor, ...]:
        """The tables that the main kernel reads."""
        tables = (self.chains, self.runs, self.worker_first, self.worker_chains, self.contributors)
        # The kernel reads the intervals of rows only for mask "interval". Other masks pass contributors in their place.
        rows = (self.contributors if row is None else row for row in (self.row_lo, self.row_hi))
        return (*tables, *rows)

    @staticmethod
    def of(
        program: Program, placement: Sequences, rows: Sequence[npt.NDArray[np.int32]], device: torch.device
    ) -> DeviceTables:
        """Upload the tables in one copy. `rows` are the intervals of the rows, empty if the kernel needs none."""
        check_turns(program.contributors)
        used = np.flatnonzero(np.diff(placement.first))  # a worker without chains would only occupy an SM
        first = np.append(placement.first[:-1][used], placement.first[-1])
        padded = np.zeros((max(1, len(program.runs)), RUN_WIDTH), np.int32)
        padded[: len(program.runs), : len(RUN)] = program.runs
        parts = [program.chains, padded, first, placement.chains, program.contributors, *rows]  # all of them int32
        views = joined(parts, device)
        chains, runs, worker_first, worker_chains, contributors, *intervals = views
        row_lo, row_hi = intervals or (None, None)
        empty = bool((program.contributors == 0).any())
        return DeviceTables(
            chains=chains,
            runs=runs,
            worker_first=worker_first,
            worker_chains=worker_chains,
            contributors=contributors,
            empty_q_tiles=empty,
            row_lo=row_lo,
            row_hi=row_hi,
        )


class PackFacts(NamedTuple):
    """Numbers that the kernel of a pack gets beside its tables.

    left, right  how far a query sees before and after its position
    """

    workers: int
    tickets: int
    left: int
    right: int


@dataclass(frozen=True, eq=False)
class PackedTables:
    """The tables of a pack that the kernels read: int32, contiguous."""

    docs: Tensor  # one row for each round: columns Round, then the columns Doc of its sequence
    bundles: Tensor
    chains: Tensor
    runs: Tensor
    contributors: Tensor  # template by template
    q_tiles: tuple[Tensor]  # first row and number of rows of each q tile
    kv_tiles: tuple[Tensor, ...]  # the same for keys. With panels: the tables folds and parts
    n_kv: int  # kv tiles, of all panels
    facts: PackFacts
    clears_dq: bool
    clears_dkv: bool

    @property
    def program(self) -> tuple[Tensor, ...]:
        """The tables that the main kernel reads."""
        return self.docs, self.bundles, self.chains, self.runs, self.contributors

    @property
    def folds(self) -> bool:
        """dK and dV are summed over panels."""
        return len(self.kv_tiles) > 1

    @property
    def n_q(self) -> int:
        return self.q_tiles[0].shape[0]

    @property
    def workers(self) -> int:
        return self.facts.workers

    @staticmethod
    def of(pack: Assembly, workers: int, sides: Sequence[int | None], device: torch.device) -> PackedTables:
        """Upload the tables in one copy. `sides` are the left and right side of the window. None is no limit."""
        check_turns(pack.contributors)
        keys = (pack.folds, pack.parts) if pack.sizes.panels > 1 and not pack.sizes.apart else (pack.kv_tiles,)
        by_round = np.hstack([pack.rounds, pack.docs[pack.rounds[:, Round.DOC]]])
        parts = [by_round, pack.bundles, pack.chains, pack.runs, pack.contributors, pack.q_tiles, *keys]
        left, right = (NO_LIMIT if side is None else max(-NO_LIMIT, min(side, NO_LIMIT)) for side in sides)
        facts = PackFacts(min(workers, pack.tickets), pack.tickets, left, right)
        docs, bundles, chains, runs, contributors, q_tiles, *kv_tiles = joined(parts, device)
        return PackedTables(
            docs=docs,
            bundles=bundles,
            chains=chains,
            runs=runs,
            contributors=contributors,
            q_tiles=(q_tiles,),
            kv_tiles=tuple(kv_tiles),
            n_kv=len(pack.kv_tiles),
            facts=facts,
            clears_dq=pack.clears_dq,
            clears_dkv=pack.clears_dkv,
        )


def check_turns(contributors: npt.NDArray[np.int32]) -> None:
    if contributors.max(initial=0) > MOST_TURNS:
        raise ValueError(f"{contributors.max()} kv tiles meet one q tile: counters hold {MOST_TURNS} turns")


def joined(parts: Sequence[npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """The tables on a device, uploaded in one copy."""
    flat = uploaded(torch.from_numpy(np.concatenate([part.ravel() for part in parts])), device)
    views = torch.split(flat, [part.size for part in parts])
    return [view.view(part.shape) for view, part in zip(views, parts, strict=True)]


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, ready for every stream. Whoever uses it says so (Uploads).

    A separate stream copies it, so the host waits for the copy and not for the kernels in the queue.
    """
    if device.type != "cuda":
        return x.to(device)
    with torch.cuda.stream(_copying(device)):
        return x.to(device)


class Uploads:
    """Uploaded tensors, and the streams that have used them.

    The stream that copied the tensors gets their memory back when nobody holds them. It must not fill that memory while
    a kernel that reads it waits in the queue of another stream.
    """

    def __init__(self, *tensors: Tensor | None) -> None:
        """One tensor of each upload is enough: those of one upload share their memory."""
        self.tensors = tuple(x for x in tensors if x is not None)
        device = self.tensors[0].device
        self._index = device.index if device.type == "cuda" else None
        self._streams: set[int] = set()

    def used(self) -> int:
        """The current stream uses the tensors: their memory stays until it has. Returns its number, 0 without a GPU."""
        if self._index is None:
            return 0
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if stream not in self._streams:
            for x in self.tensors:
                x.record_stream(torch.cuda.current_stream(self._index))
            self._streams.add(stream)
        return stream


@lru_cache(None)
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
