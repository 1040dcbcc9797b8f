"""The kernel's error against float64, beside that of other libraries on the same inputs: make gpu-test"""

from __future__ import annotations

import random

import pytest
import torch

from dash_attn.backends import Gradients, Operands
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, tiles, window
from tests.backends.sm90 import cases, peers
from tests.backends.sm90.cases import Case, prepared

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 63, 65, 128, 129, 200, 333, 512, 777, 1000, 1024, 1300, 1536, 2048)
GROUPS = (1, 1, 2, 4, 4, 8)
KINDS = ("full", "causal", "full", "causal", "window", "documents", "causal documents", "tiles")
FIXED = [  # problem, magnitude of the inputs
    (Problem(64, 32, 32, 128, 128, 128), 1.0),
    (Problem(64, 32, 8, 128, 128, 64, mask=CAUSAL), 1.0),
    (Problem(128, 16, 16, 1, 40, 64), 1.0),
    (Problem(1, 4, 1, 500, 4500, 128, mask=CAUSAL), 1.0),  # many keys: a pass of its own finishes dQ
    (Problem(1, 4, 1, 500, 4500, 64), 1.0),
    (Problem(1, 2, 2, 4100, 4100, 128, mask=window(700, 0)), 1.0),
    (Problem(1, 32, 8, 2048, 2048, 128, mask=CAUSAL), 1.0),
    (Problem(1, 4, 4, 700, 700, 128, mask=CAUSAL), 8.0),
    (Problem(1, 4, 4, 700, 700, 64), 8.0),
    (Problem(1, 4, 4, 640, 900, 128), 30.0),
    (Problem(1, 4, 4, 700, 700, 128, "float16", mask=CAUSAL), 4.0),
    (Problem(1, 4, 4, 700, 700, 64, mask=CAUSAL), 1e-2),
    (Problem(2, 4, 4, 900, 300, 128, mask=CAUSAL), 1.0),  # two thirds of the rows see nothing
    (Problem(2, 2, 1, 512, 512, 128, scale=0.5, mask=CAUSAL), 1.0),
]


def cuts(rng: random.Random, length: int, pieces: int) -> list[int]:
    """Boundaries of packed sequences, some of them empty."""
    return [0, *sorted(rng.randint(0, length) for _ in range(pieces - 1)), length]


def mask_of(rng: random.Random, kind: str, len_q: int, len_k: int) -> Mask:
    if kind == "full" or kind == "causal":
        return FULL if kind == "full" else CAUSAL
    if kind == "window":
        return window(rng.choice([None, 0, 17, 128, 300]), rng.choice([0, 0, 5, 200]))
    if kind == "tiles":
        cells = [[rng.random() < 0.6 for _ in range(-(-len_k // 128))] for _ in range(-(-len_q // 128))]
        return tiles(cells, 128, 128)
    pieces = rng.randint(1, 6)
    return documents(cuts(rng, len_q, pieces), cuts(rng, len_k, pieces), causal=kind.startswith("causal"))


def drawn(seed: int) -> Problem:
    rng = random.Random(seed)
    len_q, len_k = (rng.choice(LENGTHS) for _ in range(2))
    if rng.random() < 0.6:
        len_k = len_q
    heads_kv = rng.randint(1, 3)
    sizes = rng.randint(1, 3), heads_kv * rng.choice(GROUPS), heads_kv, len_q, len_k
    dtype = rng.choice(["bfloat16", "bfloat16", "bfloat16", "float16"])
    return Problem(*sizes, rng.choice([64, 128]), dtype, mask=mask_of(rng, KINDS[seed % len(KINDS)], len_q, len_k))


def name_of(problem: Problem) -> str:
    heads = f"{problem.batch}x{problem.heads_q}/{problem.heads_kv}"
    return f"{heads} {problem.len_q}x{problem.len_k} d{problem.dim} {problem.dtype} {problem.mask}"


def check(problem: Problem, gain: float = 1.0) -> None:
    """Norm and largest error at most twice a peer's, and a little: a sum that is nearly zero has no digits to lose."""
    case = Case.make(problem, gain=gain)
    got, want = case.run(prepared(problem)), case.want
    peer, theirs = peers.gradients(case)
    failures = []
    for name, ours, other, exact in zip(Gradients._fields, got, theirs, want, strict=True):
        assert bool(torch.isfinite(ours).all()), f"{name} is not finite"
        mine, bar = (distances(x, exact, gain) for x in (ours, other))
        slack = 1e-4, torch.finfo(ours.dtype).eps / 2  # the last digit of the largest element
        for what, a, b, room in zip(("norm", "largest"), mine, bar, slack, strict=True):
            if not a <= 2 * b + room:
                failures.append(f"{what} error of {name} is {a:.2e}, of {peer} {b:.2e}")
    assert not failures, "; ".join(failures)


def distances(got: torch.Tensor, want: torch.Tensor, gain: float) -> tuple[float, float]:
    """(norm, largest element) of the error, relative to the gradient's or, where that is tiny, the inputs' size."""
    least, error = 1e-2 * min(gain**2, gain**3), got.double() - want
    norm = error.norm() / want.norm().clamp_min(least * want.numel() ** 0.5)
    return float(norm), float(error.abs().max() / want.abs().max().clamp_min(least))


@pytest.mark.parametrize("seed", range(48), ids=lambda seed: name_of(drawn(seed)))
def test_random_problems(seed: int) -> None:
    check(drawn(seed))


@pytest.mark.parametrize(
    ("problem", "gain"), FIXED, ids=lambda x: name_of(x) if isinstance(x, Problem) else f"gain {x}"
)
def test_chosen_problems(problem: Problem, gain: float) -> None:
    check(problem, gain)


@pytest.mark.parametrize(("len_q", "len_k"), [(0, 200), (200, 0), (0, 0)])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(5, 5)], ids=str)
def test_no_tokens(len_q: int, len_k: int, mask: Mask) -> None:
    problem = Problem(2, 4, 2, len_q, len_k, 128, mask=mask)

    def filled(length: int, heads: int) -> torch.Tensor:
        return torch.full((2, length, heads, 128), float("nan"), dtype=torch.bfloat16, device=cases.DEVICE)

    q, k = filled(len_q, 4), filled(len_k, 2)
    lse = torch.full((2, 4, len_q), -torch.inf, device=cases.DEVICE)
    into = Gradients(filled(len_q, 4), filled(len_k, 2), filled(len_k, 2))
    prepared(problem).backward(Operands(q, q, k, k, q, lse), into)
    assert not any(bool((g != 0).any()) for g in into)


def test_inputs_that_no_row_sees_are_not_used() -> None:
    """NaN in the keys and values of a document without queries: whole tiles, which the kernel must not even load."""
    problem = Problem(1, 4, 4, 1024, 1024, 128, mask=documents([0, 512, 512, 1024], [0, 256, 768, 1024]))
    case, ready = Case.make(problem), prepared(problem)
    want = case.run(ready)
    for t in (case.operands.k, case.operands.v):
        t[:, 256:768] = float("nan")
    assert int(cases.changed(case.run(ready), want)) == 0
