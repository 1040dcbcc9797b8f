"""A few small backward passes, to be watched by a checker of memory accesses:

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/backends/sm90/sanitize.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from dash_attn.backends import Operands
from dash_attn.problem import CAUSAL, FULL, Problem, documents, window
from dash_attn.tools.bench.operands import draw
from tests.backends.sm90.cases import DEVICE, Case, prepared, room

PROBLEMS = [
    Problem(1, 2, 2, 257, 257, 128, mask=CAUSAL),
    Problem(2, 4, 1, 130, 300, 64, mask=CAUSAL),
    Problem(1, 2, 1, 200, 200, 128, mask=window(50, 3)),
    Problem(1, 2, 2, 300, 300, 64, mask=documents([0, 7, 7, 150, 300], causal=True)),
    Problem(1, 1, 1, 1, 1, 128, mask=FULL),
]


def operands_of(problem: Problem) -> Operands:
    """Any values do: no access depends on them."""
    dout, q, k, v = (x.to(DEVICE) for x in draw(problem, torch.device("cpu")))
    lse = torch.full((problem.batch, problem.heads_q, problem.len_q), 5.0, device=DEVICE)
    return Operands(dout, q, k, v, dout.clone(), lse)


def main() -> None:
    for problem in PROBLEMS:
        finishes = ({}, {"finish": "postpass"}) if problem.mask == CAUSAL else ({},)
        for kernel in finishes:
            operands = operands_of(problem)
            into = Case(problem, operands, room(operands)).run(prepared(problem, **kernel))
            torch.cuda.synchronize()
            assert all(bool(torch.isfinite(g).all()) for g in into), problem
        print(problem, flush=True)


if __name__ == "__main__":
    main()
