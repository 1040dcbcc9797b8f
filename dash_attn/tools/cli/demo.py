"""`dash-attn demo`: runs every policy on this machine, checks the gradients, draws the timelines."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from dash_attn.backends import Gradients, Operands, Options, backend_for
from dash_attn.order import applicable
from dash_attn.pack import Pack
from dash_attn.plan import plan
from dash_attn.prepare import Prepared, prepare
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents
from dash_attn.simulate import Paper, Tickets
from dash_attn.tiling import TileShape, tile
from dash_attn.tools import viz
from dash_attn.tools.bench.operands import draw_operands, exact
from dash_attn.tools.cli.doctor import usable_device
from dash_attn.tools.cli.gpu_demo import HEADER, gpu_rows, gpu_table
from dash_attn.tools.cli.tables import console, policy_rows, policy_table
from dash_attn.tools.cli.workload import policies_of

CPU = torch.device("cpu")
REPEATS = 4
PACKED_TILES = (4, 12, 6, 16, 4)  # of the documents of a pack
JITTER = 1e-3  # seconds by which a contribution may be late, so that unordered sums come in different orders


@dataclass(frozen=True)
class PolicyCheck:
    """One policy on one mask."""

    mask: str
    policy: str
    fingerprint: str
    error: float
    torch_error: float
    same_bits: bool


def run_demo(out: Path, quick: bool) -> None:
    """Print the checks and write the report."""
    screen = console()
    began = time.perf_counter()
    length = 1024 if quick else 1536
    problems = [Problem(1, 4, 2, length, length, 64, "float32", None, mask) for mask in (FULL, CAUSAL)]
    shape = backend_for(CPU).tile_shape(problems[0])
    policies = {problem: applicable(tile(problem, shape)) for problem in problems}
    threads = torch.get_num_threads()
    screen.print(
        f"Backend: CPU, {threads} threads. Attention forward and backward, batch 1, {length} tokens, "
        f"4 query and 2 key/value heads, head dim 64, fp32, tiles {shape}."
    )
    checks, control = [], {}
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        bar = progress.add_task("", total=sum(map(len, policies.values())) + len(problems))
        for problem, names in policies.items():
            trial, mask = Trial.make(problem), str(problem.mask)
            for name in names:
                progress.update(bar, description=f"{mask}, {name}")
                checks.append(trial.check(name))
                progress.advance(bar)
            progress.update(bar, description=f"{mask}, unordered")
            control[mask] = trial.unordered()
            progress.advance(bar)

    screen.print(_run_table(checks))
    for mask, deviation in control.items():
        screen.print(
            f"Control, {mask} mask: if contributions are added as they come, {REPEATS} runs differ by up to "
            f"{deviation:.1e}" + ("" if deviation else " [yellow](they happened to agree: run again)[/]")
        )
    sections = [
        viz.Section(
            "What ran on this machine",
            f"{length} tokens, 4 query and 2 key/value heads, head dim 64, fp32, CPU with {threads} threads. Every "
            f"policy ran {REPEATS} times: twice with {threads} threads, then with 1 and 2 threads and random delays. "
            "Same bits means that dQ, dK and dV never differed in a single bit. The error is the largest deviation of "
            "a gradient from float64.",
            _run_rows(checks),
        )
    ]
    bits_repeat = all(check.same_bits for check in checks)
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
    screen.print(
        "Simulated in the paper's model, where a task computes for 1 and adds to dQ for 0.35. Bubble is the share of "
        "time in which workers have nothing to do, stall the share in which they wait for a turn. Above bound compares "
        "the makespan with the best possible one. Needs is the number of workers that must run at the same time."
    )
    for problem in problems:
        section, table = _schedules(problem.mask, workers=16, heads=4)
        screen.print(table)
        sections.append(section)
    section, table = _pack_schedules(workers=16, heads=4)
    screen.print(table)
    sections.append(section)
    path = viz.report(out, sections, title="dash_attn: deterministic attention, policy by policy")
    screen.print(f"Wrote [bold]{path.resolve()}[/] in {time.perf_counter() - began:.0f} s: open it in a browser.")
    if not bits_repeat:
        raise ValueError("some policy did not repeat bit for bit: this is a bug")


@dataclass(frozen=True, eq=False)
class Trial:
    """Inputs, the float64 gradients, and how far torch's own gradients are from them."""

    problem: Problem
    operands: Operands
    exact: Gradients
    torch_error: float

    @staticmethod
    def make(problem: Problem) -> Trial:
        operands = draw_operands(problem, CPU)
        want = exact(problem, *operands[:4]).gradients
        return Trial(problem, operands, want, _deviation(_torch_gradients(problem, operands), want))

    def check(self, policy: str) -> PolicyCheck:
        """Run it again and again, with other thread counts and delays, and compare bits."""
        first, again = self._gradients(policy), self._gradients(policy)
        runs = [again] + [self._gradients(policy, threads=t, jitter=JITTER) for t in range(1, REPEATS - 1)]
        same = all(torch.equal(a, b) for run in runs for a, b in zip(run, first, strict=True))
        error, fingerprint = _deviation(first, self.exact), self._prepared(policy).plan.fingerprint
        return PolicyCheck(str(self.problem.mask), policy, fingerprint, error, self.torch_error, same)

    def unordered(self) -> float:
        """Largest difference between runs that add contributions as they come."""
        runs = [self._gradients("fa3", threads=4, order="any", jitter=JITTER) for _ in range(REPEATS)]
        return max(_deviation(run, runs[0]) for run in runs[1:])

    def _gradients(self, policy: str, **kernel: object) -> Gradients:
        return self._prepared(policy, **kernel).backward(self.operands)

    def _prepared(self, policy: str, **kernel: object) -> Prepared:
        return prepare(self.problem, policy, Options(kernel=tuple(kernel.items())), CPU)


def _torch_gradients(problem: Problem, operands: Operands) -> tuple[torch.Tensor, ...]:
    """torch's own attention, differentiated by torch."""
    leaves = [x.detach().requires_grad_() for x in operands.qkv]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    keys, values = (x.repeat_interleave(problem.group, 1) for x in (k, v))
    out = scaled_dot_product_attention(q, keys, values, is_causal=problem.mask.is_causal)
    return torch.autograd.grad(out.transpose(1, 2), leaves, operands.dout)


def _deviation(some: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(some, others, strict=True))


def _run_rows(checks: list[PolicyCheck]) -> list[list[object]]:
    header: list[object] = ["mask", "policy", "same bits", "error", "torch's error", "fingerprint"]
    return [header] + [
        [
            o.mask,
            o.policy,
            "yes" if o.same_bits else "NO",
            f"{o.error:.1e}",
            f"{o.torch_error:.1e}",
            o.fingerprint,
        ]
        for o in checks
    ]


def _run_table(checks: list[PolicyCheck]) -> Table:
    header, *body = _run_rows(checks)
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
    title = f"{mask} mask, {workers} x {workers} tiles, {heads} heads, {workers} workers"
    section = viz.schedules(results)
    return section, policy_table(rows, title)


def _pack_schedules(workers: int, heads: int) -> tuple[viz.Section, Table]:
    """The same for documents of different lengths in one pack, whose tickets the workers draw."""
    cu = [0, *accumulate(2 * tiles for tiles in PACKED_TILES)]
    problem = Problem(1, heads, heads, cu[-1], cu[-1], mask=documents(cu, causal=True))
    pack = Pack(problem, lambda _: TileShape(2, 2))
    tickets = [Tickets.of(replace(pack, policy=name)) for name in policies_of(pack)]
    rows, results = policy_rows(tickets, workers, Paper(1.0, 0.35), record=True)
    lengths = ", ".join(map(str, PACKED_TILES))
    title = f"a pack of causal documents of {lengths} tiles, {heads} heads, {workers} workers"
    return viz.schedules(results), policy_table(rows, title)
