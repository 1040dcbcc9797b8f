"""`dash-attn doctor`: this machine, what runs on it, whether it repeats bit for bit, and why a run may still differ."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from dash_attn import __version__
from dash_attn.api import attention, backward, explain
from dash_attn.backends import backend_for
from dash_attn.backends.sm90.cache import folder
from dash_attn.tools.cli.reasons import Finding, reasons
from dash_attn.tools.cli.tables import console, working

COLORS = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
MOST_REPEATS = 200
# What the self-test runs: head dim and arguments of attention.
CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "causal": (64, {"causal": True}),
    "full": (128, {}),
    "window": (64, {"window": (200, 0)}),
    "documents": (64, {"causal": True, "cu_seqlens": [0, 300, 301, 1000]}),
}


def run_doctor(seconds: float) -> dict[str, list[Finding]]:
    """Everything, by topic."""
    device = usable_device()
    with working("looking around"):
        found = {"environment": list(environment()), "what runs": list(what_runs(device))}
    with working("self-test: the same gradients again and again"):
        found["self-test"] = list(self_test(device, seconds))
    return {**found, "why a run may still differ": reasons()}


def failed(found: dict[str, list[Finding]]) -> bool:
    return any(finding.status == "fail" for findings in found.values() for finding in findings)


def as_rows(found: dict[str, list[Finding]]) -> dict[str, Any]:
    return {"ok": not failed(found), **{topic: [asdict(x) for x in findings] for topic, findings in found.items()}}


def show(found: dict[str, list[Finding]]) -> None:
    screen = console()
    for topic, findings in found.items():
        table = Table(title=topic, title_justify="left", header_style="bold", show_header=False)
        for _ in range(4):
            table.add_column()
        for x in findings:
            table.add_row(f"[{COLORS[x.status]}]{x.status}[/]", *map(escape, (x.name, x.found, x.advice)))
        screen.print(table)
    if failed(found):
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
    yield package("numba", "without it planning is slow", "info")
    on_gpu = "info" if not torch.cuda.is_available() else "warn"
    yield package("nvidia-cutlass-dsl", "the kernel compiler, for Hopper GPUs: pip install 'dash-attn[cuda]'", on_gpu)
    yield package("apache-tvm-ffi", "its tensor bridge: pip install 'dash-attn[cuda]'", on_gpu)
    yield package("flash-attn-4", "the fastest forward on Hopper GPUs: pip install 'dash-attn[cuda]'", "info")
    yield package("transformers", "for attn_implementation='dash': pip install 'dash-attn[hf]'", "info")


def gpu(index: int) -> Finding:
    facts = torch.cuda.get_device_properties(index)
    found = (
        f"{facts.name}, compute capability {facts.major}.{facts.minor}, {facts.multi_processor_count} SMs, "
        f"{facts.total_memory / 2**30:.0f} GiB"
    )
    try:
        backend_for(torch.device("cuda", index))
    except NotImplementedError as error:
        return Finding(f"GPU {index}", "warn", found, str(error))
    return Finding(f"GPU {index}", "ok", found)


def package(name: str, meaning: str, status: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, status, "not installed", meaning)


def what_runs(device: torch.device) -> Iterator[Finding]:
    q, k, v, _ = tensors(64, device, packed=False)
    try:
        said = explain(q, k, v, causal=True)
    except (ValueError, NotImplementedError) as error:
        yield Finding("attention", "fail", f"cannot run on {device}", str(error))
        return
    for name in ("backend", "forward", "tile", "policy", "deterministic", "software", "identity"):
        yield Finding(name, "ok", str(getattr(said, name)))
    path = folder()
    parent = next(each for each in (path, *path.parents) if each.exists())
    kept = len(list(path.glob("*.o"))) if path.is_dir() else 0
    if writable(parent):
        yield Finding("kernel cache", "ok", f"{path}, {kept} kernels")
    else:
        yield Finding("kernel cache", "warn", f"{path} cannot be written", "DASH_ATTN_CACHE_DIR names another folder")


def writable(path: Path) -> bool:
    return os.access(path, os.W_OK | os.X_OK)


# ---- self-test ---------------------------------------------------------------------------------------------


def self_test(device: torch.device, seconds: float) -> Iterator[Finding]:
    """Gradients again and again: with other numbers of threads and late contributions on the CPU, other numbers of SMs
    on a GPU. Time to compile and to plan is not counted in `seconds`."""
    for name, (dim, how) in CALLS.items():
        again = (on_gpu if device.type == "cuda" else on_cpu)(dim, how)
        yield repeats(f"{name}, head dim {dim}", again, seconds / (len(CALLS) + 1))
    yield control(device, seconds / (len(CALLS) + 1))


Run = Callable[[int], tuple[torch.Tensor, ...]]


def repeats(name: str, run: Run, seconds: float) -> Finding:
    """Bitwise, until time is up: at least three runs."""
    try:
        first = run(0)
        deadline, count = time.perf_counter() + seconds, 0
        while count < 3 or (count < MOST_REPEATS and time.perf_counter() < deadline):
            count += 1
            for what, x, y in zip(("out", "dq", "dk", "dv"), run(count), first, strict=True):
                if not torch.equal(x, y):
                    where = (x != y).nonzero()[0].tolist()
                    found = f"run {count} of {what} differs, first at {where}, by up to {(x - y).abs().max():.1e}"
                    return Finding(name, "fail", found, "this is a bug: please report it with this output")
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return Finding(name, "fail", f"{type(error).__name__}: {error}")
    return Finding(name, "ok", f"{count + 1} runs, the same bits")


def tensors(dim: int, device: torch.device, packed: bool) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    batch = () if packed else (1 if device.type == "cpu" else 4,)
    shapes = [(*batch, 1000, heads, dim) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def on_cpu(dim: int, how: dict[str, Any]) -> Run:
    q, k, v, dout = tensors(dim, torch.device("cpu"), packed="cu_seqlens" in how)
    most = torch.get_num_threads()

    def run(number: int) -> tuple[torch.Tensor, ...]:
        torch.set_num_threads(1 + (most - 1 + number) % (most + 2))  # all to begin with, then more, one, two, ...
        try:
            return gradients(q, k, v, dout, how)
        finally:
            torch.set_num_threads(most)

    return run


def on_gpu(dim: int, how: dict[str, Any]) -> Run:
    q, k, v, dout = tensors(dim, torch.device("cuda"), packed="cu_seqlens" in how)
    said = explain(q, k, v, **how)
    spare = said.workers - said.co_resident
    return lambda number: gradients(q, k, v, dout, how, sm_margin=min(4 * (number % 5), spare))


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, how: dict[str, Any], **others: Any
) -> tuple[torch.Tensor, ...]:
    out, lse = attention(q, k, v, return_lse=True, **how)
    how = {"cu_seqlens_q" if name == "cu_seqlens" else name: value for name, value in how.items()}
    return out, *backward(dout, q, k, v, out, lse, **{"deterministic": True, **how, **others})


def control(device: torch.device, seconds: float) -> Finding:
    """Sums in the order of arrival must differ, or equal bits would show nothing."""
    name = "control: order of arrival"
    runs = unordered_on_gpu() if device.type == "cuda" else unordered_on_cpu()
    first, deadline = next(runs), time.perf_counter() + seconds
    for count, run in enumerate(runs, 2):
        if not all(torch.equal(x, y) for x, y in zip(run, first, strict=True)):
            return Finding(name, "ok", f"run {count} differs from the first, as it should")
        if time.perf_counter() > deadline:
            break
    return Finding(name, "info", f"{count} runs agreed by chance", "run again: it shows what the order is good for")


def unordered_on_gpu() -> Iterator[tuple[torch.Tensor, ...]]:
    q, k, v, dout = tensors(64, torch.device("cuda"), packed=False)
    for _ in range(MOST_REPEATS):
        yield gradients(q, k, v, dout, {}, deterministic=False)


def unordered_on_cpu() -> Iterator[tuple[torch.Tensor, ...]]:
    """The CPU backend always keeps the order: its insides can be asked not to."""
    from dash_attn.backends import Operands, cpu
    from dash_attn.plan import placement, plan
    from dash_attn.problem import Problem
    from dash_attn.tiling import TileShape

    q, k, v, dout = tensors(64, torch.device("cpu"), packed=False)
    problem = Problem(1, 4, 2, 1000, 1000, 64, "float32")
    planned = plan(problem, TileShape(128, 128), "fa3")
    operands = Operands(dout, q, k, v, *cpu.forward(problem, q, k, v))
    for _ in range(MOST_REPEATS):
        yield cpu.backward(
            problem, planned.program, placement(planned, 8), operands, threads=4, order="any", jitter=1e-3
        )
