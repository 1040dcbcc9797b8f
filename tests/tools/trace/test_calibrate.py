"""Fits of made-up measurements, and what the report says of them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from importlib.resources import files as files_of
from pathlib import Path

import numpy as np
import pytest

from dash_attn.launch import compose
from dash_attn.order import looks_at_batch
from dash_attn.problem import CAUSAL, Mask, Problem, tiles, window
from dash_attn.simulate import H200_SMS, Machine, simulate
from dash_attn.tiling import TileShape, tile
from dash_attn.tools.bench.ours import USUAL
from dash_attn.tools.trace.calibrate import (
    BEGIN,
    CallModel,
    Cell,
    CellReport,
    Sample,
    calibrate,
    fit,
    hold,
    read_samples,
)
from dash_attn.tools.trace.fit import fit_trace
from dash_attn.tools.trace.measured import measured
from dash_attn.tools.trace.record import save_trace
from tests.tools.trace.synthetic import HAND_OVER, program_of, synthetic

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
POLICIES = {"full": ("shift:64", "fa3"), "causal": ("symmetric_shift:64", "spt", "descending")}


def made_up(truth: CallModel, dim: int) -> list[Sample]:
    samples = []
    for mask, policies in POLICIES.items():
        for length in (512, 2048):
            cell = Cell.parse(f"d{dim} {mask} {length}")
            assert cell is not None
            samples += [
                Sample(cell, policy, float(truth.predict([Sample(cell, policy, 1.0)])[0])) for policy in policies
            ]
    return samples


@pytest.mark.parametrize("dim", [64, 128])
def test_a_fit_finds_what_made_the_times(dim: int) -> None:
    begin = BEGIN[dim]
    machine = replace(begin.machine, compute=begin.machine.compute * 1.2, reduce=begin.machine.reduce * 0.8)
    truth = CallModel(machine, begin.start * 1.3, begin.finish)
    samples = made_up(truth, dim)
    fitted = fit(samples, begin)
    errors = fitted.predict(samples) / np.array([s.us for s in samples]) - 1
    assert np.abs(errors).max() < 0.02
    assert fitted.machine.compute == pytest.approx(truth.machine.compute, rel=0.05)


def test_result_files(tmp_path: Path) -> None:
    rows = [
        {
            "cell": "d128 full 512",
            "us": {"fa4": {"median": 1}, "shift:64": {"median": 400}, "any (fa3)": {"median": 3}},
        },
        {"cell": "d128 full 512", "us": {'fa3 {"split": true}': {"median": 5}, "fa3": {"median": 500.0}}},
        {"cell": "LLaMA3-8B 1x8192", "us": {"fa3": {"median": 7}}},
        {"cell": "d128 full 512", "deviation": {}},
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": rows}))
    later = tmp_path / "later.json"
    later.write_text(
        json.dumps({"rows": [{"cell": "d128 full 512", "us": {"fa3": {"median": 1000}, "spt": {"median": 1200}}}]})
    )
    both = {s.policy: s for s in read_samples([path, later])}
    assert {policy: s.us for policy, s in both.items()} == pytest.approx({"shift:64": 400, "fa3": 500, "spt": 600})
    assert both["fa3"].files == pytest.approx({str(path): 500, str(later): 500}), "the second ran at half the clock"
    path.write_text("[]")
    with pytest.raises(ValueError, match="holds no benchmark results"):
        read_samples([path])
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="no measured policy"):
        read_samples([path])


def test_traces_are_measurements_of_the_main_kernel(tmp_path: Path) -> None:
    program = program_of("causal")
    trace = synthetic(program, 12, Machine())
    problem = dict(batch=2, heads_q=4, heads_kv=4, len_q=1024, len_k=1024, dim=128, dtype="bfloat16")
    save_trace(replace(trace, facts={"problem": problem, "us": {"main": 123.0}}), tmp_path / "events.npz")
    (sample,) = read_samples([tmp_path / "events.npz"])
    assert sample.us == pytest.approx(123.0) and sample.main_only and sample.cell.name == "d128 causal 1024 2x4"
    report = calibrate([sample])
    assert report.part(True).predicted == 1 and not report.part(False).cells and set(report.to_json()) == {"128"}
    assert Machine(**report.to_json()["128"]["machine"]).compute == round(report.models[128].machine.compute, 3)


def test_auto_is_what_a_call_gets() -> None:
    """It orders each q head of a short group by itself."""
    problem = Problem(2, 8, 2, 1024, 1024, mask=CAUSAL)
    cell = Cell("grouped", problem)
    program = compose(cell.tiling())
    assert program.policy == "symmetric_shift:64@head"
    samples = [Sample(cell, policy, 100.0) for policy in (program.policy, "symmetric_shift:64", "spt@head")]
    (report,) = hold({128: BEGIN[128]}, samples).cells
    assert report.auto == program.policy and report.auto_loss == 0


@pytest.mark.parametrize("mask", [window(300, 0), tiles([[1, 0], [1, 1]], 512, 512)], ids=str)
def test_a_trace_of_another_mask_is_refused(mask: Mask, tmp_path: Path) -> None:
    """It is not taken for a trace of the full mask."""
    problem = Problem(1, 4, 4, 1024, 1024, mask=mask)
    trace = synthetic(compose(tile(problem, TileShape(64, 128))), 12, Machine())
    sizes = {name: getattr(problem, name) for name in ("batch", "heads_q", "heads_kv", "len_q", "len_k", "dim")}
    save_trace(replace(trace, facts={"problem": sizes, "us": {"main": 123.0}}), tmp_path / "events.npz")
    with pytest.raises(ValueError, match=rf"events\.npz is a trace of the mask {re.escape(str(mask))}"):
        read_samples([tmp_path / "events.npz"])
    with pytest.raises(ValueError, match="calibration takes the masks full and causal"):
        Cell("another", problem)


def test_results_may_say_what_the_main_kernel_takes(tmp_path: Path) -> None:
    row = {"cell": "d128 full 512", "us": {"fa3": {"median": 500}}, "main_share": {"fa3": 0.8, "fa4": 0.5}}
    (tmp_path / "results.json").write_text(json.dumps({"rows": [row]}))
    times = {(s.policy, s.main_only): s.us for s in read_samples([tmp_path / "results.json"])}
    assert times == pytest.approx({("fa3", False): 500, ("fa3", True): 400})


def test_a_trace_of_the_grid_runs_at_the_clock_of_the_grid(tmp_path: Path) -> None:
    rows = [{"cell": "d128 causal 512", "us": {"symmetric_shift:64": {"median": 300.0}}}]
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows}))
    cell = Cell.parse("d128 causal 512")
    assert cell is not None
    program = compose(cell.tiling(), "symmetric_shift:64")
    sizes = {name: getattr(cell.problem, name) for name in ("batch", "heads_q", "heads_kv", "len_q", "len_k", "dim")}
    facts = {"problem": sizes, "us": {"call": 150.0, "main": 100.0}}
    save_trace(replace(synthetic(program, 132, Machine()), facts=facts), tmp_path / "events.npz")
    times = {s.main_only: s.us for s in read_samples([tmp_path / "results.json", tmp_path / "events.npz"])}
    assert times == pytest.approx({False: 300.0, True: 200.0})


def test_what_counts_as_ranked() -> None:
    def cell(*rows: tuple[str, float, float]) -> CellReport:
        return CellReport("cell", rows, "a")

    assert cell(("a", 100, 90), ("b", 101, 80)).ranked, "1 % apart is level"
    assert not cell(("a", 100, 90), ("b", 110, 80)).ranked
    level = cell(("a", 100, 90), ("b", 110, 89))
    assert level.ranked and not level.strictly_ranked, "level as predicted, not as measured"
    undecided = replace(cell(("a", 100, 90), ("b", 110, 80)), files=({"a": 100, "b": 110}, {"a": 100, "b": 99}))
    assert undecided.strictly_ranked, "only what every file says counts"
    assert cell(("a", 100, 90), ("b", 110, 95), ("c", 200, 140)).worst == pytest.approx(-0.3)
    assert cell(("a", 110, 1), ("b", 100, 1)).auto_loss == pytest.approx(0.1)
    assert cell(("b", 100, 1)).auto_loss is None and cell(("b", 100, 1)).auto_error is None
    assert cell(("a", 110, 99), ("b", 100, 98)).choice == "b"
    assert cell(("a", 110, 99)).auto_error == pytest.approx(-0.1)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
def test_auto_is_as_good_as_the_best_in_the_fitted_machine(dim: int, mask: str, length: int) -> None:
    """auto looks neither at the machine nor at the batch, so that bits do not depend on them; here its rule is held
    against the model of the orders that it may take."""
    cell = Cell.parse(f"d{dim} {mask} {length}")
    assert cell is not None
    machine = Machine.h200(dim, cell.config.last_finishes)

    def makespan(policy: str) -> float:
        return simulate(compose(cell.tiling(), policy), H200_SMS, machine, record=False).makespan

    taken = makespan("auto")
    best = min((name for name in USUAL[mask] if not looks_at_batch(name)), key=makespan)
    assert taken <= 1.02 * makespan(best), best


def test_the_fit_that_ships_beside_the_measurements() -> None:
    """What docs/trace.md says of it, by the files that it names."""
    grid, close, ours = (RESULTS / f"{suite}_h200.json" for suite in ("grid", "grid_close", "grid_ours"))
    fitted = json.loads(files_of("dash_attn.simulate").joinpath("h200.json").read_text(encoding="utf-8"))
    models = {
        int(dim): CallModel(Machine(**each["machine"]), each["start"], each["finish"]) for dim, each in fitted.items()
    }
    report = hold(models, read_samples([grid, close, ours, *sorted(RESULTS.glob("trace_*.npz"))]))
    main, whole = report.part(True), report.part(False)
    assert len(main.cells) == len(whole.cells) == 24
    for part in (main, whole):
        assert max(abs(cell.auto_error or 1.0) for cell in part.cells) < 0.05
        assert part.predicted >= 23 and part.ranked == 24 and part.strictly_ranked >= 20
    assert max(cell.auto_loss or 0.0 for cell in whole.cells) < 0.029
    alone = hold(models, read_samples([close])).part(False)
    assert len(alone.cells) == 24 and max(cell.auto_loss or 0.0 for cell in alone.cells) < 0.016


@pytest.mark.parametrize("policy", ["auto", "fa3"])
def test_medians_of_a_trace_are_the_machine(policy: str) -> None:
    model = Machine(compute=2.1, reduce=0.9, handoff=0.4, prologue=3.0, epilogue=1.5, partial=0.25)
    fitted = fit_trace(measured(synthetic(program_of("causal", policy), 12, model)))
    want = replace(model, prologue=model.prologue + model.epilogue - HAND_OVER, epilogue=HAND_OVER, store=0.2)
    for name, value in asdict(fitted).items():
        if policy != "auto" or name != "handoff":  # where nothing waits, no hand-over shows
            assert value == pytest.approx(getattr(want, name), abs=0.01), name
