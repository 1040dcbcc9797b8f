"""audit --all: every kind of attempt and the repeats of a backward, one after the other, with their counts."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, product
from math import ceil
from pathlib import Path
from typing import Any

from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.tools.bench.audit.attempts import KINDS
from dash_attn.tools.bench.audit.audit import FINE, AuditSettings, Report, Subject, audit, reported
from dash_attn.tools.bench.audit.rounds import added
from dash_attn.tools.bench.audit.watch import Job, watched
from dash_attn.tools.bench.progress import progress

PartReport = dict[str, Any]
REPEATS = "repeats"
WHAT = {
    "mutations": "Program files, changed at random: refused, or run and right",
    "settings": "steps on the CPU with other numbers of threads and other layouts: same bits",
    "interrupts": "Ctrl-C during a step on the CPU: no thread is left, and the next step is right",
    "forks": "children, forked while threads start: each computes",
    "damage": "compiled kernels, damaged or opened to others: none is loaded",
    REPEATS: "backwards under stress: same bits",
}
PARTS = (*KINDS, REPEATS)
SHOWN = 5  # failures of a part that a report names


def audit_all(minutes: float, parts: Sequence[str], how: AuditSettings, keep: Callable[[Report], None]) -> Report:
    """Run parts one after the other. Each gets the same share of the minutes, and the repeats get as much as all others
    together. `keep` gets the unfinished report after every part. Ctrl-C ends the audit, with the counts so far."""
    shares = {part: max(1, len(parts) - 1) if part == REPEATS else 1 for part in parts}
    done: list[PartReport] = []

    def report(*last: PartReport) -> Report:
        """Of the parts that are done, and of the part that runs."""
        complete = len(done) == len(parts) and all(part["complete"] for part in done)
        return {
            "parts": [*done, *last],
            "complete": complete,
            "ok": complete and all(part["count"] and not part["failed"] for part in done),  # nothing tried, no pass
        }

    keep(report())
    for name in parts:
        seconds, began = 60 * minutes * shares[name] / sum(shares.values()), time.monotonic()

        def told(counted: PartReport, name: str = name, began: float = began) -> PartReport:
            return {"part": name, "what": WHAT[name], "seconds": round(time.monotonic() - began, 1), **counted}

        if name == REPEATS:
            counted = repeats(seconds, how, lambda part, told=told: keep(report(told(part))))  # type: ignore[misc]
        else:
            counted = attempts(name, seconds, how)
        done.append(told(counted))
        keep(report())
        if not counted["complete"]:
            break
    return report()


def attempts(kind: str, seconds: float, how: AuditSettings) -> PartReport:
    """Attempts of one kind, in a process under the watchdog. A hang or a crash is one more failure."""
    job: Job = {"attempts": kind, "seconds": seconds, "seed": how.seed}
    outcomes, began, complete = Counter[str](), time.monotonic(), True

    def hear(job: Job, event: dict[str, Any]) -> None:
        nonlocal outcomes
        if "outcomes" in event:
            outcomes = Counter(event["outcomes"])
            past = min(int(time.monotonic() - began), total - 1)
            tell(f"{kind}: {sum(outcomes.values())} tried, {_failed(outcomes)} failed", past)

    total = ceil(seconds)
    with tempfile.TemporaryDirectory(prefix="dash_attn_audit_") as folder, progress(total, "audit") as tell:
        tell(kind, 0)
        try:
            (heard,) = watched([job], Path(folder), how.timeout, hear)
            if heard.verdict != "done":
                outcomes[f"WRONG: {heard.verdict}: {heard.why}"] += 1
        except KeyboardInterrupt:
            complete = False
    wrong = [outcome for outcome in outcomes if "WRONG" in outcome]
    counts = {"count": sum(outcomes.values()), "failed": _failed(outcomes), "outcomes": dict(outcomes)}
    return {**counts, "why": wrong[:SHOWN], "complete": complete}


def _failed(outcomes: Counter[str]) -> int:
    return sum(number for outcome, number in outcomes.items() if "WRONG" in outcome)


def repeats(seconds: float, how: AuditSettings, keep: Callable[[PartReport], None]) -> PartReport:
    """Repeats of the backward of each subject, again with other inputs until the time is over. `keep` gets the counts
    after each subject."""
    total, began, chosen = reported([], complete=True), time.monotonic(), subjects(how.device)
    for number, subject in enumerate(cycle(chosen)):
        report = audit([subject], ["ours"], replace(how, seed=how.seed + number // len(chosen)))
        total = added(total, report, number // len(chosen) + 1)
        part = _counted(total)
        keep(part)
        if not report["complete"] or not report["counts"]["runs"] or time.monotonic() - began >= seconds:
            break
    return part


def _counted(report: Report) -> PartReport:
    entries, counts = report["entries"], report["counts"]
    wrong = [
        f"{e['status']}: {e['case']}, {e['stressor']}: {e['why'] or ', '.join(e['tensors'])}"
        for e in entries
        if e["status"] not in FINE
    ]
    outcomes = {"same bits": counts["runs"] - counts["differing"], "other bits": counts["differing"]}
    part: PartReport = {"count": counts["runs"], "failed": counts["differing"] + counts["broken"], "outcomes": outcomes}
    found = {"why": wrong[:SHOWN], "complete": report["complete"], "entries": entries}
    return part | found | {"stressors": report["stressors"]}


SIZES = {  # batch, q heads, kv heads, queries, keys
    "cpu": {"grouped heads": (1, 4, 2, 600, 600), "a batch": (3, 2, 2, 300, 300)},
    "cuda": {"grouped heads": (1, 16, 4, 2048, 2048), "long": (1, 8, 8, 8192, 8192), "a batch": (4, 16, 16, 999, 999)},
}
PACKS = {"cpu": (37, 300, 64), "cuda": (300, 1500, 8, 2048)}


def subjects(device: str) -> list[Subject]:
    """Whole chains, chains that are cut by q head, and packs, with every head dim and mask."""
    dims, dtype = ((32,), "float32") if device == "cpu" else ((64, 128), "bfloat16")
    tokens = sum(PACKS[device])
    chosen = []
    for dim, mask in product(dims, (CAUSAL, FULL)):
        for name, sizes in SIZES[device].items():
            chosen.append(Subject(f"{name}, d{dim}, {mask}", Problem(*sizes, dim, dtype, mask=mask)))
        packed = Problem(1, 4, 2, tokens, tokens, dim, dtype, mask=mask)
        chosen.append(Subject(f"a pack, d{dim}, {mask}", packed, pack=PACKS[device]))
    return chosen
