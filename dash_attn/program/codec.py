"""Program <-> file: a compressed numpy archive of the tables and one JSON header.

A file comes from anywhere. So `load` looks at sizes before it makes room: the header bounds the tables, and the tables'
numbers bound what is unrolled from them.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dash_attn.program.program import FORMAT, ROW, TABLES, Chain, Geometry, Int32, Program, Run

HEADER_BYTES = 2**16
PREFIX_BYTES = 2**12  # what stands before the numbers of an array: its shape and type, in words
PIECE_BYTES = 2**18
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes; others unpack without a bound


@dataclass(frozen=True)
class Limits:
    """What a file may ask for.

    With tiles of 64x128 the defaults hold panels of 4 q heads and 131,072 tokens, and windows in half a million tokens.
    A small file then takes less than 200 MB.
    """

    table_bytes: int = 2**26  # of the five tables together
    tiles: int = 2**26  # of one plane
    chains: int = 2**19
    sums: int = 2**23  # dQ tiles of all planes
    chain_visits: int = 2**20  # of one chain
    visits: int = 2**28  # of all runs: what the fingerprint unrolls
    panel_tasks: int = 2**23  # of one panel: what `verify` holds in memory
    tasks: int = 2**28  # of all chains: what `verify` plays through


LIMITS = Limits()


class OverLimit(ValueError):
    """A file asks for more than a limit allows. It need not be damaged."""

    def __init__(self, said: str, number: int, limit: str, limits: Limits) -> None:
        allowed = f"the limit is {getattr(limits, limit)}: load(path, Limits({limit}={number})) allows it"
        super().__init__(f"{said}, {allowed}")


def save(program: Program, path: str | Path, extra: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
    """Write the program. Its fingerprint goes into the header, so that `load` notices damage. `extra` arrays are stored
    beside the tables under their own names; `load` ignores them."""
    if not isinstance(program, Program):
        raise ValueError(
            f"program must be a dash_attn Program, as dash_attn.load reads it; got {type(program).__name__}"
        )
    header = {
        "format": FORMAT,
        "geometry": asdict(program.geometry),
        "policy": program.policy,
        "mask": program.mask,
        "place": program.place,
        "fingerprint": program.fingerprint,
    }
    with open(path, "wb") as file:
        arrays: dict[str, Any] = {name: getattr(program, name) for name in TABLES} | dict(extra or {})
        np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)


def load(path: str | Path, limits: Limits = LIMITS) -> Program:
    """Read a program. A file that holds none, or asks for more than `limits`, is a ValueError of one line.

    `attention`, `backward` and `explain` take the program as their policy. They verify it and compare it with the
    problem.
    """
    # zip, zlib, numpy and json each fail in their own way on a damaged file; the caller gets one kind of error.
    wrong = "is no dash_attn program"
    try:
        if not Path(path).is_file():  # a pipe or a device would be waited for
            raise ValueError("no such file")
        with zipfile.ZipFile(path) as archive:
            header = read_header(archive)
            if type(header["format"]) is not int or header["format"] != FORMAT:
                wrong = "cannot be read"
                raise ValueError(f"it has program format {header['format']}, this version reads {FORMAT}")
            wrong = "is damaged"
            geometry = Geometry(**header["geometry"])
            check_geometry(geometry, limits)
            tables = read_tables(archive, geometry, limits)
        words = [header[name] for name in ("policy", "mask", "place", "fingerprint")]
        if not all(isinstance(word, str) and word.isprintable() for word in words):
            raise ValueError("policy, mask, place and fingerprint must be words on one line")
        check_runs(geometry, tables["chains"], tables["runs"], limits)
        program = Program(geometry, header["policy"], header["mask"], header["place"], **tables)
        if program.fingerprint != header["fingerprint"]:
            raise ValueError("its fingerprint names another order")
    except OverLimit as error:
        raise ValueError(f"{path} is over a limit: {error}") from error
    except Exception as error:
        raise ValueError(f"{path} {wrong}: {reason(error)}") from error
    return program


def load_extra(path: str | Path, most_bytes: Mapping[str, int]) -> dict[str, npt.NDArray[Any]]:
    """Arrays that `save` stored beside the tables. Each name has its most bytes; absent names are left out."""
    try:
        with zipfile.ZipFile(path) as archive:
            present = {name: most for name, most in most_bytes.items() if f"{name}.npy" in archive.namelist()}
            return {name: read_array(archive, name, most) for name, most in present.items()}
    except Exception as error:
        raise ValueError(f"{path} is damaged: {reason(error)}") from error


def text_of(array: npt.NDArray[Any]) -> str:
    """The text that numpy has stored in an array. ValueError if it is none."""
    if not array.dtype.str.startswith("<U") or array.shape != ():
        raise ValueError("text is expected")
    # numpy would take any 32-bit number for a letter; Python's own strings break on such letters.
    return array.tobytes().decode("utf-32-le").rstrip("\0")


def reason(error: Exception) -> str:
    """An error on one short line, whatever a file made it say."""
    text = f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
    line = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return line if len(line) <= 200 else f"{line[:200]}..."


# ---- the archive -------------------------------------------------------------------------------------------


def read_header(archive: zipfile.ZipFile) -> dict[str, Any]:
    header = json.loads(text_of(read_array(archive, "header", HEADER_BYTES)))
    if not isinstance(header, dict) or not isinstance(header["geometry"], dict):
        raise ValueError("its header is no object with a geometry")
    return header


def read_tables(archive: zipfile.ZipFile, geometry: Geometry, limits: Limits) -> dict[str, Int32]:
    """The tables, none longer than the geometry allows and all together within the limit."""
    chains, tiles = geometry.num_groups * geometry.num_kv, geometry.num_q * geometry.num_kv
    rows = {
        "tiles": tiles,
        "chains": chains,
        "runs": tiles * geometry.num_groups * geometry.group,
        "launch": chains,
        "bundle_first": chains + 1,
    }
    left, tables = limits.table_bytes, dict[str, Int32]()
    for name in TABLES:
        row_bytes = 4 * math.prod(ROW[name])
        most = min(left, rows[name] * row_bytes)
        table = read_array(archive, name, most)
        if table.dtype != np.int32 or table.ndim == 0 or table.shape[1:] != ROW[name]:
            raise ValueError(f"table {name} is {table.dtype} of shape {table.shape}")
        left, tables[name] = left - table.nbytes, table
    for name in ("chains", "launch"):
        if len(tables[name]) != chains:
            raise ValueError(f"table {name} has {len(tables[name])} rows, the geometry has {chains} chains")
    return tables


def read_array(archive: zipfile.ZipFile, name: str, most_bytes: int) -> npt.NDArray[Any]:
    """One array of at most `most_bytes`. Nothing is unpacked before its size is known to be allowed."""
    if f"{name}.npy" not in archive.namelist():
        raise ValueError(f"it has no {name}")
    info = archive.getinfo(f"{name}.npy")
    if info.file_size > most_bytes + PREFIX_BYTES:
        raise ValueError(f"{name} of {info.file_size} bytes is over the limit of {most_bytes}")
    if info.compress_type not in COMPRESSIONS:
        raise ValueError(f"{name} is compressed in an unknown way")
    with archive.open(info) as member:
        content = b"".join(iter(lambda: member.read(PIECE_BYTES), b""))
    stream = io.BytesIO(content)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError(f"{name} is an array of another version")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=PREFIX_BYTES)
    begin = stream.tell()
    if dtype.hasobject or any(size < 0 for size in shape):
        raise ValueError(f"{name} is no array of plain values")
    size = len(content) - begin
    if size > most_bytes:
        raise ValueError(f"{name} of {size} bytes is over the limit of {most_bytes}")
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{name} has {size} bytes for {dtype} of shape {shape}")
    return np.frombuffer(content, dtype, math.prod(shape), begin).reshape(shape, order="F" if fortran else "C")


# ---- what the tables ask for -------------------------------------------------------------------------------


def check_geometry(geometry: Geometry, limits: Limits) -> None:
    asked = {
        "tiles of a plane": (geometry.num_q * geometry.num_kv, "tiles"),
        "chains": (geometry.num_groups * geometry.num_kv, "chains"),
        "dQ tiles": (geometry.num_groups * geometry.group * max(1, geometry.num_q), "sums"),
        "visits of a chain": (geometry.group * geometry.num_q, "chain_visits"),
    }
    for name, (number, limit) in asked.items():
        if number > getattr(limits, limit):
            raise OverLimit(f"its geometry has {number} {name}", number, limit, limits)


def check_runs(geometry: Geometry, chains: Int32, runs: Int32, limits: Limits) -> None:
    """Chains name runs that exist, share all of their runs or none, and visit no more tiles than they have."""
    length = runs[:, Run.COUNT].astype(np.int64)
    if len(runs) and not 1 <= length.min() <= length.max() <= geometry.num_q:
        raise ValueError(f"a run has no task or more than {geometry.num_q}")
    visits = np.concatenate([[0], np.cumsum(length)])
    if visits[-1] > limits.visits:
        raise OverLimit(f"its runs have {visits[-1]} visits", int(visits[-1]), "visits", limits)
    first, count = (chains[:, column].astype(np.int64) for column in (Chain.FIRST_RUN, Chain.NUM_RUNS))
    if len(chains) and (min(first.min(), count.min()) < 0 or (first + count).max() > len(runs)):
        raise ValueError("a chain names runs that do not exist")
    tasks = visits[first + count] - visits[first]
    if tasks.max(initial=0) > geometry.group * geometry.num_q:
        raise ValueError("a chain has more tasks than tiles")
    if tasks.sum() > limits.tasks:
        raise OverLimit(f"it has {tasks.sum()} tasks", int(tasks.sum()), "tasks", limits)
    _, panel = np.unique(chains[:, [Chain.BATCH, Chain.KV_HEAD]], axis=0, return_inverse=True)
    most = int(np.bincount(panel.reshape(-1), tasks).max(initial=0))
    if most > limits.panel_tasks:
        raise OverLimit(f"a panel has {most} tasks", most, "panel_tasks", limits)
    begin, end = np.unique(np.stack([first, first + count], 1)[count > 0], axis=0).T
    if (begin[1:] < end[:-1]).any():
        raise ValueError("chains share some of their runs but not all")
