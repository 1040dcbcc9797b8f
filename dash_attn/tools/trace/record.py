"""A trace as it came off the GPU, to and from file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dash_attn.backends.sm90.config import STAMPS
from dash_attn.program import Program, Sequences, load, save
from dash_attn.program.codec import load_extra, text_of
from dash_attn.verify import verify

STEPS, FIRST, CHAINS, FACTS = ("trace_steps", "trace_first", "trace_chains", "trace_facts")
MOST_BYTES = {STEPS: 2**30, FIRST: 2**20, CHAINS: 2**26, FACTS: 2**16}  # that a file may hold of each


@dataclass(frozen=True, eq=False)
class Trace:
    """Events of one backward: `events[worker, 1 + entry]` holds STAMPS of backends/sm90/config.py, row 0 HEAD.

    `placement` has no idle workers. `facts` says what ran where, and how long it takes without tracing.
    """

    program: Program
    placement: Sequences
    events: npt.NDArray[np.int64]
    facts: dict[str, Any]


def without_idle(placement: Sequences) -> Sequences:
    """As the kernel is launched: a worker without chains gets no CTA."""
    used = np.flatnonzero(np.diff(placement.first))
    return Sequences(np.append(placement.first[:-1][used], placement.first[-1]), placement.chains)


def save_trace(trace: Trace, path: str | Path) -> None:
    """A program file with the events beside the tables: `dash-attn verify` reads it too."""
    first, chains = trace.placement.first, trace.placement.chains
    extra: dict[str, npt.NDArray[Any]] = {
        STEPS: pack(trace.events),
        FIRST: first,
        CHAINS: chains,
        FACTS: np.array(json.dumps(trace.facts)),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save(trace.program, path, extra)


def load_trace(path: str | Path) -> Trace:
    """Read a trace; ValueError says what is wrong with a file that is none."""
    if not Path(path).is_file():
        raise ValueError(f"no such file: {path}")
    program = load(path)
    extra = load_extra(path, MOST_BYTES)
    if not extra:
        raise ValueError(f"{path} is a program without a trace: make one with dash-attn trace")
    try:
        steps, first, chains, facts = (extra[name] for name in MOST_BYTES)
        placement = Sequences(as_int32(first), as_int32(chains))
        verify(program).placed(placement)
        if steps.dtype != np.uint8 or steps.ndim != 4 or steps.shape[:3] != (8, len(first) - 1, len(STAMPS)):
            raise ValueError(f"{STEPS} is {steps.dtype} of shape {steps.shape}")
        said = json.loads(text_of(facts))
        if not isinstance(said, dict):
            raise ValueError(f"{FACTS} is no object")
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it has no {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return Trace(program, placement, unpack(steps), said)


def as_int32(array: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if array.dtype != np.int32 or array.ndim != 1:
        raise ValueError(f"a placement must be int32, got {array.dtype} of shape {array.shape}")
    return array


def pack(events: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Steps of each stamp from entry to entry, lowest bytes of all first: most bytes are zero then, and a file half as
    large."""
    steps = np.diff(events.transpose(0, 2, 1), axis=2, prepend=0).astype("<i8")
    return np.moveaxis(steps[..., None].view(np.uint8), -1, 0)


def unpack(steps: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    words = np.ascontiguousarray(np.moveaxis(steps, 0, -1)).view("<i8")[..., 0]
    return np.cumsum(words, axis=2, dtype=np.int64).transpose(0, 2, 1)
