"""Interactive pages: one file with charts, tables and text that loads nothing and opens anywhere.

Events travel as packed, deflated columns (about 5 bytes each) and are drawn on canvas by viewer.js, so that a page
of 50 000 events is a few hundred kilobytes and still answers at once.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np

from dash_attn.tools.viz import palette
from dash_attn.tools.viz.chart import Chart, Source, charts, lanes
from dash_attn.tools.viz.palette import ColourBy

NUMBER = re.compile(r"-|[-+−]?\d[\d.,]*(e[-+]?\d+)?( ?[%×x]| ?[a-zµ]{1,5})?")


@dataclass(frozen=True)
class Picture:
    """The same in PNG for light and for dark pages."""

    light: bytes
    dark: bytes
    says: str


@dataclass(frozen=True)
class Section:
    """A part of a report. `text`: paragraphs between blank lines; `table`: rows, the first of them the header;
    `charts` share one time axis."""

    heading: str = ""
    text: str = ""
    table: Sequence[Sequence[object]] = ()
    charts: Sequence[Source] = ()
    pictures: Sequence[Picture] = ()


def html(
    sources: Source | Sequence[Source], path: str | Path, *, title: str = "Timelines", colour: ColourBy = "q"
) -> Path:
    """Write a page of charts on one time axis."""
    return report(path, [Section(charts=charts(sources))], title=title, colour=colour)


def report(
    path: str | Path, sections: Sequence[Section], *, title: str = "dash_attn report", colour: ColourBy = "q"
) -> Path:
    """Write a page of sections."""
    drawn = [charts(section.charts) for section in sections]
    flat = [each for group in drawn for each in group]
    numbers = iter(range(len(flat)))
    bodies = [
        _section(section, [(next(numbers), c) for c in group]) for section, group in zip(sections, drawn, strict=True)
    ]
    folder = files("dash_attn.tools.viz")
    page = Template(folder.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        stall=palette.STALL,
        stall_pale=palette.STALL_PALE,
        toolbar=_toolbar(colour) if flat else "",
        sections="\n".join(bodies),
        # A '<' in a title must not be able to end the script element.
        data=json.dumps(_data(flat), separators=(",", ":")).replace("<", "\\u003c"),
        script=folder.joinpath("viewer.js").read_text(encoding="utf-8") if flat else "",
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _data(drawn: Sequence[Chart]) -> dict[str, object]:
    def levels(colours: Sequence[str]) -> list[list[int]]:
        return [[round(255 * level) for level in palette.rgb(colour)] for colour in colours]

    return {
        "charts": [_pack(each) for each in drawn],
        "ramp": levels(palette.RAMP),
        "hues": levels(palette.HUES),
        "shade": palette.REDUCE_SHADE,
        "tint": palette.REDUCE_TINT,
    }


def _pack(each: Chart) -> dict[str, object]:
    """What viewer.js unpacks: columns of events by (worker, lane, begin), where each lane starts, columns of tasks."""
    line, lane = each.timeline, lanes(each.timeline)
    width = int(lane.max(initial=0)) + 1
    row = line.worker * width + lane
    order = np.lexsort((line.begin, row))
    first = np.searchsorted(row[order], np.arange(line.workers * width + 1))
    names = line.names
    tasks = (names.batch, names.q_head, names.q_tile, names.kv_tile, names.turn)
    times = [column[order].astype("<f4").tobytes() for column in (line.begin, line.end)]
    counts = [column.astype("<u4").tobytes() for column in (line.task[order], first, *tasks)]
    blob = b"".join([*times, *counts, line.role[order].astype("u1").tobytes()])
    batches, heads, q, kv, _ = (1 + int(column.max(initial=0)) for column in tasks)
    return {
        "unit": line.unit,
        "workers": line.workers,
        "lanes": width,
        "events": len(line),
        "tasks": len(names.turn),
        "batches": batches,
        "heads": heads,
        "q": q,
        "kv": kv,
        "makespan": each.makespan,
        "bound": each.lower_bound,
        "blob": base64.b64encode(zlib.compress(blob, 9)).decode(),
    }


def _section(section: Section, drawn: Sequence[tuple[int, Chart]]) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"] if section.heading else []
    parts += [f"<p>{escape(text.strip())}</p>" for text in section.text.split("\n\n") if text.strip()]
    parts += [_picture(each) for each in section.pictures]
    if section.table:
        parts.append(_table(section.table))
    if drawn:
        parts.append(f'<div class="group">{"".join(_figure(number, each) for number, each in drawn)}</div>')
    return f"<section>{''.join(parts)}</section>"


def _picture(each: Picture) -> str:
    light, dark = (f"data:image/png;base64,{base64.b64encode(x).decode()}" for x in (each.light, each.dark))
    return (
        f'<div class="scroll"><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(each.says, quote=True)}"></picture></div>'
    )


def _figure(number: int, each: Chart) -> str:
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in each.facts())
    spoken = escape(f"{each.title}: " + ", ".join(f"{name} {value}" for name, value in each.facts()), quote=True)
    return (
        f"<figure><figcaption><h3>{escape(each.title)}</h3><dl>{facts}</dl></figcaption>"
        f'<div class="view" data-chart="{number}"><canvas tabindex="0" role="img" aria-label="{spoken}"></canvas>'
        "<canvas aria-hidden='true'></canvas></div></figure>"
    )


def _table(rows: Sequence[Sequence[object]]) -> str:
    header, *body = [[f"{cell:.5g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    numeric = [all(NUMBER.fullmatch(cell) for cell in column) for column in zip(*body, strict=True)]
    align = [' class="number"' if right else "" for right in numeric] or [""] * len(header)

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{a}>{escape(cell)}</{tag}>" for cell, a in zip(cells, align, strict=True))

    lines = "".join(f"<tr>{line(row, 'td')}</tr>" for row in body)
    return (
        f'<div class="scroll"><table><thead><tr>{line(header, "th")}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _toolbar(colour: ColourBy) -> str:
    options = "".join(
        f'<option value="{by}"{" selected" if by == colour else ""}>{word}</option>'
        for by, word in palette.WORDS.items()
    )
    hatch = "repeating-linear-gradient(135deg,var(--stall) 0 1.5px,var(--stall-pale) 1.5px 5px)"
    return (
        f'<div class="bar"><span><label for="colour">colour</label><select id="colour">{options}</select>'
        '<canvas id="key"></canvas><small>first to last</small></span>'
        '<span><i data-role="compute"></i>compute</span><span><i data-role="reduce"></i>reduce</span>'
        f'<span><i style="background:{hatch}"></i>stall (waits its turn)</span>'
        '<span><i style="background:var(--idle)"></i>idle</span>'
        '<span><button data-zoom="0.5" aria-label="zoom in">+</button>'
        '<button data-zoom="2" aria-label="zoom out">−</button><button data-zoom="0">reset</button></span>'
        '<span class="hint">wheel zooms, drag pans, 0 resets</span></div>'
    )
