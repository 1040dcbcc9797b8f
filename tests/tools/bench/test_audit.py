"""The audit finds what differs, hangs, dies or is missing, and passes what repeats."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

import dash_attn
from dash_attn.problem import CAUSAL, Problem
from dash_attn.tools.bench.audit import audit as audits
from dash_attn.tools.bench.audit import watch
from dash_attn.tools.bench.audit.audit import AuditSettings, Subject, audit
from dash_attn.tools.bench.audit.compare import bits, differences, in_bursts, largest, merge
from dash_attn.tools.bench.audit.step import KEYWORDS, load, made
from dash_attn.tools.bench.audit.targets import Conditions, parse, target_of
from dash_attn.tools.bench.audit.watch import Hear, Heard, watched
from dash_attn.tools.bench.record import write_json
from dash_attn.tools.cli.audit import shown
from dash_attn.tools.cli.main import main as dash_attn_command
from dash_attn.tools.viz.evidence import evidence
from dash_attn.tools.viz.results import read

PROBLEM = Problem(1, 2, 1, 768, 768, 16, "float32", mask=CAUSAL)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("step") / "step.pt"
    made(PROBLEM, CPU).save(path)
    return path


def deaf(job: dict, event: dict) -> None:
    pass


def job(step: Path, folder: Path, target: str, *stressors: str) -> dict:
    reference = str(folder / "reference.pt")
    return {
        "step": str(step),
        "target": target,
        "device": "cpu",
        "repeats": 6,
        "calls": 1,
        "stressors": list(stressors),
        "reference": reference,
    }


def test_ours_repeats_under_every_stressor(in_process: None) -> None:
    how = AuditSettings("cpu", ("plain", "threads", "workers", "jitter", "processes"), repeats=2, processes=2)
    report = audit([Subject("causal", PROBLEM)], ["ours", "ours:fa3"], how)
    assert report["ok"]
    assert [e["stressor"] for e in report["entries"]] == list(how.stressors) * 2
    assert all(e["runs"] == 2 and e["status"] == "same bits" for e in report["entries"])


def test_a_difference_is_found_and_described(in_process: None, fakes: str) -> None:
    report = audit(
        [Subject("causal", PROBLEM)], [f"{fakes}:differs"], AuditSettings("cpu", ("plain", "threads"), repeats=8)
    )
    (plain, threads) = report["entries"]
    assert not report["ok"]
    assert plain["status"] == "DIFFERS" and plain["differing"] == 3  # calls 3, 6 and 9; the first is the reference
    assert set(plain["tensors"]) == {"dk", "dv"}
    assert plain["tensors"]["dk"]["first"] == [0, 3, 0, 5] and plain["tensors"]["dv"]["first"] == [0, 7, 0, 1]
    assert plain["tensors"]["dk"]["elements"] == 1 and 0 < plain["tensors"]["dk"]["largest"] < 1e-5
    assert threads["status"] == "not applicable"
    text = shown(report)
    assert "dk differs in 3 of 8 runs" in text and "[0, 3, 0, 5]" in text and "NOT all bits equal" in text


def test_a_repeat_of_several_calls(in_process: None, fakes: str) -> None:
    """All of its calls are compared and counted. If some of them differ, the repeat counts once."""
    how = AuditSettings("cpu", ("plain", "workers"), repeats=3, calls=4)
    report = audit([Subject("causal", PROBLEM)], ["ours", f"{fakes}:differs"], how)
    runs = [(e["stressor"], e["runs"], e["differing"]) for e in report["entries"]]
    assert runs == [("plain", 12, 0), ("workers", 12, 0), ("plain", 12, 3), ("workers", 0, 0)]
    differing = report["entries"][2]["tensors"]["dk"]
    assert differing["runs"] == 3 and differing["elements"] == 1 and differing["first"] == [0, 3, 0, 5]
    assert report["stressors"] == {"plain": 24, "workers": 12} and "runs under plain: 24, workers: 12" in shown(report)


def test_results_are_freed_before_the_next_call() -> None:
    """So that the next call can get their memory, filled with other numbers."""
    alive: list[bool] = []
    last: list[weakref.ref] = []

    def results() -> Iterator[tuple[torch.Tensor, ...]]:
        for _ in range(6):
            alive.extend(each() is not None for each in last)
            result = torch.ones(3)
            last[:] = [weakref.ref(result)]
            yield (result,)
            del result

    want = (torch.ones(3),)
    assert [differences(got, want, ("dq",)) for got in in_bursts(results(), want, 3)] == [{}, {}]
    assert alive == [False] * 5


def test_a_result_of_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\(4,\) torch.float32 after \(3,\)"):
        list(in_bursts(iter([(torch.ones(4),)]), (torch.ones(3),), 1))


def test_what_is_missing_is_not_passed(in_process: None, fakes: str) -> None:
    report = audit([Subject("x", PROBLEM)], [f"{fakes}:absent", "fa4 det"], AuditSettings("cpu", ("plain",), repeats=1))
    assert [e["status"] for e in report["entries"]] == ["missing", "missing"]
    assert not report["ok"] and "not for this machine" in report["entries"][0]["why"]


def test_a_hang_is_ended_and_named(step: Path, tmp_path: Path, fakes: str) -> None:
    """Each process is watched for itself: the others, dead or well, are told apart from the one that hangs."""
    jobs = [job(step, tmp_path / name, f"{fakes}:{name}", "plain") for name in ("hangs", "dies", "copies")]
    for each in jobs:
        Path(each["reference"]).parent.mkdir()
    heard, died, well = watched(jobs, tmp_path, 3, deaf)
    assert (heard.verdict, heard.at, heard.repeat) == ("hang", "plain", 1)
    assert audits._broken("x", heard.at, heard)["status"] == "HANG"
    assert (died.verdict, died.at, died.why) == ("died", "plain", "exit status 11")
    assert well.verdict == "done" and [result["runs"] for result in well.results] == [6]


def test_who_may_have_waited_for_a_hang_gets_more_time() -> None:
    """The first is ended, and the patience with the second begins anew: it speaks later than it had to."""
    ended = SimpleNamespace(poll=lambda: 0)
    now, lines = time.monotonic(), SimpleQueue()
    silent, late = (watch._Child({}, ended, Path(), deadline) for deadline in (now, now + 0.05))
    for after, line in ((0.3, '@audit {"done": true}'), (0.4, None)):
        threading.Timer(after, lines.put, [(late, line)]).start()
    watch._listen([silent, late], lines, 5, deaf)
    assert (silent.heard.verdict, silent.heard.beside, late.heard.verdict) == ("hang", 1, "done")


def test_whom_others_may_have_held_up_is_not_blamed_silently() -> None:
    entry = audits._broken("x", "processes", Heard("hang", "silent for 4 s", beside=3))
    assert entry["status"] == "HANG" and "while 3 more ran" in entry["why"] and "--at-once 1" in entry["why"]
    assert audits._broken("x", "plain", Heard("hang", "silent for 4 s"))["why"] == "silent for 4 s, after 0 repeats"


def test_no_child_outlives_an_interrupt(step: Path, tmp_path: Path, fakes: str, monkeypatch) -> None:
    children, start = [], watch._started
    monkeypatch.setattr(watch, "_started", lambda *told: children.append(start(*told)) or children[-1])

    def hear(job: dict, event: dict) -> None:
        if event.get("repeat") == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched([job(step, tmp_path, f"{fakes}:hangs", "plain")] * 2, tmp_path, 60, hear)
    assert [child.process.returncode for child in children] == [-signal.SIGKILL] * 2


def test_after_a_hang_the_other_stressors_still_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def watched(jobs: list[dict], folder: Path, timeout: float, hear: Hear) -> list[Heard]:
        (told,) = jobs
        asked.append(told["stressors"])
        hangs = "workers" in told["stressors"]
        result = {"stressor": "plain" if hangs else "jitter", "runs": 1, "differing": 0, "tensors": {}}
        hear(told, {"result": result})
        return [Heard("hang", "silent for 2 s", "workers", 1) if hangs else Heard("done")]

    monkeypatch.setattr(audits, "watched", watched)
    subject = Subject("x", file=tmp_path)
    entries = audit([subject], ["ours"], AuditSettings("cpu", ("plain", "workers", "jitter")))["entries"]
    assert asked == [["plain", "workers", "jitter"], ["jitter"]]
    assert [(e["stressor"], e["status"]) for e in entries] == [
        ("plain", "same bits"),
        ("workers", "HANG"),
        ("jitter", "same bits"),
    ]


def test_fresh_processes_run_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of all targets, as many as may; the report keeps the order of targets."""
    asked = []

    def watched(jobs: list[dict], folder: Path, timeout: float, hear: Hear) -> list[Heard]:
        asked.append([(told["target"], *told["stressors"]) for told in jobs])
        result = {"stressor": jobs[0]["stressors"][0], "runs": 1, "differing": 0, "tensors": {}}
        for told in reversed(jobs):
            hear(told, {"result": result})
        return [Heard("done", results=[result]) for _ in jobs]

    monkeypatch.setattr(audits, "watched", watched)
    how = AuditSettings("cpu", ("plain", "processes"), processes=3, at_once=4)
    report = audit([Subject("x", file=tmp_path)], ["ours", "any"], how)
    fresh = [("ours", "processes")] * 3 + [("any", "processes")] * 3
    assert asked == [[("ours", "plain")], [("any", "plain")], fresh[:4], fresh[4:]]
    assert [(e["target"], e["stressor"], e["runs"]) for e in report["entries"]] == [
        ("ours", "plain", 1),
        ("ours", "processes", 3),
        ("any", "plain", 1),
        ("any", "processes", 3),
    ]


def test_progress_says_what_is_done_now(in_process: None, fakes: str, capsys) -> None:
    how = AuditSettings("cpu", ("plain", "jitter", "processes"), repeats=1)
    audit([Subject(name, PROBLEM) for name in ("a", "b")], ["ours", f"{fakes}:copies"], how)
    said = capsys.readouterr()
    lines = [re.sub(r", \d+ s]", "]", line) for line in said.err.splitlines()]
    assert said.out == "" and lines[:5] == [
        "[1/6] audit a, inputs",
        "[1/6] audit a, ours: start",
        "[1/6] audit a, ours: plain",
        "[1/6] audit a, ours: jitter",
        "[2/6] audit a, fakes:copies: start",
    ]
    assert lines[6:8] == [
        "[3/6] audit a, processes: start 4 at once",
        "[3/6] audit a, processes: 1 of 4 compared, ours",
    ]
    assert lines[11] == "[4/6] audit b, inputs"


def test_bits_are_compared_not_numbers() -> None:
    zero, nan = torch.zeros(2, 3), torch.full((2, 3), float("nan"))
    assert differences((zero, nan, zero), (zero, nan, zero)) == {}
    apart = differences((-zero, nan, zero), (zero, nan, zero))
    assert apart["dq"]["elements"] == 6 and apart["dq"]["first"] == [0, 0] and apart["dq"]["largest"] == 0
    assert bits(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.int16
    assert differences((nan, zero, zero), (zero, zero, zero))["dq"]["largest"] == float("inf")
    total: dict = {}
    merge(total, apart)
    merge(total, apart)
    assert total["dq"]["runs"] == 2


def test_a_saved_step_may_leave_out_the_forward_and_pack_sequences(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(60, 2, 16, generator=generator) for _ in range(4))
    kwargs = {"causal": True, "cu_seqlens_q": torch.tensor([0, 20, 60], dtype=torch.int32)}
    torch.save({"dout": dout, "q": q, "k": k, "v": v, "kwargs": kwargs}, tmp_path / "packed.pt")
    step = load(tmp_path / "packed.pt", CPU)
    assert step.operands.out.shape == q.shape and step.operands.lse.shape == (2, 60)
    assert step.problem().mask.documents is not None
    grads = target_of("ours", step)(Conditions())
    assert not differences(grads, dash_attn.backward(*step.operands, **step.keywords))


def test_a_drawn_pack(in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence has the gradients that it has alone."""
    step = made(Problem(1, 2, 1, 60, 60, 16, "float32", mask=CAUSAL), CPU, seed=3, pack=(20, 40))
    dout, q, k, v, out, lse = step.operands
    assert q.shape == (60, 2, 16) and lse.shape == (2, 60) and step.keywords["cu_seqlens_q"] == [0, 20, 60]
    alone = [x[None, 20:] for x in (dout, q, k, v, out)]
    last = dash_attn.backward(*alone, lse[None, :, 20:], causal=True)
    packed = target_of("ours", step)(Conditions())
    assert all(torch.equal(x[20:], y[0]) for x, y in zip(packed, last, strict=True))
    report = tmp_path / "report.json"
    told = ["--cpu", "--pack", "20,1,40", "--stress", "plain,jitter", "--repeats", "2", "--out", str(report)]
    assert main(told) == 0
    entries = json.loads(report.read_text())["entries"]
    assert {e["case"] for e in entries} == {f"pack of 3, 1x61 2/1 heads d32 {mask}" for mask in ("full", "causal")}
    assert all(e["runs"] == 2 and e["status"] == "same bits" for e in entries)
    monkeypatch.setattr(sys, "argv", ["dash-attn", "audit", "--mask", "full", "--add"])  # recorded as the command
    assert main([*told, "--mask", "full", "--add"]) == 0
    longer = json.loads(report.read_text())
    today = longer["environment"]["date"]
    assert longer["entries"][: len(entries)] == [{**entry, "date": today} for entry in entries]
    assert {entry["date"] for entry in longer["entries"]} == {today} and len(longer["entries"]) == len(entries) * 3 // 2
    assert len(longer["environment"]["command"].splitlines()) == 2 and longer["ok"]
    assert longer["counts"]["runs"] == sum(entry["runs"] for entry in longer["entries"]) == 12


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
        (["--calls", "0"], "--calls"),
        (["--invariance", "--calls", "2"], "--calls: --invariance"),
        (["--invariance", "--seed", "1"], "--seed: --invariance"),
        (["--timeout", "0"], "--timeout"),
        (["--at-once", "0"], "--at-once"),
        (["--target", "nope"], "nope"),
        (["--step", "nowhere.pt"], "nowhere.pt"),
        (["--step", "nowhere.pt", "--mask", "causal"], "own shape"),
        (["--seqlen", "many"], "whole numbers"),
        (["--pack", "3,0"], "whole numbers"),
        (["--pack", "3,4", "--seqlen", "7"], "--seqlen: --pack gives the sequences"),
        (["--pack", "3,4", "--invariance"], "--invariance: --pack gives the sequences"),
    ],
)
def test_mistakes_are_named(arguments: list[str], says: str, capsys) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def main(arguments: list[str]) -> int:
    """`dash-attn audit`: its exit status."""
    with pytest.raises(SystemExit) as stop:
        dash_attn_command(["audit", *arguments])
    return int(stop.value.code or 0)


def test_exit_status_and_json(in_process: None, fakes: str, step: Path, tmp_path: Path, capsys) -> None:
    common = ["--cpu", "--step", str(step), "--stress", "plain", "--repeats", "3"]
    assert main([*common, "--target", f"ours,{fakes}:right", "--json", "--out", str(tmp_path / "report.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert [e["target"] for e in report["entries"]] == ["ours", "fakes:right"]
    assert report["complete"] and report["ok"]
    assert main([*common, "--target", f"{fakes}:differs"]) == 1
    assert "NOT all bits equal" in capsys.readouterr().out


def test_equal_bits_are_not_apart_and_what_is_not_finite_is_infinitely_far() -> None:
    odd = torch.tensor([1.0, torch.nan, torch.inf])
    assert largest(odd, odd.clone()) == 0 and largest(odd, odd + torch.tensor([0.5, 0.0, 0.0])) == 0.5
    for place in (1, 2):
        assert largest(odd, odd.index_fill(0, torch.tensor([place]), 2.0)) == torch.inf


def test_a_nan_is_reported_and_can_be_read(in_process: None, fakes: str, step: Path, tmp_path: Path, capsys) -> None:
    """JSON has no NaN: values that are not finite are strings, and what is read again has numbers."""
    out = tmp_path / "report.json"
    told = ["--cpu", "--step", str(step), "--stress", "plain", "--repeats", "3", "--target", f"{fakes}:nans"]
    assert main([*told, "--json", "--out", str(out)]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report == json.loads(out.read_text(), parse_constant=pytest.fail)
    (entry,) = report["entries"]
    dq = entry["tensors"]["dq"]
    assert (entry["status"], dq["values"][0], dq["largest"]) == ("DIFFERS", "nan", "inf")
    assert read(out)["rows"][0]["tensors"]["dq"]["largest"] == torch.inf
    assert main([*told, "--add", "--out", str(out)]) == 1 and "(nan for " in capsys.readouterr().out
    assert evidence([out], tmp_path / "page.html").is_file()


def test_a_run_that_is_cut_off_leaves_what_it_found(in_process: None, fakes: str, step: Path, tmp_path, capsys) -> None:
    """SIGTERM, the end of a job's time, is taken like Ctrl-C."""
    out, before = tmp_path / "new" / "report.json", signal.getsignal(signal.SIGTERM)
    told = ["--cpu", "--step", str(step), "--stress", "plain,jitter", "--repeats", "3", "--out", str(out)]
    assert main([*told, "--target", f"ours,{fakes}:stopped,{fakes}:copies"]) == 130
    assert "NOT complete" in capsys.readouterr().out and signal.getsignal(signal.SIGTERM) == before
    report = json.loads(out.read_text())
    assert not report["ok"] and not report["complete"] and "environment" in report
    assert [(e["target"], e["stressor"], e["status"]) for e in report["entries"]] == [
        ("ours", "plain", "same bits"),
        ("ours", "jitter", "same bits"),
    ]
    assert [path.name for path in out.parent.iterdir()] == ["report.json"]


def test_the_file_grows_with_every_finding(in_process: None, fakes: str) -> None:
    kept: list[dict] = []
    report = audit(
        [Subject("x", PROBLEM)], [f"{fakes}:copies"], AuditSettings("cpu", ("plain", "processes"), 1), kept.append
    )
    assert [len(each["entries"]) for each in kept] == [0, 1, 2]  # first of all: an older file is not this run's
    assert not any(each["ok"] or each["complete"] for each in kept) and report["ok"] and report["complete"]


def test_only_files_are_replaced(tmp_path: Path) -> None:
    pipe, told = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: told.append(json.loads(pipe.read_text())))
    reader.start()
    write_json({"ok": True}, pipe)
    reader.join()
    assert told == [{"ok": True}] and pipe.is_fifo()
