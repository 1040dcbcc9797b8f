"""Interactive pages: one file with charts, tables and text that loads nothing and opens anywhere.

Events travel as packed, deflated columns of about 5 bytes an event. viewer.js draws them on canvas. A page of 50 000
events is a few hundred kilobytes and answers at once.
"""

from __future__ import annotations

import base64
import json
import re
import string
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from dash_attn.tools.viz import palette
from dash_attn.tools.viz.about import about, tour_link
from dash_attn.tools.viz.charts import Chart, Source, best, charts, lanes
from dash_attn.tools.viz.palette import ColourBy

NUMBER = re.compile(r"-|[-+−]?\d[\d.,]*(e[-+]?\d+)?( ?[%×x]| ?[a-zµ]{1,5})?")
PROSE = 48  # characters; a column with a longer cell breaks its lines
BADGE = '<span class="badge">best</span>'
LEGEND = (
    ("compute", "the products of one task; its number, where there is room, is the q tile"),
    ("reduce", "the task adds its contribution to dQ"),
    ("stall", "a contribution waits for its turn"),
    ("bubble", "a worker has nothing to do"),
    ("makespan", "the end of the last worker"),
    ("lower bound", "no order ends earlier"),
)


@dataclass(frozen=True)
class Shades:
    """One picture as PNG, for light and for dark pages."""

    light: bytes
    dark: bytes


@dataclass(frozen=True)
class Picture:
    """A picture for wide windows and one for phones; `says` tells what they show."""

    wide: Shades
    narrow: Shades
    says: str


@dataclass(frozen=True)
class Section:
    """A part of a report.

    `text` holds paragraphs between blank lines. The first row of `table` is its header; `best` are the places of the
    rows below it that are marked. A table with a `fold` is closed, under that title, until the reader opens it.
    `charts` share one time axis.
    """

    heading: str = ""
    text: str = ""
    table: Sequence[Sequence[object]] = ()
    charts: Sequence[Source] = ()
    pictures: Sequence[Picture] = ()
    best: Collection[int] = ()
    fold: str = ""


def report(
    path: str | Path, sections: Sequence[Section], *, title: str = "dash_attn report", colour: ColourBy = "q"
) -> Path:
    """Write a page of sections."""
    path = Path(path)
    drawn = [charts(section.charts) for section in sections]
    flat = [each for group in drawn for each in group]
    bodies, number = [], 0
    for section, group in zip(sections, drawn, strict=True):
        if group and not number:
            bodies.append(_toolbar(colour))
        bodies.append(_section(section, group, number, path))
        number += len(group)
    folder = files("dash_attn.tools.viz")
    page = string.Template(folder.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        stall=palette.STALL,
        stall_pale=palette.STALL_PALE,
        sections="\n".join(bodies),
        # A '<' in a title must not be able to end the script element.
        data=json.dumps(_data(flat), separators=(",", ":")).replace("<", "\\u003c"),
        script=folder.joinpath("viewer.js").read_text(encoding="utf-8") if flat else "",
    )
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
    """The columns that viewer.js unpacks: events by (worker, lane, begin), where each lane starts, tasks."""
    line, lane = each.timeline, lanes(each.timeline)
    width = int(lane.max(initial=0)) + 1
    row = line.worker * width + lane
    order = np.lexsort((line.begin, row))
    first = np.searchsorted(row[order], np.arange(line.workers * width + 1))
    names = line.names
    tasks = (names.batch, names.q_head, palette.keys(names, "q"), names.kv_tile, names.turn, names.target)
    times = [column[order].astype("<f4").tobytes() for column in (line.begin, line.end)]
    counts = [column.astype("<u4").tobytes() for column in (line.task[order], first, *tasks)]
    blob = b"".join([*times, *counts, line.role[order].astype("u1").tobytes()])
    batches, heads, q, kv, *_ = (1 + int(column.max(initial=0)) for column in tasks)
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
        "tiles": 1 + int(names.q_tile.max(initial=-1)),
        "word": names.word,
        "makespan": each.makespan,
        "bound": each.lower_bound,
        "blob": base64.b64encode(zlib.compress(blob, 9)).decode(),
    }


def _section(section: Section, drawn: Sequence[Chart], number: int, page: Path) -> str:
    """A section whose first chart has this number."""
    parts = [f"<h2>{escape(section.heading)}</h2>"] if section.heading else []
    parts += [f"<p>{_marked(text.strip())}</p>" for text in section.text.split("\n\n") if text.strip()]
    parts += [_picture(each) for each in section.pictures]
    if section.table:
        table = _table(section.table, section.best)
        title = escape(section.fold)
        parts.append(f"<details><summary>{title}</summary>{table}</details>" if section.fold else table)
    if drawn:
        marked = best(drawn)
        figures = [_figure(number + i, each, BADGE if i in marked else "", page) for i, each in enumerate(drawn)]
        parts.append(f'<div class="group">{"".join(figures)}</div>')
    return f"<section>{''.join(parts)}</section>"


def _picture(each: Picture) -> str:
    def data(png: bytes) -> str:
        return f"data:image/png;base64,{base64.b64encode(png).decode()}"

    dark, phone = "(prefers-color-scheme: dark)", "(max-width: 640px)"
    return (
        f'<picture><source media="{phone} and {dark}" srcset="{data(each.narrow.dark)}">'
        f'<source media="{phone}" srcset="{data(each.narrow.light)}">'
        f'<source media="{dark}" srcset="{data(each.wide.dark)}">'
        f'<img src="{data(each.wide.light)}" alt="{escape(each.says)}"></picture>'
    )


def _figure(number: int, each: Chart, badge: str, page: Path) -> str:
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in each.facts())
    spoken = escape(f"{each.title}: " + ", ".join(f"{name} {value}" for name, value in each.facts()))
    return (
        f"<figure><figcaption><h3>{escape(each.title)}</h3>{badge}<dl>{facts}</dl></figcaption>"
        f"{_sentences(each.policy, page)}"
        f'<div class="view" data-chart="{number}"><canvas tabindex="0" role="img" aria-label="{spoken}"></canvas>'
        "<canvas aria-hidden='true'></canvas></div></figure>"
    )


def _sentences(policies: str, page: Path) -> str:
    """What each policy of a chart does, with a link to the tour where the page lies beside it."""
    told, made = about(policies), []
    for name, each in told.items():
        link = tour_link(each.anchor, page)
        # A browser shows Markdown as plain text and does not go to the heading.
        under = each.anchor.replace("-", " ")
        more = f' More in <a href="{escape(link)}">the tour</a>, under “{escape(under)}”.' if link else ""
        lead = f"{name}: " if len(told) > 1 else ""
        made.append(f'<p class="about">{lead}{escape(each.sentence)}{more}</p>')
    return "".join(made)


def _marked(text: str) -> str:
    """Text in which backticks mark code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _table(rows: Sequence[Sequence[object]], marked: Collection[int] = ()) -> str:
    header, *body = [[f"{cell:.5g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]

    def kind(column: Sequence[str]) -> str:
        if all(NUMBER.fullmatch(cell) for cell in column):
            return ' class="number"'
        return ' class="prose"' if max(map(len, column)) > PROSE else ""

    kinds = [kind(column) for column in zip(*body, strict=True)] or [""] * len(header)
    # On a phone a table of sentences is read downwards: every cell is a line, beside the name of its column.
    stacked = any("prose" in each for each in kinds) and not any("number" in each for each in kinds)

    def line(cells: Sequence[str], badge: str = "") -> str:
        names = [f' data-head="{escape(name)}"' if stacked and name else "" for name in header]
        made = [f"<td{a}{name}>{_marked(cell)}" for cell, a, name in zip(cells, kinds, names, strict=True)]
        made[:1] = [made[0] + badge]
        return "".join(f"{cell}</td>" for cell in made)

    head = "".join(f"<th{a}>{escape(cell)}</th>" for cell, a in zip(header, kinds, strict=True))
    lines = "".join(
        f'<tr class="best">{line(row, BADGE)}</tr>' if i in marked else f"<tr>{line(row)}</tr>"
        for i, row in enumerate(body)
    )
    table = '<table class="stacked">' if stacked else "<table>"
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="table">{table}'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _toolbar(colour: ColourBy) -> str:
    """How to read the charts, and the controls of all of them."""
    options = "".join(
        f'<option value="{by}"{" selected" if by == colour else ""}>{word}</option>'
        for by, word in palette.WORDS.items()
    )
    words = "".join(
        f'<div><dt><i data-role="{name.partition(" ")[0]}"></i>{name}</dt><dd>{says}</dd></div>'
        for name, says in LEGEND
    )
    return (
        '<section class="read"><h2>How to read the charts</h2><p>One row is a worker, one bar is a task. '
        "Percentages are shares of the time of all workers.</p>"
        f'<dl class="words">{words}</dl></section>'
        f'<div class="bar"><span><label for="colour">colour by</label><select id="colour">{options}</select>'
        '<canvas id="key"></canvas><small>first to last</small></span>'
        '<span><button data-zoom="0.5" aria-label="zoom in">+</button>'
        '<button data-zoom="2" aria-label="zoom out">−</button><button data-zoom="0">reset</button></span>'
        '<span class="hint mouse">Point at a task for its times. The wheel zooms, dragging moves, 0 resets.</span>'
        '<span class="hint touch">Tap a task for its times. Pinch to zoom.</span></div>'
    )
