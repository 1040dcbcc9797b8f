"""Trace one backward on a Hopper GPU. Needs torch and the kernel compiler, nothing else of the package's dependencies.

python -m dash_attn.tools.trace --out events.npz --batch 4 --seqlen 4096 --heads 16 --headdim 128 --causal
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from dash_attn.backends import Gradients, Options
from dash_attn.backends.sm90 import builds
from dash_attn.backends.sm90.backend import DTYPES
from dash_attn.backends.sm90.launch import Launch
from dash_attn.plan import placement
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.tools.bench.operands import draw_operands
from dash_attn.tools.bench.timing import kernel_shares, sample
from dash_attn.tools.trace.measured import measured, shares
from dash_attn.tools.trace.record import Trace, save_trace, without_idle

REPEATS = 7


def require_gpu() -> None:
    """ValueError that says what to do where no kernel can run."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError(
            "tracing runs the kernel and needs a Hopper GPU, which is not here: run "
            "'python -m dash_attn.tools.trace --out events.npz' on a machine that has one, and give the file to "
            "'dash-attn trace events.npz' on any machine"
        )


def trace_problem(problem: Problem, policy: str = "auto", seed: int = 0) -> Trace:
    """Random inputs through the kernel with tracing, and without it for the times and for the bits."""
    require_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    prepared = prepare(problem, policy, Options(), device)
    operands = draw_operands(problem, device, seed)
    plain, traced = (Gradients(*(torch.empty_like(x) for x in operands[1:4])) for _ in range(2))
    call = partial(prepared.backward, operands, plain)
    sample([call], 2, device)
    us = {"call": statistics.median(sample([call], 1, device) for _ in range(REPEATS))}
    launch = prepare(problem, policy, Options(kernel=builds.TRACE), device).run_backward
    assert isinstance(launch, Launch)
    events = builds.trace(launch, operands, traced)
    if kernels := kernel_shares(call, device):
        us |= {"main": us["call"] * kernels[0], "side": us["call"] * sum(kernels[1:])}
    planned = prepared.plan
    facts = {
        "problem": {name: value for name, value in asdict(problem).items() if isinstance(value, int | float | str)},
        "policy": planned.program.policy,
        "config": asdict(replace(launch.cfg, trace=False)),
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "us": us,
        "same_bits": all(torch.equal(a, b) for a, b in zip(traced, plain, strict=True)),
    }
    placed = placement(planned, prepared.backend.workers(planned))
    return Trace(planned.program, without_idle(placed), events, facts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dash_attn.tools.trace", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help=".npz file to write")
    for name, default in (("batch", 4), ("seqlen", 4096), ("heads", 16), ("kv-heads", 0), ("headdim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    parser.add_argument("--policy", default="auto")
    args = parser.parse_args(arguments)
    mask = CAUSAL if args.causal else FULL
    heads = (args.heads, args.kv_heads or args.heads)
    problem = Problem(args.batch, *heads, args.seqlen, args.seqlen, args.headdim, args.dtype, mask=mask)
    try:
        trace = trace_problem(problem, args.policy)
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))
    save_trace(trace, args.out)
    took = ", ".join(f"{name} {us:.1f}" for name, us in trace.facts["us"].items())
    print(f"wrote {args.out}: {trace.program.num_tasks} tasks on {len(trace.events)} workers")
    for name, _, share in shares(measured(trace)).table():
        print(f"{name:8} {share:6.1%} of the SMs' time")
    print(f"microseconds without tracing: {took}; same bits with it: {trace.facts['same_bits']}")
