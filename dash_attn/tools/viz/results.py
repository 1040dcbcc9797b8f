"""Files of `dash-attn bench` and `dash-attn audit`: read, gathered by suite, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dash_attn.tools.bench.json_text import from_json
from dash_attn.tools.bench.report import dated, days
from dash_attn.tools.viz.gantt_chart import save
from dash_attn.tools.viz.plots import DARK, DRAWN, LIGHT, figure_of

Result = dict[str, Any]  # a file's suite, environment and rows

# What a row must hold. A suite that is not named here holds times, as the grid does.
TIMED = ("cell", "shape", "us", "flops", "default")
NEEDED = {
    "block": ("cell", "shape", "us", "parts", "default"),
    "deviation": ("cell", "deviation"),
    "host": ("cell", "shape", "us", "default"),
    "step": ("cell", "shape", "us", "host_us", "assemble_us", "default"),
    "audit": ("case", "target", "status", "stressor", "runs", "differing"),
}


def plot(files: Sequence[Path], out: Path, *, dark: bool = False, kind: str = "png") -> list[Path]:
    """Draw every suite of the files into a folder; returns the pictures. An audit has none."""
    if kind not in ("png", "svg"):
        raise ValueError(f"--format {kind!r}: choose png or svg")
    results = {suite: result for suite, result in gathered(files).items() if suite != "audit"}
    for suite in results:
        if suite not in DRAWN:
            raise ValueError(f"suite {suite!r} has no picture; known are {', '.join(DRAWN)}")
    theme, ending = (DARK, f"_dark.{kind}") if dark else (LIGHT, f".{kind}")
    return [save(figure_of(name, result, theme), out / f"{name}{ending}") for name, result in results.items()]


def gathered(files: Sequence[Path]) -> dict[str, Result]:
    """Results by suite, with the commands, notes and dates of their files.

    Files of one suite are put together. A grid also times the pairs of `price`, so it stands for `price` too.
    """
    suites: dict[str, Result] = {}
    for file in files:
        result = read(file)
        whole = suites.setdefault(result["suite"], {**result, "rows": [], "commands": [], "notes": []})
        mine, theirs = (each["environment"].get("device") for each in (result, whole))
        if mine != theirs:
            raise ValueError(f"{file}: measured on {mine}, another {result['suite']} file on {theirs}: give one GPU's")
        whole["rows"].extend(dated(result["rows"], result["environment"]))
        for name in ("command", "note"):
            whole[f"{name}s"] += str(result["environment"].get(name) or "").splitlines()
    for whole in suites.values():
        whole["environment"] = {**whole["environment"], "date": days(whole["rows"])}
    priced = [row for row in suites.get("grid", {}).get("rows", []) if "ours" in row.get("pairs", {})]
    if priced:
        suites.setdefault("price", {**suites["grid"], "suite": "price", "rows": priced})
    return suites


def read(file: Path) -> Result:
    """One file. Nothing else knows how files look."""
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    try:
        result = from_json(file.read_text(encoding="utf-8"))
        suite, rows = ("audit", result["entries"]) if "entries" in result else (result["suite"], result["rows"])
        environment = dict(result["environment"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file}: not a result of dash-attn bench or dash-attn audit") from None
    if not rows:
        raise ValueError(f"{file}: holds no rows")
    lacking = sorted({name for row in rows for name in NEEDED.get(suite, TIMED) if name not in row})
    if lacking:
        raise ValueError(f"{file}: rows of suite {suite!r} need {', '.join(lacking)}")
    return {"suite": str(suite), "environment": environment, "rows": list(rows)}
