"""dash-attn bench: which cases of a suite are measured, how, and where the result goes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from dash_attn.order import POLICIES, parse
from dash_attn.problem import CAUSAL, Problem
from dash_attn.tools.cli.app import Json, command, earlier_value, emit, wrote
from dash_attn.tools.cli.shapes import ShapeOptions
from dash_attn.tools.cli.workload import POLICY, SEVERAL, parse_names

if TYPE_CHECKING:
    import torch

    from dash_attn.tools.bench.cases import BenchCase, Model
    from dash_attn.tools.bench.measure import Settings
    from dash_attn.tools.bench.suites import Suite

SUITE_NAMES = "grid, grid_close, grid_ours, models, price, length, few, packed, padded, block, deviation, step, host"


@dataclass(frozen=True)
class SuiteOptions:
    """What is measured, and beside whom."""

    suite: Annotated[str, Option("--suite", help=f"what to measure: {SUITE_NAMES} or all")] = "grid"
    quick: Annotated[bool, Option("--quick", help="run fewer cases, peers and rounds")] = False
    cpu: Annotated[bool, Option("--cpu", help="run tiny cases on the CPU, to show that the harness works")] = False
    deterministic: Annotated[bool, Option("--deterministic", help="run only variants that promise equal bits")] = False
    peers: Annotated[
        str | None,
        Option("--peers", help="all, none, or names separated by commas: fa4,fa4_det [default: the suite's]"),
    ] = None
    policy: Annotated[str | None, Option("--policy", help=f"{POLICY}{SEVERAL} [default: the suite's]")] = None
    unordered: Annotated[
        bool | None, Option("--any/--no-any", help="run ours without an order too, as the control")
    ] = None

    def given(self) -> list[str]:
        """The options about variants that were given. Not every suite takes each of them."""
        values = {"--peers": self.peers, "--policy": self.policy, "--any": self.unordered or None}
        values["--deterministic"] = self.deterministic or None
        return [name for name, value in values.items() if value is not None]


@dataclass(frozen=True)
class EffortOptions:
    """How long is measured, and with which kernels."""

    rounds: Annotated[int | None, Option("--rounds", help="samples of each variant [default: the suite's]")] = None
    budget_ms: Annotated[
        float | None, Option("--budget-ms", help="time of each variant, in milliseconds [default: the suite's]")
    ] = None
    lead_ms: Annotated[
        float | None,
        Option("--lead-ms", help="untimed calls before each sample, in milliseconds [default: the suite's]"),
    ] = None
    config: Annotated[
        list[str] | None,
        Option("--config", metavar="JSON", help="JSON of kernel config fields to change; repeat it for several"),
    ] = None

    def given(self) -> list[str]:
        """The options that were given."""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]

    def check(self) -> None:
        for name, given, least in (
            ("rounds", self.rounds, 1),
            ("budget-ms", self.budget_ms, 0.1),
            ("lead-ms", self.lead_ms, 0.1),
        ):
            if given is not None and not least <= given < math.inf:
                raise ValueError(f"--{name} must be a number from {least}, got {given}")

    def configs(self) -> tuple[dict[str, Any], ...]:
        return tuple(map(json_object, self.config or ["{}"]))


@dataclass(frozen=True)
class ResultOptions:
    """Where the result goes."""

    out: Annotated[
        Path | None, Option("--out", help="file.json, or a folder [default: benchmarks/results, with --cpu nowhere]")
    ] = None
    add: Annotated[bool, Option("--add", help="keep the rows of --out that this run does not measure")] = False

    def path(self, suite: SuiteOptions, name: str, device: torch.device) -> Path | None:
        if self.out is None and suite.cpu:
            return None
        if self.out is not None and self.out.suffix == ".json":
            if suite.suite == "all":
                raise ValueError(f"--out {self.out}: --suite all writes a file for each suite, give a folder")
            return self.out
        import torch

        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        kind = re.sub(r"[^a-z0-9]+", "_", kind.lower().removeprefix("nvidia").strip())
        return (self.out or Path("benchmarks/results")) / f"{name}_{kind}.json"


@command("bench")
def bench(
    suite: SuiteOptions, shape: ShapeOptions, effort: EffortOptions, result: ResultOptions, as_json: Json = False
) -> None:
    """Time the backward beside its peers, check it against float64, print tables.

    A suite is a list of cases. --seqlen, --head-dim and --mask choose among them. Together with --heads they make new
    cases. The exit status is 1 if gradients are wrong or a deterministic variant does not repeat.
    """
    from dash_attn.tools.bench import cases
    from dash_attn.tools.bench.suites import SUITES, require_taken, run_suite, shown

    effort.check()
    if suite.suite not in (*SUITES, "all"):
        raise ValueError(f"--suite {suite.suite!r}: choose from {', '.join(SUITES)}, all")
    require_taken(suite.suite, [*suite.given(), *effort.given()])
    names = list(SUITES) if suite.suite == "all" else [suite.suite]
    device = device_of(suite)
    results = []
    for name in names:
        chosen, settings = cases_of(suite, shape, name), settings_of(suite, effort, SUITES[name], device)
        path = result.path(suite, name, device)
        models = (tiny_block(),) if suite.cpu else cases.MODELS
        results.append(run_suite(name, chosen, settings, path, models, earlier_value(path, result.add)))
        if not as_json:
            typer.echo(shown(results[-1]) + "\n")
            wrote([path])
    if as_json:
        emit(results)
    if any(row["failed"] for measured in results for row in measured["rows"]):
        raise typer.Exit(1)


def tiny_block() -> Model:
    """A block that takes a second on a CPU: it tries the harness where there is no GPU."""
    from dash_attn.tools.bench.cases import Model

    return Model("tiny", 64, 2, 1, 32, 128, CAUSAL, lengths=(128,))


def cases_of(suite: SuiteOptions, shape: ShapeOptions, name: str) -> list[BenchCase]:
    """Cases of the given shape if heads are given, else the cases of the suite that match the options."""
    from dash_attn.tools.bench import cases
    from dash_attn.tools.bench.suites import SUITES

    if shape.heads is not None:
        if name in ("block", "step"):
            raise ValueError(f"--heads: a {name} has heads of its own")
        like = Problem(1, 1, 1, 4096, 4096, 128, "float32" if suite.cpu else "bfloat16")
        return [cases.BenchCase(*named) for named in shape.problems(like)]
    if alone := {"--batch", "--kv-heads", "--dtype"} & set(shape.given()):
        raise ValueError(f"{', '.join(sorted(alone))}: a suite has its own shapes; give --heads too to pose others")
    if suite.cpu and name != "host":
        some = tiny_block().cases() if name == "block" else SUITES[name].tiny()
        some = [replace(case, problem=replace(case.problem, dtype="float32")) for case in some]
    else:
        some = SUITES[name].quick() if suite.quick else SUITES[name].cases()
    some = [
        case
        for case in some
        if (shape.mask is None or case.kind in shape.masks())
        and case.problem.dim in (shape.dims() or (case.problem.dim,))
        and case.problem.len_q in (shape.lengths() or (case.problem.len_q,))
    ]
    if not some:
        raise ValueError(f"no case of suite {name} has this --seqlen, --head-dim and --mask; --heads poses others")
    return some


def settings_of(suite: SuiteOptions, effort: EffortOptions, usual: Suite, device: torch.device) -> Settings:
    """The suite's own settings, and what the options say instead."""
    from dash_attn.tools.bench.measure import Settings
    from dash_attn.tools.bench.ours import Ours
    from dash_attn.tools.bench.peers import PEERS, peer
    from dash_attn.tools.bench.suites import QUICK
    from dash_attn.tools.bench.timing import Timing

    peers = tuple(name for name in usual.peers if not suite.quick or name in usual.quick_peers)
    if suite.peers is not None:
        words = parse_names("--peers", suite.peers)
        peers = tuple(PEERS) if words == ("all",) else tuple(peer(word).name for word in words if word != "none")
    policies = parse_names("--policy", suite.policy) or (("auto",) if suite.quick else usual.policies)
    for policy in policies:
        if parse(policy).policy not in ("auto", *POLICIES):
            raise ValueError(f"--policy {policy!r}: choose from auto, {', '.join(POLICIES)}")
    unordered = usual.unordered if suite.unordered is None else suite.unordered
    ours = Ours(policies, unordered, effort.configs(), usual.panels)
    time = QUICK if suite.quick else usual.effort
    how = (effort.rounds or time.rounds, effort.budget_ms or time.budget_ms, effort.lead_ms or time.lead_ms)
    return Settings(Timing(device, *how), ours, peers, suite.deterministic)


def device_of(suite: SuiteOptions) -> torch.device:
    """The CPU, or a GPU on which ours runs: beside peers alone there is nothing to compare."""
    import torch

    from dash_attn.backends import backend_for

    if suite.cpu:
        return torch.device("cpu")
    way_out = "throughput is measured on Hopper GPUs; --cpu runs a tiny case on the CPU"
    if not torch.cuda.is_available():
        raise ValueError(f"no CUDA GPU here: {way_out}")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        backend_for(device)
    except NotImplementedError as error:
        raise ValueError(f"{way_out} ({error})") from None
    return device


def json_object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--config {text!r} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--config {text!r}: expected an object of config fields")
    return fields
