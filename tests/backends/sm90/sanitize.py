"""A few small backward passes, to be watched by a checker of memory accesses:

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/backends/sm90/sanitize.py
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from dash_attn.backends.sm90.launch import Grads, Inputs, Workspace, backward
from dash_attn.problem import CAUSAL, FULL, Problem, documents, window
from tests.backends.sm90.cases import DEVICE, config_of, poison, sms, tables_of

PROBLEMS = [
    Problem(1, 2, 2, 257, 257, 128, mask=CAUSAL),
    Problem(2, 4, 1, 130, 300, 64, mask=CAUSAL),
    Problem(1, 2, 1, 200, 200, 128, mask=window(50, 3)),
    Problem(1, 2, 2, 300, 300, 64, mask=documents([0, 7, 7, 150, 300], causal=True)),
    Problem(1, 1, 1, 1, 1, 128, mask=FULL),
]


def inputs_of(problem: Problem) -> Inputs:
    """Any values do: no access depends on them."""
    dtype = getattr(torch, problem.dtype)
    rows = (problem.batch, problem.len_q, problem.heads_q, problem.dim)
    keys = (problem.batch, problem.len_k, problem.heads_kv, problem.dim)
    dout, q, k, v, out = (torch.randn(s).to(dtype).to(DEVICE) for s in (rows, rows, keys, keys, rows))
    return Inputs(dout, q, k, v, out, torch.full((problem.batch, problem.heads_q, problem.len_q), 5.0, device=DEVICE))


def main() -> None:
    torch.manual_seed(0)
    for problem in PROBLEMS:
        cfg = config_of(problem)
        others = [dataclasses.replace(cfg, finish="postpass")] if cfg.mask == "causal" else []
        for each in (cfg, *others):
            inputs, tables = inputs_of(problem), tables_of(problem, cfg, "auto", sms())
            ws, into = Workspace.of(each, inputs.q), Grads(*(torch.empty_like(t) for t in inputs[1:4]))
            poison(ws, into)
            found = backward(each, tables, inputs, scale=problem.softmax_scale, into=into, workspace=ws)
            torch.cuda.synchronize()
            assert all(bool(torch.isfinite(g).all()) for g in found), problem
        print(problem, flush=True)


if __name__ == "__main__":
    main()
