"""docs/models.md: a row for every family, written from what the sweep finds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from dash_attn.integrations.transformers.sweep.compare import Outcome
from dash_attn.integrations.transformers.sweep.published import gpu_cell

BEGIN = "<!-- rows: python -m dash_attn.integrations.transformers.sweep --out docs/models.md -->"
HEAD = "| family | architecture | cpu | GPU at published head dims | what stands in the way |\n|---|---|---|---|---|"
WORDS = {"own": "right, by its own attention"}


def row(outcome: Outcome) -> str:
    cpu = WORDS.get(outcome.verdict, outcome.verdict)
    runs = outcome.verdict == "right" or "right" in outcome.cases.values()
    if outcome.verdict == "refused" and runs:
        cpu = f"right, except {', '.join(k for k, x in outcome.cases.items() if x.startswith('refused'))}"
    cells = (outcome.family, outcome.architecture, cpu, gpu_cell(outcome.family) if runs else "-", outcome.reason)
    return f"| {' | '.join(_cell(x) for x in cells)} |"


def _cell(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x…", text).replace("|", "/").replace("\n", " ")


def counts(rows: Iterable[str]) -> str:
    number = Counter(_verdict(line) for line in rows)
    said = {
        "right": "families run dash_attn and are right",
        "own": "are right by an attention of their own, or have no attention: dash_attn changes nothing there",
        "refused": "are refused with a message, in all cases or in those that the table names",
        "not built": "are not built small by the sweep, so nothing is known about them",
        "wrong": "are wrong",
        "crash": "end in an error that is not a clear one",
    }
    return "\n".join(f"- {number[verdict]} {text}" for verdict, text in said.items())


def _verdict(line: str) -> str:
    """What the cell of a row says."""
    cell = line.split("|")[3].strip()
    if cell.startswith("right, except"):
        return "refused"
    return next((verdict for verdict, words in WORDS.items() if words == cell), cell)


def write(outcomes: list[Outcome], version: str, file: Path, merge: bool = False) -> None:
    """Everything above the marker is kept; counts and rows come after it. With `merge`, rows of other families stay."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    above = text.partition(BEGIN)[0]
    rows = (read(file) if merge else {}) | {x.family: row(x) for x in outcomes}
    lines = [rows[family] for family in sorted(rows, key=str.lower)]
    totals = f"Transformers {version}, {len(lines)} families:\n\n{counts(lines)}"
    file.write_text(f"{above}{BEGIN}\n\n{totals}\n\n{HEAD}\n" + "\n".join(lines) + "\n", encoding="utf-8")


def read(file: Path) -> dict[str, str]:
    """The rows by family."""
    rows = file.read_text(encoding="utf-8").partition(BEGIN)[2].partition(HEAD)[2].strip().splitlines()
    return {line.split("|")[1].strip(): line for line in rows}
