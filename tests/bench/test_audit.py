"""The audit finds what differs, hangs, dies or is missing, and passes what repeats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dash_attn.bench.audit import audit as audits
from dash_attn.bench.audit import child
from dash_attn.bench.audit.audit import Plan, Subject, audit
from dash_attn.bench.audit.command import main, shown
from dash_attn.bench.audit.compare import bits, differences, merge
from dash_attn.bench.audit.step import KEYWORDS, load, made
from dash_attn.bench.audit.targets import parse
from dash_attn.bench.audit.watch import Heard, watched
from dash_attn.problem import CAUSAL, Problem

PROBLEM = Problem(1, 2, 1, 768, 768, 16, "float32", mask=CAUSAL)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("step") / "step.pt"
    made(PROBLEM, CPU).save(path)
    return path


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of misbehaving functions, where child processes find it too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import fakes

    monkeypatch.setattr(fakes, "_calls", 0)
    return "fakes"


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children as plain calls: a process takes seconds to import torch."""

    def run(job: dict, folder: Path, timeout: float) -> Heard:
        heard = Heard()
        monkeypatch.setattr(child, "say", lambda **event: audits_note(heard, event))
        (child.make if "make" in job else child.run)(job)
        return heard

    from dash_attn.bench.audit.watch import _note as audits_note

    monkeypatch.setattr(audits, "watched", run)


def job(step: Path, folder: Path, target: str, *stressors: str) -> dict:
    reference = str(folder / "reference.pt")
    return {
        "step": str(step),
        "target": target,
        "device": "cpu",
        "repeats": 6,
        "stressors": list(stressors),
        "reference": reference,
    }


def test_ours_repeats_under_every_stressor(in_process: None) -> None:
    how = Plan("cpu", ("plain", "threads", "workers", "jitter", "processes"), repeats=2, processes=2)
    report = audit([Subject("causal", PROBLEM)], ["ours", "ours:fa3"], how)
    assert report["ok"]
    assert [e["stressor"] for e in report["entries"]] == list(how.stressors) * 2
    assert all(e["runs"] == 2 and e["status"] == "same bits" for e in report["entries"])


def test_a_difference_is_found_and_described(in_process: None, fakes: str) -> None:
    report = audit([Subject("causal", PROBLEM)], [f"{fakes}:differs"], Plan("cpu", ("plain", "threads"), repeats=8))
    (plain, threads) = report["entries"]
    assert not report["ok"]
    assert plain["status"] == "DIFFERS" and plain["differing"] == 3  # calls 3, 6 and 9; the first is the reference
    assert set(plain["tensors"]) == {"dk", "dv"}
    assert plain["tensors"]["dk"]["first"] == [0, 3, 0, 5] and plain["tensors"]["dv"]["first"] == [0, 7, 0, 1]
    assert plain["tensors"]["dk"]["elements"] == 1 and 0 < plain["tensors"]["dk"]["largest"] < 1e-5
    assert threads["status"] == "not applicable"
    text = shown(report)
    assert "dk differs in 3 of 8 runs" in text and "[0, 3, 0, 5]" in text and "NOT all bits equal" in text


def test_what_is_missing_is_not_passed(in_process: None, fakes: str) -> None:
    report = audit([Subject("x", PROBLEM)], [f"{fakes}:absent", "fa4 det"], Plan("cpu", ("plain",), repeats=1))
    assert [e["status"] for e in report["entries"]] == ["missing", "missing"]
    assert not report["ok"] and "not for this machine" in report["entries"][0]["why"]


def test_a_hang_is_ended_and_named(step: Path, tmp_path: Path, fakes: str) -> None:
    heard = watched(job(step, tmp_path, f"{fakes}:hangs", "plain"), tmp_path, timeout=2)
    assert (heard.verdict, heard.at, heard.repeat) == ("hang", "plain", 1)
    assert audits._broken("x", heard.at, heard)["status"] == "HANG"


def test_a_crash_is_told_from_a_hang(step: Path, tmp_path: Path, fakes: str) -> None:
    heard = watched(job(step, tmp_path, f"{fakes}:dies", "plain"), tmp_path, timeout=30)
    assert (heard.verdict, heard.at, heard.why) == ("died", "plain", "exit status 11")


def test_after_a_hang_the_other_stressors_still_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def watched(told: dict, folder: Path, timeout: float) -> Heard:
        asked.append(told["stressors"])
        if "workers" in told["stressors"]:
            done = {"stressor": "plain", "runs": 1, "differing": 0, "tensors": {}}
            return Heard("hang", "silent for 2 s", "workers", 1, [done])
        return Heard("done", results=[{"stressor": "jitter", "runs": 1, "differing": 0, "tensors": {}}])

    monkeypatch.setattr(audits, "watched", watched)
    entries = audits._target({"target": "ours"}, tmp_path, Plan("cpu", ("plain", "workers", "jitter")))
    assert asked == [["plain", "workers", "jitter"], ["jitter"]]
    assert [(e["stressor"], e["status"]) for e in entries] == [
        ("plain", "same bits"),
        ("workers", "HANG"),
        ("jitter", "same bits"),
    ]


def test_bits_are_compared_not_numbers() -> None:
    zero, nan = torch.zeros(2, 3), torch.full((2, 3), float("nan"))
    assert differences((zero, nan, zero), (zero, nan, zero)) == {}
    found = differences((-zero, nan, zero), (zero, nan, zero))
    assert found["dq"]["elements"] == 6 and found["dq"]["first"] == [0, 0] and found["dq"]["largest"] == 0
    assert bits(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.int16
    assert differences((nan, zero, zero), (zero, zero, zero))["dq"]["largest"] == float("inf")
    total: dict = {}
    merge(total, found)
    merge(total, found)
    assert total["dq"]["runs"] == 2


def test_a_saved_step_may_leave_out_the_forward_and_pack_sequences(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(60, 2, 16, generator=generator) for _ in range(4))
    kwargs = {"causal": True, "cu_seqlens_q": torch.tensor([0, 20, 60], dtype=torch.int32)}
    torch.save({"dout": dout, "q": q, "k": k, "v": v, "kwargs": kwargs}, tmp_path / "packed.pt")
    found = load(tmp_path / "packed.pt", CPU)
    assert found.operands.out.shape == q.shape and found.operands.lse.shape == (2, 60)
    assert found.batched().q.shape == (1, 60, 2, 16) and found.problem().mask.documents is not None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"q": 1}, "dout"),
        ([1], "expected a dict"),
        ({**dict.fromkeys(("dout", "q", "k", "v"), 0), "softcap": 1}, "softcap"),
        ({**dict.fromkeys(("dout", "q", "k", "v"), 0), "kwargs": {"dropout": 1}}, "dropout"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: object, says: str) -> None:
    torch.save(content, tmp_path / "step.pt")
    with pytest.raises(ValueError, match=says):
        load(tmp_path / "step.pt", CPU)
    assert "causal" in KEYWORDS


def test_targets() -> None:
    assert parse("ours") == ("ours", "auto") and parse("ours:shift:8") == ("ours", "shift:8")
    assert parse("fa4_det") == ("peer", "fa4 det") and parse("a.b:c") == ("function", "a.b:c")
    with pytest.raises(ValueError, match="policy"):
        parse("ours:nope")
    with pytest.raises(ValueError, match="unknown peer"):
        parse("nope")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stress", "graph", "--cpu"], "graph"),
        (["--repeats", "0"], "--repeats"),
        (["--timeout", "0"], "--timeout"),
        (["--target", "nope"], "nope"),
        (["--step", "nowhere.pt"], "nowhere.pt"),
        (["--step", "nowhere.pt", "--causal"], "own shape"),
        (["--seqlen", "many"], "whole numbers"),
    ],
)
def test_mistakes_are_named(arguments: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        main(arguments)


def test_exit_status_and_json(in_process: None, fakes: str, step: Path, tmp_path: Path, capsys) -> None:
    common = ["--cpu", "--step", str(step), "--stress", "plain", "--repeats", "3"]
    assert main([*common, "--target", f"ours,{fakes}:right", "--json", "--out", str(tmp_path / "report.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert [e["target"] for e in report["entries"]] == ["ours", "fakes:right"]
    assert main([*common, "--target", f"{fakes}:differs"]) == 1
    assert "NOT all bits equal" in capsys.readouterr().out
