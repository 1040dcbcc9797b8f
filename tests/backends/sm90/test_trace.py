"""The host's side of the tracing build, with the CPU as the device and no kernel behind it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dash_attn.backends.sm90 import backend as hopper
from dash_attn.backends.sm90 import launch
from dash_attn.backends.sm90.config import STAMPS, KernelConfig, select, with_debug, with_trace
from dash_attn.plan import placement, plan
from dash_attn.problem import CAUSAL, Problem
from dash_attn.tiling import TileShape

PROBLEM = Problem(1, 4, 2, 1000, 1000, 128, mask=CAUSAL)


def arguments(cfg: KernelConfig, workers: int = 7) -> tuple[launch.DeviceTables, launch.Inputs]:
    tables = hopper.tables_of(plan(PROBLEM, TileShape(cfg.tile_m, cfg.tile_n)), cfg, workers, torch.device("cpu"))
    q, k = (torch.zeros(1, 1000, heads, 128, dtype=torch.bfloat16) for heads in (4, 2))
    return tables, launch.Inputs(q, q, k, k, q, torch.zeros(1, 4, 1000))


def test_the_buffer_has_a_row_for_every_entry() -> None:
    cfg = with_trace(select(128, "bf16", "causal"))
    planned = plan(PROBLEM, TileShape(cfg.tile_m, cfg.tile_n))
    placed, lengths = placement(planned, 7), np.diff(planned.program.task_first)
    spans = zip(placed.first[:-1], placed.first[1:], strict=True)
    most = max(sum(1 + lengths[chain] for chain in placed.chains[a:b]) for a, b in spans)
    events = launch.TraceBuffers.of(arguments(cfg)[0]).events
    assert events.shape == (7, 1 + most, len(STAMPS)) and events.dtype == torch.int64


def test_the_kernel_is_given_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, given = with_trace(select(128, "bf16", "causal")), []
    monkeypatch.setattr(launch, "resident_workers", lambda device: 132)
    ran = lambda *args: given.append(args)  # noqa: E731
    monkeypatch.setattr(launch, "kernels", lambda cfg: (lambda *args: None, ran, None))
    _, events = launch.trace_backward(cfg, *arguments(cfg), scale=1.0)
    (_, stats, _, facts), *others = given
    assert len(others) == 3 and stats[-1].shape == events.shape and len(stats) == 5 and len(facts) == 2


def test_builds_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = select(128, "bf16", "causal")
    for run, cfg in ((launch.backward, with_trace(plain)), (launch.trace_backward, plain)):
        with pytest.raises(ValueError, match="trace_backward"):
            run(cfg, *arguments(cfg), scale=1.0)
    with pytest.raises(ValueError, match="choose one"):
        with_trace(with_debug(plain))
