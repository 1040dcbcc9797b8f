"""Pages: complete, escaped, and packed the way viewer.js unpacks them."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from dash_attn.simulate import Machine
from dash_attn.tools.viz import Section, chart, html, report


def data(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


@pytest.mark.parametrize("model", [None, Machine()])
def test_events_survive_packing(simulated, tmp_path: Path, model) -> None:
    line = simulated("fa3", n=6, heads=2, workers=6, model=model).timeline
    (meta,) = data(html(line, tmp_path / "a.html").read_text())["charts"]
    blob = zlib.decompress(base64.b64decode(meta["blob"]))
    events, rows = meta["events"], meta["workers"] * meta["lanes"] + 1
    assert len(blob) == 13 * events + 4 * rows + 20 * meta["tasks"]
    begin, end = (np.frombuffer(blob, "<f4", events, 4 * events * i) for i in range(2))
    task = np.frombuffer(blob, "<u4", events, 8 * events)
    first = np.frombuffer(blob, "<u4", rows, 12 * events)
    role = np.frombuffer(blob, "u1", events, len(blob) - events)
    worker = np.repeat(np.arange(rows - 1), np.diff(first)) // meta["lanes"]
    packed = sorted(zip(worker, role, task, begin, end, strict=True))
    ours = sorted(zip(line.worker, line.role, line.task, line.begin.astype("f4"), line.end.astype("f4"), strict=True))
    assert packed == ours


def test_fifty_thousand_events_take_half_a_megabyte(simulated, tmp_path: Path) -> None:
    simulation = simulated("symmetric_shift", n=64, heads=12, workers=132, model=Machine())
    assert len(simulation.timeline) > 50_000
    assert html(simulation, tmp_path / "a.html").stat().st_size < 500_000


def test_nothing_is_loaded_from_elsewhere(simulated, tmp_path: Path) -> None:
    page = html(simulated("fa3"), tmp_path / "a.html").read_text()
    assert not re.search(r"https?://|<link|\ssrc=|@import|url\(", page)
    assert "default-src 'none'" in page


def test_report_holds_its_sections(simulated, tmp_path: Path) -> None:
    table = [("policy", "makespan", "speed-up"), ("fa3", 24.05, "1.00x"), ("shift", 21.6, "1.11x")]
    sections = [
        Section("Numbers", "First.\n\nSecond.", table),
        Section("Pictures", charts=[simulated("fa3"), simulated("descending")]),
    ]
    page = report(tmp_path / "sub" / "report.html", sections, title="All of it").read_text()
    assert "<h1>All of it</h1>" in page
    assert "<p>First.</p><p>Second.</p>" in page
    assert '<td>fa3</td><td class="number">24.05</td><td class="number">1.00x</td>' in page
    assert page.count("<figure>") == 2


def test_a_report_without_charts_has_no_script(tmp_path: Path) -> None:
    page = report(tmp_path / "a.html", [Section("Only text", table=[("a",)])]).read_text()
    assert 'class="bar"' not in page
    assert "DecompressionStream" not in page


def test_what_is_written_is_escaped(simulated, tmp_path: Path) -> None:
    nasty = "</script><b>&\"'"
    drawn = chart(simulated("fa3"), nasty)
    page = report(tmp_path / "a.html", [Section(nasty, nasty, [(nasty,), (nasty,)], [drawn])], title=nasty).read_text()
    tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            tags.append(tag)

    Reader().feed(page)
    assert "b" not in tags
    assert tags.count("script") == 2
