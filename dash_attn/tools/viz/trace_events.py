"""Traces for ui.perfetto.dev and chrome://tracing (the Trace Event format, JSON)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from dash_attn.timeline import ROLES
from dash_attn.tools.viz.charts import Chart, Source, charts, lanes

# The format counts microseconds. A model without a unit of its own reads as milliseconds.
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
MODEL_UNIT = 1e3


def perfetto(sources: Source | Sequence[Source], path: str | Path) -> Path:
    """Write a trace: a process for each timeline, a track for each worker, and one for each of its dQ writers where
    those run beside it. A path that ends in .gz is compressed; the viewers open both."""
    drawn = charts(sources)
    events = [event for process, each in enumerate(drawn, 1) for event in _events(process, each)]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
    return path


def _events(process: int, each: Chart) -> list[dict[str, object]]:
    line, lane = each.timeline, lanes(each.timeline)
    scale = MICROSECONDS.get(line.unit, MODEL_UNIT)
    width = int(lane.max(initial=0)) + 1
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": each.title}},
    ]
    for track in range(line.workers * width):
        worker, writer = divmod(track, width)
        name = f"worker {worker}" + (f", writer {writer}" if writer else "")
        thread = {"ph": "M", "pid": process, "tid": track}
        events.append({**thread, "name": "thread_name", "args": {"name": name}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": track}})
    names = line.names
    labels = (names.word, "head", "q", "kv", "turn")
    tasks = list(
        zip(*(c.tolist() for c in (names.batch, names.q_head, names.q_tile, names.kv_tile, names.turn)), strict=True)
    )
    columns = (line.worker * width + lane, line.role, line.task, line.begin * scale, (line.end - line.begin) * scale)
    for track, role, task, begin, duration in zip(*(c.tolist() for c in columns), strict=True):
        batch, head, q, kv, turn = tasks[task]
        events.append(
            {
                "ph": "X",
                "pid": process,
                "tid": track,
                "name": f"{ROLES[role]} h{head} {'dK dV' if q < 0 else f'q{q}'} kv{kv}",
                "cat": ROLES[role],
                "ts": begin,
                "dur": duration,
                "args": dict(zip(labels, (batch, head, q, kv, turn), strict=True)),
            }
        )
    return events
