"""Records on disk: one file for each process of a run.

A file is a signature and frames. A frame has a kind, a size and a checksum, then its bytes:

    E   the environment of the run, as JSON
    L   a layout, as compressed JSON: the rows of a step, each `[phase, module, tensor, form, place]`
    S   a step: its number, the number of its layout, and 64-bit values; `place` of a row is a place in these values

Most steps have the layout of the step before, so a step costs 8 bytes for each tensor. Steps are appended, and a run
that was killed leaves a file whose last frame may be cut off.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

SIGNATURE = b"dash_attn watch 1\n"
FRAME = struct.Struct("<cII")  # kind, size, checksum
STEP = struct.Struct("<II")  # number, layout
MOST_BYTES = 1 << 32  # of a file that is read
MOST_FRAME = 1 << 26
MOST_LAYOUT = 1 << 24  # bytes of JSON: some 200,000 rows

Values = npt.NDArray[np.uint64]
Environment = dict[str, Any]


class Row(NamedTuple):
    """One tensor of a step. `form` is its dtype and shape."""

    phase: str
    module: str
    tensor: str
    form: str
    place: int


Layout = tuple[Row, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """Rows of a step, in the order in which they were seen, and the values that they point to."""

    number: int
    rows: Layout
    values: Values


@dataclass(frozen=True, eq=False)
class Record:
    """What one process of a run has recorded. A file that ends inside a frame is not `complete`."""

    rank: int
    environment: Environment
    steps: dict[int, Step]
    complete: bool


class Writer:
    """Appends to a new file. Every step is in the file when `step` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._file.write(SIGNATURE)
        self._layouts: dict[Layout, int] = {}

    def environment(self, facts: Environment) -> None:
        self._frame(b"E", json.dumps(facts).encode())

    def step(self, number: int, rows: Layout, values: Values) -> None:
        if rows not in self._layouts:
            self._layouts[rows] = len(self._layouts)
            self._frame(b"L", zlib.compress(json.dumps(rows).encode()))
        self._frame(b"S", STEP.pack(number, self._layouts[rows]) + values.astype("<u8").tobytes())

    def close(self) -> None:
        self._file.close()

    def _frame(self, kind: bytes, content: bytes) -> None:
        self._file.write(FRAME.pack(kind, len(content), zlib.crc32(content)) + content)


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.watch"


def load(path: Path) -> Record:
    """Read a file. A ValueError says in one line what is wrong with it."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: larger than {MOST_BYTES >> 30} GiB; record fewer steps")
    try:
        return _record(path)
    except (ValueError, LookupError, TypeError, struct.error, zlib.error, RecursionError) as error:
        raise ValueError(f"{path}: damaged, or no record of dash_attn.watch: {error}") from error


def load_run(folder: Path) -> list[Record]:
    """The records of all processes of a run. Also takes the file of one process."""
    paths = [folder] if folder.is_file() else sorted(folder.glob("rank*.watch"))
    if not paths:
        raise ValueError(f"no record of dash_attn.watch in {folder}")
    return sorted((load(path) for path in paths), key=lambda record: record.rank)


def _record(path: Path) -> Record:
    layouts, steps, environment = list[Layout](), dict[int, Step](), Environment()
    with path.open("rb") as file:
        if file.read(len(SIGNATURE)) != SIGNATURE:
            raise ValueError("its first line is another")
        frames = _Frames(file)
        for kind, content in frames:
            if kind == b"E":
                environment = json.loads(content)
                if not isinstance(environment, dict):
                    raise ValueError("the environment is no object")
            elif kind == b"L":
                layouts.append(_layout(content))
            elif kind == b"S":
                number, layout = STEP.unpack_from(content)
                values = np.frombuffer(content, "<u8", offset=STEP.size)
                if max((row.place for row in layouts[layout]), default=-1) >= len(values):
                    raise ValueError(f"step {number} has too few values")
                steps[number] = Step(number, layouts[layout], values)
            else:
                raise ValueError(f"a frame of the unknown kind {kind!r}")
    return Record(int(environment.get("rank", 0)), environment, steps, not frames.cut)


class _Frames:
    """Frames of a file, checked. `cut` says whether the file ends inside a frame."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.cut = False

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        while head := self._file.read(FRAME.size):
            if len(head) < FRAME.size:
                self.cut = True
                return
            kind, size, checksum = FRAME.unpack(head)
            if size > MOST_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            content = self._file.read(size)
            if len(content) < size:
                self.cut = True
                return
            if zlib.crc32(content) != checksum:
                raise ValueError("a checksum is wrong")
            yield kind, content


def _layout(content: bytes) -> Layout:
    text = zlib.decompressobj().decompress(content, MOST_LAYOUT)
    if len(text) == MOST_LAYOUT:
        raise ValueError("a layout is too long")
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError("a layout is no list")
    return tuple(_row(row) for row in rows)


def _row(row: Any) -> Row:
    phase, module, tensor, form, place = row
    if not all(isinstance(text, str) for text in (phase, module, tensor, form)) or type(place) is not int or place < 0:
        raise ValueError("a row of a layout is damaged")
    return Row(phase, module, tensor, form, place)
