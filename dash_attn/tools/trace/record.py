"""A trace as the GPU wrote it, and its file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dash_attn.backends.sm90.config import STAMPS
from dash_attn.lazily import cached_property
from dash_attn.pack import Pack
from dash_attn.problem import Mask, Problem, documents
from dash_attn.program import Board, Sequences, load, play, save
from dash_attn.program.codec import load_extra, text_of
from dash_attn.program.replay import FINISHED
from dash_attn.simulate import Tickets
from dash_attn.simulate.simulation import Work, board_for
from dash_attn.tiling import TileShape
from dash_attn.verify import verify

STEPS, FIRST, CHAINS, FACTS = ("trace_steps", "trace_first", "trace_chains", "trace_facts")
PACK = "pack"  # a key of the facts
MOST_BYTES = {STEPS: 2**30, FIRST: 2**20, CHAINS: 2**26, FACTS: 2**16}  # that a file may hold of each


@dataclass(frozen=True, eq=False)
class Trace:
    """Events of one backward. `events[worker, 1 + entry]` holds STAMPS of backends/sm90/config.py, row 0 holds HEAD.

    `placement` has no idle workers. In a pack it has the chains that each worker has drawn. `facts` says what ran and
    on which GPU, and how long it takes without tracing.
    """

    program: Work
    placement: Sequences
    events: npt.NDArray[np.int64]
    facts: dict[str, Any]

    @cached_property
    def board(self) -> Board:
        return board_for(self.program)


def ends_of(board: Board) -> int:
    """The number of entries for the end of a chain."""
    return max(1, board.parts)


def entries_of(board: Board) -> npt.NDArray[np.int64]:
    """The number of entries of each chain: its tasks and its end."""
    return np.diff(board.task_first) + ends_of(board)


def drawn(tickets: Tickets, numbers: npt.NDArray[np.int64]) -> Sequences:
    """The chains that each worker has drawn, from `numbers[worker, row]`: a ticket plus 1, or 0 for no ticket."""
    worker, row = np.nonzero(numbers)
    ticket = numbers[worker, row] - 1
    if not np.array_equal(np.sort(ticket), np.arange(tickets.num_tickets)):
        raise ValueError("the trace is incomplete: some ticket was drawn by no worker, or by two")
    first, chains = tickets.bundles.first, tickets.bundles.chains
    spans = zip(first[ticket].tolist(), first[ticket + 1].tolist(), strict=True)
    count = np.bincount(worker, np.diff(first)[ticket], len(numbers))
    taken = np.concatenate([chains[a:b] for a, b in spans])
    return Sequences(np.append(0, np.cumsum(count)).astype(np.int32), taken)


def without_idle(placement: Sequences) -> Sequences:
    """The placement without idle workers. The kernel starts no CTA for a worker without chains."""
    used = np.flatnonzero(np.diff(placement.first))
    return Sequences(np.append(placement.first[:-1][used], placement.first[-1]), placement.chains)


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a program file that also has the events. `dash-attn verify` reads it too. A file of a pack has no program
    tables, because the facts say how to make the pack again."""
    first, chains = trace.placement.first, trace.placement.chains
    extra: dict[str, npt.NDArray[Any]] = {
        STEPS: pack(trace.events),
        FIRST: first,
        CHAINS: chains,
        FACTS: np.array(json.dumps(trace.facts)),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(trace.program, Tickets):
        with open(path, "wb") as file:
            np.savez_compressed(file, **extra)  # type: ignore[arg-type]
    else:
        save(trace.program, path, extra)


def load_trace(path: str | Path) -> Trace:
    """Read a trace. If the file is no trace, a ValueError says why."""
    if not Path(path).is_file():
        raise ValueError(f"no such file: {path}")
    extra = load_extra(path, MOST_BYTES)
    if not extra:
        load(path)  # another error, if the file is no program either
        raise ValueError(f"{path} is a program without a trace: make one with dash-attn trace")
    try:
        steps, first, chains, facts = (extra[name] for name in MOST_BYTES)
        placement = Sequences(as_int32(first), as_int32(chains))
        said = json.loads(text_of(facts))
        if not isinstance(said, dict):
            raise ValueError(f"{FACTS} is no object")
        program: Work
        if PACK in said:
            program = Tickets.of(pack_of(said[PACK]))
            check_drawn(program, placement)
        else:
            program = load(path)
            verify(program).placed(placement)
        if steps.dtype != np.uint8 or steps.ndim != 4 or steps.shape[:3] != (8, len(first) - 1, len(STAMPS)):
            raise ValueError(f"{STEPS} is {steps.dtype} of shape {steps.shape}")
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it has no {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return Trace(program, placement, unpack(steps), said)


def facts_of_pack(pack: Pack) -> dict[str, Any]:
    """Everything that `pack_of` needs to make the pack again."""
    problem, shape = pack.problem, pack.shape_of(pack.problem)
    mask, cu = problem.mask, problem.mask.documents
    plain = {name: value for name, value in asdict(problem).items() if isinstance(value, int | float | str)}
    return {
        "problem": plain,
        "sides": [mask.left, mask.right],
        "documents": None if cu is None else [cu.cu_q, cu.cu_k],
        "tile": [shape.m, shape.n],
        "policy": pack.policy,
        "fingerprint": pack.fingerprint,
    }


def pack_of(facts: dict[str, Any]) -> Pack:
    left, right = facts["sides"]
    cu = None if facts["documents"] is None else documents(*facts["documents"]).documents
    problem, shape = Problem(**facts["problem"], mask=Mask(left, right, cu)), TileShape(*facts["tile"])
    pack = Pack(problem, lambda _: shape, facts["policy"])
    if pack.fingerprint != facts["fingerprint"]:
        raise ValueError(f"its orders have the fingerprint {facts['fingerprint']}, those of this version another one")
    return pack


def check_drawn(tickets: Tickets, placement: Sequences) -> None:
    """Raises a ValueError unless every chain has one worker and the workers do not wait for each other forever."""
    whole = np.array_equal(np.sort(placement.chains), np.arange(len(tickets.board.chains)))
    steady = placement.first[0] == 0 and (np.diff(placement.first) > 0).all()
    if not (whole and steady and placement.first[-1] == len(placement.chains)):
        raise ValueError("its workers do not have every chain once")
    if play(tickets.board, placement, None).status != FINISHED:
        raise ValueError("its workers would wait for each other for ever")


def as_int32(array: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if array.dtype != np.int32 or array.ndim != 1:
        raise ValueError(f"a placement must be int32, got {array.dtype} of shape {array.shape}")
    return array


def pack(events: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """The differences of each stamp from entry to entry. The lowest bytes of all differences come first, then the next
    bytes. So most bytes are zero, and the file is half as large."""
    steps = np.diff(events.transpose(0, 2, 1), axis=2, prepend=0).astype("<i8")
    return np.moveaxis(steps[..., None].view(np.uint8), -1, 0)


def unpack(steps: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    words = np.ascontiguousarray(np.moveaxis(steps, 0, -1)).view("<i8")[..., 0]
    return np.cumsum(words, axis=2, dtype=np.int64).transpose(0, 2, 1)
