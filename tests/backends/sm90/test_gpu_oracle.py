"""The order oracle on a Hopper GPU: contributions kept by the debug build, added here in turn order, are dQ.

make gpu-test
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dash_attn.backends import Gradients
from dash_attn.backends.sm90 import builds
from dash_attn.backends.sm90.builds import Debugged
from dash_attn.backends.sm90.config import DEBUG, KernelConfig
from dash_attn.backends.sm90.launch import Launch
from dash_attn.backends.sm90.packed import PackedBackward
from dash_attn.backends.sm90.packed import rows_of as packed_rows
from dash_attn.pack import Doc, Round
from dash_attn.problem import CAUSAL, FULL, Problem, documents, window
from tests.backends.sm90.cases import Case, policies, prepared, room, same

pytestmark = pytest.mark.gpu

PROBLEMS = {  # batch, q heads, kv heads, queries, keys; mask
    "full": ((2, 2, 2, 640, 640), FULL),
    "causal": ((1, 2, 2, 1000, 1000), CAUSAL),
    "causal, fewer keys": ((1, 4, 2, 1000, 777), CAUSAL),
    "grouped heads": ((1, 6, 2, 300, 1100), FULL),
    "documents": ((1, 4, 2, 1000, 1000), documents([0, 100, 100, 471, 480, 1000], causal=True)),
    "window": ((1, 2, 1, 700, 700), window(200, 30)),
}


def added_by_turn(contributions: np.ndarray, contributors: np.ndarray) -> np.ndarray:
    """fp32 sums [planes, n_q, floats of a tile]: the first contribution is stored, each further one added."""
    total = contributions[:, :, 0].copy()
    for turn in range(1, contributions.shape[2]):
        some = contributors > turn
        total[:, some] += contributions[:, some, turn]
    total[:, contributors == 0] = 0.0
    return total


def rows_of(cfg: KernelConfig, parts: np.ndarray) -> np.ndarray:
    """[planes, n_q, floats] in fragment order as [planes, n_q * tile_m, columns].

    16-byte piece j of thread t (warp, row, quad) holds columns 8j + 2 quad + {0, 1} of rows 16 warp + row + {0, 8}. Of
    128 rows each warpgroup has 64; of 64 the second has the columns behind those of the first.
    """
    planes, n_q = parts.shape[:2]
    # 64 rows each, piece, warp, row, quad, eight, column
    pieces = parts.reshape(planes, n_q, cfg.tile_m // 64, -1, 4, 8, 4, 2, 2)
    return pieces.transpose(0, 1, 2, 4, 7, 5, 3, 6, 8).reshape(planes, n_q * cfg.tile_m, cfg.columns)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.int32), b.view(np.int32))


def contributors_of(launch: Launch) -> np.ndarray:
    """Contributions to each q tile, in a pack to those of all sequences."""
    contributors = launch.tables.contributors.cpu().numpy()
    if not launch.cfg.packed:
        return contributors
    rounds = launch.tables.docs[:, len(Round) :].tolist()  # a sequence may have several
    docs = {doc[Doc.Q_TILE]: doc for doc in rounds if doc[Doc.Q_ROWS]}
    tiles = [(docs[at][Doc.CONTRIBUTORS], -(-docs[at][Doc.Q_ROWS] // launch.cfg.tile_m)) for at in sorted(docs)]
    return np.concatenate([contributors[first : first + count] for first, count in tiles])


def check(problem: Problem, launch: Launch, debugged: Debugged, dq: torch.Tensor) -> np.ndarray:
    """The contributions, one for each turn, whose sum in turn order is dQ."""
    contributors = contributors_of(launch)
    kept, sums = debugged.contributions.cpu().numpy(), debugged.dq_sum.cpu().numpy()
    due = np.arange(kept.shape[2]) < contributors[:, None]  # [n_q, turns]
    assert np.isfinite(kept[:, due]).all() and np.isnan(kept[:, ~due]).all(), "not one contribution per turn"
    total = added_by_turn(kept, contributors)
    assert same_bits(total, sums)
    rounded = torch.from_numpy(rows_of(launch.cfg, total) * np.float32(problem.softmax_scale)).to(dq.dtype)
    if launch.cfg.packed:  # each sequence begins a tile
        tiles = launch.tables.q_tiles[0].tolist()
        rounded = torch.cat([rounded[:, i * launch.cfg.tile_m :][:, :rows] for i, (_, rows) in enumerate(tiles)], dim=1)
        rounded = rounded[:, torch.argsort(torch.cat([torch.arange(first, first + rows) for first, rows in tiles]))]
    rounded = rounded[:, : problem.len_q, : problem.dim].unflatten(0, (problem.batch, problem.heads_q)).transpose(1, 2)
    assert torch.equal(rounded, dq.cpu())
    return kept


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("name", PROBLEMS)
def test_contributions_added_in_turn_order_are_dq(name: str, dim: int) -> None:
    sizes, mask = PROBLEMS[name]
    problem = Problem(*sizes, dim, mask=mask)
    case = Case.make(problem)
    for policy in policies(problem):
        launch, into = prepared(problem, policy, **dict(DEBUG)).run_backward, room(case.operands)
        operands, rows = case.operands, into
        if isinstance(launch, PackedBackward):
            launch, operands, rows = launch.launch, packed_rows(operands), Gradients(*(x[0] for x in into))
        debugged = builds.debug(launch, operands, rows)
        kept = check(problem, launch, debugged, into.dq)
        assert same(case.run(prepared(problem, policy)), into), f"{policy}: the debug build has bits of its own"
        if mask == FULL:  # the oracle can tell: another order gives other bits
            contributors = contributors_of(launch)
            assert not same_bits(added_by_turn(np.flip(kept, 2), contributors), debugged.dq_sum.cpu().numpy())


@pytest.mark.parametrize("dim", ["64", "128"])
def test_a_turn_that_never_comes_is_named(dim: str) -> None:
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(
        [sys.executable, "-m", "tests.backends.sm90.hang", dim], cwd=root, capture_output=True, text=True, timeout=150
    )
    expected = re.search("expected (.*)", run.stdout)
    assert expected, run.stdout + run.stderr
    line = re.escape(expected[1]).replace("W", "[01]")
    assert re.search(f"turns that did not come:\n  {line}\n", run.stdout), run.stdout + run.stderr
