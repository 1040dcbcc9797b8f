"""Trace one backward on a Hopper GPU."""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch

from dash_attn.backends import Gradients, Operands, Options
from dash_attn.backends.sm90 import backend, builds
from dash_attn.backends.sm90.config import STAMPS, TRACE
from dash_attn.backends.sm90.launch import Launch
from dash_attn.backends.sm90.packed import PackedBackward, rows_of
from dash_attn.pack import Pack, Planned
from dash_attn.plan import placement
from dash_attn.prepare import prepare
from dash_attn.problem import Problem
from dash_attn.program import board_of
from dash_attn.simulate import Tickets
from dash_attn.tools.bench.operands import draw_operands
from dash_attn.tools.bench.timing import kernel_shares, sample
from dash_attn.tools.trace.record import PACK, Trace, drawn, entries_of, facts_of_pack, without_idle

REPEATS = 7
MOST_EVENTS = 2**31  # 64-bit words of events, 16 GiB


def trace_problem(problem: Problem, policy: str = "auto") -> Trace:
    """Trace a backward on random inputs. The kernel also runs without tracing, for its times and bits."""
    device = torch.device("cuda", torch.cuda.current_device())
    prepared = prepare(problem, policy, Options(), device)
    operands = draw_operands(problem, device)
    plain = Gradients.room(operands)
    call = partial(prepared.backward, operands, plain)
    sample([call], 2, device)
    us = {"call": statistics.median(sample([call], 1, device) for _ in range(REPEATS))}
    tracing = prepare(problem, policy, Options(kernel=TRACE), device).run_backward
    if isinstance(tracing, PackedBackward):
        launch, inputs = tracing.launch, rows_of(operands)
        compared = Gradients(*[grad.flatten(0, 1) for grad in plain])
    else:
        assert isinstance(tracing, Launch)
        launch, inputs, compared = tracing, operands, plain
    into = Gradients.room(inputs)
    trace = traced(launch, prepared.plan, inputs, into)
    if kernels := kernel_shares(call, device):
        us |= {"main": us["call"] * kernels[0], "side": us["call"] * sum(kernels[1:])}
    facts = trace.facts | {
        "problem": {name: value for name, value in asdict(problem).items() if isinstance(value, int | float | str)},
        "policy": trace.program.policy,
        "config": asdict(replace(launch.cfg, trace=False)),
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "us": us,
        "same_bits": all(torch.equal(a, b) for a, b in zip(into, compared, strict=True)),
    }
    return replace(trace, facts=facts)


def traced(launch: Launch, planned: Planned, operands: Operands, into: Gradients) -> Trace:
    """Run the tracing build of a plan."""
    if isinstance(planned, Pack):
        tickets = Tickets.of(planned)
        most = int(entries_of(tickets.board).sum())  # a worker may draw any number of tickets
        if launch.tables.workers * (1 + most) * launch.cfg.stamps > MOST_EVENTS:
            raise ValueError(f"a trace of {tickets.board.num_tasks} tasks is too large: give fewer tokens or heads")
        events = builds.trace(launch, operands, into, most)
        placed = drawn(tickets, events[..., len(STAMPS)])
        return Trace(tickets, placed, events[..., : len(STAMPS)], {PACK: facts_of_pack(planned)})
    program = planned.program
    placed = without_idle(placement(planned, backend.resident_workers(operands.q.device)))
    counts = entries_of(board_of(program))[placed.chains]
    events = builds.trace(launch, operands, into, int(np.add.reduceat(counts, placed.first[:-1]).max()))
    return Trace(program, placed, events, {})
