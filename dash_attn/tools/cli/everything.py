"""dash-attn audit --all: which parts run, and their counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from dash_attn.tools.cli.app import emit
from dash_attn.tools.cli.workload import parse_names

if TYPE_CHECKING:
    from dash_attn.tools.bench.audit.audit import AuditSettings, Report
    from dash_attn.tools.cli.audit import AuditOptions

MINUTES = 2.0  # without --minutes


def audit_everything(options: AuditOptions, shape: Sequence[str], settings: AuditSettings, as_json: bool) -> int:
    """Run the parts that --stress names, or all of them. The result is the exit status. `shape` names options."""
    import torch

    from dash_attn.tools.bench import record
    from dash_attn.tools.bench.audit.everything import PARTS, audit_all

    own = {"--step": options.step, "--pack": options.pack, "--invariance": options.invariance or None}
    given = [name for name, value in own.items() if value is not None]
    given += [*shape, *(["--target"] if options.target != "ours" else [])]
    if given:
        raise ValueError(f"--all brings its own problems: leave out {', '.join(given)}")
    parts = parse_names("--stress", options.stress) or PARTS
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--stress {part!r}: with --all choose from {', '.join(PARTS)}")
    environment = {"environment": record.environment(torch.device(settings.device))}

    def keep(report: Report) -> None:
        if options.out is not None:
            record.write_json(environment | report, options.out)

    report = environment | audit_all(options.minutes or MINUTES, parts, settings, keep)
    if as_json:
        emit(report)
    else:
        typer.echo(shown_parts(report))
    return 130 if not report["complete"] else 0 if report["ok"] else 1


def shown_parts(report: Report) -> str:
    """A line for each part, then the outcomes, the runs under each stressor, and what failed."""
    from dash_attn.tools.bench.audit.rounds import under
    from dash_attn.tools.bench.report import text_table

    lines = []
    for part in report["parts"]:
        counts = (str(part["count"]), str(part["failed"]), f"{part['seconds']:.0f} s")
        lines.append([f"{part['part']}: {part['what']}", *counts])
    text = [text_table(["part", "tried", "failed", "time"], lines)]
    for part in report["parts"]:
        outcomes = ", ".join(f"{outcome}: {number}" for outcome, number in part["outcomes"].items() if number)
        lines_of_part = (outcomes or "nothing was tried", *under(part.get("stressors", {})), *part["why"])
        text += [f"{part['part']}: {line}" for line in lines_of_part]
    tried, failed = (sum(part[name] for part in report["parts"]) for name in ("count", "failed"))
    verdict = "all promises hold" if report["ok"] else "NOT all promises hold"
    if not report["complete"]:
        verdict = "NOT complete: cut off, the rest is not known"
    return "\n".join([*text, f"{verdict} (tried: {tried}, failed: {failed})"])
