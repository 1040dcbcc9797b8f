"""Program files changed at random: each is refused on one line, or runs and gives the gradients of its problem.

Most mutants get the fingerprint of what they hold, so that they come past the fingerprint to the checks behind it.
"""

from __future__ import annotations

import copy
import io
import json
import random
import resource
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from dash_attn.backends import Gradients, Options
from dash_attn.launch import compose
from dash_attn.plan import placement, plan
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Problem, tiles, window
from dash_attn.program import TABLES, Geometry, Program, load, save
from dash_attn.program.codec import LIMITS, check_geometry, check_runs
from dash_attn.tiling import TileShape, tile
from dash_attn.tools.bench.operands import draw_operands
from dash_attn.verify import verify

SECONDS, MEGABYTES = 10, 200  # that one mutant may compute for and take
HANG = 60  # seconds after which a mutant counts as hung, also on a machine with much else to do
SHAPE = TileShape(2, 3)
CELLS = {rows: tiles(np.ones((-(-rows // SHAPE.m), 4)), SHAPE.m, SHAPE.n) for rows in (9, 12)}  # they hide nothing
SIZES: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "dim": 8, "dtype": "float32"}
# The cells of the masks are as small as SHAPE, and the CPU backend takes them for its tiles.
PROBLEMS = (
    (Problem(1, len_q=9, len_k=12, mask=CAUSAL & CELLS[9], **SIZES), "fa3"),
    (Problem(2, len_q=12, len_k=12, mask=FULL & CELLS[12], **SIZES), "shift"),
    (Problem(1, len_q=12, len_k=11, mask=window(4, 1) & CELLS[12], **SIZES), "search"),
)
CPU = torch.device("cpu")
NUMBERS = (-(2**31), -7, -1, 0, 1, 2, 3, 5, 11, 13, 64, 1000, 2**20, 5 * 10**8, 2**31 - 1)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    2**31,
    2**63,
    10**30,
    1.0,
    2.5,
    float("nan"),
    float("inf"),
    "",
    "1",
    "a\nb",
    None,
    True,
    [],
    {},
    [1],
)

Outcomes = Generator[str, None, None]
Content = dict[str, Any]
Mutation = Callable[[Content, random.Random], None]


def any_value(rng: random.Random) -> Any:
    return copy.copy(rng.choice(VALUES))  # a later mutation may change it


def change_geometry(content: Content, rng: random.Random) -> None:
    geometry = content["header"]["geometry"]
    for name in rng.sample(sorted(geometry), rng.choice((1, 1, 2))):
        geometry[name] = rng.choice((geometry[name] + rng.choice((-1, 1, 2)), 2 * geometry[name], any_value(rng)))


def change_header(content: Content, rng: random.Random) -> None:
    place = rng.choice((content["header"], content["header"]["geometry"]))
    name = rng.choice((*place, "more"))
    if rng.random() < 0.2:
        place.pop(name, None)
    else:
        place[name] = any_value(rng)


def change_numbers(content: Content, rng: random.Random) -> None:
    table = content[rng.choice(TABLES)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = tuple(rng.randrange(size) for size in table.shape)
        near = int(table[at]) + rng.choice((-1, 1))
        table[at] = rng.choice((max(-(2**31), min(near, 2**31 - 1)), rng.choice(NUMBERS), int(rng.choice(table.flat))))


def swap_rows(content: Content, rng: random.Random) -> None:
    table = content[rng.choice(TABLES)]
    a, b = rng.randrange(len(table)), rng.randrange(len(table))
    table[[a, b]] = table[[b, a]]


def change_shape(content: Content, rng: random.Random) -> None:
    name = rng.choice(TABLES)
    table, at = content[name], rng.randrange(len(content[name]))
    content[name] = rng.choice(
        (
            np.delete(table, at, 0),
            np.insert(table, at, table[at], 0),
            table[:at],
            np.concatenate([table, table]),
            table.T,
            table.astype(rng.choice((np.int64, np.float32, ">i4", "U4"))),
            np.asfortranarray(table),
            table[..., None],
            np.zeros((100_000, *table.shape[1:]), np.int32),
            np.int32(3),
        )
    )


def drop_a_member(content: Content, rng: random.Random) -> None:
    del content[rng.choice(sorted(content))]


MUTATIONS: tuple[tuple[Mutation, int], ...] = (
    (change_geometry, 30),
    (change_numbers, 30),
    (swap_rows, 10),
    (change_shape, 10),
    (change_header, 8),
    (drop_a_member, 2),
)


def with_its_fingerprint(content: Content) -> None:
    """The header names the fingerprint of what the tables hold, if they hold anything that has one."""
    header = content["header"]
    try:
        geometry = Geometry(**header["geometry"])
        check_geometry(geometry, LIMITS)
        check_runs(geometry, content["chains"], content["runs"], LIMITS)
        tables = {name: content[name] for name in TABLES}
        header["fingerprint"] = Program(geometry, "fa3", "mask", "dealt", **tables).fingerprint
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return


def packed(content: Content, rng: random.Random) -> bytes:
    """The file of a mutant, by chance with some of its bytes changed or lost."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, value in content.items():
            array = io.BytesIO()
            np.save(array, np.array(json.dumps(value)) if name == "header" else value)
            data = array.getvalue()
            if rng.random() < 0.01:  # inside the archive, whose checksum covers it
                data = damaged(data, rng)
            archive.writestr(f"{name}.npy", data)
    return damaged(file.getvalue(), rng) if rng.random() < 0.1 else file.getvalue()


def damaged(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        changed[rng.randrange(min(len(changed), rng.choice((130, len(changed)))))] = rng.randrange(256)
    return bytes(changed)


class Base:
    """A problem with its program taken apart, and what its gradients are."""

    def __init__(self, problem: Problem, policy: str) -> None:
        self.problem, self.operands = problem, draw_operands(problem, CPU)
        program = compose(tile(problem, SHAPE), policy)
        self.tables = {name: getattr(program, name) for name in TABLES}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "p.npz"
            save(program, path)
            with np.load(path) as archive:
                self.header = str(archive["header"])
            self.expected = self.gradients(program)
            assert self.outcome(path) == "ran, right"  # and everything is compiled before time counts

    def mutant(self, rng: random.Random) -> bytes:
        content: Content = {"header": json.loads(self.header)}
        content |= {name: table.copy() for name, table in self.tables.items()}
        functions, weights = zip(*MUTATIONS, strict=True)
        for mutation in rng.choices(functions, weights, k=rng.choice((1, 1, 1, 2))):
            try:
                mutation(content, rng)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError):
                continue  # the mutation before has left nothing to change
        if rng.random() < 0.9 and "header" in content:
            with_its_fingerprint(content)
        return packed(content, rng)

    def gradients(self, program: Program) -> Gradients:
        operands = self.operands
        into = Gradients(*(torch.full_like(x, torch.nan) for x in (operands.q, operands.k, operands.v)))
        return prepare(self.problem, program, Options(), CPU).backward(operands, into)

    def outcome(self, path: Path) -> str:
        """Who refuses the file, or whether its gradients are right. `prepare` refuses whatever `verify` refuses."""
        try:
            program = load(path)
        except ValueError as error:
            return _refusal("load", error)
        refused = None
        try:
            verify(program)
        except ValueError as error:
            refused = _refusal("verify", error)
        try:
            got = self.gradients(program)
        except ValueError as error:
            return refused or _refusal("prepare", error)
        if refused is not None:
            return "ran, WRONG: verify refuses it"
        close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, self.expected, strict=True))
        return "ran, right" if close else "ran, WRONG gradients"


def _refusal(step: str, error: ValueError) -> str:
    return f"refused by {step}" if str(error).isprintable() else f"refused by {step}, WRONG: on several lines"


def forget() -> None:
    """Each mutant has its own memory: what is kept of the mutants before does not count."""
    for function in (prepare, plan, placement):
        function.cache_clear()


def too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("a mutant takes too long")


@contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError after `SECONDS` of computing and after `HANG` seconds."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def megabytes() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def chance(seed: int, number: int) -> random.Random:
    """What makes one mutant. No two pairs of numbers have the same: their sum would not do."""
    return random.Random(f"{seed}, {number}")


def mutations(seed: int) -> Outcomes:
    """The outcomes of mutants, one after the other.

    Mutant `n` is the same for every caller with the same seed. Mutants of other seeds are others.
    """
    bases = [Base(problem, policy) for problem, policy in PROBLEMS]
    before = megabytes()
    for each in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(each, too_long)
    with tempfile.TemporaryDirectory(prefix="dash_attn_mutants_") as folder:
        path = Path(folder) / "mutant.npz"
        for number in count():
            base = bases[number % len(bases)]
            path.write_bytes(base.mutant(chance(seed, number)))
            forget()
            try:
                with limited():
                    outcome = base.outcome(path)
            except Exception as error:  # what a user would see as a traceback
                outcome = f"WRONG: {type(error).__name__}"
            if megabytes() > before + MEGABYTES:
                outcome, before = f"{outcome}, WRONG: over {MEGABYTES} MB", megabytes()
            yield f"{outcome} (seed {seed}, mutant {number})" if "WRONG" in outcome else outcome
