"""The suite `step`, on the CPU."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import dash_attn
from dash_attn.tools.bench import packs, report, step
from dash_attn.tools.bench.measure import Settings
from dash_attn.tools.bench.ours import Ours
from dash_attn.tools.bench.step import Layers, measure_step, step_us
from dash_attn.tools.bench.timing import Timing
from dash_attn.tools.cli.main import main as dash_attn_command
from dash_attn.tools.viz.evidence import evidence
from dash_attn.tools.viz.results import plot

CPU = torch.device("cpu")


def settings(*peers: str) -> Settings:
    return Settings(Timing(CPU, rounds=3), Ours(("auto",), unordered=False), peers)


def test_every_timed_step_has_a_layout_that_is_new(anywhere: None, fa4: list[dict], monkeypatch) -> None:
    seen: list[tuple[int, ...]] = []
    original = dash_attn.flash_attn_varlen_func

    def ours(q: Any, k: Any, v: Any, **packing: Any) -> Any:
        assert packing["cu_seqlens_q"] is packing["cu_seqlens_k"] and packing["causal"]
        cu = tuple(packing["cu_seqlens_q"].tolist())
        assert packing["max_seqlen_q"] == max(b - a for a, b in pairwise(cu))
        seen.append(cu)
        return original(q, k, v, **packing)

    monkeypatch.setattr(dash_attn, "flash_attn_varlen_func", ours)
    row = measure_step(packs.tiny()[0], settings("fa4", "fa4 det"))
    assert set(row["us"]) == set(row["host_us"]) == {"auto", "fa4", "fa4 det"} and not row["failed"]
    assert not row["missing"] and all(row["same_bits"].values())
    layers, untimed, _ = step.EFFORT["cpu"]
    assert row["layers"] == layers and row["steps"] == 3 and len(set(seen)) == untimed + 3
    assert sorted(Counter(seen).values())[:3] == [layers] * 3, "in the layers of one step only"
    assert {call["deterministic"] for call in fa4} == {False, True}
    assert row["assemble_us"]["median"] > 0 and max(row["error"].values()) < 1e-2


def test_what_is_wrong_or_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"auto": lambda: lambda q, k, v, **_: q * k.mean() * v.mean(), "fa4 det": lambda: step._peer("fa2", CPU)}
    monkeypatch.setattr(step, "variants", lambda _: wrong)
    row = measure_step(packs.tiny()[0], settings("fa4 det"))
    assert "from float64" in row["failed"]["auto"] and "FlashAttention-4 only" in row["missing"]["fa4 det"]


def test_gradients_are_those_of_every_layer() -> None:
    problem = packs.tiny()[0].problem
    layers = Layers.of(problem, CPU, 3)
    got = layers.step(lambda q, k, v, factor: (q * factor + k.sum() + v.sum(), None), {"factor": 2.0})
    assert len(got) == 9 and torch.equal(got[6], layers.dout * 2)
    assert not torch.equal(layers.qkv[0][0], layers.qkv[1][0])


def test_a_step_is_timed_until_it_returns() -> None:
    us, host = step_us(lambda: time.sleep(0.01), CPU)
    assert us >= 10_000 and host >= 10_000


def test_only_deterministic_peers_if_asked() -> None:
    how = Settings(Timing(CPU), Ours(), ("fa4", "fa4 det"), deterministic_only=True)
    assert list(step.variants(how)) == ["auto", "fa4 det"]


def test_the_command_its_table_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    with pytest.raises(SystemExit) as stop:
        dash_attn_command(["bench", "--suite", "step", "--cpu", "--rounds", "2", "--out", str(file)])
    assert stop.value.code == 0 and "missing: fa4 det (everywhere): runs on GPUs only" in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["rows"]
    row["us"]["fa4 det"] = {"median": 3 * row["us"]["auto"]["median"]}
    header, (line,) = report.step_times({"rows": [row]})
    assert header[1:4] == ["auto, ms", "fa4 det, ms", "auto, host ms"] and line[4] == "-" and line[-1] == "3.00x"
    (picture,) = plot([file], tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = evidence([file], tmp_path / "page.html").read_text()
    assert "Training step with a new packing" in page and "Milliseconds of a step" in page


def test_a_step_has_heads_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        dash_attn_command(["bench", "--suite", "step", "--cpu", "--heads", "2"])
    assert stop.value.code == 2 and "--heads" in capsys.readouterr().err
