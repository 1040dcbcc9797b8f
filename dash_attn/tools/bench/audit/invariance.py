"""Invariance: one sequence, computed alone and then in other company. Its bits must stay.

Each change yields calls, and the place of the sequence in each. What the sequence has there is compared with what it
has alone: out, lse, dq, dk and dv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch

from dash_attn.lazily import cached_property
from dash_attn.problem import Mask, Problem
from dash_attn.tools.bench.audit.targets import Conditions
from dash_attn.tools.bench.audit.whole import Bits, CallInputs
from dash_attn.tools.bench.operands import Drawn, draw

MARGINS, WORKERS = (4, 16, 1), (3, 8, 1)


@dataclass(frozen=True, eq=False)
class Scene:
    """A problem of one sequence, and the tensors of the sequence."""

    problem: Problem
    device: torch.device

    @property
    def mask(self) -> Mask:
        return self.problem.mask

    @cached_property
    def subject(self) -> Drawn:
        return self.other(self.problem.len_q, seed=0)

    def other(self, length: int, seed: int) -> Drawn:
        """A sequence with the same heads."""
        drawn = draw(replace(self.problem, batch=1, len_q=length, len_k=length), self.device, seed)
        return Drawn(*(x[0] for x in drawn))

    def alone(self) -> CallInputs:
        return CallInputs((self.subject,), self.mask)

    def neighbours(self) -> list[Drawn]:
        """Shorter and longer ones."""
        n = self.problem.len_q
        return [self.other(length, seed) for seed, length in enumerate((n // 3 + 7, n + 129, n // 2 + 1), 1)]


Changed = tuple[CallInputs, int, slice]  # a call, the place of the sequence in it, and the kv heads that it has there
ALL = slice(None)


def pack_of_one(scene: Scene) -> Iterator[Changed]:
    """Packed, with no other."""
    yield CallInputs((scene.subject,), scene.mask, packed=True), 0, ALL


def packed(scene: Scene) -> Iterator[Changed]:
    """Packed between others."""
    first, *rest = scene.neighbours()
    yield CallInputs((first, scene.subject, *rest), scene.mask, packed=True), 1, ALL


def permuted(scene: Scene) -> Iterator[Changed]:
    """The same pack in other sequences: first, and last."""
    others = scene.neighbours()
    yield CallInputs((scene.subject, *others), scene.mask, packed=True), 0, ALL
    yield CallInputs((*reversed(others), scene.subject), scene.mask, packed=True), len(others), ALL


def neighbours(scene: Scene) -> Iterator[Changed]:
    """Packed between many short ones, and beside one that is much longer."""
    short = [scene.other(17 + 13 * number, seed=10 + number) for number in range(12)]
    yield CallInputs((*short[:6], scene.subject, *short[6:]), scene.mask, packed=True), 6, ALL
    long = scene.other(4 * scene.problem.len_q + 3, seed=30)
    yield CallInputs((long, scene.subject), scene.mask, packed=True), 1, ALL


def batch(scene: Scene) -> Iterator[Changed]:
    """In a batch of three, and in one of eight."""
    for size, place in ((3, 1), (8, 7)):
        others = [scene.other(scene.problem.len_q, seed=40 + number) for number in range(size)]
        yield CallInputs((*others[:place], scene.subject, *others[place + 1 :]), scene.mask), place, ALL


def heads(scene: Scene) -> Iterator[Changed]:
    """The first key/value head alone, and the last ones, as tensor parallelism deals them out. One head has no part."""
    kv, group = scene.problem.heads_kv, scene.problem.group
    for some in (slice(0, 1), slice((kv + 1) // 2, kv)) if kv > 1 else ():
        q_heads = slice(some.start * group, some.stop * group)
        dout, q, k, v = scene.subject
        fewer = Drawn(*(x[:, of].contiguous() for x, of in ((dout, q_heads), (q, q_heads), (k, some), (v, some))))
        yield CallInputs((fewer,), scene.mask), 0, some
        yield CallInputs((fewer, fewer), scene.mask, packed=True), 1, some


def workers(scene: Scene) -> Iterator[Changed]:
    """With fewer SMs of a GPU, or with other numbers of workers and threads of a CPU; alone and packed."""
    if scene.device.type == "cuda":
        conditions = [Conditions(sm_margin=margin) for margin in MARGINS]
    else:
        conditions = [Conditions(workers=count, threads=2) for count in WORKERS]
    (company, place, _) = next(packed(scene))
    for each in conditions:
        yield replace(scene.alone(), conditions=each), 0, ALL
        yield replace(company, conditions=each), place, ALL


def panels(scene: Scene) -> Iterator[Changed]:
    """Cut into panels, in a batch of three and with one key/value head. Alone it is cut in the same way."""
    for count in (2, 5):
        (company, place, _) = next(batch(scene))
        yield replace(company, panels=count), place, ALL
        for fewer, _, some in islice(heads(scene), 1):
            yield replace(fewer, sequences=fewer.sequences * 2, panels=count), 1, some


CHANGES: dict[str, Callable[[Scene], Iterator[Changed]]] = {
    f.__name__: f for f in (pack_of_one, packed, permuted, neighbours, batch, heads, workers, panels)
}


def part(alone: Bits, problem: Problem, kv_heads: slice) -> Bits:
    """What the sequence has alone, of some kv heads and of their q heads."""
    if kv_heads == ALL:
        return alone
    q_heads = slice(kv_heads.start * problem.group, kv_heads.stop * problem.group)
    out, lse, dq, dk, dv = alone
    return Bits(out[:, q_heads], lse[q_heads], dq[:, q_heads], dk[:, kv_heads], dv[:, kv_heads])
