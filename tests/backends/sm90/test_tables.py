"""What is uploaded is the program: checked with the CPU as the device."""

import numpy as np
import pytest
import torch

from dash_attn.backends import Options
from dash_attn.backends.sm90 import backend, launch
from dash_attn.plan import placement, plan
from dash_attn.problem import CAUSAL, Mask, Problem, window


@pytest.mark.parametrize("mask", [CAUSAL, window(64, 0), window(100, 30)], ids=str)
@pytest.mark.parametrize("workers", [8, 132])
def test_tables_are_the_program(mask: Mask, workers: int, monkeypatch):
    problem = Problem(2, 4, 2, 700, 700, 128, mask=mask)
    cpu = torch.device("cpu")
    monkeypatch.setattr(backend, "resident_workers", lambda device: workers)
    monkeypatch.setattr(launch, "kernels", lambda *_: (None, None, None, None))
    planned = plan(problem, backend.Sm90Backend(cpu).tile_shape(problem))
    program, placed = planned.program, placement(planned, workers)
    tables = backend.launch_of(planned, Options(), cpu).tables
    assert np.array_equal(tables.chains.numpy(), program.chains)
    assert np.array_equal(tables.runs.numpy()[:, :7], program.runs) and not tables.runs[:, 7].any()
    assert np.array_equal(tables.contributors.numpy(), program.contributors)
    busy = [b for a, b in zip(placed.first, placed.first[1:], strict=False) if a < b]
    assert tables.worker_first.tolist() == [0, *busy]  # workers without chains are left out
    assert np.array_equal(tables.worker_chains.numpy(), placed.chains)
    if mask == CAUSAL:
        assert tables.row_lo is None
    else:
        rows = mask.intervals(700, 700)
        assert all(np.array_equal(a.numpy(), b) for a, b in zip((tables.row_lo, tables.row_hi), rows, strict=True))
    assert all(t.is_contiguous() and t.dtype == torch.int32 for t in (tables.chains, tables.runs, tables.worker_first))
