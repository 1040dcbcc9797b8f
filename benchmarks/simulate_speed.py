"""How fast the simulator is: time per task, whether it stays the same as problems grow, and memory.

python benchmarks/simulate_speed.py [--mask full] [--policy fa3] [--model paper]
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import numpy as np

from dash_attn.launch import compose
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.program import Program
from dash_attn.simulate import Machine, Paper, simulate
from dash_attn.tiling import TileShape, tile

WORKERS = 132
# tokens, heads: 264 thousand, 1 million and 10 million tasks with a causal mask, twice that without
SIZES = ((16 * 1024, 16), (32 * 1024, 16), (64 * 1024, 40))
MASKS = {"causal": CAUSAL, "full": FULL}
MODELS = {"paper": Paper(), "machine": Machine()}


def order(tokens: int, heads: int, mask: str, policy: str) -> Program:
    problem = Problem(1, heads, heads, tokens, tokens, mask=MASKS[mask])
    return compose(tile(problem, TileShape(64, 128)), policy)


def seconds(program: Program, model: str, repeats: int = 3) -> float:
    """Of the fastest run on one core, every event kept; the first run, which may compile, is left out."""
    simulate(program, WORKERS, MODELS[model])
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        simulate(program, WORKERS, MODELS[model])
        times.append(time.perf_counter() - begin)
    return min(times)


def peak_gb() -> float:
    """Most memory this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mask", choices=MASKS, default="causal")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--model", choices=MODELS, default="machine")
    arguments = parser.parse_args()
    print(f"{arguments.mask} mask, 64x128 tiles, {WORKERS} workers, policy {arguments.policy}, {arguments.model} model")
    print(f"{'tasks':>12} {'seconds':>9} {'tasks / s':>12} {'peak GB':>8}")
    tasks, times = [], []
    for tokens, heads in SIZES:
        program = order(tokens, heads, arguments.mask, arguments.policy)
        tasks.append(program.num_tasks)
        times.append(seconds(program, arguments.model))
        print(f"{tasks[-1]:12,} {times[-1]:9.3f} {tasks[-1] / times[-1]:12,.0f} {peak_gb():8.2f}", flush=True)
    slope, offset = np.polyfit(tasks, times, 1)
    off = np.abs(np.polyval([slope, offset], tasks) / times - 1).max()
    print(f"linear fit: {1e9 * slope:.1f} ns a task + {1e3 * offset:.1f} ms, off by at most {off:.0%}")


if __name__ == "__main__":
    main()
