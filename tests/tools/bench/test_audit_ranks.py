"""The audit of invariance over ranks: processes of a group against one process, and what is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dash_attn.problem import CAUSAL, Problem
from dash_attn.tools.bench.audit import ranks
from dash_attn.tools.bench.audit.audit import AuditSettings, Report, Subject, audit
from dash_attn.tools.bench.audit.targets import CONTROL
from dash_attn.tools.cli.audit import shown_invariance
from dash_attn.tools.cli.main import main as dash_attn_command
from tests.tools.bench import ranks_with_tiles

PROBLEM = Problem(1, 4, 2, 100, 100, 16, "float32", mask=CAUSAL)


def audited(targets: list[str], numbers: tuple[int, ...], problem: Problem = PROBLEM, *spots: str) -> Report:
    how = AuditSettings("cpu", spots or tuple(ranks.spots_of(numbers)), invariance=True, ranks=numbers)
    return audit([Subject("one", problem)], targets, how)


def test_every_number_mode_and_layout_is_a_spot() -> None:
    spots = ranks.spots_of((1, 2, 4))
    assert len(spots) == 4 + 4 + 6
    assert spots["4-a2a+all_gather-zigzag"] == (4, "a2a+all_gather", "zigzag")


@pytest.mark.parametrize(("numbers", "panels"), [((1, 2, 4), 16), ((1, 3), 18), ((16,), 32), ((2, 3, 8), 48)])
def test_all_numbers_of_ranks_share_one_number_of_panels(numbers: tuple[int, ...], panels: int) -> None:
    assert ranks.panels_for(numbers) == panels


def test_ours_keeps_its_bits_on_the_ranks_and_the_control_does_not(in_process: None) -> None:
    spots = ["4-a2a-zigzag", "4-all_gather-contiguous", "4-a2a+all_gather-zigzag"]
    report = audited(["ours", CONTROL], (4,), PROBLEM, *spots)
    for target, status in (("ours", "same bits"), (CONTROL, "DIFFERS")):
        entries = [entry for entry in report["entries"] if entry["target"] == target]
        assert {entry["stressor"]: entry["status"] for entry in entries} == dict.fromkeys(spots, status)
        assert all(entry["runs"] == 2 for entry in entries), "a batch and a pack"
    assert report["ok"] and report["complete"]


def test_panels_of_several_tiles(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of 7 tokens have 3 q tiles. The control has the same panels, and other orders of their tiles."""
    spots = ["4-a2a-zigzag", "4-all_gather-contiguous", "4-a2a+all_gather-zigzag"]
    monkeypatch.setattr(ranks, "_rank", ranks_with_tiles.in_order)
    entries = audited(["ours"], (4,), PROBLEM, *spots)["entries"]
    assert [(entry["stressor"], entry["status"]) for entry in entries] == [(spot, "same bits") for spot in spots]
    monkeypatch.setattr(ranks, "_rank", ranks_with_tiles.out_of_order)
    (entry,) = audited(["ours"], (2,), PROBLEM, "2-all_gather-contiguous")["entries"]
    assert entry["status"] == "DIFFERS" and set(entry["tensors"]) == {"dq", "dk", "dv"}


def test_a_control_that_keeps_its_bits_is_a_failure(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MISTAKE", 1)
    report = audited([CONTROL], (1,), PROBLEM, "1-a2a-zigzag")
    assert not report["ok"] and "notices nothing" in shown_invariance(report)


def test_a_mesh_that_cannot_share_the_heads_is_not_applicable(in_process: None) -> None:
    spot = "4-a2a+all_gather-zigzag"
    report = audited(["ours"], (4,), Problem(1, 3, 1, 40, 40, 8, "float32"), spot)
    assert [(entry["stressor"], entry["status"]) for entry in report["entries"]] == [(spot, "not applicable")]


@pytest.mark.parametrize(
    ("device", "gpus", "count", "expected"),
    [
        ("cpu", 8, 2, ("gloo", ["cpu", "cpu"])),
        ("cuda", 1, 2, ("gloo", ["cuda:0", "cuda:0"])),
        ("cuda", 2, 2, ("nccl", ["cuda:0", "cuda:1"])),
    ],
)
def test_who_carries_tensors(
    device: str, gpus: int, count: int, expected: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    library, devices = ranks.transport(device, count)
    assert (library, list(map(str, devices))) == expected


def main(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        dash_attn_command(["audit", "--cpu", *arguments])
    return int(stop.value.code or 0)


def test_the_command(in_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    small = ["--seqlen", "60", "--head-dim", "8", "--mask", "causal", "--stress", "2-all_gather-zigzag"]
    assert main(["--invariance", "--ranks", "1,2", *small, "--out", str(file)]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in out.splitlines() if "2-all_gather-zigzag" in line]
    assert " yes " in line and "NO: " in line and "all bits equal" in out
    assert "ours: 2-all_gather-zigzag" in err, "progress"
    assert {entry["target"] for entry in json.loads(file.read_text())["entries"]} == {"ours", CONTROL}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "1,2"], "--invariance"),
        (["--invariance", "--ranks", "0"], "--ranks"),
        (["--invariance", "--ranks", "2", "--stress", "packed"], "2-a2a-zigzag"),
        (["--invariance", "--ranks", "2", "--target", "fa4"], "--target"),
    ],
)
def test_mistakes_are_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
