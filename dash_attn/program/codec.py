"""Program <-> file: a compressed numpy archive of the tables and one JSON header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dash_attn.program.program import CHAIN, FORMAT, RUN, TABLES, TILE, Geometry, Program

COLUMNS = {"tiles": (len(TILE),), "chains": (len(CHAIN),), "runs": (len(RUN),)}


def save(program: Program, path: str | Path, extra: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
    """Write the program. Its fingerprint goes into the header, so that `load` notices damage. `extra` arrays are stored
    beside the tables under their own names; `load` ignores them."""
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


def load(path: str | Path) -> Program:
    """Read a program. A file that holds none is a ValueError that says what is wrong."""
    # zip, zlib, numpy and json each fail in their own way on a damaged file; the caller gets one kind of error.
    try:
        with np.load(path, allow_pickle=False) as archive:
            header = json.loads(str(archive["header"]))
            version = header["format"]
            arrays = {name: archive[name] for name in TABLES} if version == FORMAT else {}
    except Exception as error:
        raise ValueError(f"{path} is no dash_attn program: {error}") from error
    if version != FORMAT:
        raise ValueError(f"{path} has program format {version}, this version reads {FORMAT}")
    for name, array in arrays.items():
        if array.ndim == 0 or array.shape[1:] != COLUMNS.get(name, ()):
            raise ValueError(f"{path} is damaged: table {name} has shape {array.shape}")
    try:
        geometry = Geometry(**header["geometry"])
        program = Program(geometry, header["policy"], header["mask"], header["place"], **arrays)
        intact = program.fingerprint == header["fingerprint"]
    except Exception as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not intact:
        raise ValueError(f"{path} is damaged: its fingerprint names another order")
    return program
