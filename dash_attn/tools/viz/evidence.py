"""All results on one static page: the comparison with FlashAttention-4 first, then suites, traces and schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from dash_attn.problem import CAUSAL, FULL
from dash_attn.tools.bench.headline import HEADER, headline
from dash_attn.tools.bench.paper import CLAIMS
from dash_attn.tools.bench.report import (
    absent,
    blocks,
    default_of,
    deviations,
    hosts,
    memory,
    peers,
    prices,
    step_times,
    throughput,
)
from dash_attn.tools.trace.record import load_trace
from dash_attn.tools.viz.comparison import schedules
from dash_attn.tools.viz.headline import headline_plot
from dash_attn.tools.viz.page import Picture, Section, Shades, report
from dash_attn.tools.viz.paper_figures import run
from dash_attn.tools.viz.plots import DARK, DRAWN, LIGHT, NAMES, NARROW, Theme, figure_of
from dash_attn.tools.viz.results import Result, gathered
from dash_attn.tools.viz.traced import Traced

Table = list[list[str]]

HEADINGS = {
    "grid": "Throughput",
    "grid_close": "Throughput of the contenders by themselves",
    "grid_ours": "Throughput of our orders",
    "price": "Price of determinism",
    "models": "Attention of known models",
    "few": "Few key/value heads (auto@head)",
    "packed": "Packed documents",
    "padded": "Padded head dims",
    "length": "Cost against length",
    "block": "Transformer block",
    "deviation": "Deviation of identical passes",
    "step": "Training step with a new packing",
    "host": "Host time",
    "audit": "Audit: repeats under stress",
}
# The tables of a suite by title; a suite that is not named here has those of TIMED.
Tables = dict[str, Callable[[Mapping[str, Any]], Any]]
TIMED: Tables = {"Throughput [TFLOPS]": throughput, "Peak memory [MB]": memory}
TABLES: dict[str, Tables] = {
    "price": {"Throughput lost by being deterministic": prices},
    "block": {"Times, shares and memory of a block": blocks},
    "deviation": {"Differences by variant": deviations},
    "host": {"Microseconds until a call returns": hosts},
    "step": {"Milliseconds of a step": step_times},
}
ENVIRONMENT = {
    "device": "",
    "torch": "torch ",
    "cuda": "CUDA ",
    "flash-attn-4": "FlashAttention-4 ",
    "dash_attn": "dash_attn ",
    "date": "",
}
STAMP = ("dash_attn", "date")  # in these the suites of a page differ

SOME_SMS = 8


def evidence(files: Sequence[Path], path: Path) -> Path:
    """Write the page, of results (.json) and traces (.npz)."""
    traces = [file for file in files if file.suffix == ".npz"]
    results = gathered([file for file in files if file.suffix != ".npz"])
    results = {name: results[name] for name in (*HEADINGS, *results) if name in results}
    suites = [section for name, result in results.items() for section in _suite(name, result)]
    again = [_again(results)] if results else []
    sections = [*_headline(results), *_claims(results), *suites, *map(_traced, traces), *_schedules(), *again]
    return report(path, sections, title="dash_attn: measured")


def heading_of(suite: str) -> str:
    """The heading of a suite. One without a picture goes by its own name."""
    return HEADINGS.get(suite, suite.replace("_", " "))


def where(environment: Mapping[str, Any], names: Sequence[str] = tuple(ENVIRONMENT)) -> str:
    """The machine and the versions of a result, as far as they are known, in one line."""
    return ", ".join(f"{ENVIRONMENT[name]}{environment[name]}" for name in names if environment.get(name))


def _headline(results: Mapping[str, Result]) -> list[Section]:
    """One table and one picture."""
    groups = headline(results)
    if not groups:
        return []
    suites = dict.fromkeys(suite for group in groups for suite in group.suites)
    origins = {suite: results[suite]["environment"] for suite in suites}
    stamps = {suite: where(origin, STAMP) for suite, origin in origins.items()}
    lines = [
        [*group.line, ", ".join(group.suites), "; ".join(dict.fromkeys(stamps[suite] for suite in group.suites))]
        for group in groups
    ]
    # Suites are measured on different days: the page says of all of them only what is true of each.
    first, *others = origins.values()
    shared = {name: fact for name, fact in first.items() if all(other.get(name) == fact for other in others)}
    text = (
        f"{where(shared)}\n\nSpeed of dash_attn over that of FlashAttention-4 (FA4): the geometric mean over the "
        "shapes of a row, and the worst shape. Above 1x dash_attn is faster. A shape does not count where FA4's "
        "gradients are wrong. In short calls FA4's time may be that of its Python code. In the picture a dot is a "
        "shape, a bar the mean."
    )
    picture = _picture(
        lambda theme: headline_plot(groups, shared, theme), "speed over that of FlashAttention-4 in every shape"
    )
    table = [[*HEADER, "suite", "measured with"], *lines]
    return [Section("Against FlashAttention-4", text, table), Section(pictures=[picture])]


def _claims(results: Mapping[str, Result]) -> list[Section]:
    rows = []
    for claim in CLAIMS:
        if claim.suite in results:
            result = results[claim.suite]
            said = " ".join(claim.say(list(result["rows"]))) or "-"
            rows.append([claim.title, claim.claim, said, where(result["environment"], STAMP)])
    return [Section("The paper's claims", table=[["", "the paper", "here", "measured with"], *rows])] if rows else []


def _suite(name: str, result: Result) -> list[Section]:
    """Picture and comparison of a suite; its numbers are folded."""
    text = "\n\n".join([where(result["environment"]), *(f"Note: {note}." for note in result["notes"])])
    if name == "audit":
        return [Section(heading_of(name), text, _audit(result))]
    pictures = []
    if name in DRAWN:
        pictures = [_picture(lambda theme: figure_of(name, result, theme), heading_of(name))]
    compared = [
        [NAMES.get(each.peer, each.peer), str(len(each.cells)), *each.texts, each.worst.cell]
        for each in peers(result["rows"])
    ]
    ratios = [["ours against", "cells", "geometric mean", "worst", "at"], *compared]
    if name in ("price", "host") or not compared:
        ratios = []
    else:
        orders = dict.fromkeys(map(default_of, result["rows"]))
        text += f"\n\nOrders of ours in this suite: {', '.join(orders)}."
    text = "\n\n".join([text, *absent(result).splitlines()])
    folded = []
    for title, make in TABLES.get(name, TIMED).items():
        if (made := make(result)) is not None:
            header, lines = made
            folded.append(Section(table=[header, *lines], fold=f"{title}, all {len(lines)} rows"))
    return [Section(heading_of(name), text, ratios, pictures=pictures), *folded]


def _audit(result: Result) -> Table:
    """For each target and stressor: how many runs differed."""
    rows = [
        [str(entry[key]) for key in ("case", "target", "stressor", "runs", "differing", "status")]
        for entry in result["rows"]
    ]
    return [["case", "target", "stressor", "runs", "differing runs", "verdict"], *rows]


def _traced(file: Path) -> Section:
    """The run on a few SMs; all of them would be a page of their own."""
    traced = Traced.of(load_trace(file))
    trace = traced.run.trace
    shape, us, sms = trace.facts.get("problem", {}), trace.facts.get("us", {}), traced.telling(SOME_SMS)
    cell = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shape.items())
    untraced = f", {us['main']:.0f} us without tracing" if us.get("main") else ""
    text = (
        f"{trace.facts.get('gpu', 'A GPU')}, {trace.program.policy}, {trace.program.mask} mask, {cell}. "
        f"Measured: {traced.run.makespan:.0f} us{untraced}. Simulated with the model fitted to this trace: "
        f"{traced.simulation.makespan:.0f} us. The table sums over all {len(traced.run.sm)} SMs.\n\nThe charts show "
        f"{len(sms)} SMs, numbers {', '.join(map(str, sms.tolist()))}: half waited longest for a slot of dQ, half "
        f"least. All SMs: dash-attn trace {file.name} --html page.html."
    )
    heading = f"What the SMs did: head dim {shape.get('dim', '?')}, {shape.get('len_q', '?')} tokens"
    return Section(heading, text, traced.table(), charts=traced.some(sms))


def _schedules() -> list[Section]:
    """The paper's model of the orders that were timed: its baseline and its optimum."""
    pairs = ((CAUSAL, "symmetric_shift"), (FULL, "shift"))
    return [schedules([run(8, 2, mask, name) for name in ("fa3", policy)]) for mask, policy in pairs]


def _again(results: Mapping[str, Result]) -> Section:
    rows = [["suite", "command"]]
    rows += [[name, command] for name, result in results.items() for command in result["commands"]]
    text = "These commands measured the numbers. `dash-attn paper FILES --html page.html` makes this page of them."
    return Section("Make it again", text, rows)


def _picture(draw: Callable[[Theme], Figure], says: str) -> Picture:
    wide, narrow = (Shades(_png(draw(light)), _png(draw(dark))) for light, dark in THEMES)
    return Picture(wide, narrow, says)


THEMES = ((LIGHT, DARK), (NARROW[LIGHT], NARROW[DARK]))


def _png(figure: Figure) -> bytes:
    """A figure in few colours: a third of the bytes, and no difference to the eye."""
    full, small = BytesIO(), BytesIO()
    figure.savefig(full, format="png", dpi=160)
    Image.open(full).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()
