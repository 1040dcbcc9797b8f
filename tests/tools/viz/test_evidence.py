"""The page of all results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from dash_attn.simulate import Machine
from dash_attn.tools.bench.performance import TABLES, read_results
from dash_attn.tools.viz.evidence import HEADINGS, evidence
from dash_attn.tools.viz.plots import DRAWN
from dash_attn.tools.viz.traced import Traced
from tests.tools.trace.synthetic import program_of, synthetic
from tests.tools.viz.results import audit, result, write

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


class Outline(HTMLParser):
    """Tags in their order, and the headings."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.headings: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "h2" and data.strip():
            self.headings.append(data)


def test_the_page_begins_with_one_table_and_one_picture(tmp_path: Path) -> None:
    page = Outline(evidence([write(tmp_path / "r.json", result("grid_close"))], tmp_path / "page.html"))
    table, picture = page.tags.index("table"), page.tags.index("picture")
    second = page.tags.index("h2", page.tags.index("h2") + 1)
    assert table < picture < second


def test_the_page_has_the_headline_of_the_readme(tmp_path: Path) -> None:
    """Names and numbers are those of docs/performance.md; each row has the version and the days of its own suite."""
    path = evidence(sorted(RESULTS.glob("*.json")), tmp_path / "page.html")
    text, results = path.read_text(encoding="utf-8"), read_results(RESULTS)
    first = text[: text.index("</table>")]
    said = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in re.findall(r"<tr>(<td.*?)</tr>", first)]
    measured = {file: f"dash_attn {version}, {when}" for file, version, when in TABLES["files"](results)[1]}
    wanted = []
    for *cells, file in TABLES["headline"](results)[1]:
        suites = re.findall(r"\[(\w+)\]", file)
        stamps = dict.fromkeys(map(measured.__getitem__, file.split(", ")))
        wanted.append([*cells, ", ".join(suites), "; ".join(stamps)])
    assert said == wanted
    assert len({stamp for *_, stamp in said}) > 1 and "our default" not in text


def test_every_section_says_when_and_with_which_orders_it_was_measured(tmp_path: Path) -> None:
    days = {"grid": "2026-01-01", "models": "2026-01-02", "packed": "2026-01-03"}
    files = [write(tmp_path / f"{suite}.json", result(suite, date=day)) for suite, day in days.items()]
    text = evidence(files, tmp_path / "page.html").read_text(encoding="utf-8")
    sections = {name: text[text.index(f"<h2>{HEADINGS[name]}</h2>") :].partition("</section>")[0] for name in days}
    for name, day in days.items():
        assert f"<p>Some GPU, {day}</p>" in sections[name]
        assert "<p>Orders of ours in this suite: shift:64, fa3.</p>" in sections[name]


def test_every_suite_has_its_section(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{suite}.json", result(suite)) for suite in (*DRAWN, "of_somebody")]
    path = evidence([*files, write(tmp_path / "audit.json", audit())], tmp_path / "page.html")
    page, text = Outline(path), path.read_text(encoding="utf-8")
    wanted = [HEADINGS[suite] for suite in HEADINGS if suite in DRAWN or suite == "audit"]
    assert [heading for heading in page.headings if heading in wanted] == wanted
    assert "of somebody" in page.headings
    assert page.tags.count("picture") == len(DRAWN) + 1
    assert "not here" in text and "same bits" in text
    assert "img-src data:" in text  # or the browser refuses the pictures


def test_everything_from_files_is_escaped(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script>\"'&"
    names = ("device", "torch", "cuda", "flash-attn-4", "date", "command", "note", "dash_attn")
    made = result("grid_close", **dict.fromkeys(names, nasty))
    for each in made["rows"]:
        each["cell"] = each["shape"]["mask"] = nasty
        each["missing"], each["failed"] = {nasty: nasty}, {"fa4": nasty}
        each["us"][nasty] = each["us"]["fa4"]
    trial = audit()
    trial["entries"][0] |= dict.fromkeys(("case", "target", "stressor", "status"), nasty)
    files = [write(tmp_path / "r.json", made), write(tmp_path / "a.json", trial)]
    page = Outline(evidence(files, tmp_path / "page.html"))
    assert page.tags.count("script") == 2  # the page's data and its own script


def test_traces_are_charts_of_some_sms(tmp_path: Path) -> None:
    trace = next(iter(sorted(RESULTS.glob("trace_*d64*.npz"))))
    path = evidence([write(tmp_path / "r.json", result("grid")), trace], tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    titles = re.findall(r"<h3>(measured|simulated), ", text)
    assert titles == ["measured", "simulated"]
    (data,) = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert [each["workers"] for each in json.loads(data)["charts"][:2]] == [8, 8]
    assert len(text) < 2_000_000


def test_the_script_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where the script finds dash-attn
    subprocess.run([RESULTS.parent / "report", page], check=True, env=os.environ | {"PATH": path})
    headings = Outline(page).headings
    assert set(headings) >= {HEADINGS[suite] for suite in ("grid", "price", "models", "length", "block", "deviation")}
    assert sum(heading.startswith("What the SMs did") for heading in headings) == len(list(RESULTS.glob("*.npz")))


def test_a_few_rows_of_a_timeline() -> None:
    traced = Traced.of(synthetic(program_of(), 12, Machine()))
    whole, sms = traced.charts[0].timeline, traced.telling(5)
    assert len(set(sms.tolist())) == 5
    real, modelled = traced.some(sms)
    line = real.timeline
    assert line.workers == modelled.timeline.workers == 5 and real.makespan == traced.run.makespan
    kept = np.isin(whole.worker, sms)
    np.testing.assert_array_equal(sms[line.worker], whole.worker[kept])
    np.testing.assert_array_equal(line.begin, whole.begin[kept])
    assert [line.names.text(t) for t in line.task[:9]] == [whole.names.text(t) for t in whole.task[kept][:9]]
    assert real.stall == pytest.approx(line.total("stall")) and 0 <= real.bubble < 5 * real.makespan
