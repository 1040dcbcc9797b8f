"""What is uploaded is the program: checked with the CPU as the device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dash_attn.backends import Options
from dash_attn.backends.sm90 import backend, launch
from dash_attn.backends.sm90.workspace import kv_sums
from dash_attn.distributed.layout import Layout
from dash_attn.distributed.routes import Routes
from dash_attn.pack import Pack, Round, assemble
from dash_attn.plan import placement, plan
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from dash_attn.program import RUN, RUN_WIDTH
from dash_attn.tiling import TileShape


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
    assert np.array_equal(tables.runs.numpy()[:, : len(RUN)], program.runs) and not tables.runs[:, len(RUN) :].any()
    assert tables.runs.shape[1] == RUN_WIDTH == 8, "two loads of 16 bytes"
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


CUT = {
    "causal": Problem(2, 4, 2, 700, 700, 128, mask=CAUSAL, panels=3),
    "one q head for each kv head": Problem(1, 2, 2, 700, 900, 64, mask=FULL, panels=2),
    "documents": Problem(1, 4, 2, 700, 700, 128, mask=documents([0, 100, 100, 700], causal=True), panels=4),
}


@pytest.mark.parametrize("problem", CUT.values(), ids=CUT)
def test_panels_have_sums_of_their_own(problem: Problem, monkeypatch):
    """The last kernel folds, and the sums have a place for each kv tile of each panel."""
    cpu, kinds = torch.device("cpu"), list[bool]()
    monkeypatch.setattr(backend, "resident_workers", lambda device: 132)
    monkeypatch.setattr(launch, "kernels", lambda cfg, folds: kinds.append(folds) or (None, None, None, None))
    monkeypatch.setattr(launch, "converted", lambda tensors: tensors)
    sm90 = backend.Sm90Backend(cpu)
    shape = sm90.tile_shape(problem)
    made = assemble(problem, shape)
    run = backend.pack_launch_of(Pack(problem, sm90.tile_shape), Options(), cpu)
    assert kinds == [True] and run.cfg.cut and run.cfg.packed
    folds, parts = run.tables.kv_tiles
    assert np.array_equal(folds.numpy(), made.folds) and np.array_equal(parts.numpy(), made.parts)
    assert run.tables.n_kv == sum(-(-panel.len_k // shape.n) for panel in problem.panel_list) > len(made.folds)
    k = torch.empty(1, problem.batch * problem.len_k, problem.heads_kv, problem.dim, dtype=torch.bfloat16)
    sums = kv_sums(run.cfg, k, run.tables.n_kv).kv_sum
    assert sums.shape[:2] == (problem.heads_kv, run.tables.n_kv)
    whole = sm90.workspace_bytes(Pack(problem, sm90.tile_shape))
    queries = [Problem(1, problem.heads_q, 1, panel.len_q, 0, problem.dim) for panel in problem.panel_list]
    assert sm90.kv_sum_bytes(Pack(problem, sm90.tile_shape)) == 4 * sums.numel()
    assert whole == 4 * sums.numel() + sum(sm90.workspace_bytes(plan(each, shape)) for each in queries)


def test_a_pack_with_one_cut_document_has_sums_for_all_of_its_keys():
    """The groups of the long document stay whole, and those of the short one are cut. One kernel runs both."""
    sm90 = backend.Sm90Backend(torch.device("cuda"))
    problem = Problem(1, 4, 1, 33068, 33068, 128, mask=CAUSAL & documents([0, 32768, 33068]))
    cfg = replace(backend.config_of(problem), cut=True)
    made = assemble(problem, TileShape(cfg.tile_m, cfg.tile_n))
    assert made.sizes.cut
    k = torch.empty(1, 33068, 1, 128, dtype=torch.bfloat16)
    sums = kv_sums(cfg, k, len(made.kv_tiles)).kv_sum
    pack = Pack(problem, sm90.tile_shape)
    assert sm90.kv_sum_bytes(pack) == 4 * sums.numel() < sm90.workspace_bytes(pack)


def test_the_panels_of_ranks_need_the_workspace_of_all_panels():
    """A rank also has dK and dV in 16 bits, of all keys."""
    sm90, problem = backend.Sm90Backend(torch.device("cuda")), Problem(2, 4, 2, 4096, 4096, 128, mask=CAUSAL, panels=8)
    layout = Layout("zigzag", 2, 8)
    held = [Pack(problem, sm90.tile_shape, "auto", Routes.of(problem, layout, rank).panels) for rank in range(2)]
    unused = 2 * 2 * problem.batch * problem.len_k * problem.heads_kv * problem.dim
    whole = sm90.workspace_bytes(Pack(problem, sm90.tile_shape))
    assert sum(sm90.workspace_bytes(each) - unused for each in held) == whole
    assert not any("plans" in each.__dict__ for each in held), "nothing is planned"


def test_without_panels_nothing_is_folded(monkeypatch):
    cpu, kinds = torch.device("cpu"), list[bool]()
    monkeypatch.setattr(backend, "resident_workers", lambda device: 132)
    monkeypatch.setattr(launch, "kernels", lambda cfg, folds: kinds.append(folds) or (None, None, None, None))
    monkeypatch.setattr(launch, "converted", lambda tensors: tensors)
    problem = Problem(1, 4, 2, 700, 700, 128, mask=documents([0, 100, 700], causal=True))
    run = backend.pack_launch_of(Pack(problem, lambda _: TileShape(64, 128)), Options(), cpu)
    (kv_tiles,), (q_tiles,) = run.tables.kv_tiles, run.tables.q_tiles
    made = assemble(problem, TileShape(64, 128))
    for name in ("bundles", "chains", "runs", "contributors"):
        assert np.array_equal(getattr(run.tables, name).numpy(), getattr(made, name)), name
    assert np.array_equal(q_tiles.numpy(), made.q_tiles) and np.array_equal(kv_tiles.numpy(), made.kv_tiles)
    docs = run.tables.docs.numpy()
    assert np.array_equal(docs[:, : len(Round)], made.rounds)
    assert np.array_equal(docs[:, len(Round) :], made.docs[made.rounds[:, Round.DOC]])
    memory = {table.untyped_storage().data_ptr() for table in (*run.tables.program, q_tiles, kv_tiles)}
    assert len(memory) == 1, "a stream that keeps one table keeps all of them"
    assert kinds == [False] and run.tables.n_kv == len(kv_tiles) == 1 + 5


def test_a_pack_is_refused_with_fewer_workers_than_are_said(monkeypatch):
    """Tickets of a window need more workers than the plans of its documents."""
    cpu = torch.device("cpu")
    sm90 = backend.Sm90Backend(cpu)
    mask = documents([0, 700, 2200]) & window(300, 0)
    pack = Pack(Problem(1, 4, 4, 2200, 2200, 128, mask=mask), sm90.tile_shape, "diagonal:8")
    assert sm90.co_resident(pack) == 6 > max(each.co_resident for each in pack.plans.values())
    monkeypatch.setattr(launch, "kernels", lambda *_: (None, None, None, None))
    monkeypatch.setattr(launch, "converted", lambda tensors: tensors)
    monkeypatch.setattr(backend, "resident_workers", lambda device: 6)
    assert backend.pack_launch_of(pack, Options(), cpu).tables.workers == 6
    with pytest.raises(ValueError, match="sm_margin=1 leaves 5 SMs: this order needs 6 co-resident workers, 5 are"):
        backend.pack_launch_of(pack, Options(sm_margin=1), cpu)


def test_panels_of_a_window_with_a_right_side_are_refused():
    problem = Problem(1, 4, 2, 700, 700, 128, mask=window(100, 20), panels=2)
    for ask in (backend.Sm90Backend(torch.device("cuda")).forward, backend.config_of):
        with pytest.raises(NotImplementedError, match=r"panels is 2.*after their position.*leave panels at 1"):
            ask(problem)
