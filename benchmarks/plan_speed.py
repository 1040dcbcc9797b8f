"""How fast planning is: a document layout never seen before, from cu_seqlens to tables on the device.

python benchmarks/plan_speed.py [--repeats 60] [--documents 64] [--tokens 32768]

The stages are problem, tiles, order, queue, program, verification, placement on 132 workers, and upload. The host time
of a call whose problem was seen before is measured by `dash-attn bench --suite host`.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec

import numpy as np
import torch

from dash_attn.backends.sm90.backend import Sm90Backend
from dash_attn.backends.sm90.tables import DeviceTables
from dash_attn.launch import enqueue
from dash_attn.order import arrange
from dash_attn.plan import placement, plan
from dash_attn.problem import Problem, documents
from dash_attn.program import build
from dash_attn.tiling import tile
from dash_attn.verify import verify

WORKERS = 132
HEADS = (32, 8)


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
    tiling = done(tile(problem, Sm90Backend(device).tile_shape(problem)))
    order = done(arrange(tiling))
    queue = done(enqueue(order))
    program = done(build(order, queue))
    verified = done(verify(program))
    placed = done(verified.on(WORKERS).placement)
    done(DeviceTables.of(program, placed, problem.mask.intervals(problem.len_q, problem.len_k), device))
    return np.diff(times).tolist()


def whole(cu: list[int], dim: int, causal: bool, device: torch.device) -> float:
    """Seconds of all stages as a prepared problem runs them. The upload waits for its copy."""
    begin = time.perf_counter()
    problem = problem_of(cu, dim, causal)
    planned = plan(problem, Sm90Backend(device).tile_shape(problem))
    rows = problem.mask.intervals(problem.len_q, problem.len_k)
    DeviceTables.of(planned.program, placement(planned, WORKERS), rows, device)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32768)
    arguments = parser.parse_args()
    there = torch.cuda.is_available()
    planning(arguments, torch.device("cuda", torch.cuda.current_device()) if there else torch.device("cpu"))


if __name__ == "__main__":
    main()
