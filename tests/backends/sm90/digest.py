"""Hashes of gradients, the same in every process: python tests/backends/sm90/digest.py"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import dash_attn
from dash_attn.problem import CAUSAL, Problem, window
from dash_attn.tools.bench.operands import draw

PROBLEMS = [
    Problem(2, 8, 2, 1000, 1000, 128, mask=CAUSAL),
    Problem(2, 4, 4, 777, 1300, 64),
    Problem(2, 4, 1, 1500, 1500, 128, mask=window(200, 0)),
]


def digests(device: str = "cuda") -> list[str]:
    """Of out, dq, dk and dv of each problem."""
    lines = []
    for problem in PROBLEMS:
        dout, q, k, v = (x.to(device) for x in draw(problem, torch.device("cpu")))
        out, lse = dash_attn.attention(q, k, v, mask=problem.mask, return_lse=True)
        grads = dash_attn.backward(dout, q, k, v, out, lse, mask=problem.mask)
        digest = hashlib.sha256()
        for x in (out, *grads):
            digest.update(x.view(torch.int16).cpu().numpy().tobytes())
        lines.append(digest.hexdigest())
    return lines


if __name__ == "__main__":
    print("\n".join(digests(*sys.argv[1:])))
