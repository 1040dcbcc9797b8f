"""Program <-> file: a compressed numpy archive of the tables and one JSON header."""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np

from dash_attn.program.program import CHAIN, FORMAT, RUN, TILE, Geometry, Program

TABLES = ("tiles", "chains", "runs", "launch", "bundle_first")
COLUMNS = {"tiles": len(TILE), "chains": len(CHAIN), "runs": len(RUN)}


def save(program: Program, path: str | Path) -> None:
    """Write the program; its fingerprint goes into the header, so that damage is noticed on loading."""
    header = {
        "format": FORMAT,
        "geometry": asdict(program.geometry),
        "policy": program.policy,
        "mask": program.mask,
        "place": program.place,
        "fingerprint": program.fingerprint,
    }
    with open(path, "wb") as file:
        arrays = {name: getattr(program, name) for name in TABLES}
        np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)


def load(path: str | Path) -> Program:
    """Read a program; ValueError says what is wrong with a file that is none."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            header = json.loads(str(archive["header"]))
            arrays = {name: archive[name].astype(np.int32, casting="same_kind") for name in TABLES}
        version = header["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is no dash_attn program: {error}") from error
    if version != FORMAT:
        raise ValueError(f"{path} has program format {version}, this version reads {FORMAT}")
    for name, array in arrays.items():
        if array.shape[1:] != ((COLUMNS[name],) if name in COLUMNS else ()):
            raise ValueError(f"{path} is damaged: table {name} has shape {array.shape}")
    try:
        geometry = Geometry(**header["geometry"])
        program = Program(geometry, header["policy"], header["mask"], header["place"], **arrays)
        claimed = header["fingerprint"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: its header lacks or misnames {error}") from error
    if program.fingerprint != claimed:
        raise ValueError(f"{path} is damaged: its order is not the one its fingerprint names")
    return program
