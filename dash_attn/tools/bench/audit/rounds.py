"""An audit that is left running: rounds with new inputs, whose findings are added up."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dash_attn.tools.bench.audit.audit import FINE, AuditSettings, Entry, Report, Subject, audit, reported


def audit_for(
    minutes: float,
    subjects: Sequence[Subject],
    targets: Sequence[str],
    how: AuditSettings,
    keep: Callable[[Report], None],
) -> Report:
    """Begin rounds until the minutes are over. The last round is finished.

    `keep` gets the sum of all rounds after every finding. A round in which nothing runs is the last one.
    """
    began, total, rounds = time.monotonic(), reported([], complete=True), 0
    while True:
        before = total

        def kept(report: Report, before: Report = before, rounds: int = rounds) -> None:
            keep(added(before, report, rounds + 1))

        report = audit(subjects, targets, replace(how, seed=how.seed + rounds), kept)
        rounds += 1
        total = added(before, report, rounds)
        past = (time.monotonic() - began) / 60
        print(f"audit {past:.1f} of {minutes:g} min: {in_words(total)}", file=sys.stderr, flush=True)
        if not report["complete"] or past >= minutes or not report["counts"]["runs"]:
            return total


def in_words(report: Report) -> str:
    """The counts. What is broken hangs, raises an error or is missing."""
    return _listed(report["counts"])


def under(stressors: dict[str, int]) -> list[str]:
    """A line with the runs under each stressor; no line if nothing has run."""
    return [f"runs under {_listed(stressors)}"] if stressors else []


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def added(before: Report, report: Report, rounds: int) -> Report:
    """The sum of the rounds before and of one more."""
    entries = {_place(entry): entry for entry in before["entries"]}
    for entry in report["entries"]:
        earlier = entries.get(_place(entry))
        entries[_place(entry)] = entry if earlier is None else _sum(earlier, entry)
    return reported(list(entries.values()), report["complete"], rounds)


def _place(entry: Entry) -> tuple[str, str, str]:
    return entry["case"], entry["target"], entry["stressor"]


def _sum(a: Entry, b: Entry) -> Entry:
    """The first bad status and its reason stay."""
    stays = a["status"] not in FINE or b["status"] == "not applicable"
    tensors = {name: dict(apart) for name, apart in a["tensors"].items()}
    for name, apart in b["tensors"].items():
        kept = tensors.setdefault(name, {**apart, "runs": 0})
        kept["runs"] += apart["runs"]
        kept |= {field: max(kept[field], apart[field]) for field in ("elements", "largest")}
    runs, differing = a["runs"] + b["runs"], a["differing"] + b["differing"]
    status = (a if stays else b)["status"]
    return {
        **a,
        "status": status,
        "why": a["why"] or b["why"],
        "runs": runs,
        "differing": differing,
        "tensors": tensors,
    }
