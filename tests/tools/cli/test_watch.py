"""dash-attn watch and diff: a script as it stands, its record, and what is said about two records."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dash_attn.tools.cli.main import main
from dash_attn.watching.files import SIGNATURE, load_run

SCRIPT = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--factor", type=float, default=1)
factor = parser.parse_args().factor
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    x = torch.randn(3, 4)
    loss = model(x * factor if step == 2 else x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done", __name__)
"""


@dataclass(frozen=True)
class Done:
    code: Any
    out: str
    err: str


def watched(script: Path, *arguments: str, to: str) -> Done:
    """Run `dash-attn watch` in this process, with a record beside the script."""
    out, err = io.StringIO(), io.StringIO()
    given = ["--to", str(script.with_name(to)), *arguments]
    at = given.index("--") if "--" in given else len(given)
    given[at : at + 1] = [str(script)]
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main(["watch", *given])
    return Done(stop.value.code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of three runs of one script: a and b are equal, c has another batch in step 2."""
    script = tmp_path_factory.mktemp("watch") / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    for name, factor in (("a", "1"), ("b", "1"), ("c", "1.5")):
        before = sys.argv, sys.path[0]
        done = watched(script, "--", "--factor", factor, to=name)
        assert (done.code, done.out) == (0, "done __main__\n"), done.err
        assert done.err.startswith("recorded in ") and (sys.argv, sys.path[0]) == before
    return script.parent


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["diff", *map(str, arguments)])
    return (stop.value.code, *capsys.readouterr())


def test_some_steps_and_modules(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watched(folder / "train.py", "--steps", "1:4:2", "--depth", "1", to="some").code == 0
    (record,) = load_run(folder / "some")
    assert sorted(record.steps) == [1, 3]
    assert {row.module for row in record.steps[1].rows if row.phase == "forward"} == {"", "0", "1", "2"}
    code, _, err = diff(capsys, folder / "a", folder / "some")
    assert code == 1 and "different depths (1 and all)" in err


def test_a_script_that_goes_on_from_a_checkpoint(folder: Path) -> None:
    assert watched(folder / "train.py", "--first-step", "100", "--steps", "101:103", to="later").code == 0
    assert sorted(load_run(folder / "later")[0].steps) == [101, 102]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--steps", each) for each in ("x", "5", "1:2:3:4", "1:5:0", "-2:5", "5:2", "1:9:-1")),
        *(("--depth", each) for each in ("0", "-1")),
        ("--first-step", "-1"),
    ],
)
def test_options_that_are_refused(folder: Path, option: str, value: str) -> None:
    """Before the script runs, in one line."""
    done = watched(folder / "train.py", option, value, to="none")
    assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1, done.err
    assert not (folder / "none").exists()


def test_equal_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = diff(capsys, folder / "a", folder / "b")
    assert code == 0 and out.startswith("no difference in 4 steps")
    code, out, _ = diff(capsys, folder / "a", folder / "b", "--json")
    assert (code, json.loads(out)) == (0, {"same": True, "steps": 4, "ranks": 1, "share": "1"})


def test_the_first_difference_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = diff(capsys, folder / "a", folder / "c", "--map", folder / "map.png")
    assert code == 1
    assert "first difference is in step 2" in out and "2 steps before it are equal" in out
    assert "the order of samples" in out
    assert (folder / "map.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = diff(capsys, folder / "a" / "rank0.watch", folder / "c" / "rank0.watch", "--json")
    facts = json.loads(out)
    assert code == 1
    assert (facts["same"], facts["step"], facts["tensor"], facts["topic"]) == (False, 2, "input", "data")
    assert (facts["form"], facts["other_form"]) == ("float32 [3, 4]", "float32 [3, 4]")
    assert (facts["settings"], facts["steps_equal"]) == ([], 2)
    assert {"name", "evidence", "advice", "seen"} == set(facts["causes"][0])


def test_a_damaged_record_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = bytearray((folder / "a" / "rank0.watch").read_bytes())
    content[60] ^= 255
    for number, bad in enumerate((bytes(content), b"", b"PK\x03\x04", SIGNATURE + b"E\xff\xff\xff\xff1234")):
        path = tmp_path / f"{number}" / "rank0.watch"
        path.parent.mkdir()
        path.write_bytes(bad)
        for given in (path, path.parent):
            code, out, err = diff(capsys, folder / "a", given)
            assert (code, out) == (1, ""), err
            assert err.startswith("dash-attn: error: ") and err.count("\n") == 1 and str(path) in err


def test_what_cannot_be_compared(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = diff(capsys, folder / "a", tmp_path / "none")
    assert code == 2 and "no such file or folder" in err
    code, _, err = diff(capsys, folder / "a", tmp_path)
    assert code == 1 and "no record" in err
    (tmp_path / "rank0.watch").write_bytes(SIGNATURE)
    code, _, err = diff(capsys, folder / "a", tmp_path)
    assert code == 1 and "rank0.watch: no step is recorded" in err and err.count("\n") == 1


def test_an_error_of_the_script_is_shown_with_its_record(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(f"{SCRIPT}\nraise ValueError('of the script')", encoding="utf-8")
    done = watched(script, to="r")
    assert done.code == 1 and "Traceback" in done.err and "ValueError: of the script" in done.err
    assert len(load_run(tmp_path / "r")[0].steps) == 4


@pytest.mark.parametrize(
    ("ends", "code"),
    [("sys.exit(0)", 0), ("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('no luck')", "no luck")],
)
def test_a_script_that_exits(tmp_path: Path, ends: str, code: Any) -> None:
    """Many scripts end in sys.exit(main())."""
    script = tmp_path / "exits.py"
    script.write_text(f"{SCRIPT}\nimport sys\n{ends}", encoding="utf-8")
    before = sys.argv, sys.path[0]
    done = watched(script, to="r")
    assert (done.code or 0, done.err) == (code, f"recorded in {tmp_path / 'r'}\n")
    assert len(load_run(tmp_path / "r")[0].steps) == 4 and (sys.argv, sys.path[0]) == before


@pytest.mark.parametrize("ends", ["", "import sys; sys.exit(0)", "import sys; sys.exit()", "import sys; sys.exit(3)"])
def test_a_script_without_an_optimizer(tmp_path: Path, ends: str) -> None:
    """A status of the script that is not 0 stays."""
    script = tmp_path / "none.py"
    script.write_text(f"print(1)\n{ends}", encoding="utf-8")
    done = watched(script, to="r")
    assert done.code == (3 if "3" in ends else 2)
    assert "made no optimizer" in done.err and done.err.count("\n") == 1


def test_a_script_that_trains_in_no_step_to_record(folder: Path) -> None:
    done = watched(folder / "train.py", "--steps", "100:200", to="beyond")
    assert done.code == 2 and "ran no step to record" in done.err and done.err.count("\n") == 1


LARGE = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
model[1].register_forward_hook(lambda layer, args, out: out * scale)  # as if the layer computed it
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    scale = torch.ones(2048, 1)
    if step == 1:
        scale[int(sys.argv[1])] = 1.5
    model(torch.randn(2048, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_share_of_large_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is said about inputs that were read in part. The runs differ in one row of what a layer computes."""
    script = tmp_path / "train.py"
    script.write_text(LARGE, encoding="utf-8")
    for to, row, *options in (
        ("a", "5"),
        ("b", "5"),
        ("other", "6"),
        ("whole", "5", "--share", "1"),
        ("sure", "6", "--share", "1", "--steps", "0:2"),
    ):
        assert watched(script, *options, "--", row, to=to).code == 0
    code, out, _ = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 0 and "A step read 1/16 of each large tensor" in out
    code, out, _ = diff(capsys, tmp_path / "a", tmp_path / "b", "--json")
    assert json.loads(out)["share"] == "1/16"

    code, out, _ = diff(capsys, tmp_path / "a", tmp_path / "other")
    assert code == 1 and "equal in the part that was read: input of 2" in out and "differs, most likely." in out
    assert "Record both runs again, with whole tensors:" in out
    assert "steps=range(0, 2), share=1, or --steps 0:2 --share 1" in out

    code, out, _ = diff(capsys, tmp_path / "whole", tmp_path / "sure")
    assert code == 1 and "output of 1 (Tanh): float32 [2048, 256]\n" in out
    assert "part that was read" not in out and "to be sure" not in out

    code, _, err = diff(capsys, tmp_path / "a", tmp_path / "whole")
    assert (
        code == 1 and "different shares of large tensors are read (1/16 and 1): record both runs with one share" in err
    )
    done = watched(script, "--share", "0.3", "--", "5", to="none")
    assert done.code == 2 and "share=0.3: give 1, or 1 / n" in done.err and done.err.count("\n") == 1
