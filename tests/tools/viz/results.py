"""Made-up results of every suite, small and complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def us(median: float) -> dict[str, float]:
    return {"median": median, "p20": 0.9 * median, "p80": 1.1 * median}


def row(length: int, mask: str, default: str) -> dict[str, Any]:
    """A case whose peers take 100 (fa4), 120 (fa4 det) and 300 (fa2 det) times `length`, ours 99."""
    times = {"fa4": 100.0, "fa4 det": 120.0, "fa2 det": 300.0, default: 99.0, f"any ({default})": 101.0}
    parts = {"attention forward": 10.0, "attention backward": 40.0, "rest": 40.0}
    deviation = {name: 0.0 if "det" in name or name == default else 1e-4 for name in times}
    return {
        "cell": f"d128 {mask} {length}",
        "shape": {"dim": 128, "mask": mask, "len_q": length, "len_k": length},
        "flops": 1e9 * length,
        "default": default,
        "us": {name: us(length * t) for name, t in times.items()},
        "host_us": {name: us(length * t / 2) for name, t in times.items()},
        "assemble_us": us(300.0),
        "ratio": 1.2,
        "peak_bytes": {name: 1000 * length for name in times},
        "parts": {name: {part: length * t for part, t in parts.items()} for name in times},
        "deviation": {
            name: {"mean": x, "worst": {"dq": x, "dk": 0.0, "dv": 0.0}, "deterministic": x == 0}
            for name, x in deviation.items()
        },
        "missing": {"flex": "not here"},
        "failed": {},
    }


def result(suite: str, **environment: str) -> dict[str, Any]:
    rows = [row(n, mask, d) for n in (1024, 4096) for mask, d in (("full", "shift:64"), ("causal", "fa3"))]
    about = {"device": "Some GPU", "date": "2026-01-01", "command": f"bench {suite}"}
    return {"suite": suite, "environment": about | environment, "rows": rows}


def audit() -> dict[str, Any]:
    entry = {"case": "1x64", "target": "ours", "stressor": "load", "runs": 20, "differing": 0, "status": "same bits"}
    return {"environment": {"device": "Some GPU", "command": "audit"}, "entries": [entry], "ok": True}


def write(path: Path, value: dict[str, Any]) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path
