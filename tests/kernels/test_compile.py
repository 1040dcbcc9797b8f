"""Configs compiled for sm_90a without a GPU, and what came out."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dash_attn.kernels.sm90.config import SMEM_LIMIT, select
from dash_attn.kernels.sm90.smem_plan import plan

needs = [m for m in ("cutlass", "tvm_ffi") if find_spec(m) is None]
pytestmark = pytest.mark.skipif(
    bool(needs), reason=f"not installed: {', '.join(needs)} (of nvidia-cutlass-dsl, apache-tvm-ffi)"
)

MAIN = [
    "main,128,bf16,causal,1",
    "main,64,bf16,interval,1",
    "main,128,fp16,full,0",
    "main,64,fp16,causal,0",
    "main,80,fp16,full,0",
    "main,96,bf16,causal,1",
]
SIDE = ["prepare,128,bf16,full,1", "finish,64,bf16,full,1", "prepare,80,bf16,full,1", "finish,96,bf16,full,1"]


@pytest.fixture(scope="module")
def reports():
    script = Path(__file__).with_name("compile_report.py")
    run = subprocess.run([sys.executable, str(script), *MAIN, *SIDE], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    return dict(zip(MAIN + SIDE, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", MAIN)
def test_main_kernel(reports, name):
    _, dim, dtype, mask, ordered = name.split(",")
    cfg, r = select(int(dim), dtype, mask, ordered == "1"), reports[name]
    assert set(r["frames"]) == {0}, "the kernel uses a stack"
    assert not any(r["spills"])
    assert r["remarked"], "no remarks from ptxas: nothing below would be checked"
    assert r["warnings"] == [], "ptxas serialised the products or ignored setmaxnreg"
    assert r["wgmma"] == cfg.wgmma_per_task
    assert r["setmaxnreg"] == 2
    assert r["bulk_reduce"] >= 1
    assert (r["release"] > 0) == cfg.ordered
    assert r["smem"] == plan(cfg).total <= SMEM_LIMIT


@pytest.mark.parametrize("name", SIDE)
def test_side_kernels(reports, name):
    assert set(reports[name]["frames"]) == {0} and not any(reports[name]["spills"])
