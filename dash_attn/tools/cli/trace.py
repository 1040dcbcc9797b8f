"""dash-attn trace: a traced backward as table, page and Perfetto file, over the same program in the model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from dash_attn.problem import Problem
from dash_attn.tools.cli.tables import console, working
from dash_attn.tools.cli.workload import parse_mask
from dash_attn.tools.trace.measured import WHAT
from dash_attn.tools.trace.record import Trace, load_trace, save_trace


def obtain(file: Path | None, problem: tuple[int, int, int | None, int, int, str], policy: str) -> Trace:
    """From a file, or from the GPU of this machine."""
    if file is not None:
        return load_trace(file)
    from dash_attn.tools.trace.run import require_gpu, trace_problem

    require_gpu()
    batch, heads, kv_heads, seqlen, headdim, mask = problem
    sizes = (batch, heads, kv_heads or heads, seqlen, seqlen, headdim)
    with working("compiling, running, tracing"):
        return trace_problem(Problem(*sizes, mask=parse_mask(mask)), policy)


def show_trace(trace: Trace, page: Path | None, perfetto: Path | None, keep: Path | None) -> dict[str, Any]:
    """Write what is asked for; returns the facts."""
    from dash_attn.tools.viz import Section, report
    from dash_attn.tools.viz import perfetto as write_perfetto
    from dash_attn.tools.viz.traced import Traced

    traced = Traced.of(trace)
    workers = len(traced.run.sm)
    facts: dict[str, Any] = {
        "policy": trace.program.policy,
        "mask": trace.program.mask,
        "tasks": trace.program.num_tasks,
        "workers": workers,
        "measured_us": traced.run.makespan,
        "simulated_us": traced.simulation.makespan,
        "untraced_us": trace.facts.get("us", {}),
        "same_bits": trace.facts.get("same_bits"),
        "gpu": trace.facts.get("gpu"),
        "shares": {name: share for name, _, share in traced.sums.table()},
        "model": asdict(traced.model),
    }
    if page is not None:
        fitted = ", ".join(f"{name} {value:g}" for name, value in facts["model"].items())
        text = f"{trace.program.num_tasks} tasks on {workers} SMs. The model was fitted to this trace: {fitted}."
        sections = [Section("What the SMs did", text, traced.table()), Section("SM by SM", charts=traced.charts)]
        report(page, sections, title=f"{trace.program.policy}, {trace.program.mask}: measured over simulated")
    if perfetto is not None:
        write_perfetto(traced.charts, perfetto)
    if keep is not None:
        save_trace(trace, keep)
    return facts


def print_trace(facts: dict[str, Any]) -> None:
    untraced = facts["untraced_us"].get("main") or facts["untraced_us"].get("call")
    beside = f", {untraced:.1f} us without tracing" if untraced else ""
    title = (
        f"{facts['policy']}, {facts['mask']}: {facts['measured_us']:.1f} us measured{beside}, "
        f"{facts['simulated_us']:.1f} us simulated with the model of this trace"
    )
    table = Table(title=title, title_justify="left", header_style="bold")
    for name, justify in (("of the SMs' time", "left"), ("share", "right"), ("what", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, share in facts["shares"].items():
        table.add_row(name, f"{share:.1%}", WHAT[name])
    console().print(table)
