"""dash-attn: parse, call, print. Bad arguments end with one line on standard error and exit status 2."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from dash_attn import __version__
from dash_attn.order import POLICIES, applicable
from dash_attn.program import load, save
from dash_attn.simulate import Paper, lower_bounds, simulate
from dash_attn.tools.cli.tables import console, fact_table, policy_rows, policy_table, simulation_row, working
from dash_attn.tools.cli.workload import Workload, parse_model
from dash_attn.tools.dag import dag, depth_monotone
from dash_attn.verify import VerifyError, verify

# What typer raises for bad usage; its base class has moved between releases, its name under BadParameter has not.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Deterministic attention for training: schedules as data, verified, simulated, drawn, run.",
)

MaskArg = Annotated[
    str,
    typer.Option(
        "--mask",
        help="full, causal, window:LEFT,RIGHT, documents:LENGTH,..., causal-documents:LENGTH,... in tokens; "
        "without --seqlen the smaller tiles are 2 tokens wide",
    ),
]
QTiles = Annotated[int, typer.Option("--q-tiles", help="q tiles of a head")]
KvTiles = Annotated[int, typer.Option("--kv-tiles", help="kv tiles of a head")]
Heads = Annotated[int, typer.Option("--heads", help="query heads")]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", help="key/value heads, if fewer (GQA)")]
Batch = Annotated[int, typer.Option("--batch", help="sequences")]
Seqlen = Annotated[
    int | None, typer.Option("--seqlen", help="tokens of a sequence: real lengths instead of tile counts")
]
TileArg = Annotated[str, typer.Option("--tile", help="tile shape QUERIESxKEYS, with --seqlen")]
Workers = Annotated[
    int | None, typer.Option("--workers", help="co-resident workers (default: kv tiles, or 132 SMs with --seqlen)")
]
ModelArg = Annotated[
    str, typer.Option("--model", help="paper, machine, or fitted to a GPU: h200, h200:64 (head dim 64)")
]
Compute = Annotated[float | None, typer.Option("--compute", help="time of a task's compute")]
Reduce = Annotated[float | None, typer.Option("--reduce", help="time of a task's reduction")]
PolicyArg = Annotated[
    str, typer.Option("--policy", help=f"auto, {', '.join(POLICIES)}; a window width goes behind ':'")
]
Width = Annotated[int | None, typer.Option("--width", help="window width of shift, symmetric_shift, diagonal, search")]
Json = Annotated[bool, typer.Option("--json", help="one JSON value on standard output")]


def emit(value: Any) -> None:
    """For programs."""
    typer.echo(json.dumps(value))


def workers_of(workload: Workload, workers: int | None) -> int:
    """The paper puts a head on as many workers as it has kv tiles; a real length asks for a real GPU."""
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    return workers or (132 if workload.seqlen is not None else workload.kv_tiles)


@app.command("simulate")
def simulate_command(
    mask: MaskArg = "full",
    policy: PolicyArg = "auto",
    q_tiles: QTiles = 8,
    kv_tiles: KvTiles = 8,
    heads: Heads = 1,
    kv_heads: KvHeads = None,
    batch: Batch = 1,
    seqlen: Seqlen = None,
    tile: TileArg = "64x128",
    width: Width = None,
    workers: Workers = None,
    model: ModelArg = "paper",
    compute: Compute = None,
    reduce: Reduce = None,
    save_to: Annotated[Path | None, typer.Option("--save", help="write the program to a file")] = None,
    gantt: Annotated[Path | None, typer.Option("--gantt", help="draw it: .png or .svg")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="draw it: interactive page")] = None,
    perfetto: Annotated[Path | None, typer.Option("--perfetto", help="trace for ui.perfetto.dev")] = None,
    as_json: Json = False,
) -> None:
    """Run one policy in the model: makespan, lower bound, bubbles, stalls."""
    workload = Workload(mask, q_tiles, kv_tiles, heads, kv_heads, batch, seqlen, tile)
    count, chosen = workers_of(workload, workers), parse_model(model, compute, reduce)
    drawn = any((gantt, html, perfetto))
    with working("planning and simulating"):
        program = workload.program(policy, width)
        placed = verify(program).on(count)
        result = simulate(program, count, chosen, placement=placed.placement, record=drawn)
        row = simulation_row(result, placed.co_resident)
    if save_to is not None:
        save(program, save_to)
    if drawn:
        from dash_attn.tools import viz  # matplotlib takes a second to import

        if gantt is not None:
            viz.gantt(result, gantt)
        if html is not None:
            viz.html([result], html)
        if perfetto is not None:
            viz.perfetto(result, perfetto)
    if as_json:
        emit(row)
    else:
        console().print(fact_table(row, f"{program.policy} on {program.mask}, {result.model.name} model"))
        for path in (save_to, gantt, html, perfetto):
            if path is not None:
                typer.echo(f"wrote {path}")


@app.command()
def compare(
    mask: MaskArg = "causal",
    q_tiles: QTiles = 16,
    kv_tiles: KvTiles = 16,
    heads: Heads = 4,
    kv_heads: KvHeads = None,
    batch: Batch = 1,
    seqlen: Seqlen = None,
    tile: TileArg = "64x128",
    width: Width = None,
    workers: Workers = None,
    model: ModelArg = "paper",
    compute: Compute = None,
    reduce: Reduce = None,
    html: Annotated[Path | None, typer.Option("--html", help="draw all of them: interactive page")] = None,
    as_json: Json = False,
) -> None:
    """Every policy that applies, side by side."""
    workload = Workload(mask, q_tiles, kv_tiles, heads, kv_heads, batch, seqlen, tile)
    count, chosen = workers_of(workload, workers), parse_model(model, compute, reduce)
    with working("planning and simulating every policy"):
        names = applicable(workload.tiling())
        programs = [verify(workload.program(name, width if POLICIES[name].windowed else None)) for name in names]
        rows, results = policy_rows(programs, count, chosen, record=html is not None)
    if html is not None:
        from dash_attn.tools import viz

        viz.html(results, html)
    if as_json:
        emit(rows)
        return
    size = f"{heads} heads, {count} workers, {chosen.name} model"
    console().print(policy_table(rows, f"{workload.tiling().problem.mask} mask, {size}"))
    if html is not None:
        typer.echo(f"wrote {html}")


@app.command("search")
def search_command(
    mask: MaskArg = "causal",
    q_tiles: QTiles = 4,
    kv_tiles: KvTiles = 4,
    heads: Heads = 1,
    workers: Workers = None,
    compute: Annotated[int, typer.Option("--compute", help="whole number")] = 4,
    reduce: Annotated[int, typer.Option("--reduce", help="whole number")] = 1,
    exact: Annotated[
        bool, typer.Option("--exact", help="certify the optimum (small cases; needs dash-attn[search])")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="time limit of the exact solver")] = 30.0,
    save_to: Annotated[Path | None, typer.Option("--save", help="write the best program to a file")] = None,
    as_json: Json = False,
) -> None:
    """Search an order for a mask, and with --exact prove how good it can be."""
    from dash_attn.tools.cli.search import search_rows

    workload = Workload(mask, q_tiles, kv_tiles, heads)
    count = workers_of(workload, workers)
    rows, best = search_rows(workload.tiling(), count, Paper(compute, reduce), seconds if exact else None)
    if save_to is not None:
        save(best, save_to)
    if as_json:
        emit(rows)
        return
    console().print(policy_table(rows, f"{mask} mask, {heads} heads, {count} workers, paper model"))
    for row in rows:
        if "optimal" in row:
            verdict = (
                "is optimal"
                if row["optimal"]
                else f"is within {row['makespan'] / row['proved_bound'] - 1:.1%} of the optimum"
            )
            typer.echo(
                f"{row['policy']}: {row['makespan']:g} {verdict} (proved: no order is below {row['proved_bound']:g})"
            )
    if save_to is not None:
        typer.echo(f"wrote {save_to}")


@app.command("verify")
def verify_command(
    file: Annotated[Path, typer.Argument(help="a program written by --save")],
    workers: Annotated[int | None, typer.Option("--workers", help="co-resident workers it shall run on")] = None,
    as_json: Json = False,
) -> None:
    """Exit 0 if the program may run, 1 with the reason if not."""
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    try:
        with working("verifying"):
            program = load(file)
            verified = verify(program)
            if workers is not None:
                verified.on(workers)
    except ValueError as error:
        tasks = [str(task) for task in error.tasks] if isinstance(error, VerifyError) else []
        if as_json:
            emit({"ok": False, "reason": str(error), "tasks": tasks})
        else:
            typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(1) from None
    facts = {
        "ok": True,
        "policy": program.policy,
        "mask": program.mask,
        "tasks": program.num_tasks,
        "chains": len(program.chains),
        "co_resident": verified.co_resident,
        "fingerprint": program.fingerprint,
    }
    if as_json:
        emit(facts)
    else:
        on = "" if workers is None else f" on {workers} workers"
        typer.echo(f"ok: {program.num_tasks} tasks, needs {verified.co_resident} co-resident workers, may run{on}")


@app.command()
def figures(
    out: Annotated[Path, typer.Option("--out", help="folder to write to")] = Path("figures"),
    as_json: Json = False,
) -> None:
    """Draw the paper's schedule figures from our own programs."""
    from dash_attn.tools import viz

    out.mkdir(parents=True, exist_ok=True)
    with working("drawing"):
        paths = [str(path) for path in viz.figures(out)]
    if as_json:
        emit(paths)
    else:
        typer.echo("\n".join(f"wrote {path}" for path in paths))


@app.command()
def explain(
    mask: MaskArg = "causal",
    policy: PolicyArg = "auto",
    seqlen: Annotated[int, typer.Option("--seqlen", help="tokens of a sequence")] = 4096,
    heads: Heads = 16,
    kv_heads: KvHeads = None,
    batch: Batch = 1,
    tile: TileArg = "64x128",
    width: Width = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """What would run for a problem: tiles, order, fingerprint, co-residency, bounds, critical path."""
    workload = Workload(mask, heads=heads, kv_heads=kv_heads, batch=batch, seqlen=seqlen, tile=tile)
    count = workers_of(workload, workers)
    with working("planning and simulating"):
        program = workload.program(policy, width)
        placed = verify(program).on(count)
        model = parse_model("machine", None, None)
        result = simulate(program, count, model, placement=placed.placement, record=False)
    facts: dict[str, Any] = {
        "policy": program.policy,
        "order": POLICIES[program.policy.partition(":")[0]].summary,
        "mask": program.mask,
        "tile": tile,
        "fingerprint": program.fingerprint,
        "tasks": program.num_tasks,
        "chains": len(program.chains),
        "runs": len(program.runs),
        "program_bytes": program.nbytes,
        "co_resident": placed.co_resident,
        "workers": count,
        "makespan_us": result.makespan,
        "gap": result.gap,
        "lower_bounds_us": lower_bounds(program, count, result.model),
    }
    if program.num_tasks <= 20_000:
        path = dag(program, placed.placement, Paper()).critical_path()
        facts["keeps_critical_path"] = depth_monotone(program)
        facts["critical_path"] = [str(phase) for phase in (path if as_json else [*path[:3], *path[-1:]])]
    if as_json:
        emit(facts)
    else:
        console().print(fact_table(facts, f"{batch} x {seqlen} tokens, {heads} heads"))


# Their options are read by argparse, which also serves machines that have torch and nothing else.
PASSED_ON: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


@app.command(**PASSED_ON)
def bench(context: typer.Context) -> None:
    """Time the backward beside its peers: the paper's figures and tables (bench --help)."""
    from dash_attn.tools.bench.command import main as run

    raise typer.Exit(run(context.args))


@app.command(**PASSED_ON)
def audit(context: typer.Context) -> None:
    """Repeat a backward under stress and compare every bit (audit --help)."""
    from dash_attn.tools.bench.audit.command import main as run

    raise typer.Exit(run(context.args))


@app.command("plot")
def plot_command(
    results: Annotated[list[Path], typer.Argument(help="files written by bench; those of one suite share a picture")],
    out: Annotated[Path, typer.Option("--out", help="folder to write to")] = Path("figures"),
    dark: Annotated[bool, typer.Option("--dark", help="for dark pages")] = False,
    kind: Annotated[str, typer.Option("--format", help="png or svg")] = "png",
    as_json: Json = False,
) -> None:
    """Draw results: throughput, price of determinism, memory, blocks, deviations."""
    from dash_attn.tools.viz.results import plot

    paths = [str(path) for path in plot(results, out, dark=dark, kind=kind)]
    if as_json:
        emit(paths)
    else:
        typer.echo("\n".join(f"wrote {path}" for path in paths))


@app.command()
def paper(
    results: Annotated[list[Path], typer.Argument(help="files written by bench; for --html also traces (.npz)")],
    out: Annotated[Path, typer.Option("--out", help="page to write")] = Path("paper.md"),
    figures: Annotated[Path, typer.Option("--figures", help="folder of its pictures, beside the page")] = Path("bench"),
    html: Annotated[Path | None, typer.Option("--html", help="only one self-contained web page, to this file")] = None,
) -> None:
    """The paper's figures and tables beside measured ones: a page with pictures, light and dark."""
    if html is not None:
        from dash_attn.tools.viz.evidence import evidence

        typer.echo(f"wrote {evidence(results, html)}")
        return
    from dash_attn.tools.bench.paper import page
    from dash_attn.tools.viz.results import gathered, plot

    text = page(gathered(results), figures.as_posix())
    for dark in (False, True):
        plot(results, out.parent / figures, dark=dark)
    out.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {out} and its pictures")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="report to write")] = Path("report.html"),
    quick: Annotated[bool, typer.Option("--quick", help="a smaller problem")] = False,
) -> None:
    """Run attention forward and backward under every policy, check it, and write a report."""
    from dash_attn.tools.cli.demo import run_demo

    run_demo(out, quick)


@app.command()
def doctor(
    seconds: Annotated[float, typer.Option("--seconds", help="time for the self-test")] = 10.0,
    as_json: Json = False,
) -> None:
    """This machine, what runs on it, a bitwise self-test, why a run may still differ. Exit 1 if the test fails."""
    from dash_attn.tools.cli.doctor import as_rows, failed, run_doctor, show

    with redirect_stdout(sys.stderr):  # compilers and libraries may print; standard output is for the answer
        found = run_doctor(seconds)
    if as_json:
        emit(as_rows(found))
    else:
        show(found)
    if failed(found):
        raise typer.Exit(1)


@app.command("trace")
def trace_command(
    file: Annotated[
        Path | None, typer.Argument(help="what python -m dash_attn.tools.trace wrote; without it, trace here")
    ] = None,
    mask: MaskArg = "causal",
    policy: PolicyArg = "auto",
    seqlen: Annotated[int, typer.Option("--seqlen", help="tokens of a sequence")] = 4096,
    heads: Heads = 16,
    kv_heads: KvHeads = None,
    batch: Batch = 4,
    headdim: Annotated[int, typer.Option("--headdim", help="columns of a head")] = 128,
    html: Annotated[Path | None, typer.Option("--html", help="interactive page, measured over simulated")] = None,
    perfetto: Annotated[Path | None, typer.Option("--perfetto", help="trace for ui.perfetto.dev")] = None,
    save_to: Annotated[Path | None, typer.Option("--save", help="keep the events in a file")] = None,
    as_json: Json = False,
) -> None:
    """What the GPU really did: every task of one backward in time, SM by SM, with stalls and bubbles summed."""
    from dash_attn.tools.cli.trace import obtain, print_trace, show_trace

    trace = obtain(file, (batch, heads, kv_heads, seqlen, headdim, mask), policy)
    facts = show_trace(trace, html, perfetto, save_to)
    if as_json:
        emit(facts)
        return
    print_trace(facts)
    for path in (html, perfetto, save_to):
        if path is not None:
            typer.echo(f"wrote {path}")


@app.command("calibrate")
def calibrate_command(
    files: Annotated[list[Path], typer.Argument(help="benchmark results (.json) and traces (.npz) of one GPU")],
    out: Annotated[Path | None, typer.Option("--out", help="write the fitted model, as JSON")] = None,
    as_json: Json = False,
) -> None:
    """Fit the machine model to measured times, and say how well it predicts and ranks."""
    from dash_attn.tools.cli.calibrate import facts_of, print_calibration
    from dash_attn.tools.trace.calibrate import calibrate, read_samples

    with working("fitting"):
        found = calibrate(read_samples(files))
    if out is not None:
        out.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    if as_json:
        emit(facts_of(found))
        return
    print_calibration(found)
    if out is not None:
        typer.echo(f"wrote {out}")


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if version or context.invoked_subcommand is None:
        typer.echo(__version__ if version else context.get_help())
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors are one line, never a traceback."""
    try:
        status = app(args=arguments, prog_name="dash-attn", standalone_mode=False)
    except typer.Exit as done:
        status = done.exit_code
    except (typer.Abort, KeyboardInterrupt):
        status = 130
    except UsageProblem as error:
        status = _fail(error.format_message())  # type: ignore[attr-defined]
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        status = _fail(str(error))
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> int:
    line = " ".join(message.split())
    typer.echo(f"dash-attn: error: {line}", err=True)
    return 2
