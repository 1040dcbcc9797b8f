"""probe: what this process's arithmetic gives for a few fixed products, exponentials and sums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from dash_attn.backends.cpu.planes import planes
from dash_attn.backends.cpu.threads import run_jobs

SHAPES = ((256, 512, 64), (256, 256, 128), (37, 101, 33))  # rows, keys, dim


def probe() -> str:
    """Hash of the results.

    Settings outside this package choose the math library's code: the kind of CPU, variables of the environment such as
    MKL_CBWR, and torch's precision of float32 products. Most of them cannot be read back, so the identity of a run
    covers what they do. Nothing is cached, because a setting can change at any time.
    """
    results: list[bytes] = []
    run_jobs([lambda: results.extend(x.numpy().tobytes() for shape in SHAPES for x in _results(*shape))], threads=1)
    return hashlib.sha256(b"".join(results)).hexdigest()


def _results(rows: int, keys: int, dim: int) -> Iterator[Tensor]:
    """The kinds of operations in the forward and in a task of the backward."""
    q, k = _numbers(rows, dim), _numbers(keys, dim)
    scores = torch.mm(q, k.t())
    yield from (scores, scores.exp(), scores.exp2(), scores.sum(1), scores.sub(scores.amax()).exp2_().sum(1).log2_())
    yield from (torch.mm(scores, k), _numbers(keys, dim).addmm_(scores.t(), q))


def _numbers(rows: int, dim: int) -> Tensor:
    """Numbers from -1 to 1 that every machine draws alike, in the layout of the operands."""
    drawn = torch.arange(rows * dim, dtype=torch.int64, device="cpu").mul_(7919).remainder_(4099).sub_(2049)
    return planes(drawn.view(1, rows, 1, dim))[0, 0].copy_(drawn.view(rows, dim)).div_(2048)
