"""Repeat, compare, report."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dash_attn.bench.audit.compare import merge
from dash_attn.bench.audit.stressors import NEED_CONDITIONS, PROCESSES
from dash_attn.bench.audit.targets import takes_conditions
from dash_attn.bench.audit.watch import Heard, Job, watched
from dash_attn.bench.progress import steps
from dash_attn.bench.record import shape_of
from dash_attn.problem import Problem

Entry = dict[str, Any]
FINE = ("same bits", "not applicable")


@dataclass(frozen=True)
class Plan:
    """How hard to try. `timeout` seconds without a sign of life are a hang; the first sign may need a compilation."""

    device: str
    stressors: tuple[str, ...]
    repeats: int = 20
    processes: int = 2
    timeout: float = 180.0


@dataclass(frozen=True)
class Subject:
    """A shape to draw, or a file with a saved step."""

    name: str
    problem: Problem | None = None
    file: Path | None = None


def audit(subjects: Sequence[Subject], targets: Sequence[str], how: Plan) -> dict[str, Any]:
    """An entry for each subject, target and stressor."""
    entries: list[Entry] = []
    for subject in steps(subjects, "audit"):
        with tempfile.TemporaryDirectory(prefix="dash_attn_audit_") as name:
            folder = Path(name)
            file = subject.file
            if file is None:
                file = folder / "step.pt"
                assert subject.problem is not None
                job: Job = {"make": shape_of(subject.problem), "device": how.device, "step": str(file)}
                heard = watched(job, folder, how.timeout)
                if heard.verdict != "done":
                    entries += [_entry(subject, "-", "-", "error", f"inputs: {heard.verdict}: {heard.why}")]
                    continue
            for number, target in enumerate(targets):
                job = {"step": str(file), "target": target, "device": how.device, "repeats": how.repeats}
                job["reference"] = str(folder / f"reference{number}.pt")
                entries += [{"case": subject.name, **entry} for entry in _target(job, folder, how)]
    return {"entries": entries, "ok": all(entry["status"] in FINE for entry in entries)}


def _target(job: Job, folder: Path, how: Plan) -> list[Entry]:
    """All stressors of a target. After a hang or a crash the rest goes on in a new process."""
    target, entries = job["target"], list[Entry]()
    unfit = [name for name in how.stressors if name in NEED_CONDITIONS and not takes_conditions(target)]
    pending = [name for name in how.stressors if name not in (PROCESSES, *unfit)] or ["plain"]
    while pending:
        heard = watched(job | {"stressors": pending}, folder, how.timeout)
        entries += [_judged(target, found) for found in heard.results]
        if heard.verdict == "missing":
            return [_said(target, "-", "missing", heard.why)]
        if heard.verdict == "done":
            break
        where = heard.at if heard.at in pending else pending[0]
        entries.append(_broken(target, where, heard))
        if heard.at == "start":  # it would break again
            return entries
        pending = pending[pending.index(where) + 1 :]
    entries += [_said(target, name, "not applicable", "takes no such condition") for name in unfit]
    if PROCESSES in how.stressors:
        entries.append(_processes(job, folder, how))
    return entries


def _processes(job: Job, folder: Path, how: Plan) -> Entry:
    """Fresh processes, each against the first result of the first."""
    total: Entry = {"stressor": PROCESSES, "runs": 0, "differing": 0, "tensors": {}}
    for _ in range(how.processes):
        heard = watched(job | {"stressors": [PROCESSES], "repeats": 1}, folder, how.timeout)
        if heard.verdict != "done":
            return _broken(job["target"], PROCESSES, heard)
        (found,) = heard.results
        total["runs"] += found["runs"]
        total["differing"] += found["differing"]
        merge(total["tensors"], {k: {n: x for n, x in v.items() if n != "runs"} for k, v in found["tensors"].items()})
    return _judged(job["target"], total)


def _judged(target: str, found: Entry) -> Entry:
    return {"target": target, "status": "DIFFERS" if found["differing"] else "same bits", "why": "", **found}


def _broken(target: str, stressor: str, heard: Heard) -> Entry:
    status = "HANG" if heard.verdict == "hang" else "error"
    return _said(target, stressor, status, f"{heard.why}, after {heard.repeat} repeats")


def _said(target: str, stressor: str, status: str, why: str) -> Entry:
    found = {"runs": 0, "differing": 0, "tensors": {}}
    return {"target": target, "stressor": stressor, "status": status, "why": why, **found}


def _entry(subject: Subject, target: str, stressor: str, status: str, why: str) -> Entry:
    return {"case": subject.name, **_said(target, stressor, status, why)}
