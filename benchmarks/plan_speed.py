"""How fast planning is: a document layout never seen before, from cu_seqlens to the tables of a kernel.

python benchmarks/plan_speed.py [--repeats 60] [--documents 64] [--tokens 32768]

The columns are: the problem, its tables where every template is known, and the making of one template. The host time of
a call whose problem was seen before is measured by `dash-attn bench --suite host`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch

from dash_attn.backends.sm90.backend import Sm90Backend
from dash_attn.pack import assemble
from dash_attn.pack.templates import Family, Templates
from dash_attn.plan import plan
from dash_attn.problem import Problem, SequenceColumn, documents

HEADS = (32, 8)
BACKEND = Sm90Backend(torch.device("cuda"))  # asked for its tile only, so no GPU is needed


def layout(rng: np.random.Generator, count: int, tokens: int) -> list[int]:
    return [0, *np.sort(rng.choice(np.arange(1, tokens), count - 1, replace=False)).tolist(), tokens]


def problem_of(cu: list[int], dim: int, causal: bool) -> Problem:
    return Problem(1, *HEADS, cu[-1], cu[-1], dim, mask=documents(cu, causal=causal))


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def times(cu: list[int], dim: int, causal: bool) -> tuple[float, float, float]:
    """Seconds of the problem, of its tables, and of one template, on average."""
    problem = problem_of(cu, dim, causal)
    shape = BACKEND.tile_shape(problem)
    assemble(problem, shape)
    family = Family.of(problem, shape, "auto")
    table = problem.sequence_table
    lengths = table[:, SequenceColumn.LEN_Q], table[:, SequenceColumn.LEN_K]
    codes = sorted(set(family.codes(*lengths).tolist()))
    plan.cache_clear()
    made = seconds(lambda: [Templates(family)._make(code) for code in codes]) / len(codes)
    again = problem_of(cu, dim, causal)
    return seconds(lambda: problem_of(cu, dim, causal)), seconds(lambda: assemble(again, shape)), made


def planning(arguments: argparse.Namespace) -> None:
    rng = np.random.default_rng()
    print(f"new layout, {arguments.documents} documents, {arguments.tokens} tokens, heads {HEADS}, ms")
    if find_spec("numba") is None:
        print("numba is not installed: loops over the tables run as plain Python")
    print(f"{'':<22}{'problem':>9}{'tables':>9}{'p20':>7}{'p80':>7}{'template':>10}")
    for dim, causal in ((128, True), (128, False), (64, True), (64, False)):
        every = [
            times(layout(rng, arguments.documents, arguments.tokens), dim, causal) for _ in range(arguments.repeats + 3)
        ][3:]
        problem, tables, template = 1e3 * np.median(every, 0)
        low, high = 1e3 * np.quantile([each[1] for each in every], (0.2, 0.8))
        title = f"head dim {dim:>3} {'causal' if causal else 'full'}"
        print(f"{title:<22}{problem:9.2f}{tables:9.2f}{low:7.2f}{high:7.2f}{template:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32768)
    planning(parser.parse_args())


if __name__ == "__main__":
    main()
