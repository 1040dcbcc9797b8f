"""Perfetto traces hold the timeline, whole."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from dash_attn.simulate import Machine, Paper
from dash_attn.timeline import Timeline
from dash_attn.tools.viz import perfetto


def trace(path: Path) -> list[dict]:
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] in ("ms", "ns")
    return document["traceEvents"]


def check_schema(events: list[dict]) -> None:
    """What the Trace Event format asks of metadata and complete events."""
    for event in events:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert isinstance(event["tid"], int)
            assert event["ts"] >= 0
            assert event["dur"] >= 0


@pytest.mark.parametrize(("model", "scale"), [(Paper(1.0, 0.35), 1e3), (Machine(), 1.0)])
def test_round_trip(simulated, tmp_path: Path, model, scale: float) -> None:
    line: Timeline = simulated("descending", n=6, heads=3, workers=6, model=model).timeline
    events = trace(perfetto(line, tmp_path / "a.json"))
    check_schema(events)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(line)
    for event, drawn in zip(line, slices, strict=True):
        names = (line.names.batch, line.names.q_head, line.names.q_tile, line.names.kv_tile, line.names.turn)
        assert list(drawn["args"].values()) == [int(column[event.task]) for column in names]
        assert drawn["cat"] == event.role
        assert drawn["ts"] == pytest.approx(event.begin * scale)
        assert drawn["dur"] == pytest.approx((event.end - event.begin) * scale)
        assert tracks[drawn["tid"]].split(",")[0] == f"worker {event.worker}"
        assert ("writer" in tracks[drawn["tid"]]) == (line.overlapping and event.role != "compute")


def test_slices_of_a_track_never_overlap(simulated, tmp_path: Path) -> None:
    simulation = simulated("fa3", n=8, heads=2, workers=8, model=Machine())
    by_track = defaultdict(list)
    for event in trace(perfetto(simulation, tmp_path / "a.json")):
        if event["ph"] == "X":
            by_track[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_track) > 8
    for spans in by_track.values():
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(sorted(spans)))


def test_a_process_for_each_timeline(simulated, tmp_path: Path) -> None:
    pair = [simulated("fa3"), simulated("symmetric_shift")]
    events = trace(perfetto(pair, tmp_path / "a.json"))
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert titles == {1: pair[0].timeline.title, 2: pair[1].timeline.title}
    assert len({(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}) == 8


def test_compressed(simulated, tmp_path: Path) -> None:
    plain = perfetto(simulated("shift"), tmp_path / "a.json")
    packed = perfetto(simulated("shift"), tmp_path / "a.json.gz")
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
