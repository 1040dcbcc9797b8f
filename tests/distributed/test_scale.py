"""The model of many GPUs: its pipeline, its bytes and its command."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dash_attn.distributed.scale import Cluster, Rank, pipeline, predict
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.tools.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
LONG = Problem(1, 32, 8, 2**17, 2**17, mask=CAUSAL)


TOGETHER = [(1, 1.0)]  # all panels wait for one trip


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((1, 10.0, [2.0], 3.0, TOGETHER), 2 + 10 + 3),  # nothing overlaps
        ((4, 10.0, [2.0], 3.0, TOGETHER), 2 + 4 * 10 + 3),  # only the first gather and the last sums are exposed
        ((4, 10.0, [2.0], 0.0, TOGETHER), 2 + 4 * 10),
        ((4, 1.0, [5.0], 0.0, TOGETHER), 4 * 5 + 1),  # the links are the limit: the last is computed when it is there
        ((3, 1.0, [5.0], 4.0, TOGETHER), 2 * 5 + 4 + 5 + 4 + 4),  # two gathers, then by turns: sums, next gather
        ((1, 10.0, [2.0, 2.0], 0.0, [(1, 0.3), (2, 0.7)]), 2 + 10),  # the second trip is over before it is needed
        ((1, 10.0, [2.0, 5.0], 0.0, [(0, 0.1), (1, 0.2), (2, 0.7)]), 7 + 7),  # early panels end before the late keys
        ((1, 10.0, [2.0, 2.0], 3.0, [(0, 0.5), (2, 0.5)]), 10 + 3),  # own keys need no trip
        ((1, 1.0, [2.0, 5.0], 0.0, [(0, 1.0)]), 2 + 5),  # a rank waits for keys that it has no use for
        ((2, 10.0, [2.0, 2.0], 0.0, [(1, 0.3), (2, 0.7)]), 2 + 2 * 10),  # later heads have one stage
    ],
)
def test_the_pipeline(parts: tuple[int, float, list[float], float, list[tuple[int, float]]], expected: float) -> None:
    assert pipeline(*parts) == pytest.approx(expected)


def test_one_rank_sends_nothing() -> None:
    alone = predict(LONG, 1, "all_gather", "zigzag", 1)
    assert (alone.exposed, alone.sent_bytes) == (0, 0)
    assert alone.memory_bytes == alone.workspace_bytes > 0
    flops = 4 * 32 * 128 * (2**17 * (2**17 + 1) // 2)
    assert alone.forward == pytest.approx(flops / Cluster().forward)


@pytest.mark.parametrize(("tokens", "gib"), [(2**17, 1.32), (2**20, 10.5)])
def test_the_workspace_of_the_backward_is_held(tokens: int, gib: float) -> None:
    """With all panels of its heads on a rank, the sums of dK and dV are most of it. No order is made for it."""
    problem = replace(LONG, len_q=tokens, len_k=tokens)
    own = replace(problem, heads_q=4, heads_kv=1, panels=16)
    shared, alone = predict(problem, 8, "a2a", "zigzag", 8), predict(replace(own, panels=1), 1, "a2a", "zigzag", 1)
    assert shared.memory_bytes == shared.workspace_bytes == alone.workspace_bytes
    assert shared.workspace_bytes / 2**30 == pytest.approx(gib, abs=0.01)
    sums = sum(4 * 2 * 128 * panel.len_k for panel in own.panel_list)
    assert sums < shared.workspace_bytes < 1.4 * sums


def test_memory_where_ranks_share_tokens() -> None:
    """The workspace of a rank has its own panels alone. `a2a` with few heads gathers by parts of a group: it sends more
    copies at a time than a mesh."""
    shared, by_parts = (predict(LONG, 64, mode, "zigzag", 8) for mode in ("a2a+all_gather", "a2a"))
    assert shared.workspace_bytes == by_parts.workspace_bytes > 0
    assert by_parts.memory_bytes - shared.memory_bytes == 2 * 2 * 128 * 2**17  # keys and values of one head, 16 bits
    assert shared.sent_bytes == by_parts.sent_bytes


@pytest.mark.parametrize("lengths", [(64, 0), (0, 64), (0, 0)], ids=str)
def test_without_queries_or_keys_nothing_is_computed(lengths: tuple[int, int]) -> None:
    for rank in range(4):
        spans = Rank(Problem(2, 4, 4, *lengths, mask=CAUSAL, panels=16), "zigzag", 4, 1, rank).spans(Cluster())
        assert spans.computing == 0 < spans.forward
        assert (spans.sent > 0) == (lengths[1] > 0)


def test_a_problem_that_gpus_refuse_has_no_workspace() -> None:
    assert predict(replace(LONG, dim=256), 8, "a2a", "zigzag", 8).workspace_bytes == 0


def test_the_rate_of_the_backward_is_the_measured_one() -> None:
    """Of 64k tokens, whole and in panels: docs/scale.md says so."""
    rows = json.loads((ROOT / "benchmarks/results/length_h200.json").read_text(encoding="utf-8"))["rows"]
    (row,) = (row for row in rows if row["shape"]["len_q"] == 2**16)
    ours = [name for name in row["us"] if not name.startswith("fa4")]
    assert any("panels=" in name for name in ours) and any("panels=" not in name for name in ours)
    for name in ours:
        rate = row["flops"] / (1e-6 * row["us"][name]["median"])
        assert rate == pytest.approx(Cluster().backward, rel=0.03), name


def test_zigzag_levels_causal_work_and_a_full_mask_needs_no_levelling() -> None:
    for mask, ratio in ((CAUSAL, 15 / 8), (FULL, 1.0)):
        problem = Problem(1, 32, 8, 2**17, 2**17, mask=mask)
        zigzag, contiguous = (predict(problem, 8, "all_gather", layout, 1) for layout in ("zigzag", "contiguous"))
        busy = [each.forward + each.backward - each.exposed for each in (zigzag, contiguous)]
        assert busy[1] / busy[0] == pytest.approx(ratio, rel=1e-3)


def test_slower_links_expose_more() -> None:
    fast, slow = (predict(LONG, 64, "all_gather", "zigzag", 1, Cluster(network=rate)) for rate in (100e9, 25e9))
    assert slow.exposed > fast.exposed
    assert slow.sent_bytes == fast.sent_bytes


def test_many_ranks_are_predicted_fast() -> None:
    """A rank looks at its own parts of dK and dV, and not at those between all other ranks."""
    start = time.process_time()
    predict(replace(LONG, len_q=4096, len_k=4096), 512, "all_gather", "zigzag", 1)
    assert time.process_time() - start < 3


def test_a_mesh_lies_between_the_two_modes() -> None:
    """Ranks of a node share heads, and fewer bytes cross the network than if all ranks gathered."""
    few, some, most = (predict(LONG, 64, "a2a+all_gather", "zigzag", ways) for ways in (1, 4, 8))
    assert few.sent_bytes > some.sent_bytes > most.sent_bytes
    assert few.heads_over == 1 and some.tokens_over == 16
    assert replace(few, mode="") == replace(predict(LONG, 64, "all_gather", "zigzag", 1), mode="")


COMMAND = ["simulate", "--seqlen", "8192", "--heads", "32", "--kv-heads", "8", "--ranks", "8"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "spt"], "--ranks, --mode and --layout go with the options of a problem"),
        (["--mode", "ring"], "--mode 'ring': choose from a2a, all_gather, a2a+all_gather"),
        (["--layout", "striped"], "--layout 'striped': choose from zigzag, contiguous"),
        (["--backend", "cpu"], "--ranks --backend cpu: the prediction is for Hopper GPUs"),
        (["--backend", "tpu"], "--backend 'tpu': choose from sm90, cpu"),
        (["--dtype", "float32"], "float32: on GPUs dash_attn takes bfloat16 and float16"),
        (["--head-dim", "256"], "head dim 256"),
        (["--mode", "a2a+all_gather", "--ranks", "2"], "can share 8 key/value heads"),
    ],
)
def test_choices_of_the_command(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([*COMMAND, *arguments])
    assert done.value.code == 2 and said in capsys.readouterr().err.replace("\n", " ")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in ((["--ranks", "2,8", "--json"], 0), (["--ranks", "2,x"], 2)):
        with pytest.raises(SystemExit) as done:
            main([*COMMAND, *arguments])
        assert done.value.code == status
        out, err = capsys.readouterr()
        if status:
            assert "--ranks '2,x': expected whole numbers" in err
        else:
            rows = json.loads(out)
            assert [row["ranks"] for row in rows] == [2] * 4 + [8] * 8
            assert {row["heads_over"] for row in rows if row["mode"] == "a2a"} == {2, 8}
            assert {row["heads_over"] for row in rows if row["mode"] == "a2a+all_gather"} == {2, 4}
