"""Fit the machine model to measured times of whole calls, and say how well it predicts them.

A call is the main kernel, whose time the model gives, the kernel before it (`start`) and, where dQ is finished by a
pass of its own, that pass (`finish`); both only stream tensors, and the cells of one head dim have equally many tokens.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dash_attn.backends.sm90.config import KernelConfig, select
from dash_attn.order import POLICIES, schedule
from dash_attn.order.policies import choose
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.program import Program, Sequences, build, place, replay
from dash_attn.simulate import Machine
from dash_attn.tiling import TileShape, Tiling, tile
from dash_attn.tools.trace.measured import measured
from dash_attn.tools.trace.record import load_trace

Floats = npt.NDArray[np.float64]
WORKERS = 132
TOKENS, HIDDEN = 16384, 2048  # of the paper's grid
CELL = re.compile(r"d(64|128) (full|causal) (\d+)")
FITTED = ("compute", "reduce", "handoff", "prologue", "partial", "store", "fetch")
# A time that the measurements say little about stays near where the fit began: e times it counts as this much error.
PRIOR = 0.02
LARGE = 0.05  # errors beyond this count more than by their square
WITHIN, LEVEL = 0.10, 0.02  # what counts as predicted; policies closer than this are level


@dataclass(frozen=True)
class Cell:
    """A problem by the name it has in the results; `mask` is full or causal."""

    name: str
    problem: Problem

    @staticmethod
    def parse(name: str) -> Cell | None:
        """A cell of the paper's grid: head dim, mask, tokens of a sequence."""
        found = CELL.fullmatch(name)
        if found is None:
            return None
        dim, length, mask = int(found[1]), int(found[3]), CAUSAL if found[2] == "causal" else FULL
        heads = HIDDEN // dim
        return Cell(name, Problem(TOKENS // length, heads, heads, length, length, dim, mask=mask))

    @property
    def dim(self) -> int:
        return 64 if self.problem.dim <= 64 else 128  # as tiles are padded

    @property
    def config(self) -> KernelConfig:
        mask = "causal" if self.problem.mask.is_causal else "full"
        return select(self.problem.dim, "bf16", mask, True, self.problem.len_k)

    def tiling(self) -> Tiling:
        return tile(self.problem, TileShape(self.config.tile_m, self.config.tile_n))


@dataclass(frozen=True)
class Sample:
    """A measurement: microseconds of one policy in one cell, of the whole call or of the main kernel alone; over
    several files the geometric mean, and what each file says."""

    cell: Cell
    policy: str
    us: float
    main_only: bool = False
    files: Mapping[str, float] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[str, bytes, bytes]:
        """What really ran: widths beyond a head's length are one order under several names."""
        program, placement = self.placed
        return program.fingerprint, placement.first.tobytes(), placement.chains.tobytes()

    @property
    def key(self) -> tuple[str, str, bool]:
        return self.cell.name, self.policy, self.main_only

    @cached_property
    def placed(self) -> tuple[Program, Sequences]:
        program = build(schedule(self.cell.tiling(), self.policy))
        return program, place(program, WORKERS)


@dataclass(frozen=True)
class Call:
    """The model of a whole call of one head dim, in microseconds."""

    machine: Machine
    start: float
    finish: float

    def main(self, sample: Sample) -> float:
        """Time of the main kernel."""
        # Where a pass of its own finishes dQ, nobody takes the sum in.
        takes_sum = sample.cell.config.last_finishes
        machine = self.machine if takes_sum else replace(self.machine, fetch=0.0)
        outcome = replay(*sample.placed, machine.costs())
        return float(outcome.totals[:, 0].max())

    def side(self, sample: Sample) -> float:
        """What the call does beside it."""
        if sample.main_only:
            return 0.0
        return self.start + (self.finish if sample.cell.config.finish == "postpass" else 0.0)

    def predict(self, samples: Sequence[Sample]) -> Floats:
        return np.array([self.main(s) + self.side(s) for s in samples])

    def numbers(self) -> Floats:
        return np.array([*(getattr(self.machine, name) for name in FITTED), self.start, self.finish])

    def with_numbers(self, numbers: Floats) -> Call:
        *times, start, finish = numbers.tolist()
        return Call(replace(self.machine, **dict(zip(FITTED, times, strict=True))), start, finish)


# Where a fit begins, per head dim: near the H200 it was made with, because a makespan as a function of these times has
# many valleys. Split turns (head dim 64) keep both writers busy with halves of the same tile. Two stay as they are, as
# makespans say little of them: what a first contribution takes beside an add is read off traces; tasks are somewhat
# less alike than there, in place of adds and ends of chains, which differ more and have no jitter of their own.
BEGIN = {
    128: Call(Machine(2.05, 2.3, 0.3, 2.0, 0.0, 0.01, store=6.5, fetch=0.7, first=0.85, jitter=0.1), 48.0, 10.0),
    64: Call(Machine(2.35, 1.8, 0.06, 1.4, 0.0, 0.3, 2, 1, 1.8, 1.2, first=0.7, jitter=0.1), 48.0, 44.0),
}


def read_samples(paths: Iterable[str | Path]) -> list[Sample]:
    """Result files with rows {"cell": ..., "us": {policy: {"median": ...}}}, and traces (.npz).

    A GPU at its power limit has another clock each time: what a file shares with those before it says how much slower
    it is on the whole, and that is taken out of it. So all times are those of the first file.
    """
    found: dict[tuple[str, str, bool], Sample] = {}
    for path in map(Path, paths):
        read = {s.key: s for s in (_of_trace(path) if path.suffix == ".npz" else _of_results(path))}
        shared = [found[key].us / s.us for key, s in read.items() if key in found]
        factor = statistics.geometric_mean(shared) if shared else 1.0
        for key, s in read.items():
            files = {**(found[key].files if key in found else {}), str(path): s.us * factor}
            found[key] = replace(s, us=statistics.geometric_mean(files.values()), files=files)
    if not found:
        raise ValueError("no measured policy of the grid in these files (cells are named like 'd128 causal 4096')")
    return list(found.values())


def _of_results(path: Path) -> Iterator[Sample]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no benchmark results: {error!r}") from None
    for row in rows:
        cell = Cell.parse(str(row.get("cell")))
        for name, us in row.get("us", {}).items():
            policy, _, width = name.partition(":")
            if cell is not None and policy in POLICIES and (not width or width.isdigit()):
                yield Sample(cell, name, float(us["median"]))
                if name in row.get("main_share", {}):
                    yield Sample(cell, name, float(us["median"]) * row["main_share"][name], main_only=True)


def _of_trace(path: Path) -> Iterator[Sample]:
    """The times of the call and of its main kernel without tracing, where they were taken; else as traced."""
    trace = load_trace(path)
    mask = CAUSAL if trace.program.mask == "causal" else FULL
    problem = Problem(**trace.facts["problem"], mask=mask)
    name = f"d{problem.dim} {mask} {problem.len_k}"
    grid = Cell.parse(name)
    cell = (
        grid
        if grid is not None and grid.problem == problem
        else Cell(f"{name} {problem.batch}x{problem.heads_q}", problem)
    )
    us = trace.facts["us"]
    if "call" in us:
        yield Sample(cell, trace.program.policy, us["call"])
    yield Sample(cell, trace.program.policy, us.get("main") or measured(trace).makespan, main_only=True)


def fit(samples: Sequence[Sample], begin: Call, rounds: int = 12) -> Call:
    """Least squares of the relative errors, by damped Gauss-Newton steps in the logarithms of the times."""
    target = np.array([s.us for s in samples])

    def errors(x: Floats) -> Floats:
        relative = np.log(begin.with_numbers(np.exp(x)).predict(samples) / target)
        return np.concatenate([relative * np.sqrt(1 + (relative / LARGE) ** 2), PRIOR * (x - first)])

    first = np.log(begin.numbers())
    x, damping = first, 1e-2
    now = errors(x)
    for _ in range(rounds):
        step = 0.02
        slopes = np.stack([(errors(x + step * unit) - now) / step for unit in np.eye(len(x))], axis=1)
        for _ in range(6):
            normal = slopes.T @ slopes + damping * np.eye(len(x)) * max(1e-6, float(np.square(slopes).sum(0).max()))
            move = np.clip(np.linalg.solve(normal, -slopes.T @ now), -0.7, 0.7)
            then = errors(x + move)
            if then @ then < now @ now:
                gain = 1 - (then @ then) / (now @ now)
                x, now, damping = x + move, then, damping / 4
                break
            damping *= 4
        else:
            break
        if gain < 1e-3:
            break
    return begin.with_numbers(np.exp(x))


@dataclass(frozen=True)
class CellReport:
    """One cell, by whole calls or the main kernel alone: (policy, measured, predicted) each, and what they say
    together. `files` has the policies' times in each file; those of one alone can be compared to the percent."""

    cell: str
    policies: tuple[tuple[str, float, float], ...]
    auto: str
    files: tuple[Mapping[str, float], ...] = ()
    main_only: bool = False

    @property
    def worst(self) -> float:
        """Largest relative error, signed."""
        return max((predicted / us - 1 for _, us, predicted in self.policies), key=abs)

    @property
    def auto_error(self) -> float | None:
        """Relative error for the policy that `auto` takes; None if it was not measured."""
        return next((predicted / us - 1 for policy, us, predicted in self.policies if policy == self.auto), None)

    @property
    def ranked(self) -> bool:
        """No two policies of which every file says that one is faster are predicted the other way round; what is level,
        measured or predicted, is neither."""
        return self._ranked(LEVEL)

    @property
    def strictly_ranked(self) -> bool:
        """The same, with a prediction that is level by the odd microsecond taken at its word."""
        return self._ranked(0.0)

    def _ranked(self, level: float) -> bool:
        files = self.files or ({name: us for name, us, _ in self.policies},)

        def faster(a: str, b: str) -> bool:
            both = [(times[a], times[b]) for times in files if a in times and b in times]
            return bool(both) and all(x < y * (1 - LEVEL) for x, y in both)

        rows = self.policies
        return not any(y < x * (1 - level) and faster(a, b) for a, _, x in rows for b, _, y in rows)

    @property
    def choice(self) -> str:
        """The policy that is predicted to be the fastest."""
        return min(self.policies, key=lambda row: row[2])[0]

    @property
    def auto_loss(self) -> float | None:
        """How far the policy that `auto` takes is behind the best measured; None if it was not measured."""
        mine = [us for policy, us, _ in self.policies if policy == self.auto]
        return mine[0] / min(us for _, us, _ in self.policies) - 1 if mine else None


@dataclass(frozen=True)
class Calibration:
    """The fitted model of each head dim, and how it does."""

    calls: dict[int, Call]
    cells: tuple[CellReport, ...]

    def part(self, main_only: bool) -> Calibration:
        """Of the main kernel alone, or of whole calls."""
        return replace(self, cells=tuple(cell for cell in self.cells if cell.main_only == main_only))

    @property
    def predicted(self) -> int:
        return sum(abs(cell.worst) <= WITHIN for cell in self.cells)

    @property
    def ranked(self) -> int:
        return sum(cell.ranked for cell in self.cells if len(cell.policies) > 1)

    @property
    def strictly_ranked(self) -> int:
        return sum(cell.strictly_ranked for cell in self.cells if len(cell.policies) > 1)

    def to_json(self) -> dict[str, Any]:
        """What h200.json of dash_attn.simulate holds: times in microseconds, to the nanosecond."""

        def rounded(call: Call) -> dict[str, Any]:
            times = {name: round(value, 3) for name, value in asdict(call.machine).items()}
            return {"machine": times, "start": round(call.start, 1), "finish": round(call.finish, 1)}

        return {str(dim): rounded(call) for dim, call in sorted(self.calls.items())}


def calibrate(samples: Sequence[Sample]) -> Calibration:
    """Fit each head dim for itself, and hold the outcome against what was measured."""
    dims = sorted({s.cell.dim for s in samples}, reverse=True)
    return hold({dim: fit([s for s in samples if s.cell.dim == dim], BEGIN[dim]) for dim in dims}, samples)


def hold(calls: dict[int, Call], samples: Sequence[Sample]) -> Calibration:
    """A model of each head dim, held against what was measured."""
    rows: dict[tuple[Cell, bool], list[tuple[Sample, float]]] = {}
    for dim, call in calls.items():
        mine = [s for s in samples if s.cell.dim == dim]
        for sample, us in zip(mine, call.predict(mine).tolist(), strict=True):
            rows.setdefault((sample.cell, sample.main_only), []).append((sample, us))
    return Calibration(calls, tuple(_report(cell, main_only, found) for (cell, main_only), found in rows.items()))


def _report(cell: Cell, main_only: bool, found: Sequence[tuple[Sample, float]]) -> CellReport:
    auto = Sample(cell, str(choose(cell.tiling())), 0.0)
    same = [s.policy for s, _ in found if s.runs == auto.runs]
    files = sorted({file for s, _ in found for file in s.files})
    return CellReport(
        cell.name,
        tuple((s.policy, s.us, us) for s, us in found),
        min(same, key=lambda policy: policy != auto.policy, default=auto.policy),
        tuple({s.policy: s.files[file] for s, _ in found if file in s.files} for file in files),
        main_only,
    )
