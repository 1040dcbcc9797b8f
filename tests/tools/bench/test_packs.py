"""Packs: their cases, their check against float64, and the suite `packed`."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch

from dash_attn.problem import CAUSAL, Problem, SequenceColumn, documents
from dash_attn.tools.bench import operands, packs, report
from dash_attn.tools.bench.cases import BenchCase
from dash_attn.tools.bench.measure import Settings, measure
from dash_attn.tools.bench.operands import draw_operands, error, exact, exact_part
from dash_attn.tools.bench.ours import Ours
from dash_attn.tools.bench.timing import Timing
from dash_attn.tools.cli.bench import SuiteOptions, cases_of
from dash_attn.tools.cli.main import main as dash_attn_command
from dash_attn.tools.cli.shapes import ShapeOptions

CPU, HOPPER = torch.device("cpu"), torch.device("cuda")
SMALL = BenchCase("small", Problem(1, 4, 2, 90, 90, 16, "float32", mask=documents([0, 20, 21, 90], causal=True)))


def test_packs_have_their_tokens_and_names() -> None:
    cases = packs.packs()
    assert len({case.name for case in cases}) == len({case.problem for case in cases}) == len(cases) == 11
    for case in cases:
        lengths = case.problem.sequence_table[:, SequenceColumn.LEN_Q]
        assert lengths.min() >= 1 and 16_000 < lengths.sum() == case.problem.len_q <= 65536
    first, again = (case for case in cases if case.name.startswith("mean 500, 16k, 32/8 d128 causal"))
    assert again.name == f"{first.name}, seed 1" and first.problem != again.problem
    shapes = {(case.problem.heads_q, case.problem.heads_kv, case.problem.dim) for case in cases}
    assert shapes == {(32, 8, 128), (16, 16, 64), (14, 2, 64), (8, 2, 128), (4, 1, 128)}


def test_a_seed_fixes_the_layouts() -> None:
    """These lengths are in result files under the name of the case."""
    assert packs.packs()[0].problem.sequence_table[:5, SequenceColumn.LEN_Q].tolist() == [92, 478, 1212, 232, 335]
    assert packs.packs() == packs.packs()
    run = list(islice(packs.STEPS[0].problems(0), 5))
    assert len(set(run)) == 5 and run[0] == packs.steps()[0].problem
    assert run == list(islice(packs.STEPS[0].problems(0), 5))


def test_lengths_follow_their_distribution() -> None:
    layouts = islice(packs.PackKind(packs.LogNormal(500, 2**20), packs.LayerShape(1, 1)).problems(0), 1)
    lengths = next(layouts).sequence_table[:-1, SequenceColumn.LEN_Q]
    assert lengths.mean() == pytest.approx(500, rel=0.1)


def test_flops_count_the_pairs_of_each_document() -> None:
    lengths = (20, 1, 69)
    whole = 10.0 * 4 * 16 * sum(n * n for n in lengths)
    assert SMALL.flops == whole / 2
    assert replace(SMALL, problem=replace(SMALL.problem, mask=documents([0, 20, 21, 90]))).flops == whole
    assert BenchCase("", Problem(3, 4, 2, 90, 90, 16, mask=CAUSAL)).flops == 10.0 * 3 * 4 * 90 * 90 * 16 / 2


def test_the_reference_of_a_pack_is_that_of_its_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "CHUNK", 1)  # bands of 16 rows, which span documents
    problem, drawn = SMALL.problem, operands.draw(SMALL.problem, CPU)
    whole = exact(problem, *drawn)
    for (begin, end), sequence in zip(pairwise((0, 20, 21, 90)), problem.sequences, strict=True):
        alone = exact(problem.alone(sequence), *(x[:, begin:end] for x in drawn))
        for got, want in zip(whole.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(got[:, begin:end], want)


def test_a_long_pack_needs_no_square_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only keys of the documents of a band are multiplied with its queries."""
    spans, original = [], operands._hidden
    monkeypatch.setattr(operands, "_hidden", lambda *given: spans.append(original(*given)) or spans[-1])
    cu = list(range(0, 65537, 64))
    problem = Problem(1, 1, 1, 65536, 65536, 8, "float32", mask=documents(cu, causal=True))
    exact_part(problem, *operands.draw(problem, CPU))
    assert max(hidden.numel() for _, hidden in spans) <= operands.CHUNK // 64


def test_one_wrong_document_is_an_error_however_short_it_is() -> None:
    problem = Problem(1, 1, 1, 3000, 3000, 16, "float32", mask=documents([0, 1, 1500, 1504, 3000], causal=True))
    drawn = draw_operands(problem, CPU)
    want = exact_part(problem, *drawn[:4])
    right = [x.float() for x in want]
    assert error(problem, tuple(right), want) < 1e-6  # also of a document of one token, whose dq is 0
    right[1][:, 1500:1504] = 0
    assert error(problem, tuple(right), want) > 0.9


def test_every_variant_of_a_pack_is_checked(anywhere: None, fa4: list[dict]) -> None:
    how = Settings(Timing(CPU, rounds=2, budget_ms=1.0), Ours(("auto", "auto@group"), False), ("fa4", "fa4 det", "fa2"))
    row = measure(SMALL, how)
    assert set(row["us"]) == {"fa4", "fa4 det", "auto", "auto@group"} and row["default"] == "auto"
    assert row["missing"].keys() == {"fa2"} and not row["failed"]
    assert max(row["error"].values()) < 1e-5 and row["shape"]["mask"] == "causal & documents(3)"
    text = report.summary({"suite": "packed", "rows": [row]})
    assert "default order: geometric mean" in text and "auto@group, worst" not in text, "ours is no peer"


def test_orders_of_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Ours(("auto", "auto@group", "shift:4", "fa3@head"))
    assert ours.orders(SMALL.problem, CPU) == ["auto", "auto@group", "shift:4", "fa3@head"], (
        "short documents are one tile"
    )
    alone = replace(SMALL.problem, heads_kv=4)
    assert ours.orders(alone, CPU) == ["auto", "shift:4", "fa3"]
    monkeypatch.setattr("dash_attn.backends.sm90.backend.require", lambda device: None)
    long = Problem(1, 4, 2, 2000, 2000, 64, mask=documents([0, 20, 2000], causal=True))
    assert ours.orders(long, HOPPER) == ["auto", "auto@group", "fa3@head"] and Ours().orders(long, HOPPER) == ["auto"]


def test_names_of_ours() -> None:
    assert all(map(report.is_ours, ("auto", "auto@group", "level@head", "shift:8@head", "fa3 split=True")))
    assert not any(map(report.is_ours, ("fa4", "fa4 det", "any (auto)", "triton two-pass")))


def test_options_choose_among_packs() -> None:
    chosen = cases_of(SuiteOptions(), ShapeOptions(mask="full", head_dim="128"), "packed")
    assert [case.name for case in chosen] == ["mean 2k, 32k, 8/2 d128 full"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        dash_attn_command(
            ["bench", "--suite", "packed", "--cpu", "--rounds", "1", "--budget-ms", "1", "--out", f"{tmp_path}/r.json"]
        )
    assert stop.value.code == 0
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert set(row["us"]) == {"auto", "auto@group"} and set(row["missing"]) == {"fa4", "fa4 det"}
    assert row["cell"] in capsys.readouterr().out
