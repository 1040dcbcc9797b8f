"""`dash-attn demo`: the main job on this machine. Run every policy, check it, show the schedules."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dash_attn.backends import Gradients, Operands, cpu
from dash_attn.order import applicable
from dash_attn.plan import Plan, placement, plan
from dash_attn.problem import CAUSAL, FULL, Mask, Problem
from dash_attn.simulate import Paper
from dash_attn.tiling import TileShape, tile
from dash_attn.tools import viz
from dash_attn.tools.cli.doctor import usable_device
from dash_attn.tools.cli.gpu_demo import HEADER, gpu_rows, gpu_table
from dash_attn.tools.cli.tables import console, policy_rows, policy_table

REPEATS = 4
JITTER = 1e-3  # seconds by which a contribution may be late, so that unordered sums come in different orders


@dataclass(frozen=True)
class Outcome:
    """One policy on one mask."""

    mask: str
    policy: str
    fingerprint: str
    error: float
    torch_error: float
    same_bits: bool
    milliseconds: float


def run_demo(out: Path, quick: bool) -> None:
    """Print what was found and write the report."""
    screen = console()
    began = time.perf_counter()
    length, shape = (512, TileShape(64, 64)) if quick else (1024, TileShape(128, 128))
    problems = {str(mask): Problem(1, 4, 2, length, length, 64, "float32", None, mask) for mask in (FULL, CAUSAL)}
    jobs = [(p, name) for p in problems.values() for name in applicable(tile(p, shape))]
    threads = torch.get_num_threads()
    screen.print(
        f"Backend: CPU, {threads} threads. Attention forward and backward, batch 1, {length} tokens, "
        f"4 query and 2 key/value heads, head dim 64, fp32, tiles {shape}."
    )
    outcomes, control = [], {}
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        bar = progress.add_task("", total=len(jobs) + len(problems))
        for mask, problem in problems.items():
            case = Case.make(problem)
            for name in [name for each, name in jobs if each is problem]:
                progress.update(bar, description=f"{mask}, {name}")
                outcomes.append(case.check(plan(problem, shape, name), mask, name))
                progress.advance(bar)
            progress.update(bar, description=f"{mask}, unordered")
            control[mask] = case.unordered(plan(problem, shape, "fa3"))
            progress.advance(bar)

    screen.print(_run_table(outcomes))
    for mask, deviation in control.items():
        screen.print(
            f"Control, {mask} mask: without turns, contributions added as they come, {REPEATS} runs differ by up to "
            f"{deviation:.1e}" + ("" if deviation else " [yellow](they happened to agree: run again)[/]")
        )
    sections = [
        viz.Section(
            "What ran on this machine",
            f"{length} tokens, 4 query and 2 key/value heads, head dim 64, fp32, CPU with {threads} threads. Every "
            f"policy ran {REPEATS} times, with {threads}, 1 and 2 threads and random delays; same bits means that dQ, "
            "dK and dV never differed in a single bit. The error is the largest deviation of a gradient from float64.",
            _run_rows(outcomes),
        )
    ]
    bits_repeat = all(outcome.same_bits for outcome in outcomes)
    device = usable_device()
    if device.type == "cuda":
        screen.print("A Hopper GPU: compiling the kernels takes up to a minute the first time.")
        rows = gpu_rows(device)
        screen.print(gpu_table(rows, device))
        bits_repeat = bits_repeat and all(row[HEADER.index("same bits")] == "yes" for row in rows)
        sections.append(
            viz.Section(
                f"What ran on the {torch.cuda.get_device_name(device)}",
                "Batch 4, 2048 tokens, 8 heads, bf16, by the kernel. Same bits: 20 repeats of forward and backward. "
                "Without turns, contributions are added as they come. Errors are largest deviations from float64.",
                [list[object](HEADER), *([*row] for row in rows)],
            )
        )
    for mask, (workers, heads) in {"full": (16, 4), "causal": (16, 4)}.items():
        section, table = _schedules(problems[mask].mask, workers, heads)
        screen.print(table)
        sections.append(section)
    path = viz.report(out, sections, title="dash_attn: deterministic attention, policy by policy")
    screen.print(f"Wrote [bold]{path.resolve()}[/] in {time.perf_counter() - began:.0f} s: open it in a browser.")
    if not bits_repeat:
        raise ValueError("some policy did not repeat bit for bit: this is a bug")


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs, the library's forward, and the float64 gradients of one problem."""

    problem: Problem
    operands: Operands
    exact: tuple[torch.Tensor, ...]
    torch_error: float

    @staticmethod
    def make(problem: Problem) -> Case:
        generator = torch.Generator().manual_seed(0)

        def draw(length: int, heads: int) -> torch.Tensor:
            return torch.randn(problem.batch, length, heads, problem.dim, generator=generator)

        q = draw(problem.len_q, problem.heads_q)
        k, v = draw(problem.len_k, problem.heads_kv), draw(problem.len_k, problem.heads_kv)
        dout = draw(problem.len_q, problem.heads_q)
        out, lse = cpu.forward(problem, q, k, v)
        exact = _torch_gradients(problem, *(x.double() for x in (dout, q, k, v)))
        plain = _torch_gradients(problem, dout, q, k, v)
        return Case(problem, Operands(dout, q, k, v, out, lse), exact, _deviation(plain, exact))

    def check(self, planned: Plan, mask: str, policy: str) -> Outcome:
        """Run it again and again, with other thread counts and delays, and compare bits."""
        first, began = self._backward(planned), time.perf_counter()
        again = self._backward(planned)
        took = time.perf_counter() - began
        runs = [again] + [self._backward(planned, threads=t, jitter=JITTER) for t in range(1, REPEATS - 1)]
        same = all(torch.equal(a, b) for run in runs for a, b in zip(run, first, strict=True))
        return Outcome(
            mask, policy, planned.fingerprint, _deviation(first, self.exact), self.torch_error, same, 1e3 * took
        )

    def unordered(self, planned: Plan) -> float:
        """Largest difference between runs that add contributions as they come."""
        runs = [self._backward(planned, threads=4, order="any", jitter=JITTER) for _ in range(REPEATS)]
        return max(_deviation(run, runs[0]) for run in runs[1:])

    def _backward(
        self, planned: Plan, *, threads: int | None = None, order: str = "program", jitter: float = 0.0
    ) -> Gradients:
        workers = max(planned.co_resident, threads or torch.get_num_threads())
        return cpu.backward(
            self.problem,
            planned.program,
            placement(planned, workers),
            self.operands,
            threads=threads,
            order=order,
            jitter=jitter,
        )


def _torch_gradients(problem: Problem, dout: torch.Tensor, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Plain attention in the inputs' precision, differentiated by torch."""
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in qkv)
    allowed = torch.from_numpy(problem.mask.dense(problem.len_q, problem.len_k))
    keys, values = (x.repeat_interleave(problem.group, 1) for x in (k, v))
    scores = (q @ keys.transpose(-1, -2) * problem.softmax_scale).masked_fill(~allowed, float("-inf"))
    gradients = torch.autograd.grad(scores.softmax(-1) @ values, (q, k, v), dout.transpose(1, 2))
    return tuple(g.transpose(1, 2) for g in gradients)


def _deviation(some: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(some, others, strict=True))


def _run_rows(outcomes: list[Outcome]) -> list[list[object]]:
    header: list[object] = ["mask", "policy", "same bits", "error", "torch's error", "backward", "fingerprint"]
    return [header] + [
        [
            o.mask,
            o.policy,
            "yes" if o.same_bits else "NO",
            f"{o.error:.1e}",
            f"{o.torch_error:.1e}",
            f"{o.milliseconds:.0f} ms",
            o.fingerprint,
        ]
        for o in outcomes
    ]


def _run_table(outcomes: list[Outcome]) -> Table:
    header, *body = _run_rows(outcomes)
    table = Table(title="Run on this machine", title_justify="left", header_style="bold")
    for name in header:
        table.add_column(str(name))
    for row in body:
        table.add_row(*map(str, row))
    return table


def _schedules(mask: Mask, workers: int, heads: int) -> tuple[viz.Section, Table]:
    """Every policy that applies, in the paper's model: a section of the report, and a table."""
    problem = Problem(1, heads, heads, 2 * workers, 2 * workers, mask=mask)
    shape, model = TileShape(2, 2), Paper(1.0, 0.35)
    programs = [plan(problem, shape, name).verified for name in applicable(tile(problem, shape))]
    rows, results = policy_rows(programs, workers, model, record=True)
    title = f"{mask} mask, {workers} x {workers} tiles, {heads} heads, {workers} workers, compute 1, reduce 0.35"
    section = viz.schedules(results)
    return section, policy_table(rows, title)
