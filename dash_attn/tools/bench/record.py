"""The environment of a run, and result files."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dash_attn import __version__
from dash_attn.problem import PLAIN, Problem
from dash_attn.tools.bench.json_text import to_json
from dash_attn.tools.bench.report import Result, ResultRow, dated

Environment = dict[str, Any]  # of a run: its command, date, machine and versions
PACKAGES = ("triton", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-cu13", "numba", "numpy")
SAME = ("device", "dash_attn", "torch", "cuda", *PACKAGES)  # equal in all runs that share a file


def environment(device: torch.device) -> Environment:
    """The command, the date, the machine and the versions of everything that takes part."""
    facts: Environment = {
        "command": command(),
        "date": today(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "dash_attn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if device.type == "cuda":
        query = "name,driver_version,clocks.sm,clocks.max.sm,power.limit"
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        facts |= {"gpu": _smi(query), "cudnn": cudnn}
    else:
        facts["threads"] = torch.get_num_threads()
    return facts | {name: _version(name) for name in PACKAGES}


def today() -> str:
    return time.strftime("%Y-%m-%d")


def command() -> str:
    """The command line of this process, as a user would type it."""
    program = Path(sys.argv[0])
    name = "python -m dash_attn" if program.name == "__main__.py" else program.name
    return " ".join([name, *sys.argv[1:]])


def gpu_now(device: torch.device) -> str | None:
    """Clock, power and temperature at this moment: called right after a load."""
    return _smi("clocks.sm,power.draw,temperature.gpu") if device.type == "cuda" else None


def shape_of(problem: Problem) -> dict[str, Any]:
    names = ("batch", "heads_q", "heads_kv", "len_q", "len_k", "dim", "dtype")
    shape = {name: getattr(problem, name) for name in names} | {"mask": str(problem.mask)}
    return shape if problem.features == PLAIN else shape | {"features": str(problem.features)}


def continued(earlier: Result, result: Result) -> dict[str, Any]:
    """A result that begins with the rows of an earlier run of the same suite on the same machine and versions."""
    if earlier["suite"] != result["suite"]:
        raise ValueError(f"--add: the file holds suite {earlier['suite']}, this run is suite {result['suite']}")
    environment = earlier["environment"]
    joint = joined(environment, result["environment"])
    return {**result, "environment": joint, "rows": dated(earlier["rows"], environment)}


def joined(before: Environment, now: Environment) -> Environment:
    """The environment of a file with an earlier run and this one. The machine and the versions must be the same. The
    date is that of the last run: rows have their own."""
    for name in SAME:
        if before.get(name) != now.get(name):
            raise ValueError(f"--add: {name} was {before.get(name)} in the file and is {now.get(name)} in this run")
    commands = dict.fromkeys([*before["command"].splitlines(), now["command"]])
    return {**before, **now, "command": "\n".join(commands)}


def put(row: ResultRow, rows: list[ResultRow]) -> None:
    """Add a row of today, in the place of the row of the same case if there is one."""
    at = next((i for i, old in enumerate(rows) if old["cell"] == row["cell"]), len(rows))
    rows[at : at + 1] = [{**row, "date": today()}]


def write_json(value: Mapping[str, object], path: Path) -> None:
    """Replace the file in one step, so that a run that is cut off leaves a whole file."""
    path, text = path.resolve(), to_json(value, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _smi(query: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
