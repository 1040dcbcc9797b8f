"""Pages in a real browser: drawn without an error, and they answer mouse, fingers and keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dash_attn.simulate import Machine, Simulation
from dash_attn.timeline import COMPUTE
from dash_attn.tools.viz import Section, html, report, schedules
from dash_attn.tools.viz.evidence import evidence
from dash_attn.tools.viz.plots import OURS
from tests.tools.viz.browser import Browser

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
TIP = "document.getElementById('tip')"
CANVAS = "document.querySelector('.view canvas')"
PHONE = {"width": 390, "height": 844, "touch": True}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def simulations(simulated) -> list[Simulation]:
    models = (("fa3", None), ("symmetric_shift", None), ("fa3", Machine()))
    return [simulated(policy, n=8, heads=2, workers=8, model=model) for policy, model in models]


@pytest.fixture(scope="module")
def page(simulations: list[Simulation], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three charts; the first two share an axis."""
    wide = [[f"column {i}" for i in range(30)], ["12345.6 ms"] * 30]
    sections = [schedules(simulations[:2]), Section("Machine", charts=simulations[2:]), Section("Wide", table=wide)]
    return report(tmp_path_factory.mktemp("page") / "report.html", sections)


def view(browser: Browser) -> tuple[float, float]:
    """The times at the ends of the first chart."""
    begin, end = map(float, browser.run(f"{CANVAS}.dataset.view").split())
    return begin, end


def place(browser: Browser, time: float, row: int) -> tuple[float, float]:
    """Where the first chart shows a worker at a time, in the window."""
    browser.run(f"{CANVAS}.scrollIntoView({{block: 'center'}})")
    browser.run("new Promise((done) => setTimeout(done, 300))")  # a wheel right after scrolling belongs to the page
    left, top, right, high = map(float, browser.run(f"{CANVAS}.dataset.plot").split())
    box = browser.run(f"(({{x, y}}) => [x, y])({CANVAS}.getBoundingClientRect())")
    begin, end = view(browser)
    return box[0] + left + (time - begin) / (end - begin) * (right - left), box[1] + top + (row + 0.5) * high


def waiting(simulation: Simulation) -> Any:
    """A stall of worker 3."""
    return next(event for event in simulation.timeline if event.role == "stall" and event.worker == 3)


def shown(browser: Browser) -> str:
    """The text of the box beside the pointer, or nothing."""
    return str(browser.run(f"getComputedStyle({TIP}).display === 'none' ? '' : {TIP}.textContent"))


def traced(browser: Browser) -> bool:
    """Does the first chart show the way of a dQ tile?"""
    script = "((c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((x) => x))"
    return bool(browser.run(f"{script}({CANVAS}.nextElementSibling)"))


def test_every_chart_is_drawn_without_an_error(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.run("document.getElementById('error').textContent") == ""
    assert browser.run("document.documentElement.dataset.ready") == "3"
    colours = (
        "[...document.querySelectorAll('.view canvas:first-child')].map((c) => new Set(new Uint32Array("
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"
    )
    assert min(browser.run(colours)) > 20


@pytest.mark.parametrize("touch", [False, True])
def test_pointing_and_tapping_tell_the_same(browser: Browser, page: Path, simulations, touch: bool) -> None:
    browser.open(page, **(PHONE if touch else {}))
    hints = browser.run("[...document.querySelectorAll('.hint')].map((e) => e.getClientRects().length > 0)")
    assert hints == [not touch, touch]  # for a mouse, for fingers
    event, names = waiting(simulations[0]), simulations[0].timeline.names
    x, y = place(browser, (event.begin + event.end) / 2, event.worker)
    if touch:
        browser.tap(x, y)
    else:
        browser.mouse("mouseMoved", x, y)
    said, turn = shown(browser), names.turn[event.task]
    assert f"q tile {names.q_tile[event.task]}, kv tile {names.kv_tile[event.task]}" in said
    assert f"worker 3, turn {turn} " in said
    assert f"stall {event.end - event.begin:.6g} units for turn {turn - 1} (kv tile 2, worker 2)" in said
    assert "compute 0 to 1 units" in said and f"reduce {event.end:.6g} to" in said
    assert traced(browser)
    box = browser.run(f"(({{left, right, top, bottom}}) => [left, right, top, bottom])({TIP}.getBoundingClientRect())")
    assert box[0] >= 0 and box[2] >= 0 and box[1] <= (390 if touch else 1280) and box[3] <= 900
    if touch:
        browser.tap(195, browser.run(f"{CANVAS}.getBoundingClientRect().top") - 8)
    else:
        browser.mouse("mouseMoved", 2, 2)
    assert shown(browser) == "" and not traced(browser)


def test_a_pack_names_documents_and_the_ends_of_cut_chains(
    browser: Browser, packed: Simulation, tmp_path: Path
) -> None:
    browser.open(html(packed, tmp_path / "pack.html", colour="sequence"))
    assert browser.run("document.getElementById('error').textContent") == ""
    names, tasks = packed.timeline.names, packed.board.num_tasks
    ends = [e for e in packed.timeline if e.role == "reduce" and e.task >= tasks and names.turn[e.task] == 1]
    event = ends[0]
    browser.mouse("mouseMoved", *place(browser, (event.begin + event.end) / 2, event.worker))
    said = shown(browser)
    assert f"document {names.batch[event.task]}, head 1, dK and dV, kv tile {names.kv_tile[event.task]}" in said
    assert "turn 1 (0 to 1)" in said and "compute" not in said
    for by in ("q", "kv", "head", "sequence"):
        choose = f"(c => {{ c.value = '{by}'; c.dispatchEvent(new Event('change')); }})"
        browser.run(f"{choose}(document.getElementById('colour'))")
        assert browser.run("document.getElementById('error').textContent") == ""


def test_dragging_with_a_finger_pans_and_shows_nothing(browser: Browser, page: Path) -> None:
    browser.open(page, **PHONE)
    browser.run("document.querySelector('[data-zoom=\"0.5\"]').click()")
    browser.frame()
    before = view(browser)
    x, y = place(browser, sum(before) / 2, 2)
    browser.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    for step in range(1, 9):
        browser.ask("Input.dispatchTouchEvent", type="touchMove", touchPoints=[{"x": x - 10 * step, "y": y}])
    browser.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.frame()
    assert view(browser)[0] > before[0]
    assert shown(browser) == ""


def test_zoom_pan_and_reset(browser: Browser, page: Path, simulations) -> None:
    browser.open(page)
    full = view(browser)
    assert full == (0, pytest.approx(simulations[0].makespan, rel=0.01))
    x, y = place(browser, 2, 0)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-600)
    zoomed = view(browser)
    assert zoomed[1] - zoomed[0] < 0.5 * full[1]
    assert zoomed[0] < 2 < zoomed[1]  # the time under the pointer stays in view
    views = browser.run("[...document.querySelectorAll('.view canvas:first-child')].map((c) => c.dataset.view)")
    assert views[0] == views[1] != views[2]  # the machine's chart has an axis of its own
    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x - 40, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 40, y, button="left", clickCount=1)
    panned = view(browser)
    assert panned[0] > zoomed[0] and panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0], rel=1e-3)
    browser.run(f"{CANVAS}.focus()")
    browser.key("0")
    assert view(browser) == full


@pytest.mark.parametrize("model", [None, Machine(jitter=0.2)])
def test_numbers_in_tasks_are_all_there_or_none_is(browser: Browser, simulated, tmp_path: Path, model) -> None:
    """Numbers of one and of two digits; with jitter some bars are much shorter than most.

    What is drawn is written down by the drawing function itself. Numbers left of the bars are those of workers.
    """
    simulation = simulated("symmetric_shift", n=16, heads=2, workers=16, model=model)
    line = simulation.timeline
    wanted = sorted(line.names.q_tile[line.task[line.role == COMPUTE]].tolist())
    browser.open(report(tmp_path / "a.html", [Section(charts=[simulation])]))
    spy = (
        "(async () => { const drawn = [], real = CanvasRenderingContext2D.prototype.fillText;"
        "const left = Number(document.querySelector('.view canvas').dataset.plot.split(' ')[0]);"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {"
        "  if (typeof text === 'number' && x > left) drawn.push(text); return real.call(this, text, x, y); };"
        "dispatchEvent(new Event('resize')); CanvasRenderingContext2D.prototype.fillText = real;"
        "return drawn.sort((a, b) => a - b); })()"
    )
    drawn = []
    for width in range(300, 1300, 50):
        browser.resize(width, 900)
        drawn.append(browser.run(spy))
    assert all(numbers in ([], wanted) for numbers in drawn)
    assert drawn[0] == [] and drawn[-1] == wanted


def test_colours_can_be_changed(browser: Browser, page: Path) -> None:
    browser.open(page)
    before = browser.run(f"{CANVAS}.toDataURL()")
    browser.run(
        "((s) => { s.value = 'head'; s.dispatchEvent(new Event('change')); })(document.getElementById('colour'))"
    )
    browser.frame()
    assert browser.run(f"{CANVAS}.toDataURL()") != before


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    image = browser.shot()
    assert image.std() > 20
    assert (image[2, 2].mean() < 60) == dark


def overflowing(browser: Browser) -> list[float]:
    """How far the page, and every table with its box, reach beyond the window."""
    script = (
        "[document.documentElement.scrollWidth - innerWidth, "
        "...[...document.querySelectorAll('.scroll, picture img')]"
        ".map((e) => e.getBoundingClientRect().right - innerWidth)]"
    )
    return list(browser.run(script))


def test_a_phone_shows_wide_tables_in_boxes_that_scroll(browser: Browser, page: Path) -> None:
    browser.open(page, **PHONE)
    assert max(overflowing(browser)) <= 0
    wide = "[...document.querySelectorAll('.scroll')].at(-1)"
    assert browser.run(f"{wide}.scrollWidth - {wide}.clientWidth") > 1000


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of some of the committed results."""
    files = [RESULTS / f"{suite}_h200.json" for suite in ("grid", "grid_close", "block", "deviation", "../audit")]
    return evidence(files, tmp_path_factory.mktemp("measured") / "page.html")


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_results_shows_its_pictures(browser: Browser, measured: Path, dark: bool) -> None:
    browser.open(measured, dark=dark)
    browser.run("document.querySelectorAll('picture')[1].scrollIntoView()")  # the throughput, with its thick curves
    browser.frame()
    green = [int(OURS[i : i + 2], 16) for i in (1, 3, 5)]
    assert (np.abs(browser.shot() - green).max(axis=-1) < 12).sum() > 1000
    sources = "[...document.querySelectorAll('picture img')].map((e) => e.currentSrc.length)"
    wide = browser.run(sources)
    browser.open(measured, **PHONE, dark=dark)
    assert max(overflowing(browser)) <= 0
    browser.run("Promise.all([...document.querySelectorAll('picture img')].map((e) => e.decode()))")
    narrow = browser.run(sources)
    assert len(narrow) == len(wide) > 3 and all(a != b for a, b in zip(narrow, wide, strict=True))
