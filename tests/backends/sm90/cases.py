"""Problems on the GPU: prepared as callers prepare them, with random inputs and float64 gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dash_attn.backends import Gradients, Operands, Options
from dash_attn.backends.sm90.backend import resident_workers
from dash_attn.backends.sm90.packed import PackedBackward, rows_of
from dash_attn.backends.sm90.workspace import Workspace
from dash_attn.order import applicable, looks_at_batch
from dash_attn.prepare import Prepared, prepare
from dash_attn.problem import Problem
from dash_attn.tiling import tile
from dash_attn.tools.bench.operands import draw, exact

DEVICE = torch.device("cuda", 0)


def sms() -> int:
    return resident_workers(DEVICE)


def prepared(
    problem: Problem, policy: str = "auto", workers: int | None = None, *, ordered: bool = True, **kernel: object
) -> Prepared:
    """On `workers` SMs, or on all. `kernel` are fields of the kernel's config that differ from the shipped ones."""
    margin = 0 if workers is None else sms() - workers
    return prepare(problem, policy, Options(ordered, margin, tuple(kernel.items())), DEVICE)


def policies(problem: Problem) -> list[str]:
    """Those that apply to a problem."""
    alone = problem.alone(max(problem.sequences, key=lambda sequence: sequence.len_k))
    names = applicable(tile(alone, prepared(problem).backend.tile_shape(problem)))
    return [name for name in names if not (problem.is_packed and looks_at_batch(name))]


@dataclass(frozen=True, eq=False)
class Case:
    """Random inputs of a problem with the forward's result in float64 rounded to the inputs' type, and the float64
    gradients of the rounded inputs."""

    problem: Problem
    operands: Operands
    want: Gradients

    @staticmethod
    def make(problem: Problem, seed: int = 0, gain: float = 1.0) -> Case:
        drawn = draw(problem, DEVICE, seed, gain)
        result = exact(problem, *drawn)
        operands = Operands(*drawn, result.out.to(drawn.q.dtype), result.lse.float())
        return Case(problem, operands, result.gradients)

    def run(self, prepared: Prepared) -> Gradients:
        """One backward with every byte that the kernel should not trust poisoned."""
        into = room(self.operands)
        self.poisoned(prepared, into, self.workspace(prepared))
        return into

    def workspace(self, prepared: Prepared, dq: torch.Tensor | None = None) -> Workspace | None:
        """None for a pack in a batch, which makes a workspace of its own."""
        launch = prepared.run_backward
        if not isinstance(launch, PackedBackward):
            return Workspace.of(launch.cfg, self.operands.q, dq)
        if self.problem.batch > 1:
            return None
        return Workspace.of(launch.launch.cfg, self.operands.q[0], dq, launch.launch.tables.n_q)

    def poisoned(self, prepared: Prepared, into: Gradients, workspace: Workspace | None) -> None:
        poison(workspace, into)
        launch = prepared.run_backward
        if workspace is None:
            launch(self.operands, into)
        elif isinstance(launch, PackedBackward):
            launch.launch(rows_of(self.operands), Gradients(*(x[0] for x in into)), workspace=workspace)
        else:
            launch(self.operands, into, workspace=workspace)

    def differing(self, prepared: Prepared, runs: int) -> int:
        """Gradients that did not repeat, of `runs` runs. Compared on the device: runs follow without a pause."""
        first, into = self.run(prepared), room(self.operands)
        workspace = self.workspace(prepared, into.dq)  # where it lies changes no bit
        count = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(runs):
            self.poisoned(prepared, into, workspace)
            count += changed(into, first)
        return int(count)


def check_replays(problem: Problem) -> None:
    """A captured backward writes the same bits at every replay."""
    case, ready = Case.make(problem), prepared(problem)
    want, into = case.run(ready), room(case.operands)
    ready.backward(case.operands, into)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ready.backward(case.operands, into)
    for _ in range(3):
        for x in into:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize(DEVICE)
        assert same(into, want)


def room(operands: Operands) -> Gradients:
    """Gradients to be written."""
    return Gradients(*(torch.empty_like(x) for x in operands.qkv))


def poison(workspace: Workspace | None, into: Gradients) -> None:
    for t in into if workspace is None else (workspace.lse2, workspace.delta, workspace.dq_sum, *into):
        t.fill_(float("nan"))
    if workspace is not None:
        workspace.counters.fill_(7)


def changed(a, b) -> torch.Tensor:
    """How many tensors differ in some bit, on the device and not waited for. 16-bit types: NaNs compare too."""
    pairs = zip(a, b, strict=True)
    return sum((x.view(torch.int16) != y.view(torch.int16)).any().to(torch.int64) for x, y in pairs)


def errors(got: Gradients, want: Gradients) -> list[float]:
    """Relative error of each gradient; not a number if any element is none."""

    def one(a: torch.Tensor, b: torch.Tensor) -> float:
        a = a.double()
        if not torch.isfinite(a).all():
            return float("nan")
        return ((a - b).norm() / b.norm().clamp_min(1e-2 * b.numel() ** 0.5)).item() if a.numel() else 0.0

    return [one(a, b) for a, b in zip(got, want, strict=True)]


def same(a: Gradients, b: Gradients) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
