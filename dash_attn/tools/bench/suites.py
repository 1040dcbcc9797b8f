"""Suites: which cases, beside whom, how long. One function runs any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dash_attn.tools.bench import cases, record
from dash_attn.tools.bench.block import measure_block
from dash_attn.tools.bench.cases import MODELS, Case, Model
from dash_attn.tools.bench.host import CASES as HOST_CASES
from dash_attn.tools.bench.host import measure_host
from dash_attn.tools.bench.measure import Settings, deviation, measure, release
from dash_attn.tools.bench.progress import steps
from dash_attn.tools.bench.report import summary

EVERYONE = ("fa4", "fa4 det", "fa2", "fa2 det", "cudnn", "cudnn det", "flex", "triton two-pass")
FEW = ("fa4", "fa4 det")


@dataclass(frozen=True)
class Suite:
    """`peers` and `policies` are the defaults; what --quick leaves out is named in the command's help."""

    title: str
    cases: Callable[[], list[Case]]
    quick: Callable[[], list[Case]]
    peers: tuple[str, ...]
    quick_peers: tuple[str, ...] = FEW
    policies: tuple[str, ...] = ()  # empty: the usual ones of each mask
    unordered: bool = True


# FlexAttention compiles for every shape, a quarter of a minute each: on the large grids it is left to --peers.
_GRID_PEERS = tuple(name for name in EVERYONE if name != "flex")
_DEFAULTS = ("auto",)
SUITES: dict[str, Suite] = {
    "grid": Suite(
        "throughput over the paper's grid (its Figures 8 and 9)",
        cases.grid,
        lambda: cases.grid(lengths=(512, 4096, 16384)),
        _GRID_PEERS,
    ),
    "models": Suite(
        "attention's backward at the dimensions of known models",
        cases.models,
        lambda: [case for case in cases.models() if case.problem.len_q <= 8192],
        _GRID_PEERS,
        policies=_DEFAULTS,
    ),
    "price": Suite(
        "the price of determinism by mask and head dim (its Figure 1)",
        lambda: cases.grid(lengths=(512, 2048, 8192, 16384)),
        lambda: cases.grid(lengths=(2048, 16384)),
        ("fa4", "fa4 det", "fa2", "fa2 det"),
        policies=_DEFAULTS,
    ),
    "length": Suite(
        "cost against length, up to 128k tokens",
        cases.lengths,
        lambda: cases.lengths(32768),
        ("fa4", "fa4 det", "fa2 det", "cudnn", "triton two-pass"),
        policies=_DEFAULTS,
        unordered=False,
    ),
    "block": Suite(
        "a transformer block, forward and backward (its Figure 10)",
        lambda: [case for model in MODELS for case in model.cases()],
        lambda: [model.cases()[0] for model in MODELS],
        FEW,
        policies=_DEFAULTS,
        unordered=False,
    ),
    "deviation": Suite(
        "deviation of identical backward passes (its Table 1)",
        lambda: cases.grid(lengths=(4096, 16384)),
        lambda: cases.grid((128,), (16384,)),
        EVERYONE,
        _GRID_PEERS,
        policies=_DEFAULTS,
    ),
    "host": Suite(
        "host time of a small problem seen before",
        lambda: list(HOST_CASES),
        lambda: list(HOST_CASES[:1]),
        ("fa4 det",),
    ),
}


def run_suite(
    name: str,
    chosen: Sequence[Case],
    settings: Settings,
    out: Path | None = None,
    models: Sequence[Model] = MODELS,
) -> dict[str, Any]:
    """Measure every case; the result, also written to `out` after each of them."""
    device = settings.timing.device
    result: dict[str, Any] = {"environment": record.environment(device), "suite": name, "rows": []}
    by_name = {case.name: model for model in models for case in model.cases()}
    for case in steps(chosen, name):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if name == "block":
                dtype = getattr(torch, case.problem.dtype)
                row = measure_block(by_name[case.name], case, settings, dtype)
            elif name == "host":
                (row,) = measure_host(device, [case])
            else:
                row = (deviation if name == "deviation" else measure)(case, settings)
        release(device)
        result["rows"].append(row)
        if out is not None:
            record.write(result, out)
    return result


def shown(result: dict[str, Any]) -> str:
    """Title, environment in a line, tables."""
    env = result["environment"]
    title = SUITES[result["suite"]].title if result["suite"] in SUITES else result["suite"]
    where = ", ".join(str(env[key]) for key in ("device", "torch", "cuda") if env.get(key))
    return f"{title}\n{where}\n\n{summary(result)}"
