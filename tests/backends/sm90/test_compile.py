"""Every shipped config compiled for sm_90a without a GPU, and its machine code."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dash_attn.backends.sm90.config import DTYPES, MANY_KEYS, MASKS, shipped
from dash_attn.backends.sm90.cta import SMEM_LIMIT
from dash_attn.backends.sm90.smem_plan import plan
from tests.backends.sm90.compile_report import config_of, disassembler

needs = {"nvidia-cutlass-dsl": find_spec("cutlass"), "apache-tvm-ffi": find_spec("tvm_ffi")}
needs["nvidia-cuda-nvdisasm"] = disassembler()
missing = [package for package, found in needs.items() if not found]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


# A group is compiled by one process. It has the masks of one dim, dtype and kind, because a start takes long.
GROUPS = {
    f"{dim}-{dtype}-{kind}": [f"main,{dim},{dtype},{mask},{how}" for mask in MASKS]
    for dim in (64, 128)
    for dtype in DTYPES
    for kind, how in {"last": "1,0", "postpass": f"1,{2 * max(MANY_KEYS.values())}", "any": "0,0"}.items()
}
GROUPS["padded"] = ["main,80,fp16,full,0,0", "main,96,bf16,causal,1,0"]
GROUPS["trace"] = ["main,64,bf16,causal,1,4096,trace", "main,64,bf16,full,1,0,cut,trace"]
GROUPS["trace"] += ["main,128,bf16,causal,1,8192,packed,trace", "main,128,bf16,causal,1,8192,packed,cut,trace"]
GROUPS["debug"] = ["main,128,bf16,causal,1,0,debug", "main,64,bf16,interval,1,0,debug"]
GROUPS["debug"] += ["main,128,bf16,causal,1,0,packed,debug"]
CUT = "cut", "packed,cut"
GROUPS["cut"] = ["main,128,bf16,causal,1,0,cut", "main,64,bf16,full,1,4096,cut", "main,80,fp16,causal,0,0,cut"]
PACKED = "packed", "packed,cut"
GROUPS |= {
    f"{dim}-{how}": [f"main,{dim},bf16,{mask},1,{keys},{how}" for mask in MASKS for keys in (0, 8192)]
    for dim in (64, 128)
    for how in PACKED
}
GROUPS["softcap"] = ["main,64,bf16,full,1,0,softcap", "main,64,fp16,interval,1,0,softcap,cut"]
GROUPS["softcap"] += ["main,128,bf16,causal,1,0,softcap"]
SIDE = [f"{kind},{dim},bf16,full,1,0" for kind in ("prepare", "finish") for dim in (64, 80, 128)]
SIDE += [f"{kind},{dim},bf16,full,1,0,packed" for kind in ("prepare", "finish") for dim in (64, 80, 128)]
SIDE += [f"{kind},{dim},bf16,full,1,0,{how}" for kind in ("prepare", "finish_kv") for dim in (64, 80) for how in CUT]
SIDE += ["prepare_dlse,80,fp16,full,1,0", "prepare_dlse,64,bf16,full,1,0,packed,cut"]
SIDE += ["sink_sums,64,bf16,full,1,0", "sink_sums,128,bf16,full,1,0,packed,cut"]
SIDE += [f"spread,{dim},{dtype},full,1,0,packed" for dim, dtype in ((8, "bf16"), (80, "fp16"), (128, "bf16"))]
SIDE += [f"fold_kv,{dim},{dtype},full,1,0,packed,cut" for dim, dtype in ((64, "bf16"), (80, "fp16"), (128, "bf16"))]


def reports(names: list[str]) -> dict[str, dict]:
    script = Path(__file__).with_name("compile_report.py")
    run = subprocess.run([sys.executable, str(script), *names], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    return dict(zip(names, map(json.loads, lines), strict=True))


def test_every_shipped_config_is_compiled():
    assert {config_of(name)[1] for group in GROUPS.values() for name in group} >= set(shipped())


@pytest.mark.parametrize("group", GROUPS)
def test_main_kernels(group):
    for name, r in reports(GROUPS[group]).items():
        _, cfg = config_of(name)
        assert set(r["frames"]) == {0}, f"{name}: uses a stack"
        assert not any(r["spills"]) and r["local"] == 0, f"{name}: spills"
        assert r["remarked"], f"{name}: no remarks from ptxas, so none can be missed"
        assert r["warnings"] == [], f"{name}: ptxas serialised the products or ignored setmaxnreg"
        assert r["products"] == cfg.wgmma_per_task, name
        assert r["register_moves"] == 2, f"{name}: one role group gives registers, the other takes them"
        sums = 2 if cfg.cut else 1  # dQ, and dK and dV of cut chains
        assert r["bulk_adds"] == sums * (1 if cfg.split else 2), f"{name}: one for each half that a writer serves"
        turns = int(cfg.ordered) + int(cfg.cut)
        polls = turns + int(cfg.packed)  # the ticket counter too
        assert (r["polls"], r["releases"]) == (polls, turns), name
        assert (r["fences"] > 0) == (turns > 0), f"{name}: release at gpu scope is a fence and a plain add"
        assert r["traps"] == int(cfg.debug), name
        assert r["tanhs"] == (cfg.tile_m // 2 if cfg.softcap else 0), f"{name}: one for each score of a thread"
        assert r["smem"] == plan(cfg).total <= SMEM_LIMIT, name


def test_side_kernels():
    for name, r in reports(SIDE).items():
        assert set(r["frames"]) == {0} and not any(r["spills"]) and r["local"] == 0, name
