"""A placed Program as int32 tensors on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dash_attn.program import Program, Sequences

from .config import MOST_TURNS

RUN_WORDS = 8  # words of a run on the device: the columns RUN and one zero, so that a row is two 16-byte loads


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """The tables of a verified and placed Program that the kernel reads: int32, contiguous."""

    chains: Tensor  # [C, 5] columns CHAIN
    runs: Tensor  # [R, 8] columns RUN and one column of zeros
    worker_first: Tensor  # [W + 1]
    worker_chains: Tensor  # [C]
    contributors: Tensor  # [n_q]
    empty_q_tiles: bool = False  # some q tile has no contributor, so the kernel does not write its dQ
    row_lo: Tensor | None = None  # [Sq] for mask "interval"
    row_hi: Tensor | None = None

    @property
    def workers(self) -> int:
        return self.worker_first.numel() - 1

    @staticmethod
    def of(
        program: Program, placement: Sequences, rows: Sequence[npt.NDArray[np.int32]], device: torch.device
    ) -> DeviceTables:
        """Upload the tables in one copy. `rows` are the intervals of the rows, empty if the kernel needs none."""
        if program.contributors.max(initial=0) > MOST_TURNS:
            raise ValueError(f"{program.contributors.max()} kv tiles meet one q tile: counters hold {MOST_TURNS} turns")
        used = np.flatnonzero(np.diff(placement.first))  # a worker without chains would only occupy an SM
        first = np.append(placement.first[:-1][used], placement.first[-1])
        padded = np.zeros((max(1, len(program.runs)), RUN_WORDS), np.int32)
        padded[: len(program.runs), : program.runs.shape[1]] = program.runs
        parts = [program.chains, padded, first, placement.chains, program.contributors, *rows]  # all of them int32
        flat = uploaded(torch.from_numpy(np.concatenate([part.ravel() for part in parts])), device)
        views = [
            view.view(part.shape) for view, part in zip(torch.split(flat, [p.size for p in parts]), parts, strict=True)
        ]
        chains, runs, worker_first, worker_chains, contributors, *intervals = views
        row_lo, row_hi = intervals or (None, None)
        empty = bool((program.contributors == 0).any())
        return DeviceTables(chains, runs, worker_first, worker_chains, contributors, empty, row_lo, row_hi)


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, ready for every stream.

    A separate stream copies it, so the host waits for the copy and not for the kernels in the queue.
    """
    if device.type != "cuda":
        return x.to(device)
    with torch.cuda.stream(_copying(device)):
        return x.to(device)


@lru_cache(None)
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
