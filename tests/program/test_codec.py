"""Programs to and from files: what comes back is the same, and whatever is no program is a ValueError."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.launch import compose
from dash_attn.problem import CAUSAL, FULL, Mask, Problem
from dash_attn.program import FORMAT, TABLES, Chain, Geometry, Limits, Program, Run, load, save
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
    "length is infinite": change(("header", "geometry", "len_q"), float("inf")),
    "length over 32 bits": change(("header", "geometry", "len_q"), 2**31),
    "keys over the limit": change(("header", "geometry", "len_k"), 2**31 - 1),
    "queries over the limit": change(("header", "geometry", "len_q"), 2**31 - 1),
    "heads over the limit": change(("header", "geometry", "group"), 2**31 - 1),
    "policy is a number": change(("header", "policy"), 7),
    "mask is a list": change(("header", "mask"), ["causal"]),
    "policy on two lines": change(("header", "policy"), "fa3\nok: 0 tasks"),
    "format is true": change(("header", "format"), True),
    "format is text": change(("header", "format"), "1\n2" * 1000),
    "more chains than the geometry": change(("chains",), np.zeros((500, 5), np.int32)),
    "no chains": change(("chains",), np.zeros((0, 5), np.int32)),
    "more runs than tasks": change(("runs",), np.ones((1000, 7), np.int32)),
    "no bundles": change(("bundle_first",), KeyError),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_content(damage: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    content = parts(sample(), path)
    damage(content)
    write(path, content)
    with pytest.raises(ValueError, match=r"p\.npz") as refused:
        load(path)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 300 + len(str(path))


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


# ---- sizes: a small file may not ask for much ---------------------------------------------------------------


def peak_of_loading(path: Path) -> int:
    """Bytes that Python and numpy had at once while the file was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"damaged|no dash_attn program"):
            load(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def long_run(content: dict[str, Any]) -> None:
    content["runs"][0, Run.COUNT] = 500_000_000


def overlapping_chains(content: dict[str, Any]) -> None:
    """Each chain has all runs but a few, so that each would be unrolled for itself."""
    chains, runs = content["chains"], content["runs"]
    chains[:, Chain.FIRST_RUN] = np.arange(len(chains)) % 3
    chains[:, Chain.NUM_RUNS] = len(runs) - chains[:, Chain.FIRST_RUN]


@pytest.mark.parametrize("damage", [long_run, overlapping_chains])
def test_run_lengths_are_checked_before_they_are_unrolled(damage: Any, tmp_path: Path) -> None:
    content = parts(sample(), tmp_path / "p.npz")
    damage(content)
    write(tmp_path / "p.npz", content)
    assert peak_of_loading(tmp_path / "p.npz") < 2e6


@pytest.mark.parametrize("name", ["header", "runs", "tiles", "bundle_first"])
def test_compressed_zeros_are_not_unpacked(name: str, tmp_path: Path) -> None:
    content = parts(sample(), tmp_path / "p.npz")
    content["header"]["geometry"] |= {"len_q": 2**13, "len_k": 2**13}
    zeros = np.zeros((6_000_000, 7), np.int32)
    with zipfile.ZipFile(tmp_path / "p.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for each, value in content.items():
            with archive.open(f"{each}.npy", "w") as member:
                value = np.array(json.dumps(value)) if each == "header" else value
                np.save(member, zeros if each == name else value)
    assert (tmp_path / "p.npz").stat().st_size < 400_000 < zeros.nbytes
    assert peak_of_loading(tmp_path / "p.npz") < 4e6


def test_an_array_is_as_long_as_its_prefix_says(tmp_path: Path) -> None:
    content = parts(sample(), tmp_path / "p.npz")
    for shape in ((2**40,), (-1, -42), (2**62, 2**62)):
        with zipfile.ZipFile(tmp_path / "p.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for each, value in content.items():
                file = io.BytesIO()
                np.save(file, np.array(json.dumps(value)) if each == "header" else value)
                data = file.getvalue()
                if each == "launch":
                    file = io.BytesIO()
                    prefix = {"descr": "<i4", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, prefix)
                    data = file.getvalue() + b"\0" * 4 * 42
                archive.writestr(f"{each}.npy", data)
        assert peak_of_loading(tmp_path / "p.npz") < 2e6


def test_letters_that_are_none(tmp_path: Path) -> None:
    """numpy stores text as 32-bit numbers, and gives numbers that are no letters to Python unchecked."""
    content = parts(sample(), tmp_path / "p.npz")
    letters = np.array(json.dumps(content["header"])).reshape(1).view(np.uint32).copy()
    letters[letters == ord("k")] = 0xFFFFFFF0
    text = letters.view(f"<U{len(letters)}").reshape(())
    np.savez_compressed(tmp_path / "p.npz", **{**content, "header": text})
    with pytest.raises(ValueError, match="is no dash_attn program"):
        load(tmp_path / "p.npz")


@pytest.mark.parametrize("how", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(how: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "p.npz", "w", how) as archive:
        archive.writestr("header.npy", npy())
    with pytest.raises(ValueError, match="compressed in an unknown way"):
        load(tmp_path / "p.npz")


def test_limits_can_be_set(tmp_path: Path) -> None:
    program = sample()
    save(program, tmp_path / "p.npz")
    assert load(tmp_path / "p.npz", Limits(table_bytes=program.nbytes)).nbytes == program.nbytes
    unrolled, g = int(program.runs[:, Run.COUNT].sum()), program.geometry
    assert load(tmp_path / "p.npz", Limits(visits=unrolled, tiles=g.num_q * g.num_kv, sums=g.num_targets))
    assert load(tmp_path / "p.npz", Limits(tasks=program.num_tasks, panel_tasks=program.num_tasks // g.num_groups))
    tight = (
        Limits(table_bytes=program.nbytes // 2),
        Limits(visits=unrolled - 1),
        Limits(tasks=program.num_tasks - 1),
        Limits(panel_tasks=program.num_tasks // g.num_groups - 1),
        Limits(tiles=g.num_q * g.num_kv - 1),
        Limits(chains=len(program.chains) - 1),
        Limits(sums=g.num_targets - 1),
        Limits(chain_visits=g.group * g.num_q - 1),
    )
    for limits in tight:
        with pytest.raises(ValueError, match="limit"):
            load(tmp_path / "p.npz", limits)


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_a_long_problem_is_within_the_limits(mask: Mask, tmp_path: Path) -> None:
    """What bounds hostile files must not refuse files that people make."""
    problem = Problem(1, 32, 8, 2**17, 2**17, mask=mask)
    program = compose(tile(problem, TileShape(64, 128)), "auto")
    save(program, tmp_path / "p.npz")
    assert load(tmp_path / "p.npz").fingerprint == program.fingerprint


@pytest.mark.parametrize("groups", [1, 8])
def test_a_small_file_does_not_ask_verify_for_much(groups: int, tmp_path: Path) -> None:
    """A run of a few bytes stands for a million tasks."""
    len_q, len_k = 2**20, 64 // groups
    rows = np.arange(len_k, dtype=np.int32)[:, None]
    tiles = np.insert(rows, [1, 1, 1], [0, len_q, 0], axis=1)
    chains = np.array([(0, head, k, k, 1) for head in range(groups) for k in range(len_k)], np.int32)
    runs = np.tile(np.array([0, 0, 1, len_q, 0, 0, 0], np.int32), (len_k, 1))
    launch = np.arange(len(chains) + 1, dtype=np.int32)
    geometry = Geometry(1, groups, 1, len_q, len_k, 1, 1)
    save(Program(geometry, "fa3", "full", "dealt", tiles, chains, runs, launch[:-1], launch), tmp_path / "p.npz")
    assert (tmp_path / "p.npz").stat().st_size < 4000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a panel has 67108864 tasks, the limit" if groups == 1 else "same turn"):
            verify(load(tmp_path / "p.npz"))
        assert tracemalloc.get_traced_memory()[1] < 2e8
    finally:
        tracemalloc.stop()


def test_a_small_file_at_its_limits_is_verified_in_little_memory(tmp_path: Path) -> None:
    """The later kv tiles come first at every dQ tile, so that what a task needs passes through all of them."""
    len_q, len_k, full = 2**20, 64, 8
    tiles = np.array([(k, 0, len_q, 0) for k in range(full)], np.int32)
    chains = np.array([(0, 0, k, min(k, full), int(k < full)) for k in range(len_k)], np.int32)
    runs = np.array([(0, 0, 1, len_q, full - 1 - k, 0, 0) for k in range(full)], np.int32)
    launch = np.arange(len_k + 1, dtype=np.int32)
    geometry = Geometry(1, 1, 1, len_q, len_k, 1, 1)
    limits = Limits()
    assert (len_q * len_k, full * len_q) == (limits.tiles, limits.panel_tasks)
    save(Program(geometry, "fa3", "full", "dealt", tiles, chains, runs, launch[:-1], launch), tmp_path / "p.npz")
    assert (tmp_path / "p.npz").stat().st_size < 4000
    tracemalloc.start()
    try:
        verify(load(tmp_path / "p.npz"))
        assert tracemalloc.get_traced_memory()[1] < 2e8
    finally:
        tracemalloc.stop()


def test_an_error_over_a_limit_names_the_way_out(tmp_path: Path) -> None:
    program = sample()
    save(program, tmp_path / "p.npz")
    tasks = program.num_tasks // program.geometry.num_groups
    with pytest.raises(
        ValueError, match=rf"is over a limit: .* load\(path, Limits\(panel_tasks={tasks}\)\) allows it$"
    ):
        load(tmp_path / "p.npz", Limits(panel_tasks=1))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no such file"):
        load(tmp_path / "pipe")


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


@pytest.mark.parametrize("program", ["x", None, 3])
def test_only_programs_are_saved(program: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"program must be a dash_attn Program, .* got "):
        save(program, tmp_path / "p.npz")
    assert not list(tmp_path.iterdir())
