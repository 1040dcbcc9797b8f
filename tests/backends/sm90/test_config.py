"""Feasibility of every shipped config, in pure Python."""

import dataclasses
import itertools
import subprocess
import sys

import pytest

from dash_attn.backends.sm90.barriers import (
    mbarrier_count,
    mbarrier_offsets,
    mbarrier_specs,
    named_barrier_threads,
    ring_depth_needed,
)
from dash_attn.backends.sm90.config import HEAD_DIMS, RING, SMEM_LIMIT, KernelConfig, select, shipped, with_debug
from dash_attn.backends.sm90.smem_plan import plan

CONFIGS = shipped()
IDS = [f"d{c.dim}-{c.dtype}-{c.mask}-{'ordered' if c.ordered else 'any'}" for c in CONFIGS]


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
def test_shipped_configs_are_feasible(cfg):
    assert cfg.problems() == []
    assert len(set(CONFIGS)) == len(CONFIGS), "a config is its own cache key"


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
def test_smem_buffers_are_disjoint_aligned_and_fit(cfg):
    buffers = plan(cfg).buffers
    for a, b in itertools.pairwise(buffers):
        assert a.end <= b.offset
    assert all(b.offset % b.align == 0 for b in buffers)
    assert plan(cfg).total <= SMEM_LIMIT


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dims_run_the_tiles_of_the_next_tuned_one(dim):
    cfg, tuned = select(dim, "bf16", "causal"), select(64 if dim <= 64 else 128, "bf16", "causal")
    assert cfg.columns == dim and dataclasses.replace(cfg, head_dim=0) == tuned


@pytest.mark.parametrize("dim", [0, 84, 136])
def test_other_head_dims_are_refused(dim):
    with pytest.raises(ValueError, match=f"head dim {dim} is not built; multiples of 8 up to 128"):
        select(dim, "bf16", "full")


def test_smem_totals():
    assert plan(select(64, "bf16", "full")).total == 232_448
    assert plan(select(128, "bf16", "full")).total == 231_424


def test_dk_fits_into_the_ds_buffers():
    for cfg in CONFIGS:
        assert 2 * cfg.tile_n * cfg.dim <= plan(cfg)["ds"].bytes


def test_dv_and_finished_dq_fit_into_half_slots():
    for cfg in CONFIGS:
        assert 2 * 64 * cfg.dim <= 4 * cfg.half_floats
        assert 4 * cfg.half_floats >= 2 * 64 * 64


def test_barrier_arrivals():
    counts = {s.name: (s.count, s.arrivals) for s in mbarrier_specs(select(128, "bf16", "causal"))}
    assert counts == {
        "q_full": (2, 1),
        "q_empty": (2, 8),
        "do_full": (2, 1),
        "do_empty": (2, 8),
        "k_full": (1, 1),
        "k_empty": (1, 8),
        "v_full": (1, 1),
        "v_empty": (1, 8),
        "task_full": (16, 1),
        "ds_full": (2, 8),
        "dq_full": (4, 4),
        "dq_empty": (4, 1),
        "dk_full": (1, 8),
        "dk_empty": (1, 1),
    }


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
def test_barrier_ids(cfg):
    ids = named_barrier_threads(cfg)
    assert max(ids) < 16 and ids[0] == cfg.threads and ids[1] == cfg.consumer_threads
    offsets = mbarrier_offsets(cfg)
    assert len(set(offsets.values())) == len(offsets) and max(offsets.values()) < mbarrier_count(cfg)
    assert ring_depth_needed(cfg) <= RING and RING & (RING - 1) == 0


def test_registers_beyond_the_launch_allocation_are_refused():
    """setmaxnreg moves only what the CTA was launched with; asking for more hangs the second consumer warpgroup."""
    cfg = dataclasses.replace(select(128, "bf16", "full"), worker_regs=32)
    assert any("setmaxnreg" in p for p in cfg.problems())
    assert dataclasses.replace(cfg, worker_regs=40, consumer_regs=232).problems() == []


@pytest.mark.parametrize(
    "change",
    [
        dict(dim=96),
        dict(head_dim=84),
        dict(head_dim=64),  # the second half of dQ would lie past the end
        dict(head_dim=128),  # is called 0, so that equal kernels have equal configs
        dict(tile_m=80),
        dict(tile_n=64),
        dict(dtype="fp32"),
        dict(mask="tree"),
        dict(dq_slots=3),
        dict(finish="never"),
        dict(consumer_regs=248),
        dict(stages=3),
        dict(p_early=17, delta_ahead=1),
        dict(p_early=4),  # and no delta
        dict(p_early=4, delta_ahead=9),
        dict(lse_ahead=9),
        dict(k_kept=9),
        dict(k_kept=7),  # 28 registers beside 192 of sums
        dict(dq_slots=1, split=True),
        dict(head_dim=80, split=True),  # halves of 64 and 16 columns
        dict(debug=True),  # the last contributor's slot holds its sum, not its contribution
        dict(debug=True, finish="postpass", ordered=False),
    ],
)
def test_infeasible_configs_say_why(change):
    cfg = dataclasses.replace(KernelConfig(dim=128, tile_m=64), **change)
    assert cfg.problems()
    with pytest.raises(ValueError, match="cannot run on sm_90a"):
        cfg.validate()


@pytest.mark.parametrize("cfg", [c for c in CONFIGS if c.ordered], ids=str)
def test_every_ordered_config_has_a_debug_build(cfg):
    assert with_debug(cfg).problems() == []


def test_expected_products():
    assert select(128, "bf16", "full").wgmma_per_task == 8 + 8 + 4 + 4 + 8
    assert select(64, "bf16", "full").wgmma_per_task == 4 + 4 + 8 + 8 + 8
    assert select(80, "bf16", "full").wgmma_per_task == 5 + 5 + 4 + 4 + 8
    assert select(8, "bf16", "full").wgmma_per_task == 1 + 1 + 8 + 8 + 8


@pytest.mark.parametrize(("dim", "parts"), [(64, (64, 64)), (24, (24, 24)), (80, (64, 16)), (128, (64, 64))])
def test_only_columns_that_the_tensors_have_are_summed(dim, parts):
    cfg = select(dim, "bf16", "full")
    assert cfg.sum_parts == tuple(64 * columns for columns in parts)
    assert all(part % 512 == 0 and part <= cfg.half_floats for part in cfg.sum_parts), "whole pieces of a half-slot"
    assert sum(cfg.sum_parts) == cfg.tile_m * dim


def test_pure_python_files_need_no_compiler():
    code = (
        "import sys; import dash_attn.backends.sm90.config, dash_attn.backends.sm90.smem_plan, "
        "dash_attn.backends.sm90.barriers; sys.exit('cutlass' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
