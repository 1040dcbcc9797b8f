"""Events back into time: what the stamps of known runs say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dash_attn.backends.sm90.config import STAMPS
from dash_attn.program import Sequences, load, save
from dash_attn.simulate import Machine, Tickets, simulate
from dash_attn.timeline import ROLES
from dash_attn.tools.trace.calibrate import BEGIN
from dash_attn.tools.trace.fit import fit_trace
from dash_attn.tools.trace.measured import EventRows, measured, shares
from dash_attn.tools.trace.record import CHAINS, FACTS, FIRST, PACK, STEPS, drawn, load_trace, save_trace
from dash_attn.tools.trace.timelines import simulated, timeline
from tests.tools.trace.synthetic import cut_program, pack_of_documents, packed_trace, program_of, synthetic

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
MODEL = Machine(compute=2.1, reduce=0.9, handoff=0.4, prologue=3.0, epilogue=1.5, partial=0.25)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("mask", "workers"), [("full", 12), ("causal", 13), ("causal", 200)])
def test_times_are_those_of_the_run(mask: str, workers: int, split: bool) -> None:
    program = program_of(mask)
    found = measured(synthetic(program, workers, MODEL, split=split))
    line, same = timeline(found), simulate(program, workers, MODEL).timeline
    for role in ROLES:
        assert line.total(role) == pytest.approx(same.total(role), rel=1e-3, abs=0.5)
    order = np.arange(program.num_tasks)  # compute events come first, in task order
    np.testing.assert_allclose(line.begin[order], same.begin[order], atol=0.01)
    np.testing.assert_array_equal(line.worker[order], found.sm[found.rows.task_worker])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("workers", [12, 13])
def test_times_of_cut_chains_and_packs(packed: bool, workers: int, split: bool) -> None:
    work = Tickets.of(pack_of_documents()) if packed else cut_program()
    found = measured(synthetic(work, workers, MODEL, split=split))
    assert found.trace.board.parts == 4
    line, same = timeline(found), simulate(work, workers, MODEL).timeline
    for role in ROLES:
        assert line.total(role) == pytest.approx(same.total(role), rel=1e-3, abs=0.5)
    assert len(line.names.q_tile) == found.trace.board.num_steps
    result, modelled = simulated(found, MODEL)
    assert result.makespan == pytest.approx(found.makespan, rel=0.05) and modelled.workers == workers
    sums = shares(found)
    parts = sums.compute + sums.slots + sums.loads + sums.gaps + sums.edges + sums.bubble
    assert parts == pytest.approx(sums.whole, rel=1e-3)
    assert sums.turns == pytest.approx(result.stall, rel=0.05, abs=2.0)
    model = fit_trace(found)
    assert model.compute == pytest.approx(MODEL.compute, rel=0.02) and model.reduce == pytest.approx(0.9, rel=0.02)


def test_the_chains_that_workers_have_drawn() -> None:
    """Each bundle's first entry has its ticket plus 1."""
    tickets = Tickets.of(pack_of_documents())
    trace = synthetic(tickets, 12, MODEL)
    rows, numbers = EventRows.of(trace), np.zeros(trace.events.shape[:2], np.int64)
    first_row = rows.end_row[:, 0] - np.diff(trace.board.task_first)[trace.placement.chains]
    ticket = np.searchsorted(tickets.bundles.first, trace.placement.chains, side="right") - 1
    begins = np.isin(trace.placement.chains, tickets.bundles.first)
    numbers[rows.chain_worker[begins], first_row[begins]] = ticket[begins] + 1
    placed = drawn(tickets, numbers)
    np.testing.assert_array_equal(placed.first, trace.placement.first)
    np.testing.assert_array_equal(placed.chains, trace.placement.chains)
    numbers[rows.chain_worker[begins][3], first_row[begins][3]] = 0
    with pytest.raises(ValueError, match="incomplete"):
        drawn(tickets, numbers)


def test_rows_are_sms() -> None:
    found = measured(synthetic(program_of(), 12, MODEL))
    result, line = simulated(found, MODEL)
    assert sorted(found.sm) == list(range(12)) and line.workers == 12
    tasks = np.arange(found.trace.program.num_tasks)
    np.testing.assert_array_equal(line.worker[tasks], timeline(found).worker[tasks])
    assert result.makespan == pytest.approx(found.makespan, rel=0.05)


@pytest.mark.parametrize("policy", ["auto", "fa3", "spt"])
def test_shares_add_up(policy: str) -> None:
    program = program_of("causal", policy)
    found = measured(synthetic(program, 12, MODEL))
    sums, model = shares(found), simulate(program, 12, MODEL, record=False)
    parts = sums.compute + sums.slots + sums.loads + sums.gaps + sums.edges + sums.bubble
    assert parts == pytest.approx(sums.whole, rel=1e-3)
    assert sums.compute == pytest.approx(
        (MODEL.compute * program.num_tasks) + 0.25 * program.expand().partial.sum(), rel=1e-3
    )
    assert sums.slots == pytest.approx(model.blocked, rel=1e-2, abs=1.0)
    assert sums.turns == pytest.approx(model.stall, rel=1e-2, abs=1.0)


@pytest.mark.parametrize("policy", ["auto", "fa3"])
def test_what_stamping_takes_is_no_waiting(policy: str) -> None:
    """A slot that is free is seen a quarter of a microsecond late; waits shorter than that do not show at all."""
    trace = synthetic(program_of("causal", policy), 12, MODEL)
    plain, rows, stamp = measured(trace), EventRows.of(trace), STAMPS.index
    events = trace.events.copy()
    for worker, row in ((rows.task_worker, rows.task_row), (rows.chain_worker, rows.end_row[:, 0])):
        early = events[worker, row, stamp("computed")] - 420
        events[worker, row, stamp("computed")] = early
    late = measured(replace(trace, events=events))
    assert shares(plain).gaps == pytest.approx(0, abs=1.0)
    assert shares(late).slots == pytest.approx(shares(plain).slots, rel=0.02, abs=1.0)
    assert shares(late).gaps == pytest.approx(0.25 * (program_of("causal", policy).num_tasks + 64), rel=0.15)
    np.testing.assert_array_equal(late.blocked > 0.1, plain.blocked > 0.1)


def test_a_worker_beside_whole_windows_waits_early() -> None:
    """17 workers and windows of 16 chains: one worker begins a window and waits there for the others."""
    windows = shares(measured(synthetic(program_of("full", "shift:16", 2048), 17, MODEL)))
    assert 0.03 < windows.early / windows.whole < 0.05 and windows.early <= windows.slots
    assert shares(measured(synthetic(program_of("full", "shift:16", 2048), 16, MODEL))).early == 0


@pytest.mark.parametrize(
    ("file", "makespan", "slots"),
    [("trace_d64_h200", 1228, (0.002, 0.004)), ("trace_d128_h200", 1075, (0.001, 0.003))],
)
def test_real_traces(file: str, makespan: float, slots: tuple[float, float]) -> None:
    """Of an H200: `level` fills its 132 SMs, so no SM waits for a window that others have not begun."""
    found = measured(load_trace(RESULTS / f"{file}.npz"))
    sums = shares(found)
    assert sorted(found.sm) == list(range(132)) and found.split == ("d64" in file)
    assert found.makespan == pytest.approx(makespan, abs=1)
    assert sum(us for name, us, _ in sums.table() if name not in ("turns", "early")) == pytest.approx(sums.whole)
    assert sums.early == 0 and slots[0] < sums.slots / sums.whole < slots[1]
    assert sums.loads < 0.001 * sums.whole
    machine = fit_trace(found)
    assert machine.first == pytest.approx(BEGIN[64 if found.split else 128].machine.first, abs=0.05)
    assert 0.04 < machine.jitter < 0.1
    modelled, _ = simulated(found, machine)
    assert modelled.makespan == pytest.approx(found.makespan, rel=0.03)


def test_the_table_of_the_document() -> None:
    """docs/trace.md holds the shares and times of the committed traces."""
    names = ("trace_d128_h200", "trace_d64_h200", "trace_d128_512_h200", "trace_d64_512_h200")
    columns = []
    for each in (measured(load_trace(RESULTS / f"{name}.npz")) for name in names):
        sums, machine = shares(each), fit_trace(each)
        times = (each.makespan, each.trace.facts["us"]["main"], simulated(each, machine)[0].makespan)
        columns.append(
            [f"{us:,.0f} µs" for us in times]
            + [f"{us / sums.whole:.1%}".replace("%", " %") for _, us, _ in sums.table()]
            + [f"{us:.2f} µs" for us in (machine.compute, machine.reduce)]
            + [f"{machine.first:.2f}", f"{machine.jitter:.1%}".replace("%", " %"), f"{machine.handoff:.2f} µs"]
        )
    text = (RESULTS.parents[1] / "docs" / "trace.md").read_text(encoding="utf-8")
    for cells in zip(*columns, strict=True):
        assert f" | {' | '.join(cells)} |" in text


def test_files(tmp_path: Path) -> None:
    trace = synthetic(program_of(), 12, MODEL)
    save_trace(trace, tmp_path / "events.npz")
    back = load_trace(tmp_path / "events.npz")
    np.testing.assert_array_equal(back.events, trace.events)
    assert back.events.dtype == trace.events.dtype
    assert back.facts == trace.facts and back.program.fingerprint == trace.program.fingerprint
    assert load(tmp_path / "events.npz").fingerprint == trace.program.fingerprint
    save(trace.program, tmp_path / "program.npz")
    with pytest.raises(ValueError, match="a program without a trace"):
        load_trace(tmp_path / "program.npz")
    with pytest.raises(ValueError, match="no such file"):
        load_trace(tmp_path / "none.npz")


def test_files_of_packs(tmp_path: Path) -> None:
    trace, path = packed_trace(12, MODEL), tmp_path / "pack.npz"
    save_trace(trace, path)
    back = load_trace(path)
    np.testing.assert_array_equal(back.events, trace.events)
    np.testing.assert_array_equal(back.board.chains, trace.board.chains)
    assert back.facts == json.loads(json.dumps(trace.facts)) and back.program.fingerprint == trace.program.fingerprint
    assert shares(measured(back)) == shares(measured(trace))


def _other_fingerprint(facts: dict[str, Any]) -> None:
    facts[PACK]["fingerprint"] = "0" * 16


def _another_document(facts: dict[str, Any]) -> None:
    facts[PACK]["documents"] = [[0, 2048], [0, 2048]]


def _no_tile(facts: dict[str, Any]) -> None:
    del facts[PACK]["tile"]


@pytest.mark.parametrize("damage", [_other_fingerprint, _another_document, _no_tile])
def test_damaged_facts_of_a_pack_are_refused(damage: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    trace = packed_trace(12, MODEL)
    facts = json.loads(json.dumps(trace.facts))
    damage(facts)
    save_trace(replace(trace, facts=facts), tmp_path / "pack.npz")
    with pytest.raises(ValueError, match=r"pack\.npz is damaged"):
        load_trace(tmp_path / "pack.npz")


def test_workers_of_a_pack_must_have_every_chain_once(tmp_path: Path) -> None:
    trace = packed_trace(12, MODEL)
    twice = trace.placement.chains.copy()
    twice[0] = twice[-1]
    save_trace(replace(trace, placement=Sequences(trace.placement.first, twice)), tmp_path / "pack.npz")
    with pytest.raises(ValueError, match="every chain once"):
        load_trace(tmp_path / "pack.npz")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (CHAINS, np.zeros(3)),
        (CHAINS, np.zeros(3, np.int32)),
        (FIRST, np.zeros(2, np.int32)),
        (FIRST, None),
        (STEPS, np.zeros(3, np.int64)),
        (STEPS, np.zeros((8, 5, 10, 4), np.uint8)),
        (FACTS, np.array("no json")),
        (FACTS, np.array("[1]")),
        (FACTS, np.arange(3)),
    ],
)
def test_damaged_traces_are_refused_on_one_line(name: str, value: Any, tmp_path: Path) -> None:
    save_trace(synthetic(program_of(), 12, MODEL), tmp_path / "events.npz")
    with np.load(tmp_path / "events.npz") as archive:
        content = {**archive, name: value}
    np.savez_compressed(
        tmp_path / "events.npz", **{each: array for each, array in content.items() if array is not None}
    )
    with pytest.raises(ValueError, match=r"events\.npz is damaged") as refused:
        load_trace(tmp_path / "events.npz")
    assert str(refused.value).isprintable()


def test_flipped_bits_of_a_trace_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.npz"
    save_trace(synthetic(program_of(), 12, MODEL), path)
    whole = path.read_bytes()
    at = whole.index(STEPS.encode()) + 200
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    with pytest.raises(ValueError, match=r"events\.npz is damaged"):
        load_trace(path)


def test_what_is_missing_is_noticed() -> None:
    trace = synthetic(program_of(), 12, MODEL)
    holes = trace.events.copy()
    holes[3, 4, 7] = 0
    with pytest.raises(ValueError, match="incomplete"):
        measured(replace(trace, events=holes))
    with pytest.raises(ValueError, match="too few"):
        measured(replace(trace, events=trace.events[:, :5]))
    with pytest.raises(ValueError, match="do not belong"):
        measured(replace(trace, events=trace.events[:5]))
