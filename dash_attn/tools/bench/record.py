"""Where numbers came from, and where they go: JSON for programs and plots, CSV with a line for each number."""

from __future__ import annotations

import csv
import importlib.metadata
import json
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
from dash_attn.problem import Problem

Row = dict[str, Any]
PACKAGES = ("triton", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-cu13", "numba", "numpy")
SHAPE = ("batch", "heads_q", "heads_kv", "len_q", "len_k", "dim", "mask", "dtype")
TIMES = ("us_median", "us_p20", "us_p80", "tflops")
COLUMNS = ("suite", "cell", "variant", *SHAPE, *TIMES, "peak_bytes", "error", "same_bits", "deviation", "note")


def environment(device: torch.device) -> Row:
    """What a reader needs to know to believe a number."""
    found: Row = {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "dash_attn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if device.type == "cuda":
        query = "name,driver_version,clocks.sm,clocks.max.sm,power.limit"
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        found |= {"gpu": _smi(query), "cudnn": cudnn}
    else:
        found["threads"] = torch.get_num_threads()
    return found | {name: _version(name) for name in PACKAGES}


def command() -> str:
    program = Path(sys.argv[0])
    name = "python -m dash_attn.tools.bench" if program.name == "__main__.py" else program.name
    return " ".join([name, *sys.argv[1:]])


def gpu_now(device: torch.device) -> str | None:
    """Clock, power and temperature at this moment, so right after a load."""
    return _smi("clocks.sm,power.draw,temperature.gpu") if device.type == "cuda" else None


def shape_of(problem: Problem) -> Row:
    names = ("batch", "heads_q", "heads_kv", "len_q", "len_k", "dim", "dtype")
    return {name: getattr(problem, name) for name in names} | {"mask": str(problem.mask)}


def write(result: Mapping[str, Any], path: Path) -> list[Path]:
    """`path` and the same beside it as .csv. Written after every row, so that an interrupted run leaves its rows."""
    write_json(result, path)
    beside = path.with_suffix(".csv")
    with beside.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        lines.writeheader()
        for row in result["rows"]:
            lines.writerows(_lines(str(result.get("suite", "")), row))
    return [path, beside]


def write_json(value: Mapping[str, Any], path: Path) -> None:
    """All of it or what was there before, so that a run that is cut off leaves a whole file."""
    path, text = path.resolve(), json.dumps(value, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a device or a pipe is written to, never replaced
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _lines(suite: str, row: Row) -> list[Row]:
    """A line for each variant of a row, also for those that did not run."""
    notes = row.get("missing", {}) | row.get("failed", {})
    apart = {name: x["mean"] if isinstance(x, dict) else x for name, x in row.get("deviation", {}).items()}
    made = []
    for name in dict.fromkeys([*row.get("us", {}), *apart, *notes]):
        us = row.get("us", {}).get(name)
        line: Row = {"suite": suite, "cell": row["cell"], "variant": name, "note": notes.get(name, "")}
        line |= {key: value for key, value in row.get("shape", {}).items() if key in SHAPE}
        if us is not None:
            line |= {f"us_{key}": f"{us[key]:.3f}" for key in ("median", "p20", "p80")}
            if row.get("flops"):
                line["tflops"] = f"{row['flops'] / us['median'] / 1e6:.1f}"
        line |= {key: row.get(key, {}).get(name, "") for key in ("peak_bytes", "error", "same_bits")}
        line["deviation"] = apart.get(name, "")
        made.append(line)
    return made


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
