"""The audit of invariance: the bits of a sequence in other company, and what is noticed if they change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dash_attn
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.tools.bench.audit.audit import AuditSettings, Report, Subject, audit
from dash_attn.tools.bench.audit.invariance import CHANGES, Scene, part
from dash_attn.tools.bench.audit.targets import CONTROL
from dash_attn.tools.bench.audit.whole import Bits, whole_of
from dash_attn.tools.cli.audit import shown_invariance
from dash_attn.tools.cli.main import main as dash_attn_command
from dash_attn.tools.viz.results import gathered

CPU = torch.device("cpu")
PROBLEM = Problem(1, 4, 2, 600, 600, 16, "float32", mask=CAUSAL)


def audited(targets: list[str], problem: Problem = PROBLEM, *changes: str) -> Report:
    how = AuditSettings("cpu", changes or tuple(CHANGES), invariance=True)
    return audit([Subject("one", problem)], targets, how)


def statuses(report: Report, target: str) -> dict[str, str]:
    return {e["stressor"]: e["status"] for e in report["entries"] if e["target"] == target}


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_ours_keeps_its_bits_in_any_company_and_the_control_does_not(mask, in_process: None) -> None:
    report = audited(["ours", CONTROL], replace(PROBLEM, mask=mask))
    assert statuses(report, "ours") == dict.fromkeys(CHANGES, "same bits")
    assert statuses(report, CONTROL) == dict.fromkeys(CHANGES, "DIFFERS")
    assert report["ok"] and report["complete"]


def test_an_order_that_looks_at_the_batch_is_noticed(in_process: None) -> None:
    report = audited(["ours:level"])
    apart = {name for name, status in statuses(report, "ours:level").items() if status == "DIFFERS"}
    assert apart == {"batch", "heads", "panels"} and not report["ok"]
    entry = next(e for e in report["entries"] if e["stressor"] == "batch")
    assert set(entry["tensors"]) == {"dq", "dk", "dv"}, "the forward has no order"


def test_a_control_that_keeps_its_bits_is_a_failure(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.tools.bench.audit.whole.CONTROLS", ("spt", "spt"))
    report = audited(["ours", CONTROL], PROBLEM, "packed")
    assert not report["ok"] and "notices nothing" in shown_invariance(report)


def test_a_function_that_counts_its_neighbours_is_noticed(in_process: None, fakes: str) -> None:
    report = audited([f"{fakes}:right", f"{fakes}:sociable"])
    assert set(statuses(report, "fakes:right").values()) == {"same bits", "not applicable"}
    seen = statuses(report, "fakes:sociable")
    assert seen == {
        "pack_of_one": "same bits",
        "workers": "not applicable",
        "panels": "not applicable",
        **dict.fromkeys(("packed", "permuted", "neighbours", "batch", "heads"), "DIFFERS"),
    }
    text = shown_invariance(report)
    assert [line.split()[-4:] for line in text.splitlines() if " packed " in line] == [["packed", "yes", "NO:", "dq"]]
    assert "NOT all bits equal" in text


def test_a_peer_is_called_for_batches_and_packs(in_process: None, anywhere: None, fa4: list[dict]) -> None:
    report = audited(["fa4 det"])
    seen = statuses(report, "fa4 det")
    assert {seen.pop(name) for name in ("workers", "panels")} == {"not applicable"}
    assert set(seen.values()) == {"same bits"}, seen
    packs = [call for call in fa4 if "cu_seqlens_q" in call]
    assert packs and len(packs) < len(fa4) and all(call["deterministic"] and call["causal"] for call in fa4)
    lengths = [call["cu_seqlens_q"].diff() for call in packs]
    assert [call["max_seqlen_k"] for call in packs] == [int(each.max()) for each in lengths]


def test_what_cannot_run_is_missing(in_process: None) -> None:
    report = audited(["ours", "fa4 det", "fa2"], PROBLEM, "packed")
    assert [e["status"] for e in report["entries"]] == ["same bits", "missing", "missing"] and not report["ok"]
    text = shown_invariance(report)
    assert "GPUs only" in text and "no packed sequences" in text
    assert next(line.split()[-3:] for line in text.splitlines() if " packed " in line) == ["yes", "missing", "missing"]


def test_one_key_value_head_has_no_part(in_process: None) -> None:
    report = audited(["ours", CONTROL], replace(PROBLEM, heads_kv=1), "heads", "packed")
    assert statuses(report, "ours") == {"heads": "not applicable", "packed": "same bits"} and report["ok"]


@pytest.mark.parametrize("change", CHANGES)
def test_the_sequence_is_where_a_change_says(change: str) -> None:
    """The place and the heads of a change name the tensors of the sequence."""
    scene = Scene(PROBLEM, CPU)
    _, q, k, v = scene.subject
    whole = Bits(q, q[..., 0].T, q, k, v)
    for inputs, place, kv_heads in CHANGES[change](scene):
        mine = part(whole, PROBLEM, kv_heads)
        for got, want in zip(inputs.sequences[place][1:], (mine.dq, mine.dk, mine.dv), strict=True):
            assert torch.equal(got, want)
        assert inputs.problem().is_packed == inputs.packed


def test_results_of_a_target_are_those_of_the_api() -> None:
    scene = Scene(PROBLEM, CPU)
    inputs, place, _ = next(CHANGES["packed"](scene))
    lengths = [len(each.q) for each in inputs.sequences]
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    dout, q, k, v = (torch.cat(each) for each in zip(*inputs.sequences, strict=True))
    out, lse = dash_attn.attention(q, k, v, causal=True, cu_seqlens=cu, return_lse=True)
    grads = dash_attn.backward(dout, q, k, v, out, lse, causal=True, cu_seqlens_q=cu)
    mine, rows = whole_of("ours")(inputs)[place], slice(cu[place], cu[place + 1])
    want = (out[rows], lse[:, rows], *(x[rows] for x in grads))
    assert all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))


def main(arguments: list[str]) -> int:
    """`dash-attn audit --invariance`: its exit status."""
    with pytest.raises(SystemExit) as stop:
        dash_attn_command(["audit", "--invariance", "--cpu", *arguments])
    return int(stop.value.code or 0)


def test_the_command(in_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seqlen", "600", "--head-dim", "16", "--mask", "causal", "--stress", "packed,batch"]
    file = tmp_path / "report.json"
    assert main([*small, "--out", str(file)]) == 0
    out, report = capsys.readouterr().out, json.loads(file.read_text())
    (line,) = [line for line in out.splitlines() if " batch " in line]
    assert "all bits equal" in out and line.endswith("NO: dq, dk, dv") and line.split()[6] == "yes"
    assert {e["target"] for e in report["entries"]} == {"ours", "control"} and report["ok"] and "environment" in report
    day = report["environment"]["date"]
    rows = [{**entry, "date": day} for entry in report["entries"]]
    assert gathered([file])["audit"]["rows"] == rows, "pages of results read it"
    assert main([*small, "--target", "ours:level", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]


def test_the_command_in_processes_of_their_own() -> None:
    assert main(["--seqlen", "600", "--head-dim", "16", "--mask", "causal", "--stress", "packed"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stress", "threads"], "pack_of_one"),
        (["--batch", "2"], "--batch"),
        (["--step", "nowhere.pt"], "--step"),
        (["--target", "control"], "control"),
    ],
)
def test_mistakes_are_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
