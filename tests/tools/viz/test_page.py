"""Pages: complete, escaped, and packed the way viewer.js unpacks them."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from dash_attn.simulate import Machine, Simulation
from dash_attn.tools.viz import Section, chart, html, report
from dash_attn.tools.viz.about import ABOUT


def data(page: str) -> dict:
    element = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert element is not None
    return json.loads(element.group(1))


@pytest.mark.parametrize("model", [None, Machine()])
def test_events_survive_packing(simulated, tmp_path: Path, model) -> None:
    line = simulated("fa3", n=6, heads=2, workers=6, model=model).timeline
    (meta,) = data(html(line, tmp_path / "a.html").read_text())["charts"]
    blob = zlib.decompress(base64.b64decode(meta["blob"]))
    events, rows = meta["events"], meta["workers"] * meta["lanes"] + 1
    assert len(blob) == 13 * events + 4 * rows + 24 * meta["tasks"]
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


def test_marked_rows_and_folded_tables(tmp_path: Path) -> None:
    table = [("policy", "makespan"), ("fa3", 2.0), ("shift", 1.0)]
    page = report(tmp_path / "a.html", [Section(table=table, best={1}, fold="All & more")]).read_text()
    (row,) = re.findall(r'<tr class="best">(.*?)</tr>', page)
    assert "shift" in row and "best</span>" in row and "fa3" not in row
    assert "<summary>All &amp; more</summary>" in page


def test_every_table_scrolls_by_itself(tmp_path: Path) -> None:
    page = report(tmp_path / "a.html", [Section(table=[("a",), ("b",)]), Section(table=[("c",), ("d",)], fold="e")])
    text = page.read_text()
    assert len(re.findall(r'<div class="scroll"[^>]*><table', text)) == text.count("<table") == 2


def test_charts_of_policies_are_explained_and_the_best_is_marked(simulated, tmp_path: Path) -> None:
    pair = [simulated("fa3"), simulated("symmetric_shift")]
    page = unescape(report(tmp_path / "a.html", [Section(charts=pair)]).read_text())
    fa3, symmetric = re.findall(r"<figure>(.*?)</figure>", page, re.DOTALL)
    assert ABOUT["fa3"].sentence in fa3 and ABOUT["symmetric_shift"].sentence in symmetric
    assert 'class="badge"' in symmetric and 'class="badge"' not in fa3
    assert "<a " not in fa3  # outside of the repository a link would lead nowhere


def test_every_policy_of_a_pack_is_explained_by_its_name(simulated, packed: Simulation, tmp_path: Path) -> None:
    joined = replace(chart(simulated("fa3")), policy="spt@head, symmetric_shift:64@head")
    page = unescape(report(tmp_path / "a.html", [Section(charts=[packed, joined])]).read_text())
    one, two = (re.findall(r'<p class="about">(.*?)</p>', each) for each in page.split("<figure>")[1:])
    assert packed.program.policy == "fa3@head" and one == [ABOUT["fa3"].sentence]
    assert two == [f"{name}: {ABOUT[name].sentence}" for name in ("spt", "symmetric_shift")]


def test_a_page_in_the_repository_has_links_to_the_tour(simulated, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dash_attn.tools.viz.about.REPOSITORY", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "tour.md").touch()
    text = html(simulated("fa3"), tmp_path / "a.html").read_text()
    assert 'More in <a href="docs/tour.md#fa3">the tour</a>, under “fa3”.</p>' in text


def test_a_report_without_charts_has_no_script(tmp_path: Path) -> None:
    page = report(tmp_path / "a.html", [Section("Only text", table=[("a",)])]).read_text()
    assert 'class="bar"' not in page
    assert "DecompressionStream" not in page


def test_backticks_mark_code(tmp_path: Path) -> None:
    page = report(tmp_path / "a.html", [Section("Text", "Run `a<b`.", table=[("name",), ("`shift`",)])]).read_text()
    assert "Run <code>a&lt;b</code>." in page and "<td><code>shift</code>" in page and "`" not in page.split("<h2>")[1]


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
