"""The harness on a Hopper GPU: make gpu-test"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dash_attn.problem import CAUSAL, FULL, Problem, documents
from dash_attn.tools.bench import cases, packs
from dash_attn.tools.bench.audit.audit import AuditSettings, Subject, audit
from dash_attn.tools.bench.audit.invariance import CHANGES
from dash_attn.tools.bench.audit.stressors import ON_GPU, PROCESSES
from dash_attn.tools.bench.audit.targets import CONTROL
from dash_attn.tools.bench.block import measure_block
from dash_attn.tools.bench.measure import Settings, deviation, measure
from dash_attn.tools.bench.ours import Ours
from dash_attn.tools.bench.step import measure_step
from dash_attn.tools.bench.timing import Timing

pytestmark = pytest.mark.gpu

ALL = ("fa4", "fa4 det", "fa2", "fa2 det", "cudnn", "triton two-pass")


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.fail("asked for GPU tests, but there is no Hopper GPU")
    return torch.device("cuda", torch.cuda.current_device())


def settings(device: torch.device, *peers: str) -> Settings:
    return Settings(Timing(device, rounds=2, budget_ms=5), Ours(), peers)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_every_variant_is_right(cuda: torch.device, dim: int, mask) -> None:
    row = measure(cases.BenchCase("small", Problem(2, 4, 2, 1000, 1000, dim, mask=mask)), settings(cuda, *ALL))
    wrong = {"fa4", "fa4 det"} if dim == 80 else set()  # what is wrong is reported, not left out
    assert set(row["failed"]) <= wrong, row["failed"]
    assert "triton two-pass" in row["us"] and "fa2" in row["us"], row["missing"]
    assert all(bytes_ > 0 for bytes_ in row["peak_bytes"].values())


@pytest.mark.parametrize("heads_kv", [8, 2])
@pytest.mark.parametrize("dim", [64, 128])
def test_no_more_memory_than_fa4(cuda: torch.device, dim: int, heads_kv: int) -> None:
    problem = Problem(1, 8, heads_kv, 4096, 4096, dim, mask=CAUSAL)
    peak = measure(cases.BenchCase("memory", problem), settings(cuda, "fa4", "fa4 det"))["peak_bytes"]
    assert peak[Ours().default(problem, cuda).name] <= peak["fa4 det"], peak


def test_flex_is_right(cuda: torch.device) -> None:
    row = measure(cases.BenchCase("small", Problem(1, 4, 2, 1024, 1024, 64, mask=CAUSAL)), settings(cuda, "flex"))
    assert "flex" in row["us"] and not row["failed"], (row["missing"], row["failed"])


def test_only_what_promises_nothing_deviates(cuda: torch.device) -> None:
    case = cases.BenchCase("long", Problem(1, 4, 4, 8192, 8192, 128, mask=CAUSAL))
    row = deviation(case, settings(cuda, "triton two-pass"))
    assert not row["failed"]
    assert row["deviation"][f"any ({Ours().default(case.problem, cuda).name})"]["mean"] > 0
    assert row["deviation"]["triton two-pass"]["mean"] == 0


def test_a_block(cuda: torch.device) -> None:
    model = cases.Model("small", 512, 4, 2, 128, 1024, CAUSAL, lengths=(1024,))
    case = model.cases()[0]
    row, ours = measure_block(model, case, settings(cuda)), Ours().default(case.problem, cuda).name
    assert not row["failed"] and row["same_bits"][ours]
    parts = row["parts"][ours]
    assert min(parts.values()) > 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_variant_of_a_pack_is_right(cuda: torch.device, dim: int, causal: bool) -> None:
    mask = documents([0, 1, 300, 301, 1200, 3000], causal=causal)
    how = Settings(Timing(cuda, rounds=2, budget_ms=5), Ours(("auto", "auto@group"), False), ("fa4", "fa4 det"))
    row = measure(cases.BenchCase("pack", Problem(1, 4, 2, 3000, 3000, dim, mask=mask)), how)
    assert set(row["us"]) == {"fa4", "fa4 det", "auto", "auto@group"}, row["missing"]
    assert not row["failed"], row["failed"]


def test_a_step(cuda: torch.device) -> None:
    row = measure_step(packs.tiny()[0], settings(cuda, "fa4", "fa4 det"))
    assert set(row["us"]) == {"auto", "fa4", "fa4 det"} and not row["failed"], (row["missing"], row["failed"])
    assert row["same_bits"]["auto"] and all(us["median"] > 0 for us in row["host_us"].values())


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_sequence_keeps_its_bits_in_any_company(cuda: torch.device, dim: int, mask) -> None:
    subject = Subject("one", Problem(1, 16, 4, 1900, 1900, dim, mask=mask))
    report = audit([subject], ["ours", CONTROL], AuditSettings("cuda", tuple(CHANGES), invariance=True))
    assert report["ok"], [(e["target"], e["stressor"], e["status"], [*e["tensors"]]) for e in report["entries"]]


def test_audit_under_every_stressor(cuda: torch.device, tmp_path: Path) -> None:
    how = AuditSettings("cuda", (*ON_GPU, PROCESSES), repeats=5, processes=1)
    report = audit([Subject("causal", Problem(1, 8, 2, 2048, 2048, mask=CAUSAL))], ["ours"], how)
    assert report["ok"], report["entries"]


@pytest.mark.parametrize("calls", [1, 64])
def test_every_stressor_notices_a_backward_without_order(cuda: torch.device, calls: int) -> None:
    """Also if a repeat has many calls, which the GPU compares."""
    how = AuditSettings("cuda", tuple(ON_GPU), repeats=20 if calls == 1 else 3, calls=calls)
    report = audit([Subject("causal", Problem(4, 16, 16, 2048, 2048, mask=CAUSAL))], ["any"], how)
    assert {entry["status"] for entry in report["entries"]} == {"DIFFERS"}, report["entries"]


@pytest.mark.parametrize("pack", [(), (300, 700, 8, 40)], ids=["cut chains", "a pack"])
@pytest.mark.parametrize("dim", [64, 128])
def test_many_calls_of_a_repeat(cuda: torch.device, dim: int, pack: tuple[int, ...]) -> None:
    how, tokens = AuditSettings("cuda", tuple(ON_GPU), repeats=3, calls=64), sum(pack) or 1024
    report = audit([Subject("x", Problem(1, 8, 2, tokens, tokens, dim, mask=CAUSAL), pack=pack)], ["ours"], how)
    assert report["ok"], report["entries"]
    assert report["stressors"] == {name: 3 * 64 * (64 if name == "burst" else 1) for name in ON_GPU}
