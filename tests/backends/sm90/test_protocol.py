"""No deadlock, and no buffer overwritten early, under random interleavings of the roles on random Programs."""

import dataclasses
import random
from itertools import pairwise

import pytest

from dash_attn.backends.sm90.config import select
from dash_attn.launch import compose
from dash_attn.order import applicable
from dash_attn.problem import CAUSAL, FULL, Problem, documents, window
from dash_attn.tiling import TileShape, tile
from dash_attn.verify import verify
from tests.backends.sm90.protocol import Machine, run


def chains_of(program, chains):
    """[(chain, [(dQ tile, turn, last?), ...]), ...] of one worker."""
    tasks, group, out = program.expand(), program.geometry.group, []
    for c in chains.tolist():
        batch, head, kv = program.chains[c, :3].tolist()
        mine = range(program.task_first[c], program.task_first[c + 1])
        out.append(
            (
                (batch, head, kv),
                [
                    (
                        (batch, head * group + int(tasks.head[t]), int(tasks.q[t])),
                        int(tasks.turn[t]),
                        bool(tasks.turn[t] == program.contributors[tasks.q[t]] - 1),
                    )
                    for t in mine
                ],
            )
        )
    return out


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed):
    rng = random.Random(seed)
    length, heads_kv, group = rng.randrange(1, 900), rng.choice([1, 2]), rng.choice([1, 1, 2])
    cuts = sorted(rng.randrange(length + 1) for _ in range(3))
    mask = rng.choice([FULL, CAUSAL, window(rng.randrange(300), rng.randrange(300)), documents([0, *cuts, length])])
    problem = Problem(1, heads_kv * group, heads_kv, length, length, mask=mask)
    tiling = tile(problem, TileShape(64, 128))
    program = compose(tiling, rng.choice(applicable(tiling)))
    verified = verify(program)
    placed = verified.on(max(verified.co_resident, rng.randrange(1, 9))).placement
    cfg = dataclasses.replace(select(128, "bf16", "full"), split=rng.random() < 0.5)
    if rng.random() < 0.5:
        cfg = dataclasses.replace(cfg, p_early=0, delta_ahead=0)
    cfg = dataclasses.replace(cfg, finish=rng.choice(["last", "postpass"]))
    counters = {}
    lists = [placed.chains[a:b] for a, b in pairwise(placed.first.tolist())]
    run([Machine(cfg, chains_of(program, mine), counters) for mine in lists], rng)
    seen = {tile: n for (tile, _), n in counters.items()}
    assert all(n == program.contributors[tile[2]] for tile, n in seen.items())


def test_empty_chains_back_to_back():
    cfg = select(128, "bf16", "full")
    for seed in range(5):
        chains = [((0, 0, n), [] if n % 5 else [((0, 0, n), 0, True)]) for n in range(40)]
        run([Machine(cfg, chains, {})], random.Random(seed))


def test_a_wrong_turn_is_noticed():
    cfg = select(128, "bf16", "full")
    with pytest.raises(AssertionError, match="deadlock"):
        run([Machine(cfg, [((0, 0, 0), [((0, 0, 0), 1, False)])], {})], random.Random(0))
