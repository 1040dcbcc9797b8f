"""The command line: its contract for scripts, and one clear line for every mistake."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dash_attn
from dash_attn.api.explain import Explanation
from dash_attn.launch import compose
from dash_attn.order import POLICIES
from dash_attn.problem import CAUSAL, Problem
from dash_attn.program import Program, Run, load, save
from dash_attn.simulate import CLOSED_FORMS, Machine
from dash_attn.tiling import TileShape, tile
from dash_attn.tools import missing_package
from dash_attn.tools.cli.main import main
from dash_attn.tools.trace.record import load_trace, save_trace
from tests.tools.trace.synthetic import packed_trace, program_of, synthetic


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


TRACED = Machine()


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_becomes_a_page_and_a_perfetto_file(capsys, tmp_path, packed):
    trace = packed_trace(12, TRACED) if packed else synthetic(program_of("causal"), 12, TRACED)
    save_trace(trace, tmp_path / "events.npz")
    files = ["--html", tmp_path / "page.html", "--perfetto", tmp_path / "trace.json"]
    code, out, _ = run(capsys, "trace", tmp_path / "events.npz", *files)
    assert code == 0 and "compute" in out and "wrote" in out
    page = (tmp_path / "page.html").read_text()
    assert "measured, symmetric_shift:64" in page and "simulated, symmetric_shift:64" in page
    names = {e["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert any(name.startswith("reduce") for name in names)
    code, out, _ = run(capsys, "trace", tmp_path / "events.npz", "--json", "--save", tmp_path / "copy.npz")
    assert json.loads(out)["model"]["compute"] == pytest.approx(2.0)
    assert (load_trace(tmp_path / "copy.npz").events == trace.events).all()


def test_tracing_without_a_gpu_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = run(capsys, "trace")
    assert code == 2 and "Hopper GPU" in err and "dash-attn trace --save" in err


def test_a_trace_takes_a_file_or_a_problem(capsys, tmp_path):
    save_trace(synthetic(program_of("causal"), 12, TRACED), tmp_path / "events.npz")
    problem = ["--seqlen", 99, "--heads", 16, "--policy", "nothing"]  # 16 is the default
    code, out, err = run(capsys, "trace", tmp_path / "events.npz", *problem)
    assert (code, out) == (2, "") and "--seqlen, --heads, --policy beside" in err and err.count("\n") == 1
    code, _, err = run(capsys, "trace", "--backend", "cpu")
    assert code == 2 and "No such option: --backend" in err


def test_files_that_hold_something_else_exit_1_with_one_line(capsys, tmp_path):
    broken = tmp_path / "broken.npz"
    for content in (b"not a file of ours", b"", b"PK\x03\x04 cut off", b"[1, 2]", b"\xff\xfe"):
        broken.write_bytes(content)
        text = tmp_path / "broken.json"
        text.write_bytes(content)
        for arguments in (
            ["trace", broken],
            ["calibrate", text],
            ["calibrate", broken],
            ["plot", text],
            ["paper", text],
        ):
            code, out, err = run(capsys, *arguments)
            assert (code, out) == (1, ""), (arguments, content, err)
            assert err.startswith("dash-attn: error: ") and err.count("\n") == 1 and str(arguments[1]) in err


def test_calibrate(capsys, tmp_path):
    us = {policy: {"median": median} for policy, median in (("shift:64", 383.0), ("fa3", 419.0))}
    (tmp_path / "results.json").write_text(json.dumps({"rows": [{"cell": "d128 full 512", "us": us}]}))
    code, out, _ = run(capsys, "calibrate", tmp_path / "results.json", "--out", tmp_path / "model.json")
    assert code == 0 and "d128 full 512" in out and "every policy in 1 of 1 cells" in out
    assert Machine(**json.loads((tmp_path / "model.json").read_text())["128"]["machine"]).compute > 0
    code, _, err = run(capsys, "calibrate", tmp_path / "none.json")
    assert code == 2 and "none.json" in err


@pytest.mark.parametrize(("mask", "policy"), CLOSED_FORMS)
@pytest.mark.parametrize(("n", "m", "c", "r"), [(4, 2, 5, 1), (8, 4, 3, 2), (12, 2, 1, 1)])
def test_simulate_json_reproduces_the_closed_forms(capsys, mask, policy, n, m, c, r):
    sizes = ["--q-tiles", n, "--kv-tiles", n, "--heads", m, "--workers", n, "--compute", c, "--reduce", r]
    code, out, _ = run(capsys, "simulate", "--mask", mask, "--policy", policy, *sizes, "--model", "paper", "--json")
    row = json.loads(out)
    assert code == 0
    assert {"makespan", "lower_bound", "bubble", "stall", "fingerprint"} <= row.keys()
    assert row["makespan"] == CLOSED_FORMS[mask, policy].makespan(n, m, c, r)


def test_fingerprint_does_not_depend_on_workers_or_model(capsys):
    common = [
        "simulate",
        "--mask",
        "causal",
        "--policy",
        "symmetric_shift",
        "--q-tiles",
        8,
        "--kv-tiles",
        8,
        "--heads",
        2,
        "--json",
    ]
    prints = set()
    for extra in (["--workers", 4], ["--workers", 7], ["--workers", 8, "--model", "machine"]):
        code, out, _ = run(capsys, *common, *extra)
        assert code == 0
        prints.add(json.loads(out)["fingerprint"])
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "nope"),
        (["simulate", "--bogus"], "--bogus"),
        (["simulate", "--heads", "x"], "--heads"),
        (["simulate", "--heads", "0"], "heads"),
        (["simulate", "--q-tiles", "0"], "--q-tiles"),
        (["simulate", "--workers", "0"], "--workers"),
        (["simulate", "--mask", "round"], "--mask"),
        (["bench", "--suite", "nope"], "--suite"),
        (["audit", "--repeats", "0"], "--repeats"),
        (["audit", "--mask", "documents:100,200"], "'audit --pack'"),
        (["audit", "--mask", "round"], "choose full, causal, or both"),
        (["plot", "nowhere.json"], "nowhere.json"),
        (["simulate", "--mask", "window:1,0"], "--window"),
        (["simulate", "--mask", "causal:3"], "--mask"),
        (["simulate", "--window", "1"], "--window"),
        (["simulate", "--window", "1,x"], "--window"),
        (["simulate", "--mask", "documents:a,b"], "--mask"),
        (["simulate", "--mask", "documents:100,-3"], "lengths must be at least 0"),
        (["simulate", "--ranks", "2"], "--seqlen is needed"),
        (["explain", "--mask", "documents:3,4", "--seqlen", "16"], "7 tokens, and --seqlen is 16"),
        (["simulate", "--mask", "documents:3,4", "--seqlen", "16"], "7 tokens, and --seqlen is 16"),
        (["simulate", "--mask", "documents:3,4", "--q-tiles", "2"], "give one of them"),
        (["simulate", "--mask", "documents:3,4", "--backend", "cpu"], "one after the other"),
        (["simulate", "--mask", "documents:3,4", "--save", "unwritten.npz"], "one for each length"),
        (["search", "--mask", "documents:3,4"], "this command takes one"),
        (["simulate", "--policy", "best"], "best"),
        (["simulate", "--policy", "shift"], "symmetric_shift"),
        (["simulate", "--policy", "symmetric_shift", "--mask", "full"], "causal"),
        (["simulate", "--policy", "shift", "--mask", "full", "--workers", "4"], "needs 8"),
        (["simulate", "--policy", "fa3:4"], "width"),
        (["simulate", "--policy", "shift:x"], "width"),
        (["simulate", "--model", "other"], "--model"),
        (["simulate", "--compute", "-1"], "--compute"),
        (["simulate", "--seqlen", "4096", "--q-tiles", "8"], "--q-tiles"),
        (["simulate", "--seqlen", "0"], "--seqlen"),
        (["simulate", "--backend", "tpu"], "--backend"),
        (["simulate", "--dtype", "int8"], "--dtype"),
        (["search", "--compute", "0"], "--compute"),
        (["search", "--exact", "--q-tiles", "2", "--reduce", "0.5"], "whole units"),
        (["compare", "--policy", "fa3,best"], "best"),
        (["compare", "--policy", ""], "--policy"),
        (["compare", "--policy", ","], "--policy"),
        (["compare", "--compute", "nan"], "--compute"),
        (["simulate", "--reduce", "inf"], "--reduce"),
        (["search", "--exact", "--seconds", "nan"], "--seconds"),
        (["simulate", "--ranks", "2", "--seqlen", "4096", "--mode", ""], "--mode"),
        (["bench", "--cpu", "--quick", "--budget-ms", "nan"], "--budget-ms"),
        (["bench", "--cpu", "--quick", "--policy", ","], "--policy"),
        (["audit", "--cpu", "--target", ""], "--target"),
        (["audit", "--cpu", "--target", ","], "--target"),
        (["audit", "--cpu", "--stress", ","], "--stress"),
        (["audit", "--cpu", "--all", "--stress", ","], "--stress"),
        (["audit", "--cpu", "--timeout", "nan"], "--timeout"),
        (["plot", "--format", "gif", "x.json"], "--format"),
        (["explain", "--head-dim", "256"], "head dim 256"),
        (["explain", "--dtype", "float32"], "float32"),
        (["explain", "--workers", "0"], "--workers"),
        (["simulate", "--gantt", "/dev/null/x.png"], "/dev/null"),
        (["verify"], "FILE"),
        (["verify", "/nonexistent"], "no such file"),
        (["explain", "--heads", "6", "--kv-heads", "4"], "multiple"),
    ],
)
def test_bad_arguments_exit_2_with_one_line(capsys, arguments, says):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dash-attn: error: ") and err.count("\n") == 1
    assert says in err


def causal_program(policy: str) -> Program:
    return compose(tile(Problem(1, 2, 2, 16, 16, mask=CAUSAL), TileShape(2, 2)), policy)


def test_verify_accepts_and_refuses(capsys, tmp_path):
    path = tmp_path / "program.dash"
    code, out, _ = run(capsys, "simulate", "--mask", "causal", "--policy", "symmetric_shift", "--save", path, "--json")
    assert code == 0 and load(path).fingerprint == json.loads(out)["fingerprint"]
    assert run(capsys, "verify", path, "--workers", 4)[0] == 0
    code, out, err = run(capsys, "verify", path, "--workers", 3)
    assert (code, out) == (1, "") and "needs 4" in err
    code, out, _ = run(capsys, "verify", path, "--workers", 3, "--json")
    assert code == 1 and json.loads(out)["ok"] is False

    program = causal_program("fa3")
    runs = program.runs.copy()
    runs[0, Run.TURN] += 1
    fields = {f: getattr(program, f) for f in program.__dataclass_fields__}
    save(Program(**(fields | {"runs": runs})), path)
    code, _, err = run(capsys, "verify", path)
    assert code == 1 and "turn" in err and "q tile" in err

    path.write_bytes(b"not a program")
    code, _, err = run(capsys, "verify", path)
    assert code == 1 and "no dash_attn program" in err


def test_compare_lists_every_policy_that_applies(capsys):
    code, out, _ = run(capsys, "compare", "--mask", "causal", "--json")
    rows = json.loads(out)
    assert code == 0 and [row["policy"] for row in rows] == [name for name in POLICIES if name != "shift"]
    assert all(row["makespan"] >= row["lower_bound"] for row in rows)
    code, out, _ = run(capsys, "compare", "--policy", "shift:4,fa3", "--mask", "full", "--json")
    assert code == 0 and [row["policy"] for row in json.loads(out)] == ["shift:4", "fa3"]
    code, out, _ = run(capsys, "compare", "--mask", "full", "--workers", "4", "--kv-tiles", "8", "--q-tiles", "8")
    assert code == 0 and "needs 8" in " ".join(out.split())


def test_compare_takes_documents(capsys, tmp_path):
    sizes = ["--mask", "causal-documents:300,0,1000,40", "--heads", 4, "--kv-heads", 2, "--head-dim", 64]
    page = tmp_path / "packs.html"
    code, out, _ = run(capsys, "compare", *sizes, "--html", page, "--json")
    rows = {row["policy"]: row for row in json.loads(out)}
    assert code == 0 and "fa3" in rows and "level" not in rows  # level looks at the batch
    assert all(row["makespan"] >= row["lower_bound"] and row["speedup"] > 0 for row in rows.values())
    assert "3 documents" in page.read_text() and '<option value="sequence" selected>' in page.read_text()
    code, out, _ = run(capsys, "compare", *sizes, "--policy", "fa3,fa3@head", "--json")
    cut, whole = (json.loads(out)[i] for i in (1, 0))
    assert code == 0 and (cut["policy"], cut["chains"]) == ("fa3@head", 2 * whole["chains"])
    assert cut["busy"] > whole["busy"], "dK and dV of cut chains are added up"
    code, _, err = run(capsys, "compare", *sizes, "--policy", "level")
    assert code == 2 and "a pack does not take" in err


def test_search_takes_the_times_that_compare_takes(capsys):
    times = ["--q-tiles", 4, "--heads", 2, "--compute", 1, "--reduce", 0.5, "--json"]
    (_, searched, _), (_, compared, _) = (run(capsys, name, *times) for name in ("search", "compare"))
    makespans = [{row["policy"]: row["makespan"] for row in json.loads(out)} for out in (searched, compared)]
    assert makespans[0] == makespans[1] and makespans[0]["fa3"] % 1 == 0.5


def test_search_exact_certifies_an_optimum(capsys, tmp_path):
    pytest.importorskip("ortools")
    path = tmp_path / "best.dash"
    sizes = ["--mask", "causal", "--q-tiles", 4, "--heads", 2]
    code, out, _ = run(capsys, "search", "--exact", *sizes, "--save", path, "--json")
    rows = {row["policy"]: row for row in json.loads(out)}
    assert code == 0 and rows["exact"]["optimal"]
    assert rows["exact"]["makespan"] == rows["exact"]["proved_bound"] == rows["symmetric_shift"]["makespan"]
    assert run(capsys, "verify", path, "--workers", 4)[0] == 0


def test_simulate_draws(capsys, tmp_path):
    paths = {kind: tmp_path / f"x.{kind}" for kind in ("png", "html", "json")}
    options = ["--gantt", paths["png"], "--html", paths["html"], "--perfetto", paths["json"]]
    for problem in (["--mask", "causal"], ["--mask", "causal-documents:200,500", "--kv-heads", 1]):
        for path in paths.values():
            path.unlink(missing_ok=True)
        code, out, _ = run(capsys, "simulate", *problem, "--policy", "descending", "--heads", 2, *options)
        assert code == 0 and all(path.stat().st_size > 1000 and str(path) in out for path in paths.values())


def test_module_entry_point_and_version():
    done = subprocess.run([sys.executable, "-m", "dash_attn", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == dash_attn.__version__
    done = subprocess.run([sys.executable, "-m", "dash_attn"], capture_output=True, text=True)
    assert done.returncode == 0 and "simulate" in done.stdout


def test_a_missing_package_exits_1_with_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    code, out, err = run(capsys, "search", "--exact", "--q-tiles", 2)
    assert (code, out) == (1, "") and err.count("\n") == 1 and "pip install 'dash-attn[tools]'" in err
    absent = ModuleNotFoundError("No module named 'matplotlib.pyplot'", name="matplotlib.pyplot")
    assert "matplotlib" in missing_package(absent) and "dash-attn[tools]" in missing_package(absent)
    assert missing_package(ModuleNotFoundError("no cutlass here", name="cutlass")) == "no cutlass here"


def test_the_reference_names_every_field(capsys, tmp_path):
    path = tmp_path / "program.npz"
    small = ["--q-tiles", 2, "--json"]
    answers = [
        run(capsys, "simulate", *small, "--save", path),
        run(capsys, "compare", *small),
        run(capsys, "verify", path, "--json"),
        run(capsys, "explain", "--seqlen", 256, "--heads", 1, "--json"),
    ]
    values = [json.loads(out) for _, out, _ in answers]
    fields = {name for value in values for row in (value if isinstance(value, list) else [value]) for name in row}
    reference = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    explained = {field.name for field in dataclasses.fields(Explanation)}  # listed as those of dash_attn.explain
    assert not {name for name in fields - explained if f"`{name}`" not in reference}
