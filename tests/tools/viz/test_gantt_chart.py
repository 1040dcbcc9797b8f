"""Gantt charts as files: drawn, not blank, and the same every time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dash_attn.tools.viz
from dash_attn.simulate import Machine, Simulation
from dash_attn.timeline import Timeline
from dash_attn.tools.viz import chart, compare, gantt, palette
from dash_attn.tools.viz.gantt_chart import stack


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def share(image: np.ndarray, colour: str) -> float:
    """Of the picture, in about this colour."""
    return float((np.abs(image - 255 * palette.rgb(colour)).sum(-1) < 12).mean())


def test_png_shows_bars_stalls_and_bubbles(simulated, tmp_path: Path) -> None:
    image = pixels(gantt(simulated("fa3", n=8), tmp_path / "a.png"))
    assert share(image, palette.RAMP[0]) > 0.005
    assert share(image, palette.RAMP[-1]) > 0.005
    assert share(image, palette.STALL) > 0.01
    assert share(image, palette.BUBBLE) > 0.01


def test_no_stall_is_drawn_where_there_is_none(simulated, tmp_path: Path) -> None:
    waiting, free = (
        share(pixels(gantt(simulated(policy, n=8), tmp_path / f"{policy}.png")), palette.STALL)
        for policy in ("fa3", "symmetric_shift")
    )
    assert free < 0.001 < waiting  # the legend's sample remains


def test_svg_is_well_formed_and_repeats(simulated, tmp_path: Path) -> None:
    first, second = (gantt(simulated("shift"), tmp_path / name) for name in ("a.svg", "b.svg"))
    assert first.read_bytes() == second.read_bytes()
    assert ElementTree.parse(first).getroot().tag.endswith("svg")


def test_png_repeats(simulated, tmp_path: Path) -> None:
    first, second = (gantt(simulated("shift"), tmp_path / name) for name in ("a.png", "b.png"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("colour", ["q", "kv", "head"])
def test_two_timelines_on_one_axis(simulated, tmp_path: Path, colour) -> None:
    pair = [simulated("fa3", n=6), simulated("symmetric_shift", n=6)]
    one, two = gantt(pair[0], tmp_path / "one.png", colour=colour), compare(pair, tmp_path / "two.png", colour=colour)
    assert pixels(two).shape[0] > 1.5 * pixels(one).shape[0]


@pytest.mark.parametrize("workers", [2, 132])
def test_few_and_many_workers(simulated, tmp_path: Path, workers: int) -> None:
    simulation = simulated("fa3", n=workers, heads=1, workers=workers, model=Machine())
    assert pixels(gantt(simulation, tmp_path / "a.png")).std() > 10


def test_many_events_stay_small_as_svg(simulated, tmp_path: Path) -> None:
    simulation = simulated("symmetric_shift", n=64, heads=4, workers=64, model=Machine())
    assert len(simulation.timeline) > 15_000
    assert gantt(simulation, tmp_path / "a.svg").stat().st_size < 1_000_000


@pytest.mark.parametrize(("width", "drawn"), [(11.0, set(range(12))), (4.0, set())])
def test_numbers_in_bars_are_all_there_or_none_is(simulated, width: float, drawn: set[int]) -> None:
    """12 q tiles: numbers of one and of two digits."""
    figure = stack([chart(simulated("fa3", n=12))], width=width)
    figure.canvas.draw()
    texts = figure.axes[0].texts
    assert {int(text.get_text()) for text in texts} == drawn
    assert len({text.get_size() for text in texts}) <= 1


def test_a_bare_timeline_takes_a_bound(simulated, tmp_path: Path) -> None:
    simulation = simulated("fa3")
    without = gantt(simulation.timeline, tmp_path / "a.png")
    marked = gantt(simulation.timeline, tmp_path / "b.png", lower_bound=simulation.lower_bound)
    assert without.read_bytes() != marked.read_bytes()


def test_an_empty_timeline_is_drawn_empty(simulated, tmp_path: Path) -> None:
    line: Timeline = simulated("fa3").timeline
    nothing = (np.zeros(0, np.int64),) * 3 + (np.zeros(0),) * 2
    assert gantt(Timeline("empty", "units", 3, line.names, *nothing), tmp_path / "a.png").is_file()


def test_wrong_endings_and_nothing_to_draw(simulated, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        gantt(simulated("fa3"), tmp_path / "a.pdf")
    with pytest.raises(ValueError, match="at least one timeline"):
        compare([], tmp_path / "a.png")


def test_no_global_drawing_state() -> None:
    for path in Path(dash_attn.tools.viz.__file__).parent.glob("*.py"):
        assert "pyplot" not in path.read_text(encoding="utf-8"), path


def test_a_pack_is_drawn_by_document(packed: Simulation, tmp_path: Path) -> None:
    image = pixels(gantt(packed, tmp_path / "pack.png", colour="sequence"))
    assert all(share(image, palette.HUES[document]) > 0.005 for document in range(3))
