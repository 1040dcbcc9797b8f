"""Kernels with one synchronisation left out, and the interleavings in which the machine notices it.

    python -m tests.backends.sm90.ptx.mutants --dim 64

A few are not noticed, because others imply them. The producer waits for a stage of Q before it waits for the same stage
of dO, and so the wait for dO and what leads to it are implied. A writer waits again for an entry that it has read
before. Without empty chains their barriers are not used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

from dash_attn.backends.sm90.config import KernelConfig
from dash_attn.problem import CAUSAL, Problem, documents, window
from tests.backends.sm90.ptx import kernels
from tests.backends.sm90.ptx.machine import Chance
from tests.backends.sm90.ptx.text import Instruction, Text
from tests.backends.sm90.ptx.trial import ROLES, Got, Trial, same

NOTHING = "prefetch.tensormap"
LEFT_OUT = (  # beginnings of the instructions that wait, arrive, or make stores visible
    "mbarrier.arrive",
    "fence.proxy.async.shared",
    "cp.async.bulk.wait_group",
    "wgmma.wait_group",
    "bar.sync",
    "red.release",
)


class Mutant(NamedTuple):
    """The main kernel with another instruction in one place."""

    place: int
    was: Instruction
    instruction: Instruction

    def __str__(self) -> str:
        return f"{self.place}: {self.was.op} {' '.join(self.was.operands)} -> {self.instruction.op}"


def mutants(text: Text) -> Iterator[Mutant]:
    for place, each in enumerate(text.instructions):
        if each.op.startswith("mbarrier.try_wait"):  # it passes at once
            yield Mutant(place, each, Instruction("setp.eq.b32", (each.operands[0], "0", "0"), each.guard))
        elif each.op.startswith(LEFT_OUT):
            yield Mutant(place, each, Instruction(NOTHING, (), each.guard))
        if each.op == "cp.async.bulk.wait_group":  # the copy has read its source, and perhaps not written
            yield Mutant(place, each, replace(each, op=each.op + ".read"))


@contextmanager
def changed(mutant: Mutant) -> Iterator[None]:
    usual = kernels.text_of

    def text_of(kind: str, cfg: KernelConfig) -> Text:
        text = usual(kind, cfg)
        if kind != "main":
            return text
        instructions = list(text.instructions)
        instructions[mutant.place] = mutant.instruction
        return replace(text, instructions=instructions)

    with patch.object(kernels, "text_of", text_of):
        yield


def main_text(trial: Trial) -> Text:
    """Of the kernel that runs a problem."""
    seen = list[KernelConfig]()
    usual = kernels.text_of

    def text_of(kind: str, cfg: KernelConfig) -> Text:
        if kind == "main":
            seen.append(cfg)
        return usual(kind, cfg)

    with patch.object(kernels, "text_of", text_of):
        trial.run(Chance())
    return usual("main", seen[0])


INTERLEAVINGS = [  # each with the number of its workers
    (Chance(0, 0.0, 100), 2),
    (Chance(1, 1.0, 30), 3),
    *((Chance(2 + i, 0.0, 60, role), 1 + i % 3) for i, role in enumerate(ROLES)),
    *((Chance(8 + i, 0.1, 100, role), 3 - i % 3) for i, role in enumerate(ROLES)),
]


def noticed(trial: Trial, mutant: Mutant, want: Got) -> str | None:
    """How a mutant is noticed, or None."""
    needed = trial.co_resident()
    with changed(mutant):
        for chance, workers in INTERLEAVINGS:
            try:
                got = trial.run(chance, workers=max(workers, needed))
            except Exception as error:  # what a wrong kernel reads may be any number
                return str(error) or type(error).__name__
            if not same(got, want):
                return "other bits"
    return None


def problems(dim: int) -> Iterator[Problem]:
    """Each leads through other parts of the kernel: several chains and turns, empty chains, packs."""
    yield Problem(1, 2, 1, 256, 300, dim, mask=CAUSAL)
    yield Problem(1, 2, 1, 64, 2000, dim, mask=window(100, 0))
    yield Problem(1, 1, 1, 300, 300, dim, mask=CAUSAL)
    yield Problem(1, 2, 1, 400, 400, dim, mask=CAUSAL & documents([0, 100, 400]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", type=int, default=64)
    given, unnoticed = parser.parse_args(), 0
    for problem in problems(given.dim):
        trial = Trial.of(problem)
        every, want, missed = list(mutants(main_text(trial))), trial.run(Chance()), list[Mutant]()
        for mutant in every:
            how = noticed(trial, mutant, want)
            if how is None:
                missed.append(mutant)
            print(f"{mutant}: {how or 'NOT NOTICED'}", flush=True)
        print(f"{problem}: {len(every)} mutants, {len(missed)} not noticed", flush=True)
        unnoticed += len(missed)
    sys.exit(unnoticed > 0)


if __name__ == "__main__":
    main()
