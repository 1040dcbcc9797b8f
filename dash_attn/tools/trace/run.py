"""Trace one backward on a Hopper GPU."""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from functools import partial

import torch

from dash_attn.backends import Gradients, Options
from dash_attn.backends.sm90 import builds
from dash_attn.backends.sm90.config import TRACE
from dash_attn.backends.sm90.launch import Launch
from dash_attn.plan import Plan, placement
from dash_attn.prepare import prepare
from dash_attn.problem import Problem
from dash_attn.tools.bench.operands import draw_operands
from dash_attn.tools.bench.timing import kernel_shares, sample
from dash_attn.tools.trace.record import Trace, without_idle

REPEATS = 7


def trace_problem(problem: Problem, policy: str = "auto", seed: int = 0) -> Trace:
    """Random inputs through the kernel with tracing, and without it for the times and for the bits."""
    if problem.is_packed:
        raise ValueError(
            f"a trace shows one program, and mask {problem.mask} has one for each document: trace one of them"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    prepared = prepare(problem, policy, Options(), device)
    planned = prepared.plan
    assert isinstance(planned, Plan)
    if planned.program.geometry.share > 1:
        raise ValueError(
            f"policy {policy!r} cuts chains by q head here, which the tracing build does not run: give auto@group, "
            "or a policy by name without @head"
        )
    operands = draw_operands(problem, device, seed)
    plain, traced = (Gradients(*(torch.empty_like(x) for x in operands[1:4])) for _ in range(2))
    call = partial(prepared.backward, operands, plain)
    sample([call], 2, device)
    us = {"call": statistics.median(sample([call], 1, device) for _ in range(REPEATS))}
    launch = prepare(problem, policy, Options(kernel=TRACE), device).run_backward
    assert isinstance(launch, Launch)
    events = builds.trace(launch, operands, traced)
    if kernels := kernel_shares(call, device):
        us |= {"main": us["call"] * kernels[0], "side": us["call"] * sum(kernels[1:])}
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
