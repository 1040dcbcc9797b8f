"""Records on disk: one file for each process of a run.

A file is a signature and frames. A frame has a kind, a size and a checksum, then its bytes:

    E   the environment of the run, as JSON
    L   a layout, as compressed JSON: the rows of a step, each `[phase, module, tensor, form, place]`
    S   a step: its number, the number of its layout, its forms as JSON (dtypes and shapes), and 64-bit values

`form` and `place` of a row are places in the forms and the values of a step. The form of a tensor of which only a
share was read ends with this share, as in `float32 [4096, 1024], 1/4 read`. A value that the host had has an empty
form: it is a digest of a random state, or the bits of a float64 that is a setting of an optimizer. A step has a row
for a setting only if it is not that of the step before in the file. Most steps have the layout of the step before,
also if the length of sequences changes. So a step costs little more than 8 bytes for each tensor. Steps are appended,
and a run that was killed leaves a file whose last frame may be cut off.
"""

from __future__ import annotations

import errno
import json
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

try:
    import fcntl
except ImportError:  # not on every system; those do not see that two watchers write to one file
    fcntl = None  # type: ignore[assignment]

SIGNATURE = b"dash_attn watch 4\n"
FRAME = struct.Struct("<cII")  # kind, size, checksum
STEP = struct.Struct("<III")  # number, layout, bytes of the forms
MOST_KEPT = 256  # layouts that a writer knows again
MOST_BYTES = 1 << 32  # of a file that is read
MOST_FRAME = 1 << 26
# Bytes of JSON of all layouts. A longer file may have more, so a small file takes little memory when it is read. zlib
# makes layouts 5 to 15 times smaller, and a layout that is used has values beside it.
FREE_TEXT = 1 << 22
MOST_TEXT = 64  # for each byte of the file

# What the script gives to a module has the phase "data", or "script" if it has computed it from what modules gave.
PHASES = frozenset(
    {"start", "random", "data", "script", "forward", "recompute", "backward", "reduce", "setting", "buffer", "update"}
)
READ = " read"  # the end of the form of a tensor of which a share was read
Values = npt.NDArray[np.uint64]
Environment = dict[str, Any]


class Row(NamedTuple):
    """One tensor of a step. Its form (dtype and shape) and its value stand in the step, at these places."""

    phase: str
    module: str
    tensor: str
    form: int
    place: int


Layout = tuple[Row, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """Rows of a step, in the order in which they were seen, and the forms and values that they point to."""

    number: int
    rows: Layout
    forms: tuple[str, ...]
    values: Values

    def form(self, row: Row) -> str:
        return self.forms[row.form]

    def is_whole(self, row: Row) -> bool:
        """Was every byte of the tensor read?"""
        return not self.form(row).endswith(READ)


def share_of(one_in: int) -> str:
    """A share as it stands in a file."""
    return "1" if one_in == 1 else f"1/{one_in}"


def form_of(whole: str, one_in: int) -> str:
    """The form of a tensor, with the share of it that is read."""
    return whole if one_in == 1 else f"{whole}, {share_of(one_in)}{READ}"


def bits_of(number: float) -> int:
    """The value of a setting."""
    return int.from_bytes(struct.pack("<d", number), "little")


def number_of(bits: int) -> float:
    number: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return number


@dataclass(frozen=True, eq=False)
class Record:
    """What one process of a run has recorded. A file that ends inside a frame is not `complete`."""

    rank: int
    environment: Environment
    steps: dict[int, Step]
    complete: bool

    @property
    def share(self) -> str:
        """How much of large tensors that layers of torch.nn compute is read in a step."""
        return str(self.environment.get("share", "1"))


class Writer:
    """Appends to a new file, which takes the place of an old one. Every step is in the file when `step` returns. A lock
    on the file keeps other writers away, also those of other processes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        if not _locked(self._file):
            self._file.close()
            raise ValueError(f"another watcher writes to {path}: close it, or take another folder")
        self._file.truncate(0)
        self._file.write(SIGNATURE)
        self._layouts: dict[Layout, int] = {}
        self._last: tuple[Layout, int] | None = None
        self._written = self._text = 0
        self._size = len(SIGNATURE)

    def environment(self, facts: Environment) -> None:
        self._frame(b"E", json.dumps(facts).encode())

    def step(self, step: Step) -> None:
        forms = json.dumps(step.forms).encode()
        head = STEP.pack(step.number, self._layout(step.rows), len(forms))
        self._frame(b"S", head + forms + step.values.astype("<u8").tobytes())

    def _layout(self, rows: Layout) -> int:
        """The number of a layout, which is in the file from now on."""
        if self._last is not None and self._last[0] is rows:  # a hash of thousands of rows takes long
            return self._last[1]
        if rows not in self._layouts:
            if len(self._layouts) == MOST_KEPT:
                self._layouts.clear()
            text = json.dumps(rows).encode()
            content = zlib.compress(text)
            self._text += len(text)
            if self._text > most_text(self._size + len(content)):
                raise ValueError(f"{self._path} would have too many rows to be read")
            self._frame(b"L", content)
            self._layouts[rows] = self._written
            self._written += 1
        self._last = rows, self._layouts[rows]
        return self._last[1]

    def close(self) -> None:
        if fcntl is not None:
            with suppress(OSError):  # closing is not enough: a worker of a DataLoader may have the file open as well
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def leave(self) -> None:
        """Close the file in a forked child. The lock is that of the parent."""
        self._file.close()

    def _frame(self, kind: bytes, content: bytes) -> None:
        frame = FRAME.pack(kind, len(content), zlib.crc32(content)) + content
        self._size += len(frame)
        if len(content) > MOST_FRAME or self._size > MOST_BYTES:
            raise ValueError(f"{self._path} would be too large to be read: record fewer steps or modules")
        if self._file.write(frame) < len(frame):  # a disk that gets full takes a part, without an error
            raise OSError(errno.ENOSPC, "no space left", str(self._path))


def _locked(file: BinaryIO) -> bool:
    """Lock a file, unless another writer has locked it."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # some file systems have no locks
    return True


def most_text(size: int) -> int:
    """The most bytes of JSON that the layouts of a file of this size may have."""
    return FREE_TEXT + MOST_TEXT * size


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.watch"


def remove_from(folder: Path, rank: int) -> None:
    """Remove the files of this rank and of all higher ones, which an earlier run has left."""
    for path in folder.glob("rank*.watch"):
        number = path.stem.removeprefix("rank")
        if number.isdecimal() and int(number) >= rank:
            path.unlink(missing_ok=True)


def load(path: Path) -> Record:
    """Read a file. A ValueError says in one line what is wrong with it."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: larger than {MOST_BYTES >> 30} GiB; record fewer steps")
    with path.open("rb") as file:
        first = file.readline(64)
    if first != SIGNATURE and re.fullmatch(rb"dash_attn watch \d+\n", first):
        raise ValueError(f"{path}: another version of dash_attn wrote it, in another format: record the run again")
    try:
        return _record(path)
    except (ValueError, LookupError, TypeError, struct.error, zlib.error, RecursionError) as error:
        raise ValueError(f"{path}: damaged, or no record of dash_attn.watch: {error}") from error


def load_run(folder: Path) -> list[Record]:
    """The records of all processes of a run. Also takes the file of one process."""
    paths = [folder] if folder.is_file() else sorted(folder.glob("rank*.watch"))
    if not paths:
        raise ValueError(f"no record of dash_attn.watch in {folder}")
    records = [load(path) for path in paths]
    for path, record in zip(paths, records, strict=True):
        if not record.steps:
            raise ValueError(f"{path}: no step is recorded: the run ended before the first step to record")
    return sorted(records, key=lambda record: record.rank)


def _record(path: Path) -> Record:
    layouts, steps, environment = list[Layout](), dict[int, Step](), Environment()
    left, names = most_text(path.stat().st_size), dict[str, str]()
    with path.open("rb") as file:
        if file.read(len(SIGNATURE)) != SIGNATURE:
            raise ValueError("its first line is another")
        frames = _Frames(file)
        for kind, content in frames:
            if kind == b"E":
                environment = _environment(content)
            elif kind == b"L":
                text = zlib.decompressobj().decompress(content, left + 1)
                left -= len(text)
                if left < 0:
                    raise ValueError("too many rows for a file of this size")
                layouts.append(_layout(text, names))
            elif kind == b"S":
                step = _step(content, layouts)
                steps[step.number] = step
            else:
                raise ValueError(f"a frame of the unknown kind {kind!r}")
    return Record(environment.get("rank", 0), environment, steps, not frames.cut)


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


def _environment(content: bytes) -> Environment:
    facts = json.loads(content)
    if not isinstance(facts, dict) or type(facts.get("rank", 0)) is not int:
        raise ValueError("the environment is damaged")
    for name in ("variables", "modules"):
        if not isinstance(facts.get(name, {}), dict):
            raise ValueError(f"the {name} of the environment are damaged")
    return facts


def _step(content: bytes, layouts: list[Layout]) -> Step:
    number, layout, size = STEP.unpack_from(content)
    forms = json.loads(content[STEP.size : STEP.size + size])
    values = np.frombuffer(content, "<u8", offset=STEP.size + size)
    if not isinstance(forms, list) or not all(isinstance(form, str) for form in forms):
        raise ValueError(f"the forms of step {number} are no texts")
    for row in layouts[layout]:
        if row.place >= len(values) or row.form >= len(forms):
            raise ValueError(f"step {number} has too few values or forms")
    return Step(number, layouts[layout], tuple(forms), values)


def _layout(text: bytes, names: dict[str, str]) -> Layout:
    """Rows of all layouts share their `names`."""
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError("a layout is no list")
    return tuple(_row(row, names) for row in rows)


def _row(row: Any, names: dict[str, str]) -> Row:
    phase, module, tensor, form, place = row
    texts, numbers = (phase, module, tensor), (form, place)
    typed = all(isinstance(x, str) for x in texts) and all(type(x) is int and x >= 0 for x in numbers)
    if not typed or phase not in PHASES:
        raise ValueError("a row of a layout is damaged")
    one = names.setdefault
    return Row(one(phase, phase), one(module, module), one(tensor, tensor), form, place)
