"""Golden bits: hashes of results, kept for each version of the package and each kind of arithmetic.

`python -m tests.backends.cpu.golden` adds the hashes of this version on this machine to golden.json. Do it once for a
new version, and once for a CPU that the file does not have. Within a version the hashes stay: a change that changes
bits raises the version. So the command refuses to change a hash, unless --replace says that the hash itself was wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dash_attn import __version__
from dash_attn.backends import Extras, Operands, Options
from dash_attn.backends.cpu.threads import run_jobs
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, PLAIN, Features, Problem, documents, tiles, window
from tests.backends.cpu.reference import CPU, DTYPES

FILE = Path(__file__).with_name("golden.json")
ROOT = Path(__file__).parents[3]

# Ways through the libraries: the one that they choose for this CPU, the one that they have for CPUs with AVX2, and one
# that they offer for every x86 CPU.
WAYS = {
    "own": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
    "common": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
}


class Golden(NamedTuple):
    """A problem, its order, and whether its loss depends on lse."""

    problem: Problem
    policy: str = "auto"
    dlse: bool = False

    def __str__(self) -> str:
        p = self.problem
        shape = f"{p.batch} x {p.len_q}/{p.len_k} x {p.heads_q}/{p.heads_kv} x {p.dim} {p.dtype} {p.mask} {self.policy}"
        extra = {f"{p.panels} panels": p.panels > 1, str(p.features): p.features != PLAIN, "dlse": self.dlse}
        return ", ".join([shape, *(text for text, is_there in extra.items() if is_there)])


EVERYTHING = Features(softcap=5.0, sinks=True, dropout=0.25, dim_v=40)
PACKED = documents([0, 100, 364, 520], causal=True)
PROBLEMS = [
    Golden(Problem(1, 1, 1, 17, 17, 64, "float32", None, FULL)),
    Golden(Problem(2, 4, 2, 300, 520, 64, "float32", None, FULL)),
    Golden(Problem(2, 4, 2, 300, 520, 64, "bfloat16", None, FULL), "shift"),
    Golden(Problem(2, 4, 2, 300, 520, 64, "float32", None, FULL), "spt@head"),
    Golden(Problem(1, 3, 3, 515, 515, 33, "float32", None, CAUSAL)),
    Golden(Problem(1, 3, 1, 515, 515, 128, "float16", 0.1, CAUSAL), "symmetric_shift"),
    Golden(Problem(1, 1, 1, 2100, 2100, 32, "float32", None, CAUSAL), "fa3"),
    Golden(Problem(1, 2, 2, 700, 700, 64, "float32", None, window(200, 0))),
    Golden(Problem(1, 2, 2, 530, 530, 64, "float32", None, documents([0, 17, 300, 530], causal=True))),
    Golden(Problem(1, 1, 1, 512, 512, 64, "float32", None, tiles([[1, 0], [1, 1]], 256, 256))),
    Golden(Problem(1, 4, 2, 1100, 1100, 64, "bfloat16", None, CAUSAL, panels=4)),
    Golden(Problem(2, 2, 2, 600, 600, 32, "float32", None, FULL, panels=2)),
    Golden(Problem(1, 4, 2, 515, 515, 64, "float32", None, CAUSAL, features=Features(softcap=5.0))),
    Golden(Problem(1, 4, 2, 515, 515, 64, "float16", None, CAUSAL, features=Features(sinks=True))),
    Golden(Problem(2, 4, 2, 300, 520, 64, "float32", None, FULL, features=Features(dropout=0.25))),
    Golden(Problem(1, 3, 1, 515, 515, 64, "float32", None, CAUSAL, features=Features(dim_v=40))),
    Golden(Problem(1, 2, 1, 515, 515, 64, "float32", None, CAUSAL), dlse=True),
    Golden(Problem(1, 4, 2, 520, 520, 64, "bfloat16", None, PACKED, panels=2, features=EVERYTHING), dlse=True),
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
    """A hash of out, lse and the gradients for each problem."""
    return {str(golden): result(golden) for golden in PROBLEMS}


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


def result(golden: Golden) -> str:
    problem = golden.problem
    heads = (problem.heads_q, problem.heads_q, problem.heads_kv, problem.heads_kv)
    lengths = (problem.len_q, problem.len_q, problem.len_k, problem.len_k)
    dims = (problem.dim_v, problem.dim, problem.dim, problem.dim_v)
    dout, q, k, v = (
        numbers(seed, (problem.batch, *shape)).to(DTYPES[problem.dtype])
        for seed, shape in enumerate(zip(lengths, heads, dims, strict=True))
    )
    extras = extras_of(golden)
    prepared = prepare(problem, golden.policy, Options(), CPU)
    out, lse = prepared.forward(q, k, v, None if extras is None else extras._replace(dlse=None))
    grads = prepared.backward(Operands(dout, q, k, v, out, lse), None, extras)
    digest = hashlib.sha256()
    for x in (out, lse, *grads, *(() if extras is None or extras.dsinks is None else (extras.dsinks,))):
        digest.update(bytes_of(x))
    return digest.hexdigest()[:16]


def extras_of(golden: Golden) -> Extras | None:
    problem, features = golden.problem, golden.problem.features
    sinks = numbers(4, (problem.heads_q,)) if features.sinks else None
    seed = torch.tensor(7) if features.dropout else None
    dlse = numbers(5, (problem.batch, problem.heads_q, problem.len_q)) if golden.dlse else None
    if sinks is seed is dlse is None:
        return None
    return Extras(sinks, seed, dlse, dsinks=None if sinks is None else torch.empty_like(sinks))


def numbers(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers from -2 to 2 that every machine draws alike."""
    drawn = np.random.default_rng(seed).integers(-1024, 1025, shape)
    return torch.from_numpy((drawn / 512).astype(np.float32))


def bytes_of(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def kept() -> dict[str, dict[str, str]]:
    every: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return every


def joined(old: dict[str, dict[str, str]], new: dict[str, dict[str, str]], replace: bool) -> dict[str, dict[str, str]]:
    """The kept hashes and new ones. A ValueError if a kept hash would change or go, unless `replace` is set."""
    for where, results in new.items():
        lost = [name for name, kept in old.get(where, {}).items() if results.get(name) != kept]
        if lost and not replace:
            raise ValueError(
                f"golden.json has other bits for {where}: {'; '.join(lost)}. A change that changes bits raises the "
                "version (dash_attn/__init__.py) and is listed under Bits in CHANGELOG.md. If the kept hashes are "
                "wrong, and no release has these bits, give --replace"
            )
    return old | new


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Add the hashes of this version on this machine to golden.json.")
    parser.add_argument("--replace", action="store_true", help="change hashes that this version already has")
    replace = parser.parse_args(arguments).replace
    try:
        every = joined(kept(), dict(measure(way) for way in WAYS), replace)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    FILE.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
