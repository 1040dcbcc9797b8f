"""The configs, their shared memory and their barriers, in pure Python."""

import dataclasses
import itertools
import subprocess
import sys

import pytest

from dash_attn.backends.sm90 import cta
from dash_attn.backends.sm90.barriers import (
    MBARRIER_COUNT,
    MBARRIER_OFFSETS,
    MBARRIERS,
    NAMED_BARRIER_THREADS,
    NamedBarrier,
    ring_depth_needed,
)
from dash_attn.backends.sm90.config import DEBUG, HEAD_DIMS, KernelConfig, select, shipped
from dash_attn.backends.sm90.cta import CONSUMER_WARPGROUPS, STAGES
from dash_attn.backends.sm90.smem_plan import (
    DELTA_BYTES,
    ENTRY_WORDS,
    GradEntry,
    TaskEntry,
    delta_offset,
    dk_piece,
    plan,
)

CONFIGS = shipped()
IDS = [f"d{c.dim}-{c.dtype}-{c.mask}-{'ordered' if c.ordered else 'any'}-{c.finish}" for c in CONFIGS]


def test_shipped_configs_differ():
    assert len(set(CONFIGS)) == len(CONFIGS) == 36, "a config is its own cache key"
    assert not any(cfg.softcap for cfg in CONFIGS)


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
def test_smem_buffers_are_disjoint_aligned_and_fit(cfg):
    buffers = plan(cfg).buffers
    for a, b in itertools.pairwise(buffers):
        assert a.end <= b.offset
    assert all(b.offset % b.align == 0 for b in buffers)
    assert plan(cfg).total <= cta.SMEM_LIMIT


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dims_run_the_tiles_of_the_next_tuned_one(dim):
    cfg, tuned = select(dim, "bf16", "causal"), select(64 if dim <= 64 else 128, "bf16", "causal")
    assert cfg.columns == dim and dataclasses.replace(cfg, columns=tuned.columns) == tuned
    assert (cfg.dim, cfg.tile_m) == (tuned.columns, tuned.tile_m)


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


def test_delta_lies_in_ds_but_not_in_dk():
    cfg = select(64, "bf16", "full")
    own, places = cfg.tile_m * cfg.tile_n, []  # bytes of dS that a warpgroup writes in a stage
    for stage in range(STAGES):
        for wg in range(CONSUMER_WARPGROUPS):
            begin = delta_offset(cfg, wg, stage)
            first = (stage * CONSUMER_WARPGROUPS + wg) * own
            assert begin % 1024 == 0 and first <= begin and begin + DELTA_BYTES <= first + own
            places.append(range(begin, begin + DELTA_BYTES))
    for wg in range(CONSUMER_WARPGROUPS):
        begin = dk_piece(cfg, wg) * 2 * 64 * cfg.dim
        places.append(range(begin, begin + 2 * 64 * cfg.dim))
    places.sort(key=lambda place: place.start)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(places)) and places[-1].stop <= plan(cfg)["ds"].bytes


def test_dv_and_finished_dq_fit_into_half_slots():
    for cfg in CONFIGS:
        assert 2 * 64 * cfg.dim <= 4 * cfg.half_floats
        assert 4 * cfg.half_floats >= 2 * 64 * 64


def test_barrier_arrivals():
    assert {s.name: (s.count, s.arrivals) for s in MBARRIERS} == {
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


def test_barriers_do_not_overlap():
    used = [MBARRIER_OFFSETS[spec.name] + i for spec in MBARRIERS for i in range(spec.count)]
    assert sorted(used) == list(range(MBARRIER_COUNT))


def test_named_barriers():
    assert set(NAMED_BARRIER_THREADS) == set(NamedBarrier) and max(NamedBarrier) < 16
    assert all(threads % cta.WARP == 0 for threads in NAMED_BARRIER_THREADS.values()), "they count whole warps"


def test_the_task_ring_is_deep_enough():
    assert ring_depth_needed(1) == 9 and ring_depth_needed(4) == 15 <= cta.RING
    assert cta.RING & (cta.RING - 1) == 0, "slots are taken by a bit mask"
    assert max(*TaskEntry, *GradEntry) < ENTRY_WORDS and TaskEntry.FLAGS == GradEntry.FLAGS, "entries of one ring"


def test_registers_stay_within_the_launch_allocation():
    """setmaxnreg moves only what the CTA was launched with; with more, the second consumer warpgroup hangs."""
    wanted = cta.WORKER_REGS * cta.WARPGROUP + cta.CONSUMER_REGS * cta.CONSUMER_THREADS
    assert wanted <= cta.LAUNCH_REGS == 168 * 384
    assert cta.WORKER_REGS % 8 == cta.CONSUMER_REGS % 8 == 0, "setmaxnreg takes multiples of 8"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(columns=84), "head dim 84 is not a multiple of 8"),
        (dict(columns=136), "head dim 136"),
        (dict(dtype="fp32"), "dtype 'fp32' is not one of"),
        (dict(mask="tree"), "mask 'tree' is not one of"),
        (dict(finish="never"), "finish 'never' is not one of"),
        (dict(p_early=17, delta_ahead=1), "16 words of P"),
        (dict(p_early=4), "needs a delta_ahead"),
        (dict(p_early=4, delta_ahead=9), "delta_ahead 9: a thread has 8 pairs"),
        (dict(lse_ahead=9), "lse_ahead 9: a thread has 8 pairs"),
        (dict(k_kept=9), "K has 8 steps"),
        (dict(k_kept=7), "220 registers for tiles"),
        (dict(columns=80, split=True), "those of head dim 80 differ"),  # 64 and 16 columns
        (dict(debug=True), "debug keeps every contribution"),  # the last slot holds a sum, not a contribution
        (dict(debug=True, finish="postpass", ordered=False), "debug keeps every contribution"),
        (dict(debug=True, finish="postpass", trace=True), "choose one"),
    ],
)
def test_infeasible_configs_cannot_be_made(change, says):
    with pytest.raises(ValueError, match=f"cannot run on sm_90a: .*{says}"):
        KernelConfig(**{"columns": 128, **change})


def test_a_change_of_a_config_is_checked():
    with pytest.raises(ValueError, match="cannot run on sm_90a"):
        dataclasses.replace(select(128, "bf16", "full"), k_kept=9)


@pytest.mark.parametrize("cfg", [c for c in CONFIGS if c.ordered], ids=str)
def test_every_ordered_config_has_a_debug_build(cfg):
    assert dataclasses.replace(cfg, **dict(DEBUG)).debug


def test_expected_products():
    assert select(128, "bf16", "full").wgmma_per_task == 8 + 8 + 4 + 4 + 8
    assert select(64, "bf16", "full").wgmma_per_task == 4 + 5 + 8 + 8 + 8
    assert select(64, "bf16", "full", softcap=True).wgmma_per_task == 4 + 4 + 8 + 8 + 8
    assert select(80, "bf16", "full").wgmma_per_task == 5 + 5 + 4 + 4 + 8
    assert select(8, "bf16", "full").wgmma_per_task == 1 + 2 + 8 + 8 + 8


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
