"""Golden bits: hashes of results, kept for each version of the package and each kind of arithmetic.

`python -m tests.backends.cpu.golden` adds the hashes of this version on this machine to golden.json. Do it once for a
new version. Within a version the hashes stay: a change that changes bits raises the version.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dash_attn import __version__
from dash_attn.backends import Operands, Options
from dash_attn.backends.cpu.threads import run_jobs
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Problem, documents, tiles, window
from tests.backends.cpu.reference import CPU, DTYPES

FILE = Path(__file__).with_name("golden.json")
ROOT = Path(__file__).parents[3]

# Ways through the libraries: the one that they choose for this CPU, and one that they offer for every x86 CPU.
WAYS = {"own": {}, "common": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}}

PROBLEMS = [
    (Problem(1, 1, 1, 17, 17, 64, "float32", None, FULL), "auto"),
    (Problem(2, 4, 2, 300, 520, 64, "float32", None, FULL), "auto"),
    (Problem(2, 4, 2, 300, 520, 64, "bfloat16", None, FULL), "shift"),
    (Problem(2, 4, 2, 300, 520, 64, "float32", None, FULL), "spt@head"),
    (Problem(1, 3, 3, 515, 515, 33, "float32", None, CAUSAL), "auto"),
    (Problem(1, 3, 1, 515, 515, 128, "float16", 0.1, CAUSAL), "symmetric_shift"),
    (Problem(1, 1, 1, 2100, 2100, 32, "float32", None, CAUSAL), "fa3"),
    (Problem(1, 2, 2, 700, 700, 64, "float32", None, window(200, 0)), "auto"),
    (Problem(1, 2, 2, 530, 530, 64, "float32", None, documents([0, 17, 300, 530], causal=True)), "auto"),
    (Problem(1, 1, 1, 512, 512, 64, "float32", None, tiles([[1, 0], [1, 1]], 256, 256)), "auto"),
]


def key() -> str:
    """The version, and what else fixes the bits: torch, the vectors of the CPU, and the math library's code for it.

    The package's own probe is not used here. A change of it would hide a change of bits.
    """
    digest = hashlib.sha256()

    def compute() -> None:
        for rows, columns, inner in ((64, 48, 80), (256, 256, 64), (129, 65, 257)):
            x = numbers(1, (rows, inner)) @ numbers(2, (inner, columns))
            for result in (x, x.div(64).exp(), x.div(64).exp2(), x.sum(1)):
                digest.update(bytes_of(result))

    run_jobs([compute], threads=1)
    kind = torch.backends.cpu.get_cpu_capability()
    return f"{__version__}, torch {torch.__version__}, {kind}, arithmetic {digest.hexdigest()[:12]}"


def hashes() -> dict[str, str]:
    """A hash of out, lse, dq, dk and dv for each problem."""
    return {name(problem, policy): result(problem, policy) for problem, policy in PROBLEMS}


def name(problem: Problem, policy: str) -> str:
    p = problem
    return f"{p.batch} x {p.len_q}/{p.len_k} x {p.heads_q}/{p.heads_kv} x {p.dim} {p.dtype} {p.mask} {policy}"


def measure(way: str) -> tuple[str, dict[str, str]]:
    """The key and the hashes in a new process, because libraries read their variables once."""
    script = "import json; from tests.backends.cpu import golden; print(json.dumps([golden.key(), golden.hashes()]))"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | WAYS[way],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    where, results = json.loads(ran.stdout)
    return where, results


def result(problem: Problem, policy: str) -> str:
    heads = (problem.heads_q, problem.heads_q, problem.heads_kv, problem.heads_kv)
    lengths = (problem.len_q, problem.len_q, problem.len_k, problem.len_k)
    dout, q, k, v = (
        numbers(seed, (problem.batch, length, head, problem.dim)).to(DTYPES[problem.dtype])
        for seed, (length, head) in enumerate(zip(lengths, heads, strict=True))
    )
    prepared = prepare(problem, policy, Options(), CPU)
    out, lse = prepared.forward(q, k, v)
    digest = hashlib.sha256()
    for x in (out, lse, *prepared.backward(Operands(dout, q, k, v, out, lse))):
        digest.update(bytes_of(x))
    return digest.hexdigest()[:16]


def numbers(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers from -2 to 2 that every machine draws alike."""
    drawn = np.random.default_rng(seed).integers(-1024, 1025, shape)
    return torch.from_numpy((drawn / 512).astype(np.float32))


def bytes_of(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def kept() -> dict[str, dict[str, str]]:
    every: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return every


if __name__ == "__main__":
    FILE.write_text(json.dumps(kept() | dict(measure(way) for way in WAYS), indent=1) + "\n")
