"""Pictures of results: every suite, both grounds, older files too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from dash_attn.simulate import Machine
from dash_attn.tools.viz.evidence import HEADINGS, evidence
from dash_attn.tools.viz.results import DARK, DRAWN, LIGHT, gathered, plot, read, throughput
from dash_attn.tools.viz.traced import Traced
from tests.tools.trace.synthetic import program_of, synthetic

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def us(median: float) -> dict[str, float]:
    return {"median": median, "p20": 0.9 * median, "p80": 1.1 * median}


def row(length: int, mask: str, default: str) -> dict[str, Any]:
    times = {"fa4": 100.0, "fa4 det": 120.0, "fa2 det": 300.0, default: 99.0, f"any ({default})": 101.0}
    parts = {"attention forward": 10.0, "attention backward": 40.0, "rest": 40.0}
    return {
        "cell": f"d128 {mask} {length}",
        "shape": {"dim": 128, "mask": mask, "len_q": length},
        "flops": 1e9 * length,
        "default": default,
        "us": {name: us(length * t) for name, t in times.items()},
        "peak_bytes": {name: 1000 * length for name in times},
        "parts": {name: {part: length * t for part, t in parts.items()} for name in times},
        "deviation": {
            name: {"mean": 0.0 if "det" in name or ":" in name else 1e-4, "deterministic": True} for name in times
        },
    }


def result(suite: str) -> dict[str, Any]:
    rows = [row(n, mask, d) for n in (1024, 4096) for mask, d in (("full", "shift:64"), ("causal", "fa3"))]
    return {"suite": suite, "environment": {"device": "Some GPU", "date": "2026-01-01"}, "rows": rows}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("suite", DRAWN)
def test_every_suite_has_a_picture(suite: str, dark: bool, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(result(suite)))
    (path,) = plot([file], tmp_path, dark=dark)
    assert path.name == f"{suite}{'_dark' if dark else ''}.png"
    picture = matplotlib.image.imread(path)
    assert picture.shape[1] == 1760 and picture[..., :3].std() > 0.05
    assert (picture[0, 0, :3].mean() < 0.3) == dark


def test_the_committed_grid_has_a_picture(tmp_path: Path) -> None:
    paths = plot([RESULTS / "grid_h200.json", RESULTS / "audit_h200.json"], tmp_path, kind="svg")
    assert [path.name for path in paths] == ["grid.svg", "price.svg"]
    text = paths[0].read_text()
    assert text.count("<svg") == 1 and "NVIDIA H200, 2026-11-15" in text
    figure = throughput(read(RESULTS / "grid_h200.json"), LIGHT)
    titles = [f"head dim {dim}, {mask} mask" for dim in (64, 128) for mask in ("causal", "full")]
    assert [ax.get_title(loc="left") for ax in figure.axes] == titles
    labels = {line.get_label() for line in figure.axes[0].lines}
    assert {"ours", "any", "fa4", "fa4 det"} <= labels
    assert DARK.ground != LIGHT.ground


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "not a result"), ("[]", "not a result"), ('{"rows": []}', "no rows")],
)
def test_what_is_no_result_is_refused(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=says):
        plot([file], tmp_path)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        plot([tmp_path / "nowhere.json"], tmp_path)
    with pytest.raises(ValueError, match="--format"):
        plot([], tmp_path, kind="gif")
    file = tmp_path / "r.json"
    file.write_text(json.dumps(result("grid") | {"suite": "mine"}))
    with pytest.raises(ValueError, match="mine"):
        plot([file], tmp_path)


def test_one_page_holds_everything(tmp_path: Path) -> None:
    files = []
    for suite in DRAWN:
        made = result(suite)
        for each in made["rows"]:
            each["missing"], each["failed"] = {"flex": "not here"}, {}
            for found in each["deviation"].values():
                found["worst"] = {"dq": found["mean"], "dk": 0.0, "dv": 0.0}
        files.append(tmp_path / f"{suite}.json")
        files[-1].write_text(json.dumps(made))
    text = evidence(files, tmp_path / "page.html").read_text()
    assert all(f"<h2>{heading}</h2>" in text for heading in HEADINGS.values()) and set(HEADINGS) == set(DRAWN)
    assert text.count('srcset="data:image/png') == text.count('<img src="data:image/png') == len(DRAWN)
    assert "missing: flex (everywhere): not here" in text and "Figure 10" in text and "Schedules: causal mask" in text
    assert re.search(r"img-src data:", text)  # or the browser refuses them


def test_traces_are_charts_of_some_sms(tmp_path: Path) -> None:
    file, trace = tmp_path / "r.json", RESULTS / "trace_d64_h200.npz"
    file.write_text(json.dumps(result("grid")))
    text = evidence([file, trace], tmp_path / "page.html").read_text()
    assert "<h2>What the SMs did: head dim 64</h2>" in text and "(part of slots)" in text
    assert text.count("measured, level</h3>") == text.count("simulated, level</h3>") == 1
    assert len(text) < 2_000_000


def test_the_script_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where the script finds dash-attn
    subprocess.run([RESULTS.parent / "report", page], check=True, env=os.environ | {"PATH": path})
    text = page.read_text(encoding="utf-8")
    assert all(heading in text for heading in ("Figure 1", "Table 1", "What the SMs did: head dim 128"))


def test_a_few_rows_of_a_timeline() -> None:
    traced = Traced.of(synthetic(program_of(), 12, Machine()))
    whole, sms = traced.charts[0].timeline, traced.telling(5)
    assert len(set(sms.tolist())) == 5
    real, modelled = traced.some(sms)
    line = real.timeline
    assert line.workers == modelled.timeline.workers == 5 and real.makespan == traced.found.makespan
    kept = np.isin(whole.worker, sms)
    np.testing.assert_array_equal(sms[line.worker], whole.worker[kept])
    np.testing.assert_array_equal(line.begin, whole.begin[kept])
    assert [line.names.text(t) for t in line.task[:9]] == [whole.names.text(t) for t in whole.task[kept][:9]]
    assert real.stall == pytest.approx(line.total("stall")) and 0 <= real.idle < 5 * real.makespan


def test_files_of_one_suite_are_told_together(tmp_path: Path) -> None:
    for number, (command, note) in enumerate((("first", "a part"), ("second", None))):
        env = {"command": command} | ({"note": note} if note else {})
        made = {"suite": "length", "environment": env, "rows": [row(512 << number, "causal", "level")]}
        (tmp_path / f"{number}.json").write_text(json.dumps(made))
    (found,) = gathered(sorted(tmp_path.glob("*.json"))).values()
    assert found["commands"] == ["first", "second"] and found["notes"] == ["a part"]
    assert [each["shape"]["len_q"] for each in found["rows"]] == [512, 1024]


def test_a_grid_stands_for_the_price_where_no_run_of_it_is_given(tmp_path: Path) -> None:
    timed, untimed = row(512, "full", "shift"), row(1024, "full", "shift")
    timed["pairs"] = {"ours": {"shift": us(3.0), "any (shift)": us(2.0)}}
    grid, price = tmp_path / "grid.json", tmp_path / "price.json"
    grid.write_text(json.dumps({"suite": "grid", "environment": {"command": "g"}, "rows": [timed, untimed]}))
    price.write_text(json.dumps({"suite": "price", "environment": {"command": "p"}, "rows": [untimed]}))
    found = gathered([grid])["price"]
    assert [each["cell"] for each in found["rows"]] == [timed["cell"]] and found["commands"] == ["g"]
    assert [each["cell"] for each in gathered([grid, price])["price"]["rows"]] == [untimed["cell"]]
