"""Ranks on the GPU: as threads of one process, which are up to 8 ranks, and as processes that share the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from dash_attn.backends import KeySums, Options
from dash_attn.distributed.layout import LAYOUTS, MODES
from dash_attn.prepare import prepare_panels
from dash_attn.problem import CAUSAL, Problem
from dash_attn.tools.bench.audit.audit import AuditSettings, Subject, audit
from dash_attn.tools.bench.audit.ranks import spots_of
from dash_attn.tools.bench.audit.targets import CONTROL
from tests.backends.sm90.cases import DEVICE, Case, prepared
from tests.distributed import jobs, threads
from tests.distributed.pool import Pool

pytestmark = pytest.mark.gpu

ON_GPU = jobs.Case(dtype=torch.bfloat16, device="cuda", panels=8)

SHAPES = {"d128 grouped": (4, 2, 128), "d64": (4, 4, 64), "d80 one kv head": (4, 1, 80)}  # heads_q, heads_kv, dim
MASKS: dict[str, dict[str, Any]] = {"causal": {"causal": True}, "full": {}, "window": {"window": (100, 0)}}

# Ranks, mode, layout, and bytes of a chunk: 1 gathers each kv head by itself.
PLACES: list[tuple[threads.Grid, str, str, int]] = [
    ((2,), "all_gather", "zigzag", 1),
    ((4,), "all_gather", "contiguous", 2**30),
    ((4,), "a2a", "zigzag", 1),
    ((2, 2), "a2a+all_gather", "zigzag", 2**30),
]


def assert_equal_on_ranks(case: jobs.Case, places: list[tuple[threads.Grid, str, str, int]] = PLACES) -> None:
    expected = case.alone()
    for place in places:
        grid, mode, *_ = place
        if mode != "a2a+all_gather" or case.heads[1] % grid[1] == 0:
            assert jobs.differences(threads.apart(case, *place), expected) == [], (case.lengths, place)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_panels_of_ranks_have_the_bits_of_one_call(shape: tuple[int, int, int], mask: dict[str, Any]) -> None:
    heads_q, heads_kv, dim = shape
    for batch, *lengths in ((1, 1000, 1000), (2, 513, 513), (1, 700, 1100), (1, 900, 500)):
        assert_equal_on_ranks(
            replace(ON_GPU, batch=batch, lengths=tuple(lengths), heads=(heads_q, heads_kv), dim=dim, arguments=mask)
        )


FEATURES: dict[str, tuple[dict[str, Any], bool]] = {
    "softcap": ({"softcap": 20.0}, False),
    "sinks": ({"sinks": torch.linspace(-2.0, 4.0, 4)}, False),
    "gradient of lse": ({}, True),
    "all": ({"softcap": 20.0, "sinks": torch.linspace(-2.0, 4.0, 4)}, True),
}


def with_features(features: dict[str, Any], with_lse: bool, dim: int) -> jobs.Case:
    here = {name: x.to(ON_GPU.device) if isinstance(x, torch.Tensor) else x for name, x in features.items()}
    return replace(ON_GPU, dim=dim, arguments=here, with_lse=with_lse)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("features", "with_lse"), FEATURES.values(), ids=FEATURES)
def test_panels_of_ranks_with_features(
    features: dict[str, Any], with_lse: bool, dim: int, mask: dict[str, Any]
) -> None:
    """Of 900 queries and 500 keys, a causal mask hides all keys of 400 queries, and so of whole panels."""
    case = with_features(features, with_lse, dim)
    case = replace(case, arguments=case.arguments | mask)
    for batch, *lengths in ((2, 513, 513), (1, 700, 1100), (1, 900, 500)):
        its = replace(case, batch=batch, lengths=tuple(lengths))
        assert_equal_on_ranks(its)
        if with_lse:
            differ = jobs.differences(its.alone(), replace(its, with_lse=False).alone())
            assert {"dq", "dk"} <= set(differ), "the gradient counts"


CU_SEQLENS = [0, *accumulate([130, 7, 0, 300, 64, 499])]
LENGTHS = (CU_SEQLENS[-1], CU_SEQLENS[-1])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("features", "with_lse"), FEATURES.values(), ids=FEATURES)
def test_packs_with_features(features: dict[str, Any], with_lse: bool, dim: int) -> None:
    case = with_features(features, with_lse, dim)
    pack = case.arguments | {"causal": True, "cu_seqlens": CU_SEQLENS}
    assert_equal_on_ranks(replace(case, lengths=LENGTHS, arguments=pack))


@pytest.mark.parametrize(
    ("grid", "mode"),
    [
        *(((ranks,), mode) for ranks in (1, 2, 4, 8) for mode in ("all_gather", "a2a")),
        *(((ranks // 2, 2), "a2a+all_gather") for ranks in (4, 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [8192, 32768, 131072])
def test_long_sequences_on_any_number_of_ranks(length: int, grid: threads.Grid, mode: str) -> None:
    case = replace(ON_GPU, lengths=(length, length), dim=128, panels=16, arguments={"causal": True})
    assert_equal_on_ranks(case, [(grid, mode, "zigzag", 32 * 2**20)])


@pytest.mark.parametrize("policy", ["auto", "spt"])
def test_packs(policy: str) -> None:
    pack = {"causal": True, "cu_seqlens": CU_SEQLENS, "policy": policy}
    assert_equal_on_ranks(replace(ON_GPU, lengths=LENGTHS, dim=128, arguments=pack))


def test_another_order_of_the_sums_is_noticed() -> None:
    """The control: the first addend has all rows, so it stays the first, and the others are turned round."""
    problem = Problem(1, 4, 2, 1000, 1000, 128, mask=CAUSAL, panels=8)
    case = Case.make(problem)
    held = prepare_panels(problem, problem.panel_list, "auto", Options(), DEVICE)
    sums = held.backward(case.operands).sums[::-1]
    results = []
    for order in (sums, (sums[0], *sums[:0:-1])):
        into = KeySums(torch.empty_like(case.operands.k), torch.empty_like(case.operands.v))
        held.fold((KeySums(*(x.clone() for x in each)) for each in order), into)
        results.append(into)
    whole = case.run(prepared(problem))
    assert torch.equal(results[0].dk, whole.dk) and torch.equal(results[0].dv, whole.dv)
    assert not torch.equal(results[1].dk, whole.dk)


@pytest.mark.alone
def test_an_audit_of_processes_that_share_the_gpu() -> None:
    """Ranks with a group of gloo, or of NCCL if there are GPUs enough, in every mode and layout."""
    how = AuditSettings("cuda", tuple(spots_of((1, 2))), invariance=True, ranks=(1, 2))
    report = audit([Subject("one", Problem(1, 4, 2, 1000, 1000, 128, mask=CAUSAL))], ["ours", CONTROL], how)
    assert report["ok"], [(entry["stressor"], entry["status"], entry["why"]) for entry in report["entries"]]


SHARED = {
    "causal": jobs.Case(lengths=(1024, 1024), heads=(8, 4), arguments={"causal": True}),
    "two kv heads": jobs.Case(lengths=(1024, 1024), heads=(4, 2), arguments={"causal": True}),
    "one kv head": jobs.Case(lengths=(1024, 1024), heads=(4, 1), arguments={"causal": True}),
    "pack": jobs.Case(
        lengths=(1024, 1024), heads=(4, 4), arguments={"causal": True, "cu_seqlens": [0, 90, 90, 515, 1024]}
    ),
}


@pytest.mark.alone
@pytest.mark.parametrize("mode", MODES)
def test_processes_that_share_the_gpu(mode: str) -> None:
    """1, 2 and 4 ranks in every layout, or a mesh of 4. Gloo carries the tensors, each kv head by itself.

    The processes start once and run all cases: their start takes longer than the cases.
    """
    pool = Pool(4, 200.0)  # seconds: a rank compiles kernels while others wait for it
    try:
        for name, case in SHARED.items():
            on_gpu = replace(case, dim=128, dtype=torch.bfloat16, device="cuda")
            assert pool.run(jobs.equal_everywhere, on_gpu, (1, 2, 4), 1, LAYOUTS, (mode,))[0] == {}, name
    finally:
        pool.close()
