"""audit: repeats the targets under the stressors, compares their bits and reports."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dash_attn.problem import Problem
from dash_attn.tools.bench.audit.compare import merge
from dash_attn.tools.bench.audit.stressors import NEED_CONDITIONS, PROCESSES
from dash_attn.tools.bench.audit.targets import CONTROL, takes_conditions
from dash_attn.tools.bench.audit.watch import Heard, Job, watched
from dash_attn.tools.bench.progress import progress
from dash_attn.tools.bench.record import shape_of

Entry = dict[str, Any]
Report = dict[str, Any]
FINE = ("same bits", "not applicable")


@dataclass(frozen=True)
class AuditSettings:
    """How hard to try. `timeout` seconds without a sign of life are a hang; the first sign may need a compilation.
    At most `at_once` fresh processes run side by side. With `invariance`, the stressors are changes of the company in
    which a sequence is computed, or with `ranks` numbers of processes that share its tokens, modes and layouts. `seed`
    draws the inputs of a shape. A repeat has `calls` calls, which are compared where the tensors are."""

    device: str
    stressors: tuple[str, ...]
    repeats: int = 20
    processes: int = 2
    timeout: float = 180.0
    at_once: int = 8
    invariance: bool = False
    seed: int = 0
    ranks: tuple[int, ...] = ()
    calls: int = 1


@dataclass(frozen=True)
class Subject:
    """A shape to draw, or a file with a saved step. `pack` has the lengths of the sequences that share its rows."""

    name: str
    problem: Problem | None = None
    file: Path | None = None
    pack: tuple[int, ...] = ()


class Findings:
    """The entries so far, in the order of cases and targets, whichever ended first. `keep` gets every new state."""

    def __init__(self, keep: Callable[[Report], None]) -> None:
        self._groups: list[list[Entry]] = []
        self._keep = keep

    def group(self, case: str) -> Callable[[Entry], None]:
        """Where the entries of a case and a target go."""
        entries: list[Entry] = []
        self._groups.append(entries)

        def add(entry: Entry) -> None:
            entries.append({"case": case, **entry})
            self._keep(self.report())

        return add

    def report(self, complete: bool = False) -> Report:
        return reported([entry for group in self._groups for entry in group], complete)


def reported(entries: list[Entry], complete: bool, rounds: int = 1) -> Report:
    """Entries with their verdict and their counts. The control, which must differ, is not counted."""
    counted = [entry for entry in entries if entry["target"] != CONTROL]
    counts = {
        "rounds": rounds,
        "runs": sum(entry["runs"] for entry in counted),
        "differing": sum(entry["differing"] for entry in counted),
        "broken": sum(entry["status"] not in (*FINE, "DIFFERS") for entry in counted),
    }
    runs = Counter[str]()
    for entry in counted:
        runs[entry["stressor"]] += entry["runs"]
    fine = complete and counts["runs"] > 0 and all(map(_is_fine, entries))
    return {"entries": entries, "counts": counts, "stressors": dict(+runs), "complete": complete, "ok": fine}


def _is_fine(entry: Entry) -> bool:
    """The control must differ: an audit that does not notice it would notice nothing."""
    if entry["target"] == CONTROL:
        return entry["status"] in ("DIFFERS", "not applicable")
    return entry["status"] in FINE


@dataclass(frozen=True)
class Audited:
    """One subject while it is audited. `tell` takes the step that begins and how many of this case are finished."""

    subject: Subject
    folder: Path
    how: AuditSettings
    tell: Callable[[str, int], None]

    def watched(self, jobs: Sequence[Job], hear: Callable[[Job, dict[str, Any]], None]) -> list[Heard]:
        return watched(jobs, self.folder, self.how.timeout, hear)


def audit(
    subjects: Sequence[Subject],
    targets: Sequence[str],
    how: AuditSettings,
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """An entry for each subject, target and stressor. `keep` gets the unfinished report again and again; after Ctrl-C
    that is also what is returned."""
    findings, each = Findings(keep), len(targets) + (PROCESSES in how.stressors)
    keep(findings.report())  # whatever an earlier run left there is not the result of this one
    try:
        with progress(each * len(subjects), "audit") as tell:
            for number, subject in enumerate(subjects):

                def tell_here(label: str, done: int, name: str = subject.name, before: int = number * each) -> None:
                    tell(f"{name}, {label}", before + done)

                with tempfile.TemporaryDirectory(prefix="dash_attn_audit_") as folder:
                    _audit_one(Audited(subject, Path(folder), how, tell_here), targets, findings)
    except KeyboardInterrupt:
        return findings.report()
    return findings.report(complete=True)


def _audit_one(audited: Audited, targets: Sequence[str], findings: Findings) -> None:
    """Target after target, then the fresh processes of all."""
    if audited.how.invariance:
        assert audited.subject.problem is not None
        for number, target in enumerate(targets):
            job: Job = {"sequence": shape_of(audited.subject.problem), "target": target, "device": audited.how.device}
            job["ranks"] = audited.how.ranks
            _target(job, audited, number, findings.group(audited.subject.name))
        return
    file = _inputs(audited, findings)
    if file is None:
        return
    fresh = []
    for number, target in enumerate(targets):
        job = {"step": str(file), "target": target, "device": audited.how.device}
        job |= {"repeats": audited.how.repeats, "calls": audited.how.calls}
        job["reference"] = str(audited.folder / f"reference{number}.pt")
        add = findings.group(audited.subject.name)
        if _target(job, audited, number, add):
            fresh.append((job, add))
    if PROCESSES in audited.how.stressors:
        _processes(fresh, audited, len(targets))


def _inputs(audited: Audited, findings: Findings) -> Path | None:
    if audited.subject.file is not None:
        return audited.subject.file
    assert audited.subject.problem is not None
    audited.tell("inputs", 0)
    file = audited.folder / "step.pt"
    drawn = {"make": shape_of(audited.subject.problem), "pack": audited.subject.pack, "seed": audited.how.seed}
    job = drawn | {"device": audited.how.device, "step": str(file)}
    (heard,) = audited.watched([job], lambda job, event: None)
    if heard.verdict == "done":
        return file
    findings.group(audited.subject.name)(_said("-", "-", "error", f"inputs: {heard.verdict}: {heard.why}"))
    return None


def _target(job: Job, audited: Audited, number: int, add: Callable[[Entry], None]) -> bool:
    """All stressors of a target but processes. After a hang or a crash the rest goes on in a new process. Whether it
    runs at all."""
    target, stressors = job["target"], audited.how.stressors
    unfit = [name for name in stressors if name in NEED_CONDITIONS and not takes_conditions(target)]
    pending = [name for name in stressors if name not in (PROCESSES, *unfit)] or ["plain"]

    def hear(job: Job, event: dict[str, Any]) -> None:
        if "result" in event:
            add(_judged(target, event["result"]))
        elif event.get("at") in pending and "repeat" not in event:
            audited.tell(f"{target}: {event['at']}", number)

    while pending:
        audited.tell(f"{target}: start", number)
        (heard,) = audited.watched([job | {"stressors": pending}], hear)
        if heard.verdict == "missing":
            add(_said(target, "-", "missing", heard.why))
            return False
        if heard.verdict == "done":
            break
        where = heard.at if heard.at in pending else pending[0]
        add(_broken(target, where, heard))
        if heard.at == "start":  # it would break again
            return False
        pending = pending[pending.index(where) + 1 :]
    for name in unfit:
        add(_said(target, name, "not applicable", "takes no such condition"))
    return True


def _processes(fresh: Sequence[tuple[Job, Callable[[Entry], None]]], audited: Audited, number: int) -> None:
    """Fresh processes side by side, each against the first result of its target."""
    count, at_once = audited.how.processes, audited.how.at_once
    jobs = [job | {"stressors": [PROCESSES], "repeats": 1} for job, _ in fresh for _ in range(count)]
    ended = itertools.count(1)

    def hear(job: Job, event: dict[str, Any]) -> None:
        if "result" in event:
            audited.tell(f"{PROCESSES}: {next(ended)} of {len(jobs)} compared, {job['target']}", number)

    heard: list[Heard] = []
    for first in range(0, len(jobs), at_once):
        some = jobs[first : first + at_once]
        audited.tell(f"{PROCESSES}: start {len(some)} at once", number)
        heard += audited.watched(some, hear)
    for index, (job, add) in enumerate(fresh):
        add(_together(job["target"], heard[index * count : (index + 1) * count]))


def _together(target: str, heard: Sequence[Heard]) -> Entry:
    """One entry for the fresh processes of a target: the first that broke, or the sum."""
    total: Entry = {"stressor": PROCESSES, "runs": 0, "differing": 0, "tensors": {}}
    for each in heard:
        if each.verdict != "done":
            return _broken(target, PROCESSES, each)
        (result,) = each.results
        total["runs"] += result["runs"]
        total["differing"] += result["differing"]
        merge(total["tensors"], {k: {n: x for n, x in v.items() if n != "runs"} for k, v in result["tensors"].items()})
    return _judged(target, total)


def _judged(target: str, result: Entry) -> Entry:
    status = "DIFFERS" if result["differing"] else "same bits" if result["runs"] else "not applicable"
    return {"target": target, "status": status, "why": "", **result}


def _broken(target: str, stressor: str, heard: Heard) -> Entry:
    status = "HANG" if heard.verdict == "hang" else "error"
    others = f", while {heard.beside} more ran, perhaps because of them (--at-once 1 runs each alone)"
    why = f"{heard.why}, after {heard.repeat} repeats{others if heard.beside else ''}"
    return _said(target, stressor, status, why)


def _said(target: str, stressor: str, status: str, why: str) -> Entry:
    nothing = {"runs": 0, "differing": 0, "tensors": {}}
    return {"target": target, "stressor": stressor, "status": status, "why": why, **nothing}
