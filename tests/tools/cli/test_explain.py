"""dash-attn explain names what the kernel runs, and so does every command that is given the same problem."""

import json

import pytest
import torch

import dash_attn
from dash_attn.backends import Options
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.backends.sm90.backend import Sm90Backend
from dash_attn.pack import Pack
from dash_attn.plan import plan
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Problem, documents, window
from dash_attn.simulate import Machine, simulate
from dash_attn.tiling import TileShape
from dash_attn.tools.cli.absent import AbsentSm90
from dash_attn.tools.cli.main import main


def run(capsys, *arguments):
    out, err, code = called(capsys, *arguments)
    assert code == 0, err
    return out


def called(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return *capsys.readouterr(), stop.value.code


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


MASKS = {
    "full": (["--mask", "full"], FULL),
    "causal": (["--mask", "causal"], CAUSAL),
    "window": (["--mask", "causal", "--window", "300,-1"], CAUSAL & window(300, None)),
}


@pytest.mark.parametrize("dim", [40, 64, 96, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_tile_and_fingerprint_are_those_that_the_kernel_runs(capsys, dim, mask):
    words, value = MASKS[mask]
    sizes = ["--batch", 2, "--heads", 4, "--kv-heads", 2, "--seqlen", 1024, "--head-dim", dim, *words, "--json"]
    problem = Problem(2, 4, 2, 1024, 1024, dim, mask=value)
    shape = Sm90Backend(torch.device("cuda")).tile_shape(problem)
    planned = plan(problem, shape, "auto")
    said = json.loads(run(capsys, "explain", *sizes))
    assert said["tile"] == str(shape) == ("128x128" if dim <= 64 else "64x128")
    assert said["fingerprint"] == planned.fingerprint
    assert (said["policy"], said["tasks"]) == (planned.program.policy, planned.program.num_tasks)
    assert json.loads(run(capsys, "simulate", *sizes))["fingerprint"] == planned.fingerprint
    (row,) = json.loads(run(capsys, "compare", *sizes, "--policy", "auto"))
    assert row["fingerprint"] == planned.fingerprint


@pytest.mark.parametrize("backend", [Sm90Backend(torch.device("cuda")), CpuBackend()], ids=lambda each: each.name)
def test_panels_are_explained(capsys, backend):
    dtype = "bfloat16" if backend.name == "sm90" else "float32"
    sizes = ["--heads", 4, "--kv-heads", 2, "--seqlen", 3000, "--mask", "causal", "--backend", backend.name]
    pack = Pack(Problem(1, 4, 2, 3000, 3000, 128, dtype, mask=CAUSAL, panels=3), backend.tile_shape)
    said = json.loads(run(capsys, "explain", *sizes, "--panels", 3, "--json"))
    assert (said["sequences"], said["panels"], said["fingerprint"]) == (1, 3, pack.fingerprint)
    assert said["kv_sum_bytes"] == backend.kv_sum_bytes(pack) > 0
    assert said["fingerprint"] != json.loads(run(capsys, "explain", *sizes, "--json"))["fingerprint"]
    assert ("makespan_us" in said) == (backend.name == "sm90")


@pytest.mark.parametrize("backend", [Sm90Backend(torch.device("cuda")), CpuBackend()], ids=lambda each: each.name)
def test_documents_are_explained_together(capsys, backend):
    mask, dtype = "causal-documents:300,24,300,2400", "bfloat16" if backend.name == "sm90" else "float32"
    sizes = ["--batch", 2, "--heads", 4, "--kv-heads", 2, "--seqlen", 3024, "--mask", mask, "--backend", backend.name]
    problem = Problem(2, 4, 2, 3024, 3024, 128, dtype, mask=documents([0, 300, 324, 624, 3024], causal=True))
    pack = Pack(problem, backend.tile_shape)
    alone = [plan(each, backend.tile_shape(each)) for each in map(problem.alone, problem.sequences)]
    said = json.loads(run(capsys, "explain", *sizes, "--json"))
    assert (said["sequences"], said["templates"]) == (8, 3)
    assert said["fingerprint"] == pack.fingerprint and said["tasks"] == sum(each.num_tasks for each in alone)
    assert said["co_resident"] == max(each.co_resident for each in alone)
    assert said["tile"] == ("64x128" if backend.name == "sm90" else "256x256, 512x512")
    assert said["workspace_bytes"] > 0 and said["policy"] == ", ".join(dict.fromkeys(p.program.policy for p in alone))
    assert "3024 tokens" in run(capsys, "explain", *sizes)
    if backend.name == "sm90":
        row = json.loads(run(capsys, "simulate", *sizes, "--model", "h200", "--json"))
        assert (row["makespan"], row["gap"]) == (said["makespan_us"], said["gap"])
        assert row["lower_bound"] == max(said["lower_bounds_us"].values()) <= row["makespan"]
        for name in ("tasks", "chains", "fingerprint", "policy", "workers"):
            assert row[name] == said[name]
        assert said["tickets"] > 0 and said["critical_path"]


NEEDS = {
    "causal": ["--mask", "causal-documents:300,24,2400"],
    "window": ["--mask", "documents:700,1500", "--window", "300,0", "--policy", "diagonal:8"],
}


@pytest.mark.parametrize("words", NEEDS.values(), ids=NEEDS)
@pytest.mark.parametrize("backend", ["sm90", "cpu"])
def test_too_few_workers_for_documents_are_refused_in_the_words_of_all_orders(capsys, backend, words):
    sizes = ["--heads", 2, *words, "--backend", backend]
    needed = json.loads(run(capsys, "explain", *sizes, "--json"))["co_resident"]
    out, err, code = called(capsys, "explain", *sizes, "--workers", needed - 1)
    assert (out, code) == ("", 2) and f"needs {needed} co-resident workers, {needed - 1} are there" in err
    assert called(capsys, "explain", *sizes, "--workers", needed)[2] == 0


@pytest.mark.parametrize("dim", [64, 128])
def test_on_the_cpu_it_says_what_the_function_says(capsys, dim):
    q, k = torch.zeros(2, 700, 4, dim), torch.zeros(2, 700, 2, dim)
    expected = dash_attn.explain(q, k, k, causal=True, policy="fa3")
    sizes = ["--batch", 2, "--heads", 4, "--kv-heads", 2, "--seqlen", 700, "--head-dim", dim]
    said = json.loads(run(capsys, "explain", "--backend", "cpu", *sizes, "--policy", "fa3", "--json"))
    for name in ("backend", "forward", "fingerprint", "identity", "workspace_bytes", "software", "reason"):
        assert said[name] == getattr(expected, name), name
    assert said["tile"] == str(CpuBackend().tile_shape(Problem(2, 4, 2, 700, 700, dim, "float32", mask=CAUSAL)))
    assert "makespan_us" not in said  # the machine model is one of a GPU


def test_a_backend_stands_for_a_device_that_is_not_here():
    problem, backend = Problem(1, 4, 2, 700, 700, mask=CAUSAL), AbsentSm90()
    prepared = prepare(problem, "auto", Options(), backend)
    assert prepare(problem, "auto", Options(), backend) is prepared and prepared.backend is backend
    assert prepared.plan is plan(problem, backend.tile_shape(problem), "auto")


def test_what_only_the_gpu_knows_is_unknown(capsys):
    said = json.loads(run(capsys, "explain", "--seqlen", 1024, "--json"))
    unknown = {name for name, value in said.items() if str(value).startswith("unknown")}
    assert unknown == {"forward", "software", "identity"}
    assert said["workers"] == 132 and said["workspace_bytes"] > 0 and said["backend"] == "sm90"


def test_the_model_is_that_of_the_head_dim(capsys):
    sizes = ["--seqlen", 4096, "--heads", 16, "--json"]
    makespans = {
        dim: json.loads(run(capsys, "simulate", *sizes, "--head-dim", dim, "--mask", "causal", "--model", "h200"))
        for dim in (64, 128)
    }
    assert makespans[64]["makespan"] < 0.7 * makespans[128]["makespan"]
    said = json.loads(run(capsys, "explain", *sizes, "--head-dim", 64))
    assert said["makespan_us"] == makespans[64]["makespan"] >= max(said["lower_bounds_us"].values())


@pytest.mark.parametrize("backend", ["sm90", "cpu"])
@pytest.mark.parametrize(("dim", "tile_dim"), [(40, 64), (64, 64), (72, 128), (128, 128)])
def test_the_fitted_model_is_that_of_the_head_dim_of_tiles(capsys, dim, tile_dim, backend):
    rows = [
        json.loads(run(capsys, "simulate", *words, "--backend", backend, "--model", "h200", "--json"))
        for words in (["--q-tiles", 4, "--head-dim", dim], ["--q-tiles", 4, "--head-dim", tile_dim])
    ]
    problem = Problem(1, 1, 1, 8, 8, mask=CAUSAL)
    result = simulate(plan(problem, TileShape(2, 2)).program, 4, Machine.h200(tile_dim), record=False)
    assert rows[0] == rows[1] and rows[0]["makespan"] == result.makespan


def test_the_critical_path_is_named(capsys):
    sizes = ["--seqlen", 1024, "--heads", 2]
    said = json.loads(run(capsys, "explain", *sizes, "--json"))
    assert said["critical_path"][0].startswith("C(batch 0") and said["co_resident"] <= 64
    shown = run(capsys, "explain", *sizes)
    assert said["fingerprint"] in shown and "head dim 128" in shown


def test_documents_have_lengths_of_their_own(capsys) -> None:
    plain = run(capsys, "explain", "--mask", "documents:100,200")
    assert plain.strip().startswith("1 x 300 tokens")
    assert run(capsys, "explain", "--mask", "documents:100,200", "--seqlen", 300) == plain
