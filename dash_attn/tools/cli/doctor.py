"""`dash-attn doctor`: this machine, what runs on it, whether it repeats bit for bit, and why a run may still differ."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from dash_attn import __version__
from dash_attn.api.explain import explain
from dash_attn.backends import Operands, Options, backend_for
from dash_attn.backends.sm90.cache import assembler, folder
from dash_attn.backends.sm90.store import SUFFIX, Store, Untrusted
from dash_attn.prepare import Prepared, prepare
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from dash_attn.tools.bench.operands import Drawn, draw
from dash_attn.tools.cli.reasons import Finding, reasons
from dash_attn.tools.cli.tables import console, working

COLORS = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
MOST_REPEATS = 200
JITTER = 1e-3  # seconds by which a contribution may be late on the CPU
# What the self-test runs: head dim and mask.
CALLS: dict[str, tuple[int, Mask]] = {
    "causal": (64, CAUSAL),
    "full": (128, FULL),
    "window": (64, window(200, 0)),
    "documents": (64, documents([0, 300, 301, 1000], causal=True)),
}


def run_doctor(seconds: float) -> dict[str, list[Finding]]:
    """Everything, by topic."""
    device = usable_device()
    with working("looking around"):
        topics = {"environment": list(environment()), "what runs": list(what_runs(device))}
    with working("self-test: the same gradients again and again"):
        topics["self-test"] = list(self_test(device, seconds))
    return {**topics, "why a run may still differ": reasons()}


def failed(topics: dict[str, list[Finding]]) -> bool:
    return any(finding.status == "fail" for findings in topics.values() for finding in findings)


def as_rows(topics: dict[str, list[Finding]]) -> dict[str, Any]:
    return {"ok": not failed(topics), **{topic: [asdict(x) for x in findings] for topic, findings in topics.items()}}


def show(topics: dict[str, list[Finding]]) -> None:
    screen = console()
    for topic, findings in topics.items():
        table = Table(title=topic, title_justify="left", header_style="bold", show_header=False)
        for _ in range(4):
            table.add_column()
        for x in findings:
            table.add_row(f"[{COLORS[x.status]}]{x.status}[/]", *map(escape, (x.name, x.found, x.advice)))
        screen.print(table)
    if failed(topics):
        screen.print("[bold red]The self-test failed: do not trust gradients of this machine with this version.[/]")


# ---- environment -------------------------------------------------------------------------------------------


def usable_device() -> torch.device:
    """The GPU, if there is one that the kernel runs on, else the CPU."""
    if torch.cuda.is_available():
        try:
            backend_for(torch.device("cuda"))
            return torch.device("cuda")
        except NotImplementedError:
            pass  # `environment` says why
    return torch.device("cpu")


def environment() -> Iterator[Finding]:
    yield Finding("dash_attn", "ok", __version__)
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.platform()}")
    yield Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")
    if not torch.cuda.is_available():
        yield Finding("GPU", "info", "none", "everything runs on the CPU")
    for index in range(torch.cuda.device_count()):
        yield gpu(index)
    yield package("numba", "without it packs and the simulator take longer: pip install 'dash-attn[numba]'", "info")
    on_gpu = "info" if not torch.cuda.is_available() else "warn"
    yield package("nvidia-cutlass-dsl", "the kernel compiler, for Hopper GPUs: pip install 'dash-attn[cuda]'", on_gpu)
    if torch.cuda.is_available() and find_spec("cutlass") is not None:
        yield compiler()
    yield package("apache-tvm-ffi", "its tensor bridge: pip install 'dash-attn[cuda]'", on_gpu)
    yield package("flash-attn-4", "the fastest forward on Hopper GPUs: pip install 'dash-attn[cuda]'", "info")
    yield package("transformers", "for attn_implementation='dash': pip install 'dash-attn[hf]'", "info")


def gpu(index: int) -> Finding:
    facts = torch.cuda.get_device_properties(index)
    said = (
        f"{facts.name}, compute capability {facts.major}.{facts.minor}, {facts.multi_processor_count} SMs, "
        f"{facts.total_memory / 2**30:.0f} GiB"
    )
    try:
        backend_for(torch.device("cuda", index))
    except NotImplementedError as error:
        return Finding(f"GPU {index}", "warn", said, str(error))
    return Finding(f"GPU {index}", "ok", said)


def compiler() -> Finding:
    """The CUDA whose assembler the kernel compiler has. Head dim 128 needs the later one to be fast."""
    major, minor = assembler()
    said = f"CUDA {major}.{minor}"
    if major >= 13:
        return Finding("its assembler", "ok", said)
    faster = "kernels of head dim 128 are 8 % faster with CUDA 13's: pip install 'nvidia-cutlass-dsl[cu13]'"
    return Finding("its assembler", "info", said, faster)


def package(name: str, meaning: str, status: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, status, "not installed", meaning)


def what_runs(device: torch.device) -> Iterator[Finding]:
    try:
        said = explain(*draw(problem_on(device, 64, CAUSAL), device)[1:], causal=True)
    except (ValueError, NotImplementedError) as error:
        yield Finding("attention", "fail", f"cannot run on {device}", str(error))
        return
    for name in ("backend", "forward", "tile", "policy", "deterministic", "software", "identity"):
        yield Finding(name, "ok", str(getattr(said, name)))
    try:
        path = Store.at(folder()).folder
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, Untrusted) as error:
        yield Finding("kernel cache", "warn", str(error), "DASH_ATTN_CACHE_DIR names another folder")
    else:
        yield Finding("kernel cache", "ok", f"{path}, {len(list(path.glob(f'*{SUFFIX}')))} kernels")


# ---- self-test ---------------------------------------------------------------------------------------------


Attempt = Callable[[int], tuple[torch.Tensor, ...]]


def self_test(device: torch.device, seconds: float) -> Iterator[Finding]:
    """Gradients again and again: with other numbers of threads and late contributions on the CPU, other numbers of SMs
    on a GPU. Time to compile and to plan is not counted in `seconds`."""
    for name, (dim, mask) in CALLS.items():
        run = changing(problem_on(device, dim, mask), device)
        yield repeats(f"{name}, head dim {dim}", run, seconds / (len(CALLS) + 1))
    yield control(device, seconds / (len(CALLS) + 1))


def repeats(name: str, run: Attempt, seconds: float) -> Finding:
    """Bitwise, until time is up: at least three runs."""
    try:
        first = run(0)
        deadline, count = time.perf_counter() + seconds, 0
        while count < 3 or (count < MOST_REPEATS and time.perf_counter() < deadline):
            count += 1
            for what, x, y in zip(("out", "dq", "dk", "dv"), run(count), first, strict=True):
                if not torch.equal(x, y):
                    where = (x != y).nonzero()[0].tolist()
                    said = f"run {count} of {what} differs, first at {where}, by up to {(x - y).abs().max():.1e}"
                    return Finding(name, "fail", said, "this is a bug: please report it with this output")
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return Finding(name, "fail", f"{type(error).__name__}: {error}")
    return Finding(name, "ok", f"{count + 1} runs, the same bits")


def problem_on(device: torch.device, dim: int, mask: Mask) -> Problem:
    batch, dtype = (1, "float32") if device.type == "cpu" else (4, "bfloat16")
    return Problem(batch, 4, 2, 1000, 1000, dim, dtype, mask=mask)


def changing(problem: Problem, device: torch.device) -> Attempt:
    """Runs that differ in what must not matter."""
    drawn, most = draw(problem, device), torch.get_num_threads()

    def options(number: int) -> Options:
        if device.type == "cpu":  # all threads to begin with, then more, one, two, ...
            late = JITTER if number % 2 else 0.0
            return Options(kernel=(("threads", 1 + (most - 1 + number) % (most + 2)), ("jitter", late)))
        prepared = prepare(problem, "auto", Options(), device)
        backend, planned = prepared.backend, prepared.plan
        spare = backend.workers(planned) - backend.co_resident(planned)
        return Options(sm_margin=min(4 * (number % 5), spare))

    return lambda number: results(prepare(problem, "auto", options(number), device), drawn)


def results(prepared: Prepared, drawn: Drawn) -> tuple[torch.Tensor, ...]:
    """out, dq, dk and dv."""
    out, lse = prepared.forward(*drawn[1:])
    return out, *prepared.backward(Operands(*drawn, out, lse))


def control(device: torch.device, seconds: float) -> Finding:
    """Sums in the order of arrival must differ, or equal bits would show nothing."""
    name = "control: order of arrival"
    runs = unordered(device)
    try:
        first, deadline = next(runs), time.perf_counter() + seconds
        for count, run in enumerate(runs, 2):
            if not all(torch.equal(x, y) for x, y in zip(run, first, strict=True)):
                return Finding(name, "ok", f"run {count} differs from the first, as it should")
            if time.perf_counter() > deadline:
                break
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return Finding(name, "fail", f"{type(error).__name__}: {error}")
    return Finding(name, "info", f"{count} runs agreed by chance", "run again: it shows what the order is good for")


def unordered(device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
    """Runs that add contributions as they come. The CPU keeps the order unless its config says otherwise."""
    problem = problem_on(device, 64, FULL)
    late = (("order", "any"), ("threads", 4), ("jitter", JITTER)) if device.type == "cpu" else ()
    prepared = prepare(problem, "fa3", Options(deterministic=False, kernel=late), device)
    drawn = draw(problem, device)
    for _ in range(MOST_REPEATS):
        yield results(prepared, drawn)
