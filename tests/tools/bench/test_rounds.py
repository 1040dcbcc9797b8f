"""An audit that is left running adds up its rounds, and never loses what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from dash_attn.problem import CAUSAL, Problem
from dash_attn.tools.bench.audit import audit as audits
from dash_attn.tools.bench.audit import child, rounds
from dash_attn.tools.bench.audit.audit import AuditSettings, Entry, Subject, reported
from dash_attn.tools.bench.audit.rounds import added, audit_for
from dash_attn.tools.bench.audit.targets import CONTROL
from dash_attn.tools.bench.audit.watch import Hear, Heard
from dash_attn.tools.cli.main import main as dash_attn_command

SUBJECT = Subject("x", Problem(1, 2, 1, 96, 96, 16, "float32", mask=CAUSAL))


@pytest.fixture
def minutes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Each look at the clock takes this long."""

    def take(minutes: float) -> None:
        ticks = count()
        monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: next(ticks) * 60 * minutes))

    return take


def test_rounds_begin_until_the_time_is_over(
    in_process: None, minutes: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    seeds, obey, kept = [], child.obey, []

    def spied(job: dict) -> None:
        seeds.extend([job["seed"]] if "make" in job else [])
        obey(job)

    monkeypatch.setattr(child, "obey", spied)
    minutes(1.0)
    report = audit_for(2.5, [SUBJECT], ["ours"], AuditSettings("cpu", ("plain", "jitter"), repeats=4), kept.append)
    assert seeds == [0, 1, 2]
    assert report["ok"] and report["complete"]
    assert report["counts"] == {"rounds": 3, "runs": 24, "differing": 0, "broken": 0}
    assert [(e["stressor"], e["runs"], e["status"]) for e in report["entries"]] == [
        ("plain", 12, "same bits"),
        ("jitter", 12, "same bits"),
    ]
    assert [each["counts"]["runs"] for each in kept] == [0, 4, 8, 8, 12, 16, 16, 20, 24]
    assert not any(each["complete"] or each["ok"] for each in kept)
    said = [line for line in capsys.readouterr().err.splitlines() if " min: " in line]
    assert said[1] == "audit 2.0 of 2.5 min: rounds: 2, runs: 16, differing: 0, broken: 0" and len(said) == 3


def test_a_finding_stays(in_process: None, fakes: str, minutes: Callable[[float], None]) -> None:
    """Of a target that differs in some runs, in every round."""
    minutes(1.0)
    report = audit_for(2, [SUBJECT], [f"{fakes}:differs"], AuditSettings("cpu", ("plain",), repeats=8), lambda _: None)
    (entry,) = report["entries"]
    assert report["complete"] and not report["ok"] and entry["status"] == "DIFFERS"
    assert entry["runs"] == 16 and report["counts"]["differing"] == entry["differing"] == entry["tensors"]["dk"]["runs"]
    assert entry["differing"] > 3  # of the first round there are three


def entry(status: str, runs: int = 0, why: str = "", target: str = "ours") -> Entry:
    what = {"case": "x", "target": target, "stressor": "plain"}
    return {**what, "status": status, "why": why, "runs": runs, "differing": 0, "tensors": {}}


@pytest.mark.parametrize(
    ("first", "second", "status", "broken"),
    [
        ("same bits", "same bits", "same bits", 0),
        ("same bits", "HANG", "HANG", 1),
        ("HANG", "same bits", "HANG", 1),
        ("DIFFERS", "HANG", "DIFFERS", 0),
        ("not applicable", "same bits", "same bits", 0),
        ("same bits", "not applicable", "same bits", 0),
        ("missing", "missing", "missing", 1),
    ],
)
def test_the_first_bad_status_stays(first: str, second: str, status: str, broken: int) -> None:
    whys = {"HANG": "silent", "missing": "absent"}
    one, two = (reported([entry(each, 2, whys.get(each, ""))], complete=True) for each in (first, second))
    total = added(one, two, 2)
    assert [e["status"] for e in total["entries"]] == [status]
    assert total["counts"] == {"rounds": 2, "runs": 4, "differing": 0, "broken": broken}
    assert total["ok"] is (status == "same bits")
    assert total["entries"][0]["why"] == next((whys[each] for each in (first, second) if each in whys), "")


def test_the_control_is_not_counted() -> None:
    report = reported([entry("same bits", 3), entry("DIFFERS", 5, target=CONTROL)], complete=True)
    assert report["ok"] and report["counts"]["runs"] == 3


def test_a_round_in_which_nothing_runs_is_the_last(in_process: None, fakes: str) -> None:
    report = audit_for(1e9, [SUBJECT], [f"{fakes}:absent"], AuditSettings("cpu", ("plain",), 1), lambda _: None)
    assert report["counts"] == {"rounds": 1, "runs": 0, "differing": 0, "broken": 1} and not report["ok"]


def test_an_interrupt_keeps_the_rounds_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def watched(jobs: list[dict], folder: Path, timeout: float, hear: Hear) -> list[Heard]:
        asked.append(jobs)
        if len(asked) == 3:
            raise KeyboardInterrupt
        hear(jobs[0], {"result": {"stressor": "plain", "runs": 5, "differing": 0, "tensors": {}}})
        return [Heard("done")]

    monkeypatch.setattr(audits, "watched", watched)
    report = audit_for(1e9, [Subject("x", file=tmp_path)], ["ours"], AuditSettings("cpu", ("plain",)), lambda _: None)
    assert not report["complete"] and not report["ok"]
    assert report["counts"]["runs"] == report["entries"][0]["runs"] == 10


def test_the_command(in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    out = tmp_path / "report.json"
    told = ["audit", "--cpu", "--stress", "plain", "--repeats", "2", "--seqlen", "96", "--mask", "causal"]
    with pytest.raises(SystemExit) as stop:
        dash_attn_command([*told, "--minutes", "1e-9", "--out", str(out)])
    assert not stop.value.code
    assert json.loads(out.read_text())["counts"] == {"rounds": 1, "runs": 2, "differing": 0, "broken": 0}
    assert "runs: 2" in capsys.readouterr().out
    drawn = []
    monkeypatch.setattr(child, "make", lambda job, make=child.make: (drawn.append(job["seed"]), make(job)))
    with pytest.raises(SystemExit) as stop:
        dash_attn_command([*told, "--seed", "7"])
    assert not stop.value.code and drawn == [7]
    for wrong in ("0", "-1", "inf", "nan"):
        with pytest.raises(SystemExit) as stop:
            dash_attn_command([*told, "--minutes", wrong])
        assert stop.value.code == 2 and "--minutes" in capsys.readouterr().err
