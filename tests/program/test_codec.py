"""Programs to and from files: what comes back is the same, and whatever is no program is a ValueError."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.launch import compose
from dash_attn.problem import CAUSAL, Problem
from dash_attn.program import FORMAT, TABLES, Program, Run, load, save
from dash_attn.tiling import TileShape, tile
from dash_attn.verify import VerifyError, verify
from tests.strategies import examples, programs


def sample() -> Program:
    return compose(tile(Problem(1, 4, 2, 12, 12, mask=CAUSAL), TileShape(2, 2)), "symmetric_shift")


def parts(program: Program, path: Path) -> dict[str, Any]:
    """A saved program taken apart: header and tables."""
    save(program, path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    return {**arrays, "header": json.loads(str(arrays["header"]))}


def write(path: Path, content: dict[str, Any]) -> None:
    np.savez_compressed(path.open("wb"), **{**content, "header": np.array(json.dumps(content["header"]))})


@examples(100)
@given(program=programs())
def test_round_trip(program: Program, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.npz"
    save(program, path)
    loaded = load(path)
    for name in TABLES:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(program, name))
        assert not getattr(loaded, name).flags.writeable
    for name in ("geometry", "policy", "mask", "place", "fingerprint"):
        assert getattr(loaded, name) == getattr(program, name)
    verify(loaded)


def test_the_name_is_taken_as_it_is(tmp_path: Path) -> None:
    save(sample(), tmp_path / "order.program")
    assert load(str(tmp_path / "order.program")).fingerprint == sample().fingerprint


def test_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    content = parts(sample(), path)
    content["header"]["format"] = FORMAT + 1
    write(path, content)
    with pytest.raises(ValueError, match=f"format {FORMAT + 1}, this version reads {FORMAT}"):
        load(path)


# ---- damage ------------------------------------------------------------------------------------------------


def change(path: tuple[str, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        if value is KeyError:
            del content[path[-1]]
        else:
            content[path[-1]] = value

    return apply


HEADER = ("format", "geometry", "policy", "mask", "place", "fingerprint")
DAMAGE = {
    **{f"no {name}": change((name,), KeyError) for name in TABLES},
    **{f"header without {name}": change(("header", name), KeyError) for name in HEADER},
    "header is a list": change(("header",), [1, 2]),
    "header is null": change(("header",), None),
    "geometry is a number": change(("header", "geometry"), 3),
    "geometry without batch": change(("header", "geometry", "batch"), KeyError),
    "geometry with more": change(("header", "geometry", "colour"), 3),
    "batch is text": change(("header", "geometry", "batch"), "1"),
    "batch is negative": change(("header", "geometry", "batch"), -1),
    "batch is zero": change(("header", "geometry", "batch"), 0),
    "length is fractional": change(("header", "geometry", "len_q"), 2.5),
    "tile of zero": change(("header", "geometry", "tile_m"), 0),
    "unknown place rule": change(("header", "place"), "anywhere"),
    "fingerprint of another": change(("header", "fingerprint"), "0123456789abcdef"),
    "too many columns": change(("runs",), np.zeros((3, 8), np.int32)),
    "too few columns": change(("chains",), np.zeros((3, 4), np.int32)),
    "a matrix for a list": change(("launch",), np.zeros((2, 2), np.int32)),
    "a number for a list": change(("launch",), np.int32(4)),
    "fractions": change(("launch",), np.zeros(6)),
    "text": change(("bundle_first",), np.array(["a", "b"])),
    "numbers over 32 bits": change(("launch",), np.array([2**40])),
    "negative run lengths": change(("runs",), np.full((3, 7), -1, np.int32)),
    "runs that do not exist": change(("chains",), np.full((6, 5), 1000, np.int32)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_content(damage: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    content = parts(sample(), path)
    damage(content)
    write(path, content)
    with pytest.raises(ValueError, match=r"p\.npz"):
        load(path)


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(4))
    return file.getvalue()


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04", b"\x93NUMPY", npy(), b"\x80\x04N."])
def test_files_that_are_something_else(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is no dash_attn program"):
        load(path)


def test_no_file_and_no_header(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no dash_attn program"):
        load(tmp_path / "absent")
    with pytest.raises(ValueError, match="is no dash_attn program"):
        load(tmp_path)
    np.savez(tmp_path / "arrays.npz", a=np.arange(3))
    with pytest.raises(ValueError, match="is no dash_attn program"):
        load(tmp_path / "arrays.npz")


@examples(400)
@given(data=st.data())
def test_flipped_and_lost_bytes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Either the file is refused, or what was hit means nothing and the very same program comes back."""
    path = tmp_path_factory.getbasetemp() / "flipped.npz"
    program = sample()
    save(program, path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        loaded = load(path)
    except ValueError:
        return
    assert loaded.fingerprint == program.fingerprint
    for name in TABLES:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(program, name))


def test_a_program_that_is_whole_but_wrong_loads_and_is_refused_by_verify(tmp_path: Path) -> None:
    program = sample()
    runs = program.runs.copy()
    runs[0, Run.TURN] += 1
    save(dataclasses.replace(program, runs=runs), tmp_path / "wrong.npz")
    with pytest.raises(VerifyError, match="turns are no permutation"):
        verify(load(tmp_path / "wrong.npz"))
