"""Templates: the verified order of one panel. Sequences with the same tiles in the same states share a template."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import numpy as np

from dash_attn.kept import Kept
from dash_attn.order import require_alone
from dash_attn.pack.rounds import awaited, rounds_of
from dash_attn.pack.tables import PackedBundle, PackedChain
from dash_attn.plan import plan
from dash_attn.problem import Mask, Problem
from dash_attn.program import RUN, RUN_WIDTH, Chain
from dash_attn.program.program import Int32, Longs, frozen
from dash_attn.tiling import TileShape
from dash_attn.verify import Verified

KEPT_BYTES = 64 * 2**20  # of the templates of a family
FAMILIES = 8  # families that are kept
BITS = 32  # bits of a length in a code


class Fact(IntEnum):
    """Numbers of a template.

    BUNDLES, CHAINS, RUNS, Q_TILES  rows of its tables
    ROUNDS                          rounds of its bundles
    TASKS                           tasks of one panel
    CO_RESIDENT                     workers that must run at the same time
    SHARE                           panels with the same keys and values. More than 1 means that chains are cut. 0 means
                                    that the sequence has no queries or no keys
    BLIND                           q tiles that see no key
    """

    BUNDLES = 0
    CHAINS = 1
    RUNS = 2
    Q_TILES = 3
    TASKS = 4
    CO_RESIDENT = 5
    SHARE = 6
    BLIND = 7
    ROUNDS = 8


@dataclass(frozen=True, eq=False)
class PackedTemplate:
    """The order of one panel, counted from its own first row of each table.

    bundles       columns PackedBundle, in launch order
    chains        columns PackedChain; the chains of a bundle are neighbours
    runs          the columns RUN, and zeros up to RUN_WIDTH
    contributors  contributions to the dQ tile of each q tile
    rounds        the number of bundles of each round
    """

    bundles: Int32
    chains: Int32
    runs: Int32
    contributors: Int32
    rounds: Longs
    facts: tuple[int, ...]  # columns Fact

    @staticmethod
    def of(verified: Verified) -> PackedTemplate:
        """The order of the first panel of a program of one kv head. All panels must have the same order."""
        program, g = verified.program, verified.program.geometry
        orders = program.chains[:, Chain.FIRST_RUN :].reshape(g.num_groups, g.num_kv, 2)
        if not (orders == orders[:1]).all():
            raise ValueError(
                f"policy {program.policy!r} orders the query heads of a group in different ways, which a pack does "
                "not take: choose another policy"
            )
        if verified.rounds is None:
            raise ValueError(
                f"policy {program.policy!r} launches other bundles between those that wait for each other, which a "
                "pack does not take: choose another policy"
            )
        panel = program.chains[program.launch, Chain.KV_HEAD]
        chains = program.chains[program.launch[panel == 0]][:, Chain.KV_TILE :]
        first = panel[program.bundle_first[:-1]] == 0  # bundles of the first panel
        sizes = np.diff(program.bundle_first)[first]
        runs = np.zeros((len(program.runs), RUN_WIDTH), np.int32)
        runs[:, : len(RUN)] = program.runs
        later = awaited(verified.rounds[first])
        rounds = rounds_of(later)
        bundles = np.empty((len(sizes), len(PackedBundle)), np.int32)
        bundles[:, PackedBundle.FIRST_CHAIN], bundles[:, PackedBundle.NUM_CHAINS] = np.cumsum(sizes) - sizes, sizes
        bundles[:, PackedBundle.AWAITS] = later
        facts = {
            Fact.BUNDLES: len(bundles),
            Fact.CHAINS: len(chains),
            Fact.RUNS: len(runs),
            Fact.Q_TILES: g.num_q,
            Fact.TASKS: program.num_tasks // g.num_groups,
            Fact.CO_RESIDENT: 1 + int(later.max()),
            Fact.SHARE: g.share,
            Fact.BLIND: int((program.contributors == 0).sum()),
            Fact.ROUNDS: len(rounds),
        }
        return PackedTemplate(
            frozen(bundles), frozen(chains), frozen(runs), program.contributors, frozen(rounds), _in_columns(facts)
        )

    @staticmethod
    def idle(q_tiles: int) -> PackedTemplate:
        """A sequence without queries or without keys has nothing to do."""
        bundles, chains, runs = (
            np.zeros((0, width), np.int32) for width in (len(PackedBundle), len(PackedChain), RUN_WIDTH)
        )
        contributors = frozen(np.zeros(q_tiles, np.int32))
        facts = _in_columns({Fact.Q_TILES: q_tiles, Fact.BLIND: q_tiles})
        return PackedTemplate(bundles, chains, runs, contributors, np.zeros(0, np.int64), facts)


def _in_columns(facts: dict[Fact, int]) -> tuple[int, ...]:
    """Facts in the order of their columns. Those that are not given are 0."""
    return tuple(facts.get(fact, 0) for fact in Fact)


def needed_workers(orders: Iterable[PackedTemplate]) -> int:
    """The number of workers that must run at the same time, if they draw the tickets of a pack of these templates.

    It can be more than the plans of the panels need. A worker draws its next ticket while it still works on a bundle.
    So each bundle from the first to the last that wait for each other needs a worker of its own.
    """
    return max((each.facts[Fact.CO_RESIDENT] for each in orders), default=0)


@dataclass(frozen=True)
class Family:
    """What the sequences of a pack have in common: everything except their lengths."""

    group: int
    dim: int
    dtype: str
    scale: float | None
    mask: Mask
    shape: TileShape
    policy: str

    @staticmethod
    def of(problem: Problem, shape: TileShape, policy: str) -> Family:
        mask = problem.mask if problem.mask.documents is None else replace(problem.mask, documents=None)
        return Family(problem.group, problem.dim, problem.dtype, problem.scale, mask, shape, policy)

    def codes(self, len_q: Longs, len_k: Longs) -> Longs:
        """One number for each sequence. Sequences with equal numbers have the same tiles in the same states."""
        m, n = self.shape.m, self.shape.n
        if self.mask.is_full:
            # Only the last kv tile can be partial. A last q tile that is not full has no other tasks than a full one.
            tiles = -(-len_k // n)
            return _code(_up(len_q, m), np.where(tiles * n == len_k, len_k, tiles * n - 1))
        if self.mask.right == 0 and n % m == 0:  # causal, perhaps with a window
            return _code(*self._longest(len_q, len_k))
        if all(side is None or side >= 0 for side in (self.mask.left, self.mask.right)):
            return _code(*self._longest_ahead(len_q, len_k))
        return _code(len_q, len_k)

    def _longest(self, len_q: Longs, len_k: Longs) -> tuple[Longs, Longs]:
        """Lengths that stand for all lengths with the same tiles, for masks that end at the query.

        No kv tile begins inside a q tile. So of the keys before the queries that do not fill a q tile, three numbers
        count: none, one, and one less than a q tile. A last q tile is as long as it can be: until it meets the next
        kv tile, or until its window no longer begins in the same kv tile.
        """
        m, n, left = self.shape.m, self.shape.n, self.mask.left
        before = len_k - len_q
        rest = before % m
        start = before - rest + np.where(rest == m - 1, rest, np.minimum(rest, 1))
        longest = self._in_window(len_q, np.minimum(_up(len_q, m), _up(len_k, n) - start))
        known = (before >= 0 if left is None else (before == 0) & (left >= 0)) & (len_q > 0)
        return np.where(known, longest, len_q), np.where(known, longest + start, len_k)

    def _longest_ahead(self, len_q: Longs, len_k: Longs) -> tuple[Longs, Longs]:
        """As `_longest` for windows that look ahead, if there are as many keys as queries.

        The last row sees the last key, so the last q tile reaches the last kv tile, however long both are. The last kv
        tile is partial unless keys fill it.
        """
        m, n = self.shape.m, self.shape.n
        longest = self._in_window(len_q, np.minimum(_up(len_q, m), _up(len_k, n) - 1))
        known = (len_q == len_k) & (len_k % n != 0)
        return np.where(known, longest, len_q), np.where(known, longest, len_k)

    def _in_window(self, len_q: Longs, longest: Longs) -> Longs:
        """The longest length at which the window of the last query begins in the kv tile where it begins now."""
        left, n = self.mask.left, self.shape.n
        return longest if left is None else np.minimum(longest, np.maximum(_up(len_q - 1 - left, n), 0) + left + 1)

    def code(self, problem: Problem) -> int:
        """The number of one sequence."""
        return int(self.codes(np.array(problem.len_q), np.array(problem.len_k)))

    def problem(self, code: int) -> Problem:
        """One kv head of a sequence with this code."""
        lengths = code >> BITS, code & ((1 << BITS) - 1)
        return Problem(1, self.group, 1, *lengths, self.dim, self.dtype, self.scale, self.mask)


class Templates:
    """The templates of a family, made when they are first needed."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._known: Kept[PackedTemplate] = Kept(KEPT_BYTES)

    def of(self, code: int) -> PackedTemplate:
        template = self._known.get(code)
        return self._known.add(code, self._make(code)) if template is None else template

    def _make(self, code: int) -> PackedTemplate:
        family, problem = self._family, self._family.problem(code)
        if problem.len_q and problem.len_k:
            require_alone(family.policy)
            planned = plan(problem, family.shape, family.policy)
            return PackedTemplate.of(planned.verified)
        return PackedTemplate.idle(-(-problem.len_q // family.shape.m))


@lru_cache(maxsize=FAMILIES)
def templates(family: Family) -> Templates:
    """The templates of a family. Equal families share them."""
    return Templates(family)


def _code(len_q: Longs, len_k: Longs) -> Longs:
    return (len_q << BITS) | len_k


def _up(length: Longs, size: int) -> Longs:
    return -(-length // size) * size
