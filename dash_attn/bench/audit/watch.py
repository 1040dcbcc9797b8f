"""The watchdog: runs a child, hears how far it is, and ends it when it has been silent for too long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

from dash_attn.bench.audit.child import MARK

Job = dict[str, Any]
START = 180.0  # seconds until a process has imported everything and says its first word


@dataclass
class Heard:
    """What a child said before it ended: `verdict` is done, missing, hang or died."""

    verdict: str = "died"
    why: str = ""
    at: str = "start"
    repeat: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)


def watched(job: Job, folder: Path, timeout: float) -> Heard:
    """Run a job in a process of its own; `timeout` seconds of silence are a hang."""
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    heard = Heard()
    with tempfile.TemporaryFile("w+", dir=folder) as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "dash_attn.bench.audit.child", str(path)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # so that what it started ends with it
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        try:
            for event in _events(process, timeout):
                _note(heard, event)
        except TimeoutError:
            heard.verdict, heard.why = "hang", f"silent for {timeout:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        if heard.verdict == "died":
            errors.seek(0)
            last = [line.strip() for line in errors if line.strip()][-1:]
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


def _events(process: subprocess.Popen[str], timeout: float) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    lines: SimpleQueue[str | None] = SimpleQueue()
    Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    patience = max(timeout, START)
    while True:
        try:
            line = lines.get(timeout=patience)
        except Empty:
            raise TimeoutError from None
        if line is None:
            return
        if line.startswith(MARK):
            patience = timeout
            yield json.loads(line.removeprefix(MARK))


def _read(stream: IO[str], lines: SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
