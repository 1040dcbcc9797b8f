"""The launch queue: which chains follow each other, over all heads. It changes the speed and never a bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dash_attn.order import Order, Rounds
from dash_attn.order.types import Ints
from dash_attn.program import PlaceRule, Queue
from dash_attn.tiling import Tiling

# Tuned to a GPU of 132 SMs with 50 MB of L2. No number here changes a bit.
IN_FLIGHT = 128  # bundles that fill the GPU: the tiles of more heads would leave the cache between two rounds
TINY = 6  # most kv tiles of a tiny head: it ends so soon that its tiles hardly stay in cache
NEAR = 8  # chains of the tiny heads that are launched in turn


@dataclass(frozen=True)
class LaunchRule:
    """How the heads of an order share the GPU.

    few_heads  launch only as many heads at a time as fill the GPU, instead of all heads. This pays if bundles are
               equally long: the windows of a head then follow each other while its tiles are in cache
    in_turn    launch block after block. Inside a block launch one chain of each head, then the next chain of each head
    place      how bundles go to workers
    """

    few_heads: bool = False
    in_turn: bool = False
    place: PlaceRule = "balanced"


RULES: dict[str, LaunchRule] = {
    "fa3": LaunchRule(place="dealt"),
    "descending": LaunchRule(place="faster"),  # its chains wait more than they work, and balance may not pay
    "shift": LaunchRule(few_heads=True),
    "symmetric_shift": LaunchRule(few_heads=True),
    "level": LaunchRule(in_turn=True),
}


def enqueue(order: Order) -> Queue:
    """The queue of an order, by the rule of its policy. A policy without an entry in RULES gets the plain rule."""
    rule = RULES.get(order.choice.policy, LaunchRule())
    blocks = np.split(np.arange(order.tiling.panels), np.flatnonzero(np.diff(order.block_of)) + 1)
    if rule.in_turn:
        chains = np.concatenate([_in_turn(order, part) for part in _tiny_parts(order.tiling, blocks)])
        return Queue(chains, np.arange(len(chains) + 1), rule.place)
    queue, sizes = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    share = order.tiling.problem.group // order.tiling.heads
    for block in blocks:
        block = _apart(block, share)
        rounds = [bundles for bundles in order.rounds[order.template_of[block[0]]] if bundles]
        for part in _few_heads(block, rounds) if rule.few_heads else [block]:
            parts, lengths = _round_by_round(part * order.tiling.num_kv, rounds)
            queue += parts
            sizes += lengths
    return Queue(np.concatenate(queue), np.cumsum(np.concatenate(sizes)), rule.place)


def _apart(panels: Ints, share: int) -> Ints:
    """The first of each `share` panels that add to the same dK and dV, then the second ones, and so on.

    Neighbours in the queue run at the same time, and would wait for each other's turns.
    """
    return panels[np.argsort(panels % share, kind="stable")]


def _round_by_round(first_chain: Ints, rounds: Rounds) -> tuple[list[Ints], list[Ints]]:
    """Chains, and lengths of the bundles: one round of each panel, then the next round of each panel.

    So the windows that share the GPU belong to different panels.
    """
    chains = [np.array([chain for bundle in bundles for chain in bundle], np.int64) for bundles in rounds]
    lengths = [np.array([len(bundle) for bundle in bundles], np.int64) for bundles in rounds]
    return (
        [(first_chain[:, None] + each).ravel() for each in chains],
        [np.tile(each, len(first_chain)) for each in lengths],
    )


def _few_heads(block: Ints, rounds: Rounds) -> list[Ints]:
    """Parts of a block whose smallest rounds fill the GPU."""
    heads = -(-IN_FLIGHT // min(map(len, rounds), default=1))
    return np.array_split(block, max(1, len(block) // heads))


def _in_turn(order: Order, part: Ints) -> Ints:
    """One chain of each panel, then the next chain of each panel."""
    chains = np.array([chain for bundles in order.rounds[order.template_of[part[0]]] for (chain,) in bundles], np.int64)
    return (chains[:, None] + part * order.tiling.num_kv).ravel()


def _tiny_parts(tiling: Tiling, blocks: list[Ints]) -> list[Ints]:
    """The blocks. If heads are tiny, each block but the last is cut into parts of a few heads.

    If a whole block of tiny heads is launched in turn, the tiles of a head leave the cache between one of its chains
    and the next. The cut needs q tiles smaller than kv tiles: chains of one head are then two steps apart and do not
    catch up with each other.
    """
    if tiling.heads > 1 or tiling.num_kv > TINY or tiling.shape.m >= tiling.shape.n:
        return blocks
    heads = -(-NEAR // max(1, tiling.num_kv))
    *early, last = blocks
    return [*(part for block in early for part in np.array_split(block, -(-len(block) // heads))), last]
