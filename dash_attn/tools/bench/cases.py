"""The cases of the suites, as data: the paper's grid, known models at their real dimensions, lengths up to 128k."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dash_attn.problem import CAUSAL, FULL, Features, Mask, Problem, SequenceColumn

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LONG = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
DIMS = (128, 64)
TOKENS, HIDDEN = 16384, 2048  # in every cell of the paper's grid


@dataclass(frozen=True)
class BenchCase:
    """A problem, and its name in tables and result files."""

    name: str
    problem: Problem

    @property
    def mask(self) -> str:
        return str(self.problem.mask)

    @property
    def kind(self) -> Mask:
        """The mask of each sequence: that of the problem, without its documents."""
        return replace(self.problem.mask, documents=None)

    @property
    def flops(self) -> float:
        """Operations of the backward by the usual count: five products over the pairs of each sequence. A causal mask
        has half of the pairs of its last queries and keys."""
        p, table = self.problem, self.problem.sequence_table.astype(float)
        len_q, len_k = table[:, SequenceColumn.LEN_Q], table[:, SequenceColumn.LEN_K]
        seen = np.minimum(len_q, len_k)
        pairs = seen * (len_k - 0.5 * seen) if self.kind.is_causal else len_q * len_k
        return float(10.0 * p.heads_q * p.dim * pairs.sum())


@dataclass(frozen=True)
class Model:
    """One transformer block of a model. `mlp` is the width of its MLP, gated or not.

    In a mixture of experts a token visits `experts` of them. The block has one dense MLP of that many widths instead:
    the arithmetic of balanced routing without its gathers and scatters.
    """

    name: str
    hidden: int
    heads: int
    heads_kv: int
    dim: int
    mlp: int
    mask: Mask
    gated: bool = True
    bias: bool = False  # in the query, key and value projections
    rotary: bool = True
    experts: int = 1
    batch: int = 1
    lengths: tuple[int, ...] = (8192, 16384, 32768)

    def cases(self) -> list[BenchCase]:
        return [
            BenchCase(
                f"{self.name} {self.batch}x{n}",
                Problem(self.batch, self.heads, self.heads_kv, n, n, self.dim, mask=self.mask),
            )
            for n in self.lengths
        ]


MODELS = (
    Model("LLaMA3-8B", 4096, 32, 8, 128, 14336, CAUSAL),
    Model("Qwen2.5-7B", 3584, 28, 4, 128, 18944, CAUSAL, bias=True),
    Model("Mixtral-8x7B", 4096, 32, 8, 128, 14336, CAUSAL, experts=2),
    Model("SAM-huge", 1280, 16, 16, 80, 5120, FULL, gated=False, bias=True, rotary=False, batch=16, lengths=(4096,)),
    Model(
        "SD3.5-medium", 1536, 24, 24, 64, 6144, FULL, gated=False, bias=True, rotary=False, batch=16, lengths=(4096,)
    ),
    Model("SD3.5-large", 2432, 38, 38, 64, 9728, FULL, gated=False, bias=True, rotary=False, batch=16, lengths=(4096,)),
    Model("LLaDA-1B", 2048, 32, 32, 64, 5634, FULL, batch=16, lengths=(4096,)),
)


def grid(dims: tuple[int, ...] = DIMS, lengths: tuple[int, ...] = LENGTHS) -> list[BenchCase]:
    """The paper's grid: every cell has 16,384 tokens and hidden size 2,048."""
    return [
        BenchCase(f"d{dim} {mask} {n}", Problem(TOKENS // n, HIDDEN // dim, HIDDEN // dim, n, n, dim, mask=mask))
        for dim in dims
        for mask in (FULL, CAUSAL)
        for n in lengths
    ]


def models() -> list[BenchCase]:
    """Attention of the models. Mixtral is left out: its attention has the shape of LLaMA3-8B's.

    Of Gemma2 and GPT-OSS these are the layers without a window.
    """
    others = {
        "LLaMA3-8B 4x2048": Problem(4, 32, 8, 2048, 2048, 128, mask=CAUSAL),
        "Gemma2-27B 1x8192": Problem(1, 32, 16, 8192, 8192, 128, mask=CAUSAL, features=Features(softcap=50.0)),
        "GPT-OSS-20B 1x8192": Problem(1, 64, 8, 8192, 8192, 64, mask=CAUSAL, features=Features(sinks=True)),
    }
    capped, sunk = Features(softcap=50.0), Features(sinks=True)
    for mask in (CAUSAL, FULL):  # at shapes of the paper's grid
        others[f"softcap d128 {mask} 4x4096"] = Problem(4, 16, 16, 4096, 4096, 128, mask=mask, features=capped)
        others[f"sinks d64 {mask} 4x4096"] = Problem(4, 32, 32, 4096, 4096, 64, mask=mask, features=sunk)
    named = [case for model in MODELS if model.name != "Mixtral-8x7B" for case in model.cases()]
    return [*named, *(BenchCase(*each) for each in others.items())]


def lengths(longest: int = LONG[-1]) -> list[BenchCase]:
    """One sequence with the heads of LLaMA3-8B, from 1k tokens on."""
    return [
        BenchCase(f"32/8 heads causal {n}", Problem(1, 32, 8, n, n, 128, mask=CAUSAL)) for n in LONG if n <= longest
    ]


def few() -> list[BenchCase]:
    """One sequence with grouped heads, as tensor parallelism leaves them on a GPU, and queries after many keys."""
    shapes = [
        *((32, 8, 128, n, CAUSAL) for n in (512, 1024, 2048, 4096)),
        *((28, 4, 128, n, CAUSAL) for n in (1024, 2048, 4096)),
        *((8, 1, 128, n, CAUSAL) for n in (1024, 2048, 4096)),
        *((64, 8, 128, n, CAUSAL) for n in (1024, 2048, 4096)),
        *((16, 1, 128, n, CAUSAL) for n in (2048, 4096)),
        *((14, 2, 64, n, CAUSAL) for n in (1024, 2048, 4096)),
        (32, 8, 128, 2048, FULL),
        (14, 2, 64, 2048, FULL),
    ]
    last = [(32, 8, 128, 2048, 16384), (8, 1, 128, 1024, 8192), (28, 4, 128, 512, 4096), (14, 2, 64, 2048, 8192)]
    return [
        *(
            BenchCase(f"{q}/{kv} heads d{dim} {mask} {n}", Problem(1, q, kv, n, n, dim, mask=mask))
            for q, kv, dim, n, mask in shapes
        ),
        *(
            BenchCase(f"{q}/{kv} heads d{dim} causal, last {m} of {n}", Problem(1, q, kv, m, n, dim, mask=CAUSAL))
            for q, kv, dim, m, n in last
        ),
    ]


def padded(dims: tuple[int, ...] = (80, 96)) -> list[BenchCase]:
    """Head dims that the kernel pads to 128."""
    return [
        BenchCase(f"16x4096 16/16 heads d{dim} {mask}", Problem(16, 16, 16, 4096, 4096, dim, mask=mask))
        for dim in dims
        for mask in (FULL, CAUSAL)
    ]


def tiny() -> list[BenchCase]:
    """Cases for machines without a GPU: they show that the harness works, and nothing about speed."""
    return [
        BenchCase(f"d64 {mask} 256", Problem(1, 2, 1, 256, 256, 64, "float32", mask=mask)) for mask in (FULL, CAUSAL)
    ]
