"""Random problems on the machine: right against float64, and the same bits in every interleaving.

python -m tests.backends.sm90.ptx.trial --minutes 10 --seed 1
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_attn.backends import Extras, Operands, Options
from dash_attn.order import applicable, looks_at_batch
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Features, Mask, Problem, documents, window
from dash_attn.tiling import tile
from dash_attn.tools.bench.operands import draw, draw_extras, exact
from tests.backends.sm90.ptx.device import MachineBackend, machine
from tests.backends.sm90.ptx.machine import Chance

CPU = torch.device("cpu")
ROLES = (0,), (1,), (2,), (3,), (4, 5, 6, 7), (8, 9, 10, 11)  # warps of the producer, the writers and the consumers
BOUND = {"bfloat16": 6e-3, "float16": 1e-3}  # relative error of a gradient
SINK_BOUND = 2e-2


class Got(NamedTuple):
    """What a backward gives. `dsinks` is None if the problem has no sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Trial:
    """A problem with random inputs, and its gradients in float64."""

    problem: Problem
    operands: Operands
    extras: Extras
    want: Got

    @staticmethod
    def of(problem: Problem, seed: int = 0, with_dlse: bool = False) -> Trial:
        drawn, extras = draw(problem, CPU, seed), draw_extras(problem, CPU)
        extras = extras if with_dlse else extras._replace(dlse=None)
        result = exact(problem, *drawn, extras=extras)
        operands = Operands(*drawn, result.out.to(drawn.q.dtype), result.lse.float())
        return Trial(problem, operands, extras, Got(*result.gradients, result.dsinks))

    def run(self, chance: Chance, policy: str = "auto", workers: int = 4, **kernel: object) -> Got:
        """One backward, through the code that users run. It must leave its inputs as they are."""
        given = [x.clone() for x in self.operands]
        dsinks = None if self.extras.sinks is None else torch.full_like(self.extras.sinks, torch.nan)
        with machine(chance, workers):
            ready = prepare(self.problem, policy, Options(kernel=tuple(kernel.items())), CPU)
            grads = ready.backward(self.operands, extras=self.extras._replace(dsinks=dsinks))
        for name, x, before in zip(Operands._fields, self.operands, given, strict=True):
            assert torch.equal(words(x), words(before)), f"{name} is written"
        return Got(*grads, dsinks)

    def co_resident(self, policy: str = "auto", **kernel: object) -> int:
        """The least number of workers that the order needs."""
        with machine(Chance()):
            ready = prepare(self.problem, policy, Options(kernel=tuple(kernel.items())), CPU)
            return ready.backend.co_resident(ready.plan)

    def errors(self, got: Got) -> list[float]:
        """Relative to the norm of the right gradient, or to the norm of elements of 0.01 if that is larger. NaN if an
        element is NaN."""
        out = []
        for mine, want in zip(got[:3], self.want[:3], strict=True):
            norm = max(want.norm().item(), 1e-2 * want.numel() ** 0.5)
            out.append((mine.double() - want).norm().item() / norm if want.numel() else 0.0)
        return out

    def check(self, got: Got) -> None:
        errors = self.errors(got)
        assert all(each < BOUND[self.problem.dtype] for each in errors), f"error {errors}"
        if got.dsinks is not None:
            assert self.want.dsinks is not None
            rows = self.problem.batch * self.problem.len_q * self.problem.heads_q
            norm = max(self.want.dsinks.norm().item(), 0.1 * rows**0.5)  # a sum over rows, each rounded in `out`
            distance = (got.dsinks.double() - self.want.dsinks).norm().item()
            assert distance < SINK_BOUND * norm, f"dsinks {got.dsinks} instead of {self.want.dsinks}"


def same(a: Got, b: Got) -> bool:
    pairs = zip(a, b, strict=True)
    return all(
        x is y is None or (x is not None and y is not None and torch.equal(words(x), words(y))) for x, y in pairs
    )


def words(x: Tensor) -> Tensor:
    """The bits, so that NaN equals itself."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def drawn(seed: int) -> tuple[Problem, str, dict[str, Any]]:
    """A random problem, a policy that orders it, and fields of the kernel's config."""
    rng = random.Random(seed)
    len_q = rng.choice([1, 40, 64, 65, 128, 130, 200, 256, 300, 384, 500])
    len_k = len_q if rng.random() < 0.6 else rng.choice([1, 63, 128, 129, 200, 256, 384, 500, 900])
    heads_kv = rng.choice([1, 1, 2])
    heads = heads_kv * rng.choice([1, 1, 2, 3, 4]), heads_kv
    mask = rng.choice([FULL, CAUSAL, CAUSAL, _window(rng)])
    batch, panels = rng.choice([1, 1, 2]), 1
    kind = rng.random()
    if kind < 0.35:
        pieces = rng.randint(1, 4)
        cu_q = [0, *sorted(rng.randint(0, len_q) for _ in range(pieces - 1)), len_q]
        cu_k = cu_q if len_q == len_k else [0, *sorted(rng.randint(0, len_k) for _ in range(pieces - 1)), len_k]
        mask = mask & documents(cu_q, cu_k)
    elif kind < 0.5 and len_q == len_k and mask.right in (None, 0):
        panels = rng.choice([2, 4])
    dim = rng.choice([64, 64, 128, 128, 80, 96, 32])
    features = Features(softcap=rng.choice([0.0, 0.0, 0.0, 15.0]), sinks=rng.random() < 0.15)
    dtype = rng.choice(["bfloat16", "bfloat16", "float16"])
    problem = Problem(batch, *heads, len_q, len_k, dim, dtype, mask=mask, panels=panels, features=features)
    kernel = rng.choice([{}, {}, {}, {"finish": "postpass"}])
    return problem, rng.choice(policies(problem)), kernel


def _window(rng: random.Random) -> Mask:
    return window(rng.choice([None, 0, 17, 64, 150]), rng.choice([0, 0, 5, 100]))


def policies(problem: Problem) -> list[str]:
    """auto, and the rules that order the longest sequence of a problem."""
    if problem.panels > 1:
        return ["auto", "auto@group"]
    shape = MachineBackend().tile_shape(problem)
    alone = problem.alone(max(problem.sequences, key=lambda sequence: sequence.len_k))
    names = applicable(tile(alone, shape)) if alone.len_q and alone.len_k else []
    named = [name for name in names if not (problem.is_packed and looks_at_batch(name))]
    return ["auto", "auto", "auto@group", *(f"{name}{at}" for name in named for at in ("", "@head"))]


def interleavings(seed: int) -> Iterator[tuple[Chance, int]]:
    """Three, each with its number of workers: a random one, one in which copies come as late as possible, and one in
    which the warps of one role run as late as possible."""
    rng = random.Random(seed)
    yield Chance(seed, rng.choice([0.02, 0.3, 1.0]), rng.choice([3, 30, 300])), rng.choice([2, 3, 5])
    yield Chance(seed, 0.0, rng.choice([10, 100])), 4
    yield Chance(seed, rng.choice([0.0, 0.1]), rng.choice([30, 300]), rng.choice(ROLES)), rng.choice([1, 2, 4])


def attempt(seed: int) -> str | None:
    """One problem in several interleavings. Raises an error if a gradient is wrong or has other bits in one of them.
    Returns why the problem is refused, or None."""
    problem, policy, kernel = drawn(seed)
    trial, first = Trial.of(problem, seed, with_dlse=seed % 5 == 0), None
    try:
        needed = trial.co_resident(policy, **kernel)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    for chance, workers in interleavings(seed):
        got = trial.run(chance, policy, max(workers, needed), **kernel)
        trial.check(got)
        assert first is None or same(first, got), f"the bits depend on the interleaving: {chance}"
        first = got
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begin, seed, failed = time.monotonic(), given.seed, 0
    while time.monotonic() - begin < 60 * given.minutes:
        try:
            refused = attempt(seed)
            if refused is not None:
                print(f"{seed}: refused: {refused}", flush=True)
        except Exception:
            failed += 1
            print(f"{seed}: FAILED {drawn(seed)}\n{traceback.format_exc()[-1500:]}", flush=True)
        seed += 1
    print(f"{seed - given.seed} problems, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
