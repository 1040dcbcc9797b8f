"""Fit the machine model to measured times of whole calls, and say how well it predicts them.

A call runs a kernel before the main kernel (`start`), the main kernel, and in some cells a kernel that finishes dQ
(`finish`). The model gives the time of the main kernel. The two others only stream tensors, and all cells of one head
dim have the same number of tokens. So the fit has one number for each of the two and each head dim.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dash_attn.backends.sm90.config import KernelConfig, select
from dash_attn.launch import compose
from dash_attn.lazily import cached_property
from dash_attn.order import POLICIES, looks_at_batch, resolve
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.program import play
from dash_attn.simulate import H200_SMS, Machine
from dash_attn.tiling import TileShape, Tiling, tile
from dash_attn.tools.bench.json_text import from_json
from dash_attn.tools.trace.measured import measured
from dash_attn.tools.trace.record import Trace, load_trace
from dash_attn.verify import Placed, verify

Floats = npt.NDArray[np.float64]
TOKENS, HIDDEN = 16384, 2048  # of the paper's grid
CELL = re.compile(r"d(64|128) (full|causal) (\d+)")
MASKS = {str(mask): mask for mask in (FULL, CAUSAL)}  # those of the grid, which the side kernels are fitted for
FITTED = ("compute", "reduce", "handoff", "prologue", "partial", "store", "fetch")
# A time that the measurements say little about stays near its first value. A factor of e away from the first value
# counts as this relative error.
PRIOR = 0.02
LARGE = 0.05  # larger errors count more than their square
WITHIN = 0.10  # a prediction is right if its relative error is at most this
LEVEL = 0.02  # policies closer than this are level


@dataclass(frozen=True)
class Cell:
    """A problem, and its name in the results. Its mask is full or causal."""

    name: str
    problem: Problem

    def __post_init__(self) -> None:
        if self.problem.mask not in MASKS.values():
            raise ValueError(f"calibration takes the masks {' and '.join(MASKS)}, not {self.problem.mask}")

    @staticmethod
    def parse(name: str) -> Cell | None:
        """A cell of the paper's grid: head dim, mask, tokens of a sequence."""
        match = CELL.fullmatch(name)
        if match is None:
            return None
        dim, length, mask = int(match[1]), int(match[3]), MASKS[match[2]]
        heads = HIDDEN // dim
        return Cell(name, Problem(TOKENS // length, heads, heads, length, length, dim, mask=mask))

    @property
    def dim(self) -> int:
        """As tiles are padded."""
        return self.config.dim

    @property
    def config(self) -> KernelConfig:
        return select(self.problem.dim, "bf16", str(self.problem.mask), True, self.problem.len_k)

    def tiling(self) -> Tiling:
        return tile(self.problem, TileShape(self.config.tile_m, self.config.tile_n))


@dataclass(frozen=True)
class Sample:
    """A measurement: microseconds of one policy in one cell, of the whole call or of the main kernel alone.

    `us` is the geometric mean over several files, `files` has the time of each file.
    """

    cell: Cell
    policy: str
    us: float
    main_only: bool = False
    files: Mapping[str, float] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[str, bytes, bytes]:
        """The order and the placement that ran. Two policies can have the same: if a window holds all chains of a head,
        a larger width changes only the name."""
        placement = self.placed.placement
        return self.placed.program.fingerprint, placement.first.tobytes(), placement.chains.tobytes()

    @property
    def key(self) -> tuple[str, str, bool]:
        return self.cell.name, self.policy, self.main_only

    @cached_property
    def placed(self) -> Placed:
        return verify(compose(self.cell.tiling(), self.policy)).on(H200_SMS)


@dataclass(frozen=True)
class CallModel:
    """The model of a whole call of one head dim, in microseconds."""

    machine: Machine
    start: float
    finish: float

    def main(self, sample: Sample) -> float:
        """Time of the main kernel."""
        # If a kernel of its own finishes dQ, no contributor reads the sum back.
        takes_sum = sample.cell.config.last_finishes
        machine = self.machine if takes_sum else replace(self.machine, fetch=0.0)
        return play(sample.placed.program, sample.placed.placement, machine.costs()).makespan

    def side(self, sample: Sample) -> float:
        """Time of the kernels around the main kernel."""
        if sample.main_only:
            return 0.0
        return self.start + (self.finish if sample.cell.config.finish == "postpass" else 0.0)

    def predict(self, samples: Sequence[Sample]) -> Floats:
        return np.array([self.main(s) + self.side(s) for s in samples])

    def numbers(self) -> Floats:
        return np.array([*(getattr(self.machine, name) for name in FITTED), self.start, self.finish])

    def with_numbers(self, numbers: Floats) -> CallModel:
        *times, start, finish = numbers.tolist()
        return CallModel(replace(self.machine, **dict(zip(FITTED, times, strict=True))), start, finish)


# First values of a fit, for each head dim. They are near the fitted H200, because a makespan as a function of these
# times has many valleys. At head dim 64 turns are split: both writers add halves of the same tile, so they count as
# one. `first` and `jitter` are not fitted, as makespans say little about them. `first` is read off traces. `jitter` is
# larger than in traces, because it also stands for adds and ends of chains, which differ more and have no jitter of
# their own.
BEGIN = {
    128: CallModel(Machine(2.05, 2.3, 0.3, 2.0, 0.0, 0.01, store=6.5, fetch=0.7, first=0.85, jitter=0.1), 48.0, 10.0),
    64: CallModel(Machine(2.35, 1.8, 0.06, 1.4, 0.0, 0.3, 2, 1, 1.8, 1.2, first=0.7, jitter=0.1), 48.0, 44.0),
}


def read_samples(paths: Iterable[str | Path]) -> list[Sample]:
    """Result files with rows {"cell": ..., "us": {policy: {"median": ...}}}, and traces (.npz).

    A GPU at its power limit runs at another clock each time. The samples that a file shares with earlier files say how
    much slower it ran, and its times are divided by that. So all times are at the clock of the first file.
    """
    samples: dict[tuple[str, str, bool], Sample] = {}
    for path in map(Path, paths):
        read = {s.key: s for s in (_of_trace(path) if path.suffix == ".npz" else _of_results(path))}
        shared = [samples[key].us / s.us for key, s in read.items() if key in samples]
        factor = statistics.geometric_mean(shared) if shared else 1.0
        for key, s in read.items():
            files = {**(samples[key].files if key in samples else {}), str(path): s.us * factor}
            samples[key] = replace(s, us=statistics.geometric_mean(files.values()), files=files)
    if not samples:
        raise ValueError("no measured policy of the grid in these files (cells are named like 'd128 causal 4096')")
    return list(samples.values())


def _of_results(path: Path) -> Iterator[Sample]:
    try:
        rows = from_json(path.read_text(encoding="utf-8"))["rows"]
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
    """The times of the call and of its main kernel without tracing. A trace without them gives the traced time."""
    trace = load_trace(path)
    if trace.program.mask not in MASKS:
        raise ValueError(f"{path} is a trace of the mask {trace.program.mask}: calibration takes {' and '.join(MASKS)}")
    cell, us = _cell_of(trace), trace.facts["us"]
    if "call" in us:
        yield Sample(cell, trace.program.policy, us["call"])
    yield Sample(cell, trace.program.policy, us.get("main") or measured(trace).makespan, main_only=True)


def _cell_of(trace: Trace) -> Cell:
    """The cell of the paper's grid that was traced, or one with a name of its own."""
    problem = Problem(**trace.facts["problem"], mask=MASKS[trace.program.mask])
    name = f"d{problem.dim} {problem.mask} {problem.len_k}"
    of_grid = Cell.parse(name)
    if of_grid is not None and of_grid.problem == problem:
        return of_grid
    return Cell(f"{name} {problem.batch}x{problem.heads_q}", problem)


def fit(samples: Sequence[Sample], begin: CallModel, rounds: int = 12) -> CallModel:
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
    """One cell, by whole calls or the main kernel alone: (policy, measured, predicted) of each policy.

    `files` has the times of the policies file by file. Times of one file can be compared to the percent.
    """

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
        """If one policy is faster than another in every file, the prediction does not say the opposite. Times that are
        level, measured or predicted, say nothing."""
        return self._ranked(LEVEL)

    @property
    def strictly_ranked(self) -> bool:
        """As `ranked`, but no prediction counts as level: the smaller number is faster."""
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
        """The policy with the smallest prediction."""
        return min(self.policies, key=lambda row: row[2])[0]

    @property
    def auto_loss(self) -> float | None:
        """How far the policy that `auto` takes is behind the best that it may take; None if it was not measured."""
        mine = [us for policy, us, _ in self.policies if policy == self.auto]
        return mine[0] / min(us for policy, us, _ in self.policies if not looks_at_batch(policy)) - 1 if mine else None


@dataclass(frozen=True)
class Calibration:
    """The fitted model of each head dim, and how well it predicts each cell."""

    models: dict[int, CallModel]
    cells: tuple[CellReport, ...]

    def part(self, main_only: bool) -> Calibration:
        """The cells of the main kernel alone, or of whole calls."""
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
        """The content of dash_attn/simulate/h200.json: times in microseconds, to the nanosecond."""

        def rounded(model: CallModel) -> dict[str, Any]:
            times = {name: round(value, 3) for name, value in asdict(model.machine).items()}
            return {"machine": times, "start": round(model.start, 1), "finish": round(model.finish, 1)}

        return {str(dim): rounded(model) for dim, model in sorted(self.models.items())}


def calibrate(samples: Sequence[Sample]) -> Calibration:
    """Fit each head dim by itself, and compare the predictions with the measurements."""
    dims = sorted({s.cell.dim for s in samples}, reverse=True)
    return hold({dim: fit([s for s in samples if s.cell.dim == dim], BEGIN[dim]) for dim in dims}, samples)


def hold(models: dict[int, CallModel], samples: Sequence[Sample]) -> Calibration:
    """Compare the predictions of a model of each head dim with the measurements."""
    rows: dict[tuple[Cell, bool], list[tuple[Sample, float]]] = {}
    for dim, model in models.items():
        mine = [s for s in samples if s.cell.dim == dim]
        for sample, us in zip(mine, model.predict(mine).tolist(), strict=True):
            rows.setdefault((sample.cell, sample.main_only), []).append((sample, us))
    return Calibration(models, tuple(_report(cell, main_only, row) for (cell, main_only), row in rows.items()))


def _report(cell: Cell, main_only: bool, predicted: Sequence[tuple[Sample, float]]) -> CellReport:
    auto = Sample(cell, str(resolve(cell.tiling(), "auto")), 0.0)
    same = [s.policy for s, _ in predicted if s.runs == auto.runs]
    files = sorted({file for s, _ in predicted for file in s.files})
    return CellReport(
        cell.name,
        tuple((s.policy, s.us, us) for s, us in predicted),
        min(same, key=lambda policy: policy != auto.policy, default=auto.policy),
        tuple({s.policy: s.files[file] for s, _ in predicted if file in s.files} for file in files),
        main_only,
    )
