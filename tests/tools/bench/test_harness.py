"""The harness: what is timed is checked, what cannot run is named, what was written can be read."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dash_attn
from dash_attn.api.explain import explanation
from dash_attn.backends import Options
from dash_attn.backends.dropout import kept, row_words
from dash_attn.prepare import Prepared, prepare
from dash_attn.problem import CAUSAL, FULL, Features, Problem, window
from dash_attn.tools.bench import cases, report, timing
from dash_attn.tools.bench.measure import Settings, deviation, measure
from dash_attn.tools.bench.operands import draw, draw_extras, draw_operands, error, exact, exact_part, input_sets
from dash_attn.tools.bench.ours import Ours, Way
from dash_attn.tools.bench.peers import PEERS, insist, peer
from dash_attn.tools.bench.suites import OPTIONS, SUITES
from dash_attn.tools.bench.timing import Timing
from dash_attn.tools.bench.variants import Variant, reason
from dash_attn.tools.cli.bench import EffortOptions, SuiteOptions, cases_of, settings_of
from dash_attn.tools.cli.main import main as dash_attn_command
from dash_attn.tools.cli.shapes import ShapeOptions
from dash_attn.tools.viz.evidence import evidence
from dash_attn.tools.viz.results import plot

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
TINY = cases.BenchCase("tiny", Problem(2, 4, 2, 96, 96, 16, "float32", mask=CAUSAL))


def settings(*peers: str, **ours: object) -> Settings:
    return Settings(Timing(CPU, rounds=2, budget_ms=1.0), Ours(**{"policies": ("fa3",), **ours}), peers)


# ---- cases -------------------------------------------------------------------------------------------------


def test_the_grid_is_the_papers() -> None:
    grid = cases.grid()
    assert len({case.name for case in grid}) == len(grid) == 24
    for case in grid:
        p = case.problem
        assert p.batch * p.len_q == 16384 and p.heads_q * p.dim == 2048 and p.group == 1
    assert grid[0].flops == 2 * cases.BenchCase("", Problem(32, 16, 16, 512, 512, mask=CAUSAL)).flops


def test_models_have_their_real_dimensions() -> None:
    for model in cases.MODELS:
        assert model.heads % model.heads_kv == 0
        assert model.heads * model.dim == model.hidden
    names = [case.name for case in cases.models()]
    assert "LLaMA3-8B 1x32768" in names and "SAM-huge 16x4096" in names and len(names) == len(set(names))
    assert cases.lengths()[-1].problem.len_q == 131072


def test_every_suite_has_known_peers_and_a_smaller_quick_form() -> None:
    for suite in SUITES.values():
        assert set(suite.peers) | set(suite.quick_peers) <= set(PEERS) and set(suite.takes) <= set(OPTIONS)
        assert not suite.peers or "--peers" in suite.takes
        assert 0 < len(suite.quick()) < len(suite.cases())


# ---- operands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(20, 5)], ids=str)
def test_the_float64_reference_agrees_with_autograd(mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.tools.bench.operands.CHUNK", 1)  # bands of 16 rows
    problem = Problem(2, 4, 2, 50, 50, 8, "float32", mask=mask)
    o = draw_operands(problem, CPU)
    q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in (o.q, o.k, o.v))
    hidden = torch.from_numpy(~mask.dense(50, 50))
    scores = (q @ k.repeat_interleave(2, 1).mT * problem.softmax_scale).masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    grads = [g.transpose(1, 2) for g in torch.autograd.grad(out, (q, k, v), o.dout.double().transpose(1, 2))]
    assert error(problem, tuple(grads), exact_part(problem, *o[:4])) < 1e-12
    grads[1][0, 0, 0, 0] = float("nan")  # also outside of what float64 covers
    assert np.isnan(error(problem, tuple(grads), exact_part(problem, *o[:4])))


def test_the_float64_reference_of_features_agrees_with_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.tools.bench.operands.CHUNK", 1)  # bands of 16 rows
    problem = Problem(2, 4, 2, 50, 40, 8, "float32", mask=CAUSAL, features=Features(1.5, True, 0.25, 6))
    extras = draw_extras(problem, CPU)
    dout, *inputs = (x.double() for x in draw(problem, CPU))
    sinks = extras.sinks.double().requires_grad_()
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in inputs)
    scores = 1.5 * (q @ k.repeat_interleave(2, 1).mT * problem.softmax_scale / 1.5).tanh()
    scores = scores.masked_fill(torch.from_numpy(~CAUSAL.dense(50, 40)), -torch.inf)
    scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 50, 1)], -1)
    key = np.arange(40, dtype=np.uint32)
    keeps = [[kept(row_words(int(extras.seed) + b * 2**32, h, 0, 50), key, 0.25) for h in range(4)] for b in range(2)]
    out = (scores.softmax(-1)[..., :-1] * torch.from_numpy(np.array(keeps)) / 0.75) @ v.repeat_interleave(2, 1)
    lse = scores.logsumexp(-1)
    leaves, given = (q, k, v, sinks), (dout.transpose(1, 2), extras.dlse.double())
    dq, dk, dv, dsinks = torch.autograd.grad((out, lse), leaves, given)
    results = (out.transpose(1, 2), lse, *(x.transpose(1, 2) for x in (dq, dk, dv)), dsinks)
    for mine, theirs in zip(exact(problem, dout, *inputs, extras=extras), results, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)


def test_inputs_rotate() -> None:
    sets = input_sets(TINY.problem, CPU)
    assert len(sets) >= 2 and not torch.equal(sets[0].q, sets[1].q)


# ---- measuring ---------------------------------------------------------------------------------------------


def wrong(problem: Problem, sets):
    return [lambda s=s: (s.q, s.k, s.v) for s in sets]


def restless(problem: Problem, sets):
    calls = Way("fa3").calls(problem, sets)
    return [lambda call=call: tuple(x + 1e-9 * torch.randn(()) for x in call()) for call in calls]


def test_every_variant_is_checked_and_what_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "wrong", Variant("wrong", True, wrong))
    monkeypatch.setitem(PEERS, "restless", Variant("restless", True, restless))
    row = measure(TINY, settings("torch math", "fa4 det", "wrong", "restless"))
    assert set(row["us"]) == {"torch math", "wrong", "restless", "fa3", "any (fa3)"}
    assert row["missing"] == {"fa4 det": "runs on GPUs only"}
    assert "from float64" in row["failed"].pop("wrong") and "differ" in row["failed"].pop("restless")
    assert not row["failed"] and row["error"]["fa3"] < 1e-5 and row["same_bits"]["fa3"]
    assert all(us["p20"] <= us["median"] <= us["p80"] for us in row["us"].values())


def test_the_price_is_that_of_the_two_by_themselves() -> None:
    row = measure(TINY, settings("torch math"))
    assert set(row["pairs"]) == {"ours"} and set(row["pairs"]["ours"]) == {"fa3", "any (fa3)"}  # no FA4 on a CPU
    row["pairs"]["ours"] = {"fa3": {"median": 100.0}, "any (fa3)": {"median": 98.0}}
    assert report.price(row, "ours") == pytest.approx(0.02) and report.price(row, "fa4") is None
    assert "+2.0%" in report.summary({"suite": "grid", "rows": [row]})
    del row["pairs"]  # not timed by themselves
    assert report.price(row, "ours") == pytest.approx(1 - row["us"]["any (fa3)"]["median"] / row["us"]["fa3"]["median"])


def test_a_call_longer_than_the_lead_in_has_one_before_it() -> None:
    how = Timing(CPU, lead_ms=10.0, most_calls=40)
    assert [timing._lead(us, how) for us in (100.0, 3_000.0, 9_900.0, 10_600.0)] == [100, 4, 2, 1]


def test_our_own_errors_are_failures_but_what_is_not_built_is_missing() -> None:
    row = measure(TINY, settings(policies=("fa3", "diagonal:0")))
    assert "diagonal:0" in row["failed"]


def test_deviation_is_zero_in_order_and_not_without(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.BenchCase("four tiles", Problem(1, 1, 1, 1024, 1024, 16, "float32"))
    late = {"threads": 4, "jitter": 2e-3}

    def unordered(problem: Problem, sets):
        return Way("fa3", late, ordered=False).calls(problem, sets)

    monkeypatch.setitem(PEERS, "unordered", Variant("unordered", False, unordered))
    row = deviation(case, settings("unordered", "cudnn", unordered=False))
    assert row["deviation"]["fa3"]["mean"] == 0 and row["deviation"]["fa3"]["differing_passes"] == 0
    assert row["deviation"]["unordered"]["mean"] > 0 and row["deviation"]["unordered"]["worst"]["dv"] == 0
    assert "cudnn" in row["missing"] and not row["failed"]


def test_only_deterministic_variants_if_asked() -> None:
    how = Settings(Timing(CPU), Ours(("fa3",)), ("fa4", "fa4 det"), deterministic_only=True)
    assert [v.name for v in how.variants(TINY)] == ["fa4 det", "fa3"]


def test_orders_follow_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.backends.sm90.backend.require", lambda device: None)
    gpu = torch.device("cuda")
    full, causal = Problem(16, 16, 16, 1024, 1024), Problem(16, 16, 16, 1024, 1024, mask=CAUSAL)
    assert Ours().orders(full, gpu)[0] == "shift:8" and Ours().orders(TINY.problem, CPU)[0].startswith("s")
    assert Ours(("auto",)).orders(full, gpu) == ["shift:8"]
    both = Ours(("shift:64", "symmetric_shift:64", "fa3"))
    assert both.orders(full, gpu) == ["shift:64", "fa3"] and both.orders(causal, gpu) == ["symmetric_shift:64", "fa3"]
    assert both.orders(TINY.problem, CPU) == ["shift:64", "symmetric_shift:64", "fa3"], "one tile is whole"


def test_orders_are_those_of_the_backend() -> None:
    """The tiles of the CPU and those of a Hopper GPU give this problem other orders."""
    problem = Problem(1, 1, 1, 20_000, 20_000, 8, "bfloat16", mask=CAUSAL)
    assert Ours(("auto",)).orders(problem, CPU) == [explanation(prepare(problem, "auto", Options(), CPU)).policy]


def test_what_is_timed_is_what_callers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of a variant is the backward of the object that dash_attn.backward and autograd prepare."""
    ran, original = [], Prepared.backward
    monkeypatch.setattr(Prepared, "backward", lambda self, *given: ran.append(self) or original(self, *given))
    o = draw_operands(TINY.problem, CPU)
    dash_attn.backward(*o, causal=True, policy="fa3")
    (call,) = Way("fa3").calls(TINY.problem, [o])
    call()
    assert len(ran) == 2 and ran[0] is ran[1] is prepare(TINY.problem, "fa3", Options(), CPU)


def test_interleaved_samples_go_round_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    calls = {"a": [lambda i=i: seen.append(f"a{i}") for i in range(2)], "b": [lambda: seen.append("b")]}
    monkeypatch.setattr(timing, "sample", lambda run, count, device: [call() for call in run[:count]] and 100.0)
    timing.time_all(calls, Timing(CPU, rounds=30, budget_ms=3.0))  # a call in each round
    rounds = [seen[-60:][i : i + 2] for i in range(0, 60, 2)]  # each in an order of its own
    assert [sorted(each) for each in rounds] == [["a0", "b"], ["a1", "b"]] * 15
    assert len({tuple(name[0] for name in each) for each in rounds}) == 2


def test_shares_of_kernels() -> None:
    """Per call 10 us of one, 3 of another, 20 in all; a late call does not count, nor what does not run in each."""
    main = [(20.0 * i, 20.0 * i + 10) for i in range(5)]
    main[0] = (-100.0, -80.0)
    side = [(20.0 * i + 12, 20.0 * i + 15) for i in range(5)]
    assert timing.shares_of([side, main, [(0.0, 1000.0)]], 5) == pytest.approx([0.5, 0.15])
    assert timing.shares_of([], 5) == [] and timing.shares_of([[(0.0, 1.0)]], 1) == []
    assert timing.kernel_shares(lambda: None, CPU) == []


def test_insist_puts_back_what_was() -> None:
    with insist():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_reasons_are_one_short_line() -> None:
    assert reason(ValueError("a\nb")) == "a" and reason(RuntimeError("")) == "RuntimeError"
    assert len(reason(ValueError("x" * 1000))) == 200
    with pytest.raises(ValueError, match="fa4_det"):
        peer("nope")


# ---- the command -------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """`dash-attn bench`: its exit status."""
    with pytest.raises(SystemExit) as stop:
        dash_attn_command(["bench", *arguments])
    return int(stop.value.code or 0)


@pytest.mark.parametrize("suite", ["price", "deviation", "block"])
def test_a_run_on_the_cpu(suite: str, tmp_path: Path, capsys) -> None:
    quick = ["--cpu", "--quick", "--suite", suite, "--mask", "causal", "--policy", "auto,descending"]
    quick += [] if suite == "block" else ["--peers", "torch_math,fa4"]
    quick += [] if suite == "deviation" else ["--rounds", "1"]
    assert main([*quick, "--out", str(tmp_path / "r.json")]) == 0
    out, result = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
    assert result["suite"] == suite and result["environment"]["torch"] == torch.__version__
    assert "missing: fa4 (everywhere): runs on GPUs only" in out
    (row,) = result["rows"]
    assert row["missing"]["fa4"] == "runs on GPUs only"
    ran = row["deviation" if suite == "deviation" else "us"]
    assert "descending" in ran and len(ran) > 1 and (suite == "block" or "torch math" in ran)


def test_json_is_one_value(capsys) -> None:
    quick = ["--cpu", "--rounds", "1", "--budget-ms", "1", "--peers", "none", "--policy", "fa3", "--mask", "causal"]
    assert main([*quick, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["suite"] == "grid" and [row["cell"] for row in result["rows"]] == ["d64 causal 256"]
    own = ["--heads", "2", "--kv-heads", "1", "--batch", "2", "--seqlen", "128", "--head-dim", "16"]
    assert main([*quick, *own, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert [row["cell"] for row in result["rows"]] == ["2x128 2/1 heads d16 causal"]


def test_a_second_run_adds_to_the_file(tmp_path: Path, capsys) -> None:
    file = tmp_path / "r.json"
    quick = ["--cpu", "--rounds", "1", "--budget-ms", "1", "--peers", "none", "--policy", "fa3", "--out", str(file)]
    assert main([*quick, "--mask", "causal"]) == 0 and main([*quick, "--mask", "full", "--add"]) == 0
    both = json.loads(file.read_text())
    assert [row["cell"] for row in both["rows"]] == ["d64 causal 256", "d64 full 256"]
    assert {row["date"] for row in both["rows"]} == {both["environment"]["date"]}
    both["rows"][0]["default"] = "earlier"
    both["environment"]["date"] = "2020-01-01"
    del both["rows"][0]["date"], both["rows"][1]["date"]  # a file whose rows have the date of their file
    file.write_text(json.dumps(both))
    assert main([*quick, "--mask", "causal", "--add"]) == 0
    again = json.loads(file.read_text())["rows"]
    assert again[0]["date"] > again[1]["date"] == "2020-01-01"
    assert [(row["cell"], row["default"]) for row in again] == [("d64 causal 256", "fa3"), ("d64 full 256", "fa3")]
    capsys.readouterr()
    assert main([*quick, "--suite", "price", "--add"]) == 2
    assert "holds suite grid, this run is suite price" in capsys.readouterr().err
    file.write_text(json.dumps({**both, "environment": {**both["environment"], "torch": "0.1"}}))
    assert main([*quick, "--add"]) == 2 and "torch was 0.1" in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["grid", "deviation"])
def test_a_nan_is_reported_and_can_be_read(suite: str, tmp_path: Path, monkeypatch, capsys) -> None:
    calls = itertools.count()

    def broken(problem: Problem, sets):
        def call():
            value = 1.0 if next(calls) % 3 == 1 else torch.nan
            return tuple(torch.full_like(x, value) for x in sets[0][1:4])

        return [call]

    monkeypatch.setitem(PEERS, "broken", Variant("broken", True, broken))
    quick = ["--cpu", "--quick", "--suite", suite, "--mask", "full", "--peers", "broken"]
    file = tmp_path / "r.json"
    assert main([*quick, "--json", "--out", str(file)]) == 1
    (result,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert result == json.loads(file.read_text(), parse_constant=pytest.fail)
    (row,) = result["rows"]
    if suite == "grid":
        assert row["error"]["broken"] == "nan"
    else:  # some passes have numbers: they are infinitely far from the first
        assert row["deviation"]["broken"]["worst"] == {"dq": "inf", "dk": "inf", "dv": "inf"}
        assert "passes differ" in row["failed"]["broken"]
    assert main([*quick, "--add", "--out", str(file)]) == 1
    assert plot([file], tmp_path) and evidence([file], tmp_path / "page.html").is_file()


def test_without_rich_progress_is_plain_text(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from dash_attn.tools.bench.progress import steps

    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert list(steps([TINY, TINY], "grid")) == [TINY, TINY]
    assert "[2/2, 0 s] grid tiny" in capsys.readouterr().err


def test_torch_and_numpy_are_enough() -> None:
    """GPU machines often have little more: no command line library, no compiler of loops, nothing to draw with."""
    absent = ("typer", "rich", "numba", "matplotlib", "rustworkx", "ortools", "transformers", "triton", "cutlass")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n" + "\n".join(
        f"import dash_attn.tools.bench.{name}" for name in ("suites", "ours", "audit.audit", "audit.child")
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=RESULTS.parents[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_way_out_is_named(capsys) -> None:
    assert main(["--suite", "grid"]) == 2 and "--cpu" in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["grid", "host", "all"])
def test_a_gpu_that_is_not_hopper_is_refused_before_any_work(suite: str, monkeypatch, tmp_path: Path, capsys) -> None:
    answers = {"is_available": True, "current_device": 0, "get_device_capability": (8, 0), "get_device_name": "A GPU"}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    assert main(["--suite", suite, "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "--cpu" in err and "A GPU (compute capability 8.0)" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "nope"], "--suite"),
        (["--peers", "nope", "--cpu"], "nope"),
        (["--policy", "nope", "--cpu"], "nope"),
        (["--rounds", "0"], "--rounds"),
        (["--batch", "2", "--cpu"], "--heads"),
        (["--seqlen", "17", "--cpu"], "--seqlen"),
        (["--config", "{", "--cpu"], "JSON"),
        (["--suite", "all", "--cpu", "--out", "x.json"], "folder"),
        (
            ["--suite", "host", "--peers", "none", "--policy", "spt", "--config", "{}"],
            "--peers, --policy, --config: suite",
        ),
        (["--suite", "host", "--rounds", "3"], "suite host takes none of these"),
        (["--suite", "block", "--any", "--deterministic"], "--any, --deterministic: suite block takes --policy"),
        (["--suite", "block", "--budget-ms", "3", "--lead-ms", "3"], "--budget-ms, --lead-ms: suite block"),
        (["--suite", "step", "--policy", "spt", "--any"], "--policy, --any: suite step takes --peers"),
        (["--suite", "deviation", "--rounds", "3"], "--rounds: suite deviation takes --peers"),
    ],
)
def test_mistakes_are_named(arguments: list[str], says: str, capsys) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_shape_options_pose_or_choose() -> None:
    def chosen(**words: object) -> list[cases.BenchCase]:
        return cases_of(SuiteOptions(), ShapeOptions(**words), "grid")

    own = chosen(heads=8, kv_heads=2, seqlen="512,1024", mask="causal")
    assert [case.problem for case in own] == [Problem(1, 8, 2, n, n, 128, mask=CAUSAL) for n in (512, 1024)]
    assert [case.name for case in chosen(seqlen="4096", head_dim="64")] == ["d64 full 4096", "d64 causal 4096"]


# ---- tables ------------------------------------------------------------------------------------------------


def test_tables_of_the_committed_results() -> None:
    result = json.loads((RESULTS / "grid_h200.json").read_text())
    text = report.summary(result)
    assert "d128 causal 16384" in text and "geometric mean" in text and "price of determinism" in text
    row = result["rows"][0]
    assert report.default_of(row) == "shift:4" and report.unordered_of(row) == "any (shift:4)"
    us = {name: row["us"][name]["median"] for name in ("fa2", "fa2 det")}
    assert report.price(row, "fa2") == pytest.approx(1 - us["fa2"] / us["fa2 det"])
    row["peak_bytes"] = {"shift:4": 123e6}
    assert "123" in report.memory(result)[1][0] and "peak MB" in text
    for each in result["rows"]:
        each["peak_bytes"] = {}
    assert not report.memory(result)
    assert report.is_ours("fa3") and not report.is_ours("fa4 det")


def test_a_suite_says_how_long_it_is_timed() -> None:
    suite, words = SUITES["grid_close"], SuiteOptions(cpu=True)
    how = settings_of(words, EffortOptions(), suite, CPU).timing
    assert (how.rounds, how.budget_ms, how.lead_ms) == (31, 250.0, 20.0)
    assert settings_of(words, EffortOptions(rounds=3, lead_ms=5), suite, CPU).timing.lead_ms == 5


def test_a_variant_for_each_config() -> None:
    ours = Ours(("fa3",), configs=({}, {"finish": "postpass", "split": True}))
    names = [variant.name for variant in ours.variants(TINY.problem, CPU)]
    assert names == ["fa3", "fa3 finish=postpass split=True", "any (fa3)"]
    assert ours.default(TINY.problem, CPU).name == "fa3"
    assert [report.is_ours(name) for name in names] == [True, True, False]


@pytest.mark.parametrize("features", [Features(softcap=5.0), Features(sinks=True)], ids=str)
def test_features_are_checked_and_most_peers_refuse_them(features: Features) -> None:
    problem = Problem(1, 4, 2, 90, 90, 16, "float32", mask=CAUSAL, features=features)
    how = Settings(Timing(CPU, rounds=1, budget_ms=1.0), Ours(("auto",), False), ("torch math",))
    row = measure(cases.BenchCase("small", problem), how)
    assert row["shape"]["features"] == str(features) and not row["failed"] and len(row["us"]) == 1
    assert str(features) in row["missing"]["torch math"]
    plain = measure(cases.BenchCase("small", Problem(1, 4, 2, 90, 90, 16, "float32", mask=CAUSAL)), how)
    assert "features" not in plain["shape"] and "torch math" in plain["us"]


def test_panels_are_a_variant() -> None:
    problem = Problem(1, 2, 2, 90, 90, 16, "float32", mask=CAUSAL)
    row = measure(cases.BenchCase("small", problem), Settings(Timing(CPU, 1, 1.0), Ours(("auto",), False, panels=3)))
    assert "auto panels=3" in row["us"] and not row["failed"] and report.is_ours("auto panels=3")
    assert [suite for suite in SUITES if SUITES[suite].panels > 1] == ["length"]
