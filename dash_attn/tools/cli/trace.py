"""dash-attn trace: a traced backward as table, page and Perfetto file, over the same program in the model."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Context, Option

from dash_attn.tools.cli.app import Json, command, emit, given_options, reading, wrote
from dash_attn.tools.cli.tables import console, working
from dash_attn.tools.cli.workload import PolicyOption, ProblemOptions

if TYPE_CHECKING:
    from dash_attn.tools.trace.record import Trace
    from dash_attn.tools.viz.traced import Traced


@dataclass(frozen=True)
class TraceFiles:
    """Files to write of one trace."""

    save: Annotated[Path | None, Option("--save", help="write the events to this file (.npz)")] = None
    html: Annotated[Path | None, Option("--html", help="write an interactive page, measured over simulated")] = None
    perfetto: Annotated[Path | None, Option("--perfetto", help="write a trace for ui.perfetto.dev")] = None

    def keep(self, trace: Trace) -> None:
        from dash_attn.tools.trace.record import save_trace

        if self.save is not None:
            save_trace(trace, self.save)

    def draw(self, trace: Trace, traced: Traced) -> None:
        from dash_attn.tools.viz import perfetto

        if self.html is not None:
            write_page(trace, traced, self.html)
        if self.perfetto is not None:
            perfetto(traced.charts, self.perfetto)


# A traced problem runs on this machine's GPU, so there is no backend to choose.
@command("trace", without=["backend"], seqlen=4096, heads=16, batch=4)
def trace_command(
    context: Context,
    problem: ProblemOptions,
    out: TraceFiles,
    file: Annotated[
        Path | None, Argument(help="events that --save wrote; without them this machine's GPU runs the problem")
    ] = None,
    policy: PolicyOption = "auto",
    as_json: Json = False,
) -> None:
    """Show what the GPU did: every task of one backward in time, SM by SM, with stalls and bubbles summed."""
    trace = traced_here(problem.given(context), policy) if file is None else read(file, context)
    out.keep(trace)  # first of all: a GPU is not always at hand again

    from dash_attn.tools.viz.traced import Traced

    traced = Traced.of(trace)
    facts = facts_of(trace, traced)
    out.draw(trace, traced)
    if as_json:
        emit(facts)
        return
    print_trace(facts)
    wrote(astuple(out))


def read(file: Path, context: Context) -> Trace:
    from dash_attn.tools.trace.record import load_trace

    names = [field.name for field in fields(ProblemOptions)]
    if given := given_options(context, [*names, "policy"]):
        raise ValueError(
            f"{', '.join(given)} beside {file}: the file says which problem and order ran: give one of them"
        )
    with reading([file]):
        return load_trace(file)


def traced_here(problem: ProblemOptions, policy: str) -> Trace:
    """Run the problem on the GPU of this machine."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError(
            "tracing runs the kernel and needs a Hopper GPU, which is not here: run 'dash-attn trace --save "
            "events.npz' on a machine that has one, and give the file to 'dash-attn trace events.npz' on any machine"
        )
    from dash_attn.tools.trace.run import trace_problem

    with working("compiling, running, tracing"):
        return trace_problem(problem.problem(), policy)


def facts_of(trace: Trace, traced: Traced) -> dict[str, Any]:
    return {
        "policy": trace.program.policy,
        "mask": trace.program.mask,
        "tasks": trace.board.num_tasks,
        "workers": len(traced.run.sm),
        "measured_us": traced.run.makespan,
        "simulated_us": traced.simulation.makespan,
        "untraced_us": trace.facts.get("us", {}),
        "same_bits": trace.facts.get("same_bits"),
        "gpu": trace.facts.get("gpu"),
        "shares": {name: share for name, _, share in traced.sums.table()},
        "model": asdict(traced.model),
    }


def write_page(trace: Trace, traced: Traced, path: Path) -> None:
    from dash_attn.simulate import Tickets
    from dash_attn.tools.viz import Section, report

    fitted = ", ".join(f"{name} {value:g}" for name, value in asdict(traced.model).items())
    workers = len(traced.run.sm)
    text = f"{trace.board.num_tasks} tasks on {workers} SMs. The model was fitted to this trace: {fitted}."
    sections = [Section("What the SMs did", text, traced.table()), Section("SM by SM", charts=traced.charts)]
    title = f"{trace.program.policy}, {trace.program.mask}: measured over simulated"
    report(path, sections, title=title, colour="sequence" if isinstance(trace.program, Tickets) else "q")


def print_trace(facts: dict[str, Any]) -> None:
    from dash_attn.tools.trace.measured import WHAT

    untraced = facts["untraced_us"].get("main") or facts["untraced_us"].get("call")
    beside = f", {untraced:.1f} us without tracing" if untraced else ""
    title = (
        f"{facts['policy']}, {facts['mask']}: {facts['measured_us']:.1f} us measured{beside}, "
        f"{facts['simulated_us']:.1f} us simulated with the model of this trace"
    )
    table = Table(title=title, title_justify="left", header_style="bold")
    for name, justify in (("of the SMs' time", "left"), ("share", "right"), ("what", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, share in facts["shares"].items():
        table.add_row(name, f"{share:.1%}", WHAT[name])
    console().print(table)
