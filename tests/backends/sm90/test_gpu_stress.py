"""The same bits whatever else the GPU does, and however the kernel is launched: make gpu-test"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dash_attn
from dash_attn.backends import Gradients, Operands
from dash_attn.backends.sm90.workspace import Workspace
from dash_attn.problem import CAUSAL, FULL, Problem, window
from tests.backends.sm90.cases import DEVICE, Case, changed, poison, policies, prepared, room, sms
from tests.backends.sm90.digest import digests

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[3]
PROBLEMS = {
    "causal": Problem(2, 16, 4, 1024, 1024, 128, mask=CAUSAL),
    "full d64": Problem(2, 16, 16, 1000, 1000, 64),
    "window": Problem(2, 8, 8, 1500, 1500, 128, mask=window(300, 20)),
}
EVERY = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


class Load:
    """Work for the other streams: products that fill the GPU, copies on it and to it. Each call queues about 1 ms."""

    def __init__(self) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.factors = [torch.randn(4096, 4096, device=DEVICE).bfloat16() for _ in range(3)]
        self.blocks = [torch.empty(2**26, device=DEVICE) for _ in range(2)]
        self.host = torch.empty(2**22).pin_memory()
        torch.cuda.synchronize()

    def queue(self) -> None:
        products, copies, transfers = self.streams
        with torch.cuda.stream(products):
            torch.mm(self.factors[0], self.factors[1], out=self.factors[2])
            torch.mm(self.factors[0][:640], self.factors[1], out=self.factors[2][:640])  # leaves some SMs free
        with torch.cuda.stream(copies):
            self.blocks[0].copy_(self.blocks[1])
        with torch.cuda.stream(transfers):
            self.blocks[0][: self.host.numel()].copy_(self.host, non_blocking=True)


@EVERY
def test_beside_other_work(problem: Problem) -> None:
    """A co-running kernel may hold SMs back; all workers then start together, a little later."""
    case, load = Case.make(problem), Load()
    for workers in (sms(), sms() - 16):
        ready = prepared(problem, workers=workers)
        alone, launch, into = case.run(ready), ready.run_backward, room(case.operands)
        workspace = Workspace.of(launch.cfg, case.operands.q)
        count = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(300):
            load.queue()
            poison(workspace, into)
            launch(case.operands, into, workspace=workspace)
            count += changed(into, alone)
        assert int(count) == 0
        torch.cuda.synchronize()


def late_runs(case: Case, want: Gradients, runs: int) -> list[torch.Tensor]:
    """Runs on the current stream, on inputs that are there only after a while: who does not follow it reads noise."""
    ready = prepared(case.problem)
    torch.cuda._sleep(10_000_000)  # cycles: some 5 ms
    late = Case(case.problem, Operands(*(x.clone() for x in case.operands)), case.want)
    return [changed(late.run(ready), want) for _ in range(runs)]


@EVERY
def test_on_a_side_stream(problem: Problem) -> None:
    case, stream = Case.make(problem), torch.cuda.Stream()
    want = case.run(prepared(problem))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        counts = late_runs(case, want, 50)
    torch.cuda.synchronize()
    assert not any(int(count) for count in counts)


@EVERY
def test_in_a_graph(problem: Problem) -> None:
    """Captured once, replayed with other inputs in the same places."""
    first, second = (Case.make(problem, seed) for seed in (0, 1))
    ready = prepared(problem)
    wants = [case.run(ready) for case in (first, second)]
    held = Operands(*(x.clone() for x in first.operands))
    launch, into = ready.run_backward, room(held)
    workspace = Workspace.of(launch.cfg, held.q)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launch(held, into, workspace=workspace)
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(100):
        for x, given in zip(held, (first, second)[i % 2].operands, strict=True):
            x.copy_(given)
        poison(workspace, into)
        graph.replay()
        count += changed(into, wants[i % 2])
    assert int(count) == 0


def call(case: Case, **how: object) -> Gradients:
    mask = case.problem.mask
    return dash_attn.backward(*case.operands, mask=mask, **how)


def test_a_graph_of_the_public_call() -> None:
    """Workspace and gradients come from the graph's own memory."""
    case = Case.make(PROBLEMS["causal"])
    want = call(case)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        grads = call(case)
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(100):
        for g in grads:
            g.fill_(float("nan"))
        graph.replay()
        count += changed(grads, want)
    assert int(count) == 0


def test_graphed_forward_and_backward() -> None:
    class Block(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return dash_attn.attention(q, k, v, causal=True)

    def leaves(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        shapes = [(2, 512, heads, 128) for heads in (8, 2, 2)]
        drawn = [torch.randn(shape, generator=generator, device=DEVICE) for shape in shapes]
        return [x.bfloat16().requires_grad_() for x in drawn]

    def results(module: torch.nn.Module, seed: int) -> list[torch.Tensor]:
        given = leaves(seed)
        out = module(*given)
        dout = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(out)
        return [x.clone() for x in (out.detach(), *torch.autograd.grad(out, given, dout))]

    wants = [results(Block(), seed) for seed in (1, 2)]
    graphed = torch.cuda.make_graphed_callables(Block(), tuple(leaves(0)))
    for _ in range(20):
        for seed, want in zip((1, 2), wants, strict=True):
            assert int(changed(results(graphed, seed), want)) == 0


@EVERY
def test_every_policy_and_margin(problem: Problem) -> None:
    """A margin takes workers away and keeps the bits; an order fixes them, another order may change them."""
    case = Case.make(problem)
    for policy in policies(problem):
        want = call(case, policy=policy)
        for margin in (0, 4, 16):
            runs = [call(case, policy=policy, sm_margin=margin) for _ in range(10)]
            assert not any(int(changed(run, want)) for run in runs), (policy, margin)


def test_fresh_processes() -> None:
    command = [sys.executable, str(ROOT / "tests/backends/sm90/digest.py")]
    want = digests()
    running = [subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        printed = [process.communicate(timeout=120)[0].split()[-len(want) :] for process in running]
    finally:
        for process in running:
            process.kill()
    assert printed == [want] * 2


def test_control_without_order() -> None:
    """The public call differs from itself when told that it may."""
    case = Case.make(Problem(1, 8, 8, 4096, 4096, 64, mask=FULL))
    runs = [call(case, deterministic=False) for _ in range(30)]
    assert any(int(changed(run[:1], runs[0][:1])) for run in runs[1:])


def test_memory_accesses() -> None:
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        pytest.skip("compute-sanitizer is not on PATH")
    command = [
        checker,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "1",
        sys.executable,
        "tests/backends/sm90/sanitize.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr


def test_two_at_once() -> None:
    """Two launches that each want every SM: one waits until the other has gone, neither holds half of them."""
    case = Case.make(PROBLEMS["causal"])
    want = case.run(prepared(case.problem))
    streams, counts = [torch.cuda.Stream() for _ in range(2)], []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            counts += late_runs(case, want, 50)
    torch.cuda.synchronize()
    assert not any(int(count) for count in counts)
