"""How fast the host is: planning a document layout never seen before, and a call whose problem has been seen.

python benchmarks/plan_speed.py [--repeats 60] [--documents 64] [--tokens 32768]

Planning goes from cu_seqlens to tables on the device: problem, tiles, order, program, verification, placement on 132
workers, upload. On a Hopper GPU the overhead of a call is the time until dash_attn.backward returns, with the GPU left
to run behind; elsewhere, and there once more, kernels that do nothing stand in: what is left is Python and torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from unittest import mock

import numpy as np
import torch

import dash_attn
from dash_attn.api import calls
from dash_attn.backends.sm90 import backend as hopper
from dash_attn.backends.sm90 import launch
from dash_attn.backends.sm90.cache import Kernels
from dash_attn.launch import enqueue
from dash_attn.order import arrange
from dash_attn.plan import plan
from dash_attn.problem import Problem, documents
from dash_attn.program import build
from dash_attn.tiling import tile
from dash_attn.verify import verify

WORKERS = 132
HEADS = (32, 8)
BURST = 20  # calls timed together: few enough that a GPU's queue never fills


def layout(rng: np.random.Generator, count: int, tokens: int) -> list[int]:
    return [0, *np.sort(rng.choice(np.arange(1, tokens), count - 1, replace=False)).tolist(), tokens]


def problem_of(cu: list[int], dim: int, causal: bool) -> Problem:
    return Problem(1, *HEADS, cu[-1], cu[-1], dim, mask=documents(cu, causal=causal))


def stages(cu: list[int], dim: int, causal: bool, device: torch.device) -> list[float]:
    """Seconds of each stage."""
    times = [time.perf_counter()]

    def done(value: object) -> object:
        times.append(time.perf_counter())
        return value

    problem = done(problem_of(cu, dim, causal))
    tiling = done(tile(problem, hopper.HopperBackend().tile_shape(problem)))
    order = done(arrange(tiling))
    queue = done(enqueue(order))
    program = done(build(order, queue))
    verified = done(verify(program))
    placed = done(verified.on(WORKERS).placement)
    done(launch.DeviceTables.of(program, placed, problem.mask.intervals(problem.len_q, problem.len_k), device))
    return np.diff(times).tolist()


def whole(cu: list[int], dim: int, causal: bool, device: torch.device) -> float:
    """Seconds of all of them as a call makes them. Plans are kept as they are there, tables are not."""
    begin = time.perf_counter()
    problem = problem_of(cu, dim, causal)
    planned = plan(problem, hopper.HopperBackend().tile_shape(problem))
    hopper.tables_of.__wrapped__(planned, hopper.config_of(problem, True), WORKERS, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def planning(arguments: argparse.Namespace, device: torch.device) -> None:
    rng = np.random.default_rng()

    def fresh() -> list[int]:
        return layout(rng, arguments.documents, arguments.tokens)

    print(f"new layout, {arguments.documents} documents, {arguments.tokens} tokens, heads {HEADS}, on {device}, ms")
    if find_spec("numba") is None:
        print("not timed: without numba the loops run as plain Python, a hundred times slower")
        return
    names = ("problem", "tile", "order", "queue", "build", "verify", "place", "upload")
    print(f"{'':<22}" + "".join(f"{name:>9}" for name in names) + f"{'whole':>9}{'p20':>7}{'p80':>7}")
    for dim, causal in ((128, True), (128, False), (64, True), (64, False)):
        for _ in range(3):
            stages(fresh(), dim, causal, device)
        parts = [stages(fresh(), dim, causal, device) for _ in range(arguments.repeats)]
        total = [whole(fresh(), dim, causal, device) for _ in range(arguments.repeats)]
        numbers = 1e3 * np.array([*np.median(parts, 0), *np.quantile(total, (0.5, 0.2, 0.8))])
        title = f"head dim {dim:>3} {'causal' if causal else 'full'}"
        print(f"{title:<22}" + "".join(f"{x:9.2f}" for x in numbers[:9]) + "".join(f"{x:7.2f}" for x in numbers[9:]))


@contextlib.contextmanager
def idle_kernels() -> Iterator[None]:
    """Kernels that do nothing, on any device."""
    nothing = lambda *_: None  # noqa: E731
    with contextlib.ExitStack() as stack:
        replace = lambda where, what, by: stack.enter_context(mock.patch.object(where, what, by))  # noqa: E731
        replace(launch, "kernels", lambda cfg: Kernels(nothing, nothing, nothing))
        replace(launch, "on_default_stream", lambda device: True)
        for module in (launch, hopper):
            replace(module, "resident_workers", lambda device: WORKERS)
        module = importlib.import_module("dash_attn.api.backward")
        replace(module, "backend_for", lambda device: hopper.HopperBackend())
        calls._seen.clear()
        yield
    calls._seen.clear()


def per_call(call: Callable[[], object], device: torch.device, repeats: int) -> np.ndarray:
    """Seconds until a call returns: p20, median, p80 over bursts."""
    found = []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        for _ in range(BURST):
            call()
        found.append((time.perf_counter() - begin) / BURST)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return np.quantile(found[3:], (0.2, 0.5, 0.8))


def overhead(arguments: argparse.Namespace, device: torch.device, kernels: str) -> None:
    print(f"\ndash_attn.backward of a problem seen before, tensors on {device}, {kernels}, us a call")
    # Small, so that no time goes into memory: what the host does is the same for any size.
    q, dout, out = (torch.randn(1, 64, 2, 128, device=device).bfloat16() for _ in range(3))
    k, v = (torch.randn(1, 64, 1, 128, device=device).bfloat16() for _ in range(2))
    batch = (dout, q, k, v, out, torch.randn(1, 2, 64, device=device))
    packed = tuple(x[0] for x in batch)
    cu = list(range(65))
    hosted = torch.tensor(cu, dtype=torch.int32)
    cases: dict[str, Callable[[], object]] = {
        "full": lambda: dash_attn.backward(*batch),
        "causal": lambda: dash_attn.backward(*batch, causal=True),
        "64 documents, list": lambda: dash_attn.backward(*packed, causal=True, cu_seqlens_q=cu),
        "64 documents, CPU tensor": lambda: dash_attn.backward(*packed, causal=True, cu_seqlens_q=hosted),
    }
    if device.type == "cuda":
        there = hosted.to(device)
        cases["64 documents, GPU tensor"] = lambda: dash_attn.backward(*packed, causal=True, cu_seqlens_q=there)
    for name, call in cases.items():
        low, middle, high = 1e6 * per_call(call, device, arguments.repeats)
        print(f"{name:<26}{middle:8.1f}   p20 {low:.1f}   p80 {high:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32768)
    arguments = parser.parse_args()
    hopper_there = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    device = torch.device("cuda", torch.cuda.current_device()) if hopper_there else torch.device("cpu")
    planning(arguments, device)
    if hopper_there:
        overhead(arguments, device, "the kernels launched")
    with idle_kernels():
        overhead(arguments, device, "kernels that do nothing")


if __name__ == "__main__":
    main()
