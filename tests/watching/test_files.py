"""Records on disk: what is written is read, a run that was killed is read up to its end, all else is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from dash_attn.watching import files
from dash_attn.watching.files import (
    FRAME,
    MOST_FRAME,
    MOST_KEPT,
    SIGNATURE,
    STEP,
    Row,
    Step,
    Writer,
    load,
    load_run,
    path_of,
)

ROWS = (Row("data", "", "input", 0, 0), Row("forward", "a", "output", 1, 1))
FORMS = ("int64 [2]", "float32 [2]")


def written(path: Path, steps: int = 3) -> Path:
    writer = Writer(path)
    writer.environment({"rank": 2, "torch": "2"})
    for number in range(steps):
        writer.step(Step(number, ROWS[: 1 + number % 2], FORMS, np.array([number, 2**64 - 1], np.uint64)))
    writer.close()
    return path


def frame(kind: bytes, content: bytes) -> bytes:
    return FRAME.pack(kind, len(content), zlib.crc32(content)) + content


LAYOUT = SIGNATURE + frame(b"L", zlib.compress(json.dumps([["data", "m", "t", 0, 0]]).encode()))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = load(written(path_of(tmp_path, 2)))
    assert (record.rank, record.environment["torch"], record.complete) == (2, "2", True)
    assert [record.steps[number].rows for number in range(3)] == [ROWS[:1], ROWS, ROWS[:1]]
    assert record.steps[1].values.tolist() == [1, 2**64 - 1]
    assert record.steps[1].form(ROWS[1]) == FORMS[1]
    assert [each.rank for each in load_run(tmp_path)] == [2]


def test_a_layout_is_written_once(tmp_path: Path) -> None:
    sizes = [written(tmp_path / f"{steps}.watch", steps).stat().st_size for steps in (2, 3, 4)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] == FRAME.size + STEP.size + len(json.dumps(FORMS)) + 16


def test_many_layouts_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank0.watch"
    writer = Writer(path)
    for number in range(2 * MOST_KEPT + 3):
        rows = (Row("data", str(number), "input", 0, 0),)
        for again in (0, 1):
            writer.step(Step(2 * number + again, rows, ("f",), np.array([number], np.uint64)))
    assert len(writer._layouts) <= MOST_KEPT
    writer.close()
    steps = load(path).steps
    assert all(steps[number].rows[0].module == str(number // 2) for number in steps) and len(steps) == 4 * MOST_KEPT + 6


def test_a_file_that_was_cut_off_keeps_its_whole_steps(tmp_path: Path) -> None:
    whole = written(tmp_path / "rank0.watch").read_bytes()
    cut, kept = tmp_path / "cut.watch", set()
    for size in range(len(SIGNATURE), len(whole)):
        cut.write_bytes(whole[:size])
        record = load(cut)
        kept.add(len(record.steps))
        assert all(record.steps[number].values[0] == number for number in record.steps)
    assert kept == {0, 1, 2}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"something else",
        SIGNATURE + frame(b"X", b""),
        SIGNATURE + frame(b"E", b"[]"),
        SIGNATURE + frame(b"E", b"{"),
        SIGNATURE + frame(b"E", b'{"rank": "x"}'),
        SIGNATURE + frame(b"E", b'{"modules": 3}'),
        SIGNATURE + frame(b"E", b'{"variables": []}'),
        SIGNATURE + frame(b"L", zlib.compress(json.dumps([["unknown", "m", "t", 0, 0]]).encode())),
        SIGNATURE + frame(b"S", STEP.pack(0, 0, 0)),
        SIGNATURE + frame(b"S", b"ab"),
        LAYOUT + frame(b"S", STEP.pack(0, 0, 2) + b"{}" + bytes(8)),
        LAYOUT + frame(b"S", STEP.pack(0, 0, 3) + b"[1]" + bytes(8)),
        LAYOUT + frame(b"S", STEP.pack(0, 0, 2) + b"[]" + bytes(8)),
        LAYOUT + frame(b"S", STEP.pack(0, 0, 5) + b'["f"]'),
        LAYOUT + frame(b"S", STEP.pack(0, 1, 5) + b'["f"]' + bytes(8)),
        LAYOUT + frame(b"S", STEP.pack(0, 0, 9999) + b'["f"]' + bytes(8)),
        SIGNATURE + frame(b"L", b"no zlib"),
        SIGNATURE + frame(b"L", zlib.compress(b"{}")),
        SIGNATURE + frame(b"L", zlib.compress(b"[[1, 2]]")),
        SIGNATURE + frame(b"L", zlib.compress(b"[" * 100000)),
        SIGNATURE + frame(b"L", zlib.compress(json.dumps([["data", "m", "t", 0, -1]]).encode())),
        SIGNATURE + frame(b"L", zlib.compress(json.dumps([["data", "m", 0, 0, 0]]).encode())),
        SIGNATURE + FRAME.pack(b"S", MOST_FRAME + 1, 0) + bytes(64),
    ],
    ids=range(24),
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank0.watch"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rank0\.watch: damaged, or no record"):
        load(path)


@pytest.mark.parametrize("number", [b"1", b"2", b"3", b"77"])
def test_a_record_of_another_version(tmp_path: Path, number: bytes) -> None:
    path = tmp_path / "rank0.watch"
    path.write_bytes(b"dash_attn watch " + number + b"\n" + frame(b"E", b"{}"))
    with pytest.raises(ValueError, match="another version of dash_attn wrote it") as refused:
        load(path)
    assert "damaged" not in str(refused.value) and "record the run again" in str(refused.value)


def test_a_record_without_a_step(tmp_path: Path) -> None:
    written(path_of(tmp_path, 0))
    path_of(tmp_path, 1).write_bytes(SIGNATURE)
    with pytest.raises(ValueError, match=r"rank1\.watch: no step is recorded"):
        load_run(tmp_path)


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    path = path_of(tmp_path, 0)
    writer = Writer(path)
    writer.environment({"rank": 5})
    with pytest.raises(ValueError, match=r"another watcher writes to .*rank0\.watch: close it"):
        Writer(path)
    child = "import sys, pathlib\nfrom dash_attn.watching.files import Writer\nWriter(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", child, path], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "ValueError: another watcher writes to" in done.stderr
    writer.step(Step(0, ROWS, FORMS, np.array([1, 2], np.uint64)))
    writer.close()
    assert load(path).rank == 5
    written(path)
    assert load(path).rank == 2


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank0.watch"
    path.write_bytes(SIGNATURE + frame(b"L", zlib.compress(bytes(1 << 28))))
    tracemalloc.start()
    with pytest.raises(ValueError, match="damaged"):
        load(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 28
    tracemalloc.stop()


def test_many_layouts_of_a_small_file_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit the rows of this file take 200 times as much as here."""
    path = tmp_path / "rank0.watch"
    monkeypatch.setattr(files, "FREE_TEXT", 1 << 16)
    layout = frame(b"L", zlib.compress(json.dumps([["data", "m", "t", 0, 0]] * 2000).encode()))
    path.write_bytes(SIGNATURE + layout * 200)
    tracemalloc.start()
    with pytest.raises(ValueError, match="too many rows"):
        load(path)
    assert tracemalloc.get_traced_memory()[1] < 400 * path.stat().st_size + (1 << 21)
    tracemalloc.stop()


def long_step(number: int, rows: int, name: str = "input") -> Step:
    """Most of its rows are one tensor, as if it passed many modules."""
    layout = tuple(
        Row("forward", f"model.language_model.blocks.{i % 99}.attention.projection", name, 0, i // 50)
        for i in range(rows)
    )
    return Step(number, layout, ("f",), np.arange(1 + rows // 50, dtype=np.uint64))


def test_a_long_step(tmp_path: Path) -> None:
    path, step = tmp_path / "rank0.watch", long_step(0, 200000)
    writer = Writer(path)
    writer.step(step)
    writer.close()
    assert load(path).steps[0].rows == step.rows


@pytest.mark.parametrize(
    ("limit", "value"), [("MOST_FRAME", 10000), ("MOST_BYTES", 10000), ("FREE_TEXT", 5000), ("MOST_TEXT", 0)]
)
def test_what_a_reader_refuses_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    """The steps before it can be read."""
    path = tmp_path / "rank0.watch"
    monkeypatch.setattr(files, "FREE_TEXT", 5000)
    monkeypatch.setattr(files, "MOST_TEXT", 3)
    monkeypatch.setattr(files, limit, value)
    writer = Writer(path)
    with pytest.raises(ValueError, match=r"rank0\.watch"):
        for number in range(10):
            writer.step(long_step(number, 2 * 4**number, str(number)))
    writer.close()
    record = load(path)
    assert 0 < len(record.steps) < 9 and record.complete


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    """A changed byte in a frame fails its checksum. One in the head of a frame may look like the end of the file."""
    whole, draw = written(tmp_path / "rank0.watch").read_bytes(), random.Random(0)
    path = tmp_path / "changed.watch"
    for _ in range(500):
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            record = load(path)
        except ValueError as error:
            assert str(error).count("\n") == 0
        else:
            assert not record.complete


def test_a_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no record"):
        load_run(tmp_path)
