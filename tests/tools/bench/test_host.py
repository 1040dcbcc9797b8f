"""The benchmark of host time, on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from dash_attn.problem import CAUSAL, Problem, documents
from dash_attn.tools.bench import host
from dash_attn.tools.bench.cases import BenchCase
from dash_attn.tools.bench.host import host_us, measure_host
from dash_attn.tools.bench.report import hosts
from dash_attn.tools.cli.main import main as dash_attn_command
from dash_attn.tools.viz.results import plot

CPU = torch.device("cpu")
SMALL = [
    BenchCase("plain", Problem(1, 2, 1, 40, 40, 16, "float32", mask=CAUSAL)),
    BenchCase("packed", Problem(1, 2, 2, 40, 40, 16, "float32", mask=documents([0, 10, 40], causal=True))),
]


def test_every_variant_is_checked_and_what_cannot_run_is_named() -> None:
    plain, packed = measure_host(CPU, SMALL)
    assert set(plain["us"]) == {"attention", "forward", "backward", "torch"}
    assert set(packed["us"]) == {"attention", "forward", "backward"}
    assert plain["missing"] == {"fa4 det": "runs on GPUs only"} and "torch" in packed["missing"]
    assert not plain["failed"] and not packed["failed"]
    assert plain["ratio"] > 0 and packed["ratio"] is None


@pytest.mark.parametrize("table", ["OURS", "PEERS"])
def test_wrong_gradients_and_errors_are_named(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(setting: host.Setting) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setitem(getattr(host, table), "wrong", lambda setting: lambda: tuple(x.detach() for x in setting.qkv))
    monkeypatch.setitem(getattr(host, table), "breaks", breaks)
    (row,) = measure_host(CPU, SMALL[:1])
    assert "from float64" in row["failed"]["wrong"]
    assert row["failed" if table == "OURS" else "missing"]["breaks"] == "out of order"


def test_a_clock_that_changes_between_rounds_does_not_change_the_ratio() -> None:
    """In slow rounds all calls take longer. One slow call in a round, and one slow round of ours, do not count."""
    ours, theirs = [[12, 12, 90], [60, 60, 60], [120, 120, 120]], [[10, 10, 10], [10, 10, 10], [100, 100, 400]]
    assert host.ratio(ours, theirs) == 1.2


def test_the_report_has_the_ratio_of_the_rounds() -> None:
    us = {name: {"median": 100.0} for name in ("attention", "torch")}
    rows = [{"cell": "a", "us": us, "ratio": 1.234}, {"cell": "b", "us": us, "ratio": None}]
    header, lines = hosts({"rows": rows})
    assert header[-1] == "attention/torch" and [line[-1] for line in lines] == ["1.23x", "-"]


def test_a_call_is_timed_until_it_returns() -> None:
    times = host_us(lambda: time.sleep(0.01), CPU, 3)
    assert len(times) == 3 and all(us >= 10_000 for us in times)


def test_the_command_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        dash_attn_command(["bench", "--suite", "host", "--cpu", "--quick", "--out", str(tmp_path / "host.json")])
    assert stop.value.code == 0
    (picture,) = plot([tmp_path / "host.json"], tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    (row,) = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert row["shape"]["len_q"] == 512 and row["shape"]["dtype"] == "bfloat16"
    out = capsys.readouterr().out
    assert "attention/torch" in out and "missing: fa4 det (everywhere): runs on GPUs only" in out
