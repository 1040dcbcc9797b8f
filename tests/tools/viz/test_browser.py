"""Pages in a real browser: drawn without an error, and they answer pointer, wheel and keys."""

from __future__ import annotations

import html as entities
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dash_attn.simulate import Machine, Simulation
from dash_attn.tools.viz import Section, report
from dash_attn.tools.viz.evidence import evidence
from dash_attn.tools.viz.results import OURS

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",
)


def browse(page: Path, folder: Path, *arguments: str) -> str:
    """Open a page and return what the browser prints."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        message = f"no browser: install one of {', '.join(BROWSERS)}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments, page.resolve().as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=180).stdout


def page_of(simulations: list[Simulation], path: Path) -> Path:
    table = [("policy", "makespan"), *((s.program.policy, s.makespan) for s in simulations)]
    machine = [s for s in simulations if isinstance(s.model, Machine)]
    paper = [s for s in simulations if s not in machine]
    return report(path, [Section("Model", "Text.", table, paper), Section("Machine", charts=machine)])


@pytest.fixture(scope="module")
def simulations(simulated) -> list[Simulation]:
    models = (("fa3", None), ("symmetric_shift", None), ("fa3", Machine()))
    return [simulated(policy, n=8, heads=2, workers=8, model=model) for policy, model in models]


@pytest.fixture(scope="module")
def seen(simulations, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a user saw and did (selftest.js) on a page with three charts, the first two on one axis."""
    folder = tmp_path_factory.mktemp("browser")
    page = page_of(simulations, folder / "report.html")
    waiting = next(e for e in simulations[0].timeline if e.role == "stall" and e.worker == 3)
    script = (Path(__file__).parent / "selftest.js").read_text(encoding="utf-8")
    script = script.replace("WORKERS", "8").replace("HOVER_ROW", str(waiting.worker))
    script = script.replace("HOVER_TIME", str((waiting.begin + waiting.end) / 2))
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"))
    found = re.search(r'<pre id="selftest">(.*?)</pre>', browse(page, folder, "--dump-dom"), re.DOTALL)
    assert found is not None, "the page never became ready"
    return json.loads(entities.unescape(found.group(1)))


def test_every_chart_is_drawn_without_an_error(seen) -> None:
    assert seen["error"] == ""
    assert seen["ready"] == 3
    assert min(seen["colours"]) > 20


def test_hovering_names_task_turn_and_wait(seen, simulations) -> None:
    line = simulations[0].timeline
    waiting = next(e for e in line if e.role == "stall" and e.worker == 3)
    names, t = line.names, waiting.task
    assert seen["shown"] == "block"
    assert f"head {names.q_head[t]}, q {names.q_tile[t]}, kv {names.kv_tile[t]}" in seen["tip"]
    assert f"worker 3, turn {names.turn[t]} " in seen["tip"]
    assert f"waits {waiting.end - waiting.begin:.6g} units for turn {names.turn[t] - 1} (kv 2, worker 2)" in seen["tip"]
    assert re.search(r"compute 0 to 1\s", seen["tip"])
    assert re.search(rf"reduce {waiting.end:.6g} to", seen["tip"])
    assert seen["traced"]
    assert seen["left"] == ["none", 1]


def test_zoom_pan_and_reset(seen, simulations) -> None:
    whole = seen["full"][1] - seen["full"][0]
    assert seen["full"][0] == 0
    assert whole == pytest.approx(simulations[0].makespan, rel=0.01)
    zoomed = seen["zoomed"][1] - seen["zoomed"][0]
    assert zoomed < 0.5 * whole
    assert seen["zoomed"][0] < 2 < seen["zoomed"][1]  # the time under the pointer stays in view
    assert seen["linked"] is False  # the machine's chart has an axis of its own
    assert seen["panned"][0] > seen["zoomed"][0]
    assert seen["panned"][1] - seen["panned"][0] == pytest.approx(zoomed, rel=1e-3)
    assert seen["reset"] == seen["full"]


def test_colours_can_be_changed(seen) -> None:
    assert seen["recoloured"]


@pytest.mark.parametrize(("name", "scheme"), [("light", 1), ("dark", 0)])
def test_screenshot(simulations, tmp_path: Path, name: str, scheme: int) -> None:
    page = page_of(simulations, tmp_path / "report.html")
    shot = tmp_path / f"{name}.png"
    browse(
        page,
        tmp_path,
        f"--screenshot={shot}",
        "--window-size=1280,900",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    image = np.asarray(Image.open(shot).convert("L")).astype(float)
    assert image.std() > 20
    assert (image[2, 2] > 200) == (name == "light")


def fits_a_phone(page: Path, folder: Path) -> tuple[str, ...]:
    """(width of the content, of the window, charts drawn) at 390 pixels: in a frame, since a browser window cannot be
    that narrow."""
    check = "((d) => parent.postMessage([d.scrollWidth, innerWidth, d.dataset.ready], '*'))(document.documentElement)"
    page.write_text(page.read_text().replace("</body>", f"<script>setTimeout(() => {check}, 3000)</script></body>"))
    frame = folder / "phone.html"
    frame.write_text(
        f'<iframe src="{page.name}" width="390" height="800" style="border:0"></iframe><pre id="seen"></pre>'
        "<script>onmessage = (e) => document.getElementById('seen').textContent = e.data.join(' ')</script>"
    )
    found = re.search(r'<pre id="seen">(\d+) (\d+) (\d+)</pre>', browse(frame, folder, "--dump-dom"))
    assert found is not None
    return found.groups()


def test_fits_a_phone(simulations, tmp_path: Path) -> None:
    assert fits_a_phone(page_of(simulations, tmp_path / "report.html"), tmp_path) == ("390", "390", "3")


@pytest.mark.parametrize(("name", "scheme"), [("light", 1), ("dark", 0)])
def test_the_page_of_results_shows_its_pictures(tmp_path: Path, name: str, scheme: int) -> None:
    traces = sorted(RESULTS.glob("*.npz"))
    page = evidence([*sorted(RESULTS.glob("*.json")), *traces], tmp_path / "page.html")
    shot = tmp_path / "shot.png"
    look = ("--window-size=1280,1600", f"--blink-settings=preferredColorScheme={scheme}")
    browse(page, tmp_path, f"--screenshot={shot}", *look)
    image = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    curve = np.abs(image - [int(OURS[i : i + 2], 16) for i in (1, 3, 5)]).max(axis=-1) < 12
    assert curve.sum() > 1000 and (image[2, 2].mean() > 200) == (name == "light")
    if name == "light":
        assert fits_a_phone(page, tmp_path) == ("390", "390", str(2 * len(traces) + 4))
