"""The cases with documents, as data: packs for the suite `packed`, and the packings of a training run for `step`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from dash_attn.problem import Problem, documents
from dash_attn.tools.bench.cases import BenchCase

SIGMA = 0.8  # of the logarithm of a document's length
LONG_TAIL = 1.3
IMAGES = (256,) * 20 + (576,) * 10 + (1024,) * 5 + (144,) * 8  # tokens of images of four sizes


@dataclass(frozen=True)
class LogNormal:
    """Documents whose lengths are log-normal. The last one is cut where the tokens end."""

    mean: int
    tokens: int
    sigma: float = SIGMA

    def lengths(self, rng: np.random.Generator) -> tuple[int, ...]:
        """The lengths of one pack. The generator's next pack is another."""
        drawn, left = list[int](), self.tokens
        while left:
            length = rng.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma)
            drawn.append(min(left, max(1, round(length))))
            left -= drawn[-1]
        return tuple(drawn)

    def __str__(self) -> str:
        tail = " long tail" if self.sigma > SIGMA else ""
        return f"mean {_brief(self.mean)}{tail}, {_brief(self.tokens)}"


@dataclass(frozen=True)
class LayerShape:
    """The heads, the head dim and the mask within a document."""

    heads: int
    heads_kv: int
    dim: int = 128
    causal: bool = True

    def problem(self, lengths: tuple[int, ...]) -> Problem:
        tokens, mask = sum(lengths), documents([0, *accumulate(lengths)], causal=self.causal)
        return Problem(1, self.heads, self.heads_kv, tokens, tokens, self.dim, mask=mask)

    def __str__(self) -> str:
        return f"{self.heads}/{self.heads_kv} d{self.dim} {'causal' if self.causal else 'full'}"


@dataclass(frozen=True)
class PackKind:
    """Packs of one kind of documents: a training run sees another layout in every step."""

    documents: LogNormal
    layer: LayerShape

    def problems(self, seed: int) -> Iterator[Problem]:
        """Layout after layout, without an end. Equal seeds give equal layouts, and each kind has its own."""
        kind, heads = self.documents, self.layer
        rng = np.random.default_rng([seed, kind.mean, kind.tokens, heads.heads, heads.dim])
        while True:
            yield self.layer.problem(self.documents.lengths(rng))

    def case(self, seed: int = 0) -> BenchCase:
        """The first layout of a seed."""
        return BenchCase(f"{self}{f', seed {seed}' if seed else ''}", next(self.problems(seed)))

    def __str__(self) -> str:
        return f"{self.documents}, {self.layer}"


K = 1024
PACK_KINDS = (
    PackKind(LogNormal(500, 16 * K), LayerShape(32, 8)),
    PackKind(LogNormal(700, 32 * K), LayerShape(32, 8)),
    PackKind(LogNormal(1500, 32 * K), LayerShape(32, 8)),
    PackKind(LogNormal(4 * K, 64 * K, LONG_TAIL), LayerShape(32, 8)),
    PackKind(LogNormal(700, 16 * K), LayerShape(14, 2, 64)),
    PackKind(LogNormal(1500, 16 * K), LayerShape(4, 1)),
    PackKind(LogNormal(700, 32 * K), LayerShape(16, 16, 64, causal=False)),
    PackKind(LogNormal(2 * K, 32 * K), LayerShape(8, 2, causal=False)),
)
TWICE = (PACK_KINDS[0], PACK_KINDS[4])  # these have a case of a second seed
STEPS = tuple(PackKind(LogNormal(700, 16 * K), LayerShape(*heads)) for heads in ((32, 8), (8, 2)))
TINY = PackKind(LogNormal(60, 256), LayerShape(2, 1, 64))


def packs() -> list[BenchCase]:
    """Packed documents of a language model, of a tensor parallel one, and of an image model."""
    images = LayerShape(16, 16, 64, causal=False)
    mixed = np.random.default_rng(0).permutation(IMAGES).tolist()
    return [
        *(kind.case() for kind in PACK_KINDS),
        BenchCase(f"images, {_brief(sum(IMAGES))}, {images}", images.problem(tuple(mixed))),
        *(kind.case(seed=1) for kind in TWICE),
    ]


def steps() -> list[BenchCase]:
    """The first layout of each training run."""
    return [kind.case() for kind in STEPS]


def pack_kind_of(case: BenchCase) -> PackKind:
    """The training run of a case of `steps`."""
    return next(kind for kind in (*STEPS, TINY) if kind.case().name == case.name)


def tiny() -> list[BenchCase]:
    """A case for machines without a GPU."""
    return [TINY.case()]


def _brief(tokens: int) -> str:
    return f"{tokens // K}k" if tokens >= 2 * K else str(tokens)
