"""All results on one static page: the paper's claims, pictures, tables, schedules, and how to make it all again."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from dash_attn.problem import CAUSAL, FULL
from dash_attn.tools.bench.paper import CLAIMS
from dash_attn.tools.bench.report import absent, ratios, tables
from dash_attn.tools.trace.record import load_trace
from dash_attn.tools.viz.figures import run
from dash_attn.tools.viz.html import Picture, Section, report
from dash_attn.tools.viz.results import DARK, DRAWN, LIGHT, Result, Theme, gathered
from dash_attn.tools.viz.traced import Traced

HEADINGS = {
    "grid": "Throughput",
    "grid_close": "Throughput of the contenders by themselves",
    "grid_ours": "Throughput of our orders",
    "price": "Price of determinism",
    "models": "Attention of known models",
    "block": "Transformer block",
    "deviation": "Deviation of identical passes",
    "length": "Cost against length",
    "padded": "Padded head dims",
    "host": "Host time",
}

SOME_SMS = 8


def evidence(files: Sequence[Path], path: Path) -> Path:
    """Write the page, of results (.json) and traces (.npz)."""
    traces = [file for file in files if file.suffix == ".npz"]
    results = gathered([file for file in files if file.suffix != ".npz"])
    sections = [section for name in HEADINGS if name in results for section in _suite(name, results[name])]
    return report(path, [*sections, *map(_traced, traces), *_schedules(), _again(results)], title="dash_attn: measured")


def _suite(name: str, result: Result) -> list[Section]:
    env = result.get("environment", {})
    where = ", ".join(
        f"{key} {env[key]}" for key in ("gpu", "device", "torch", "cuda", "flash-attn-4", "date") if env.get(key)
    )
    claims = [
        f"{claim.title}. The paper: {claim.claim} Here: {' '.join(claim.say(list(result['rows'])))}"
        for claim in CLAIMS
        if claim.suite == name
    ]
    facts = [] if name in ("block", "deviation", "host") else ratios(result).splitlines()
    text = "\n\n".join([f"Measured on: {where}.", *claims, *facts, *absent(result).splitlines()])
    picture = Picture(
        _png(name, result, LIGHT), _png(name, result, DARK), f"{HEADINGS[name]}: the numbers of the table"
    )
    first, *others = tables(result)
    made = [Section(HEADINGS[name], text, [first[0], *first[1]], pictures=[picture])]
    return made + [Section(table=[header, *lines]) for header, lines in others]


def _traced(file: Path) -> Section:
    """What the SMs really did; some of them, because all would be a page of their own."""
    traced = Traced.of(load_trace(file))
    trace = traced.found.trace
    shape, us, sms = trace.facts.get("problem", {}), trace.facts.get("us", {}), traced.telling(SOME_SMS)
    cell = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shape.items())
    untraced = f", {us['main']:.0f} us without tracing" if us.get("main") else ""
    text = (
        f"{trace.facts.get('gpu', 'A GPU')}, {trace.program.policy}, {trace.program.mask} mask, {cell}: "
        f"{traced.found.makespan:.0f} us{untraced}, {traced.result.makespan:.0f} us in the model that was fitted to "
        f"this trace. The table is of all {len(traced.found.sm)} SMs.\n\nThe charts show {len(sms)} of them, numbers "
        f"{', '.join(map(str, sms.tolist()))}: half waited longest for a slot of dQ, half least. All SMs: dash-attn "
        f"trace {file.name} --html page.html."
    )
    heading = f"What the SMs did: head dim {shape.get('dim', '?')}"
    return Section(heading, text, traced.table(), charts=traced.some(sms))


def _schedules() -> list[Section]:
    """Why: the paper's model of the orders that were timed."""
    pairs = ((CAUSAL, "symmetric_shift"), (FULL, "shift"))
    text = (
        "Simulated in the paper's model, 8 kv tiles on 8 workers, 2 heads: its baseline, and the order that is timed."
    )
    return [
        Section(f"Schedules: {mask} mask", text, charts=[run(8, 2, mask, "fa3"), run(8, 2, mask, policy)])
        for mask, policy in pairs
    ]


def _again(results: dict[str, Result]) -> Section:
    rows = [["suite", "command"]]
    rows += [
        [name, line]
        for name, result in results.items()
        for command in result["commands"]
        for line in command.splitlines()
    ]
    text = "dash-attn bench --suite NAME, then dash-attn paper FILES --html page.html. What made the numbers here:"
    return Section("Make it again", text, rows)


def _png(name: str, result: Result, theme: Theme) -> bytes:
    buffer = BytesIO()
    DRAWN[name](result, theme).savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()
