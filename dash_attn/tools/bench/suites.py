"""The suites: their cases, peers, orders and number of rounds. One function runs any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dash_attn.tools.bench import cases, packs, record
from dash_attn.tools.bench.block import measure_block
from dash_attn.tools.bench.cases import MODELS, BenchCase, Model
from dash_attn.tools.bench.cases import tiny as tiny_cases
from dash_attn.tools.bench.host import CASES as HOST_CASES
from dash_attn.tools.bench.host import measure_host
from dash_attn.tools.bench.measure import Settings, deviation, measure, release
from dash_attn.tools.bench.progress import steps
from dash_attn.tools.bench.report import Result, summary
from dash_attn.tools.bench.step import measure_step

EVERYONE = ("fa4", "fa4 det", "fa2", "fa2 det", "cudnn", "cudnn det", "flex", "triton two-pass")
FEW = ("fa4", "fa4 det")
OPTIONS = ("--peers", "--policy", "--any", "--deterministic", "--config", "--rounds", "--budget-ms", "--lead-ms")
OF_VARIANTS = OPTIONS[:5]


@dataclass(frozen=True)
class Effort:
    """How long each variant is timed: the samples, the milliseconds of all of them, the milliseconds before each."""

    rounds: int = 15
    budget_ms: float = 100.0
    lead_ms: float = 10.0


QUICK = Effort(5, 25.0)


@dataclass(frozen=True)
class Suite:
    """What a suite measures unless options say otherwise, and the options that it `takes`. `quick` are the cases that
    --quick runs, with those of the peers that `quick_peers` names."""

    title: str
    cases: Callable[[], list[BenchCase]]
    quick: Callable[[], list[BenchCase]]
    peers: tuple[str, ...] = ()
    quick_peers: tuple[str, ...] = FEW
    policies: tuple[str, ...] = ()  # empty: the usual ones of each mask
    unordered: bool = True
    effort: Effort = Effort()
    panels: int = 1  # above 1: ours also runs in this number of panels
    tiny: Callable[[], list[BenchCase]] = tiny_cases  # for machines without a GPU
    takes: tuple[str, ...] = OPTIONS


# FlexAttention takes a quarter of a minute to compile for a shape, so on large grids it runs only if --peers names it.
_GRID_PEERS = tuple(name for name in EVERYONE if name != "flex")
_DEFAULTS = ("auto",)
SUITES: dict[str, Suite] = {
    "grid": Suite(
        "throughput over the paper's grid (its Figures 8 and 9)",
        cases.grid,
        lambda: cases.grid(lengths=(512, 4096, 16384)),
        _GRID_PEERS,
        effort=Effort(lead_ms=20.0),
    ),
    "grid_close": Suite(
        "the grid's contenders by themselves: auto, the paper's orders and level beside FlashAttention-4",
        cases.grid,
        lambda: cases.grid(lengths=(512, 4096, 16384)),
        FEW,
        policies=("auto", "shift:64", "symmetric_shift:64", "level"),
        unordered=False,
        effort=Effort(31, 250.0, 20.0),
    ),
    "grid_ours": Suite(
        "our orders over the grid, without peers",
        cases.grid,
        lambda: cases.grid(lengths=(512, 4096, 16384)),
        unordered=False,
        effort=Effort(lead_ms=20.0),
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
        panels=16,  # as many as context parallel has by default
    ),
    "few": Suite(
        "one sequence with few key/value heads: each query head ordered by itself, and all of a group together",
        cases.few,
        lambda: cases.few()[:4],
        FEW,
        policies=("auto", "auto@group"),
        unordered=False,
    ),
    "packed": Suite(
        "packed documents of different lengths",
        packs.packs,
        lambda: packs.packs()[:3],
        FEW,
        policies=("auto", "auto@group"),
        unordered=False,
        tiny=packs.tiny,
    ),
    "padded": Suite(
        "head dims that the kernel pads to 128",
        cases.padded,
        lambda: cases.padded((96,)),
        FEW,
        policies=_DEFAULTS,
    ),
    "block": Suite(
        "a transformer block, forward and backward (its Figure 10)",
        lambda: [case for model in MODELS for case in model.cases()],
        lambda: [model.cases()[0] for model in MODELS],
        policies=_DEFAULTS,
        takes=("--policy", "--config", "--rounds"),
    ),
    "deviation": Suite(
        "deviation of identical backward passes (its Table 1)",
        lambda: cases.grid(lengths=(4096, 16384)),
        lambda: cases.grid((128,), (16384,)),
        EVERYONE,
        _GRID_PEERS,
        policies=_DEFAULTS,
        takes=OF_VARIANTS,
    ),
    "step": Suite(
        "a training step: 16 layers of attention, forward and backward, with a new packing in every step",
        packs.steps,
        lambda: packs.steps()[:1],
        FEW,
        effort=Effort(31),
        tiny=packs.tiny,
        takes=("--peers", "--deterministic", "--rounds"),
    ),
    "host": Suite(
        "host time of a small problem seen before",
        lambda: list(HOST_CASES),
        lambda: list(HOST_CASES[:1]),
        takes=(),
    ),
}


def require_taken(suite: str, options: Sequence[str]) -> None:
    """ValueError if the suite does not take one of these options. Of `all` each suite gets those that it takes."""
    if suite == "all":
        return
    takes = SUITES[suite].takes
    if others := [option for option in options if option not in takes]:
        raise ValueError(f"{', '.join(others)}: suite {suite} takes {', '.join(takes) or 'none of these'}")


def run_suite(
    name: str,
    chosen: Sequence[BenchCase],
    settings: Settings,
    out: Path | None = None,
    models: Sequence[Model] = MODELS,
    earlier: Result | None = None,
) -> dict[str, Any]:
    """Measure every case. The result is also written to `out` after each case, so an interrupted run leaves its rows.
    It keeps the rows of an `earlier` run whose cases are not measured again."""
    device = settings.timing.device
    result: dict[str, Any] = {"environment": record.environment(device), "suite": name, "rows": []}
    if earlier is not None:
        result = record.continued(earlier, result)
    by_name = {case.name: model for model in models for case in model.cases()}
    for case in steps(chosen, name):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if name == "block":
                dtype = getattr(torch, case.problem.dtype)
                row = measure_block(by_name[case.name], case, settings, dtype)
            elif name == "step":
                row = measure_step(case, settings)
            elif name == "host":
                (row,) = measure_host(device, [case])
            else:
                row = (deviation if name == "deviation" else measure)(case, settings)
        release(device)
        record.put(row, result["rows"])
        if out is not None:
            record.write_json(result, out)
    return result


def shown(result: Result) -> str:
    """The suite's title, the environment in a line, the tables."""
    env = result["environment"]
    where = ", ".join(str(env[key]) for key in ("device", "torch", "cuda") if env.get(key))
    return f"{SUITES[result['suite']].title}\n{where}\n\n{summary(result)}"
