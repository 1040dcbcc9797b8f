"""The watchdog: runs child processes, reads their progress, and ends each one that is silent for too long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from dash_attn.tools.bench.audit.child import MARK

Job = dict[str, Any]
Hear = Callable[[Job, dict[str, Any]], None]  # whose word it is, and the word
START = 180.0  # seconds until a process has imported everything and says its first word


@dataclass
class Heard:
    """What a child said before it ended: `verdict` is done, missing, hang or died; `beside` others ran at its end."""

    verdict: str = "died"
    why: str = ""
    at: str = "start"
    repeat: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)
    beside: int = 0


@dataclass(eq=False)
class _Child:
    job: Job
    process: subprocess.Popen[str]
    errors: Path
    deadline: float
    heard: Heard = field(default_factory=Heard)


_Lines = SimpleQueue[tuple[_Child, str | None]]


def watched(jobs: Sequence[Job], folder: Path, timeout: float, hear: Hear) -> list[Heard]:
    """Run jobs in processes of their own, all at once. `timeout` seconds of silence are a hang of the silent one."""
    lines: _Lines = SimpleQueue()
    children: list[_Child] = []
    try:
        for number, job in enumerate(jobs):
            children.append(_started(job, folder / f"job{number}.json", timeout))
            Thread(target=_read, args=(children[-1], lines), daemon=True).start()
        _listen(children, lines, timeout, hear)
    finally:  # also when this process is told to stop
        for child in children:
            _kill(child)
        heard = [_ended(child) for child in children]
    return heard


def _started(job: Job, path: Path, timeout: float) -> _Child:
    path.write_text(json.dumps(job), encoding="utf-8")
    errors = path.with_suffix(".err")
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "dash_attn.tools.bench.audit.child", str(path)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,  # so that what it started ends with it
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
    return _Child(job, process, errors, time.monotonic() + max(timeout, START))


def _listen(children: Sequence[_Child], lines: _Lines, timeout: float, hear: Hear) -> None:
    running = list(children)
    while running:
        first = min(running, key=lambda child: child.deadline)
        try:
            child, line = lines.get(timeout=max(0.0, first.deadline - time.monotonic()))
        except Empty:
            first.heard.verdict, first.heard.why = "hang", f"silent for {timeout:g} s"
            _kill(first)
            _gone(first, running)
            for child in running:  # they may have waited for this one
                child.deadline = max(child.deadline, time.monotonic() + timeout)
            continue
        if line is None and child in running:
            _gone(child, running)
        elif line is not None and line.startswith(MARK) and child in running:
            child.deadline = time.monotonic() + timeout
            event = json.loads(line.removeprefix(MARK))
            _note(child.heard, event)
            hear(child.job, event)


def _gone(child: _Child, running: list[_Child]) -> None:
    running.remove(child)
    child.heard.beside = len(running)


def _kill(child: _Child) -> None:
    if child.process.poll() is None:
        os.killpg(child.process.pid, signal.SIGKILL)


def _ended(child: _Child) -> Heard:
    status, heard = child.process.wait(), child.heard
    if heard.verdict == "died":
        last = [line.strip() for line in child.errors.read_text(errors="replace").splitlines() if line.strip()][-1:]
        heard.why = last[0] if last else f"exit status {status}"
    return heard


def _note(heard: Heard, event: dict[str, Any]) -> None:
    heard.at, heard.repeat = event.get("at", heard.at), event.get("repeat", 0 if "at" in event else heard.repeat)
    if "result" in event:
        heard.results.append(event["result"])
    elif "missing" in event:
        heard.verdict, heard.why = "missing", event["missing"]
    elif "done" in event:
        heard.verdict = "done"


def _read(child: _Child, lines: _Lines) -> None:
    assert child.process.stdout is not None
    for line in child.process.stdout:
        lines.put((child, line))
    lines.put((child, None))
