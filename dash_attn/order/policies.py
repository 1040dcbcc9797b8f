"""Policies: named rules that turn a tiling into an order. POLICIES lists all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dash_attn.order.rules import Rules, Tasks, apply, offsets, windows
from dash_attn.order.search import ranked
from dash_attn.order.types import GROUP, HEAD, PANELS, Choice, Ints, Order, Rounds, Template
from dash_attn.tiling import Span, Tiling

# Every constant here fixes bits: another value is another order with another fingerprint. No constant here may depend
# on the GPU. Constants that may depend on it are in dash_attn/launch.
DEFAULT_WIDTH = 128  # chains of a window, if the name of a policy is given without a width
AUTO_WIDTH = 64  # most chains of a window of `auto`: every Hopper GPU holds them, even beside other kernels
NARROW_WIDTH = 32  # chains of a window of `auto`, if nothing asks for more
# Fewest chains of a window of keys before the queries. These windows run one after the other, and heads may be few.
PREFIX_WIDTH = 16
TINY = 4  # kv tiles of a short causal panel: if its q tiles are small, its pairs end before turns are handed on
FAR = 256  # most queries between neighbours of a rotation
LEVEL_BLOCKS = (128, 256)  # chains of a block of heads of `level`: grouped or short heads, and others
SHORT, LONG = 16, 128  # kv tiles of a short head, and of a head that `level` no longer keeps in step

Built = tuple[Template, Rounds]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Policy:
    """How to order a tiling, and which tilings it can order.

    `build(tiling, width)` gives a template and its rounds. `applies` says which tilings the policy can order, and
    `needs` says the same to people. With `last`, some blocks of panels follow another template: `last(tiling, width)`
    gives it.
    """

    build: Callable[[Tiling, int], Built]
    summary: str
    applies: Callable[[Tiling], bool] = lambda tiling: True
    needs: str = "any mask"
    windowed: bool = False
    last: Callable[[Tiling, int], Built] | None = None


def _is_banded(tiling: Tiling) -> bool:
    """Some tile is empty, or would be at another tile size: the mask is causal or has a window."""
    mask = tiling.problem.mask
    return not tiling.is_rectangle or mask.left is not None or mask.right is not None


def _is_band(tiling: Tiling) -> bool:
    return tiling.is_staircase and _is_banded(tiling)


def _is_causal(tiling: Tiling) -> bool:
    """Every chain reaches the last q tile, and the mask is causal or has a window."""
    return tiling.is_triangle and _is_banded(tiling)


BAND, TRIANGLE = "a causal or sliding-window mask", "a causal mask"


def _ascending(tiling: Tiling, tasks: Tasks) -> Ints:
    return tasks.head * tiling.num_q + tasks.q


def _coming_down(tiling: Tiling, tasks: Tasks) -> Ints:
    return tasks.head * tiling.num_q + (tiling.num_q - 1 - tasks.q)


def _singles(chains: Ints, window: Ints | None = None) -> Rounds:
    """Every chain is a bundle, and every window is a round."""
    if window is None:
        return [list(zip(chains.tolist(), strict=True))]
    return [list(zip(chains[window[chains] == w].tolist(), strict=True)) for w in range(window.max(initial=-1) + 1)]


def _fa3(tiling: Tiling, width: int) -> Built:
    tasks, chains = Tasks.of(tiling), np.arange(tiling.num_kv)
    return apply(tiling, tasks, Rules(_ascending(tiling, tasks), chains)), _singles(chains)


def _descending(tiling: Tiling, width: int) -> Built:
    tasks, chains = Tasks.of(tiling), np.arange(tiling.num_kv)
    return apply(tiling, tasks, Rules(_coming_down(tiling, tasks), chains)), _singles(chains)


def _spt(tiling: Tiling, width: int) -> Built:
    """Shortest chain first, each chain upwards."""
    tasks = Tasks.of(tiling)
    launch = np.lexsort((-np.arange(tiling.num_kv), tiling.spans[:, Span.COUNT]))
    return apply(tiling, tasks, Rules(_ascending(tiling, tasks), np.argsort(launch))), _singles(launch)


def _longest_first(tiling: Tiling, width: int) -> Built:
    tasks = Tasks.of(tiling)
    launch = np.lexsort((np.arange(tiling.num_kv), -tiling.spans[:, Span.COUNT]))
    return apply(tiling, tasks, Rules(_coming_down(tiling, tasks), np.argsort(launch))), _singles(launch)


def _fold(tiling: Tiling, width: int) -> Built:
    """Some of the shortest chains of a group, then as many of the longest. So all workers end at the same time.

    Then they begin the next chains together and visit the same query head, and its tiles stay in cache.
    """
    tasks, n, group = Tasks.of(tiling), tiling.num_kv, tiling.heads
    parts = np.array_split(np.lexsort((-np.arange(n), tiling.spans[:, Span.COUNT])), 2 * max(1, n // (2 * LONG)))
    folded = [np.concatenate([parts[i], parts[-1 - i][::-1]]) for i in range(len(parts) // 2)]
    is_long = np.zeros(n, bool)
    is_long[np.concatenate(parts[len(parts) // 2 :])] = True
    # Long chains begin one by one. They come down to their diagonals in the last query head, and so end one by one.
    down = is_long[tasks.chain] & (tasks.head == group - 1)
    visit = np.where(down, _coming_down(tiling, tasks), _ascending(tiling, tasks))
    rules = Rules(visit, np.argsort(np.concatenate(folded)))
    return apply(tiling, tasks, rules), [each for part in folded for each in _singles(part)]


def _diagonal(tiling: Tiling, width: int) -> Built:
    tasks, chains = Tasks.of(tiling), np.arange(tiling.num_kv)
    window = windows(tiling.num_kv, width)
    rules = Rules(_ascending(tiling, tasks), chains[::-1].copy(), window)
    return apply(tiling, tasks, rules), _singles(chains, window)


def _shift(tiling: Tiling, width: int) -> Built:
    """Chains of a window start evenly spread over the q tiles and go round.

    They go through one query head at a time, all together, so that its tiles stay in cache.
    """
    tasks, chains, circle = Tasks.of(tiling), np.arange(tiling.num_kv), max(1, tiling.num_q)
    window = windows(tiling.num_kv, min(width, circle))
    visit = tasks.head * circle + (tasks.q - offsets(window, circle)[tasks.chain]) % circle
    return apply(tiling, tasks, Rules(visit, chains, window, by_arrival=True)), _singles(chains, window)


def prefix_of(tiling: Tiling) -> int:
    """The number of chains of keys before the queries: all chains that meet every q tile, except the last of them, with
    which the triangle begins.

    It is 0 in a short sequence, which has too few of these chains for windows of their own.
    """
    whole = int((tiling.spans[:, Span.COUNT] == tiling.num_q).sum())
    return max(0, whole - 1) if tiling.num_kv > SHORT else 0


def shared_from(tiling: Tiling) -> int:
    """The first q tile that all long chains of a triangle share."""
    n, prefix = tiling.num_kv, prefix_of(tiling)
    return int(tiling.spans[prefix + (n - prefix) // 2, Span.FIRST]) if n else 0


def _symmetric_shift(tiling: Tiling, width: int) -> Built:
    """Long chain i, then its short partner n-1-i; an odd middle chain stays alone.

    Long chains rotate through the rectangle of q tiles that all of them share, then climb their own triangle from the
    diagonal. Short chains come down from the last q tile. All pairs rotate through one query head of the group at a
    time, so that its tiles stay in cache. Chains of keys before the queries come first. They have no partners, and
    rotate through all q tiles as in `shift`.
    """
    tasks, n, group, prefix = Tasks.of(tiling), tiling.num_kv, tiling.heads, prefix_of(tiling)
    chains, pairs, last = np.arange(n), (n - prefix + 1) // 2, n + prefix - 1
    partner = np.where(chains < prefix, chains, np.minimum(chains, last - chains))
    is_short = chains > partner
    split, all_q = shared_from(tiling), max(1, tiling.num_q)
    circle = max(1, tiling.num_q - split)
    alone, paired = windows(prefix, min(width, all_q)), windows(pairs, min(width, circle))
    window = np.concatenate([alone, 1 + alone.max(initial=-1) + paired])[partner]
    offset = np.concatenate([offsets(alone, all_q), split + offsets(paired, circle)])[partner]

    round_trip = np.where(chains < prefix, all_q, circle)[tasks.chain]
    rotated = tasks.head * round_trip + (tasks.q - offset[tasks.chain]) % round_trip
    climbing = group * circle + _ascending(tiling, tasks)
    climbs = (tasks.chain >= prefix) & (tasks.q < split)
    visit = np.where(is_short[tasks.chain], _coming_down(tiling, tasks), np.where(climbs, climbing, rotated))
    start = np.where(is_short, (tiling.spans[:, Span.COUNT] * group)[partner], 0)
    rounds: Rounds = [[] for _ in range(int(window.max(initial=-1)) + 1)]
    for i in range(prefix + pairs):
        rounds[window[i]].append((i,) if i < prefix or i == last - i else (i, last - i))
    return apply(tiling, tasks, Rules(visit, chains, window, by_arrival=True, start=start)), rounds


def _search(tiling: Tiling, width: int) -> Built:
    template, launch, window = ranked(tiling, min(width, max(1, tiling.heads * tiling.num_q)))
    return template, _singles(launch, window)


POLICIES: dict[str, Policy] = {
    "fa3": Policy(_fa3, "ascending q tiles, turns by ascending kv tile (the paper's baseline)"),
    "spt": Policy(_spt, "shortest chain first, ascending q tiles, turns as launched"),
    "descending": Policy(_descending, "descending q tiles, turns by ascending kv tile"),
    "shift": Policy(
        _shift,
        "chains start evenly spread over the q tiles and wrap around",
        applies=lambda t: t.is_rectangle,
        needs="a mask without empty tiles (full)",
        windowed=True,
    ),
    "symmetric_shift": Policy(
        _symmetric_shift,
        "long and short chains paired; rotation in the rectangle, folded triangles",
        applies=_is_causal,
        needs=TRIANGLE,
        windowed=True,
    ),
    "diagonal": Policy(
        _diagonal,
        "longest chain first, each from its diagonal upwards, turns by descending kv tile",
        applies=_is_band,
        needs=BAND,
        windowed=True,
    ),
    "level": Policy(
        _spt,
        "shortest chain first, each from its diagonal upwards; in the last block of heads (in every other block, if "
        "grouped) longest first, coming down",
        applies=_is_band,
        needs=BAND,
        last=_longest_first,
    ),
    "fold": Policy(
        _fold,
        "some of the shortest chains of a group, then as many of the longest, which come down in the last query head",
        applies=_is_causal,
        needs=TRIANGLE,
    ),
    "search": Policy(_search, "list scheduling, turns ranked by modelled time", windowed=True),
}


def applicable(tiling: Tiling) -> list[str]:
    """Names of the policies that can order this tiling."""
    return [name for name, policy in POLICIES.items() if policy.applies(tiling)]


def choose(tiling: Tiling) -> Choice:
    """What `auto` means for panels of this tiling.

    The choice depends on one sequence: its lengths, mask, group of q heads and tile shape. It does not depend on the
    batch, the number of kv heads or the GPU. So a sequence keeps its bits in every batch.
    """
    if tiling.is_rectangle:
        return Choice("shift", auto_width(tiling))
    if _is_causal(tiling):
        prefix = prefix_of(tiling)
        one_window = tiling.num_kv - prefix <= 2 * AUTO_WIDTH  # of pairs
        if prefix and one_window:
            return Choice("symmetric_shift", max(PREFIX_WIDTH, auto_width(tiling)))
        if tiling.heads > 1 and tiling.num_kv >= 2 * LONG:
            return Choice("fold")
        # One window holds all pairs of a panel, and they last long enough for turns to be handed on.
        tiny = tiling.num_kv <= TINY and tiling.shape.m < tiling.shape.n
        return Choice("symmetric_shift", AUTO_WIDTH) if one_window and not tiny else Choice("spt")
    return Choice("spt") if tiling.is_staircase else Choice("search", AUTO_WIDTH)


def cuts(tiling: Tiling) -> bool:
    """Whether `auto` orders each q head of a group by itself. Like `choose`, it looks at one sequence alone.

    With few keys a group has few chains, and each chain visits all q heads of the group. So workers would be idle. With
    many keys whole groups are better: a group adds to dK and dV once, and its q heads find K and V in cache. Chains of
    keys before the queries are equally long. If most chains are such, half as many keep the workers busy.
    """
    enough = LONG if 4 * prefix_of(tiling) >= 3 * tiling.num_kv else 2 * LONG
    return tiling.heads > 1 and tiling.num_kv < enough


def auto_width(tiling: Tiling) -> int:
    """How many chains go round the q tiles together.

    Neighbours start at least two q tiles apart, because one tile leaves little time to hand a turn on. Tiles of FAR
    queries or more are long enough for neighbours that start one tile apart. The width is at most NARROW_WIDTH, because
    a window starts only when enough workers are free. If neighbours would then start more than FAR queries apart, the
    width is larger, up to AUTO_WIDTH.
    """
    near = tiling.num_q // max(1, FAR // tiling.shape.m)
    return min(AUTO_WIDTH, max(1, near, min(NARROW_WIDTH, tiling.num_q // 2)))


def parse(text: str) -> Choice:
    """'shift', 'shift:64' or 'shift:64@head'; 'auto', 'auto@head' or 'auto@group'."""
    named, at, panels = text.partition("@")
    name, colon, width = named.partition(":")
    if at and panels not in PANELS:
        raise ValueError(f"policy {text!r}: behind '@' comes {' or '.join(PANELS)}")
    if panels == GROUP and name != "auto":
        raise ValueError(f"policy {text!r}: '@{GROUP}' goes with auto; other policies keep groups together without it")
    if colon and not width.isdecimal():
        raise ValueError(f"policy {text!r}: the width after ':' must be a whole number")
    return Choice(name, int(width) if width else None, panels or None)


def looks_at_batch(policy: str) -> bool:
    """Whether the order of a sequence changes with its batch. `auto` takes no such policy."""
    rule = POLICIES.get(parse(policy).policy)
    return rule is not None and rule.last is not None


def require_alone(policy: str, taker: str = "a pack") -> None:
    """ValueError if the policy cannot order a panel by itself. `taker` orders its panels one by one."""
    if looks_at_batch(policy):
        raise ValueError(
            f"policy {policy!r} orders the last heads of a batch in another way, which {taker} does not take: choose "
            f"another policy, or leave out {taker}"
        )


def resolve(tiling: Tiling, policy: str | Choice) -> Choice:
    """The policy by its own name. `auto` becomes what it means for this tiling. Other policies stay as they are."""
    choice = parse(policy) if isinstance(policy, str) else policy
    if choice.policy != "auto":
        return choice
    if choice.width is not None:
        raise ValueError(f"policy 'auto' cannot take width {choice.width}: it sets its own")
    by_head = cuts(tiling) if choice.panels is None else choice.by_head
    return replace(choose(tiling.by_head if by_head else tiling), panels=HEAD if by_head else None)


def arrange(tiling: Tiling, policy: str | Choice = "auto") -> Order:
    """Order a tiling by a policy. `parse` says which texts name a policy."""
    choice = resolve(tiling, policy)
    tiling = tiling.by_head if choice.by_head else tiling
    if choice.policy not in POLICIES:
        raise ValueError(f"unknown policy {choice.policy!r}: choose from auto, {', '.join(POLICIES)}")
    rule = POLICIES[choice.policy]
    if not rule.applies(tiling):
        raise ValueError(
            f"policy {choice.policy!r} needs {rule.needs}, not {tiling.problem.mask} cut into {tiling.shape} tiles: "
            f"choose from {', '.join(applicable(tiling))}"
        )
    if choice.width is not None and (not rule.windowed or choice.width < 1):
        takers = ", ".join(name for name, each in POLICIES.items() if each.windowed)
        raise ValueError(
            f"policy {choice.policy!r} cannot take width {choice.width}: a width of at least 1 goes with {takers}"
        )
    width = choice.width or DEFAULT_WIDTH
    template, rounds = rule.build(tiling, width)
    if rule.last is None:
        return Order.of_one(tiling, choice, template, rounds)
    last_template, last_rounds = rule.last(tiling, width)
    block_of, is_last = _level_blocks(tiling)
    if is_last.all():  # a single panel is the last one
        return Order.of_one(tiling, choice, last_template, last_rounds)
    return Order(tiling, choice, (template, last_template), (rounds, last_rounds), is_last.astype(np.int64), block_of)


def _level_blocks(tiling: Tiling) -> tuple[Ints, Bools]:
    """The block of each panel, and whether the panel follows the `last` template.

    The last block follows `last`, so that any number of workers end together. Chains that go up from the diagonal,
    shortest first, never catch up with each other, whenever they start. Chains that come down, longest first, never
    catch up if they start a step apart. They start a step apart, because the chains before them end one by one, and
    because chains of other panels come between them.

    Chains of grouped heads drift apart while they run, and then visit different query heads at the same time. If all
    chains end at one q tile, every other block follows `last`. After such a block all chains begin together again.
    """
    groups, grouped = tiling.panels, tiling.heads > 1
    in_step = grouped and tiling.is_triangle and tiling.num_kv <= LONG
    chains = LEVEL_BLOCKS[not grouped and tiling.num_kv > SHORT]
    heads = min(-(-chains // max(1, tiling.num_kv)), -(-groups // 2))
    block_of = windows(groups, heads)
    from_end = block_of[-1] - block_of
    return block_of, from_end % 2 == 0 if in_step else from_end == 0
