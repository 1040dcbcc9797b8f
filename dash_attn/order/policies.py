"""Policies: named rules that turn a tiling into an order. POLICIES lists all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dash_attn.order.rules import Rules, Tasks, apply, offsets, windows
from dash_attn.order.search import ranked
from dash_attn.order.types import GROUP, HEAD, PANELS, Choice, Ints, Order, Rounds, Template
from dash_attn.tiling import Span, Tiling

# Every constant here fixes bits: another value is another order with another fingerprint. Nothing here may follow the
# GPU at hand. What may follow it is in dash_attn/launch.
DEFAULT_WIDTH = 128  # chains of a window of a policy that is asked for by name, without a width
AUTO_WIDTH = 64  # chains of a window of `auto`, at most: every Hopper part holds them, also beside other kernels
LONG = 128  # chains of a part of `fold`; from two parts on `auto` keeps the q heads of a group together

Built = tuple[Template, Rounds]


@dataclass(frozen=True)
class Policy:
    """How to order a tiling, and which tilings it can order.

    `build(tiling, width)` gives a template and its rounds. `applies` says for which tilings, and `needs` says the same
    to people.
    """

    build: Callable[[Tiling, int], Built]
    summary: str
    applies: Callable[[Tiling], bool] = lambda tiling: True
    needs: str = "any mask"
    windowed: bool = False


def _is_banded(tiling: Tiling) -> bool:
    """Some tile is empty, or would be at another tile size: the mask is causal or has a window."""
    mask = tiling.problem.mask
    return not tiling.is_rectangle or mask.left is not None or mask.right is not None


def _is_band(tiling: Tiling) -> bool:
    return tiling.is_staircase and _is_banded(tiling)


def _is_causal(tiling: Tiling) -> bool:
    """Every chain goes on to the last q tile, and the mask is banded."""
    return tiling.is_triangle and _is_banded(tiling)


BAND, TRIANGLE = "a causal or sliding-window mask", "a causal mask"


def _ascending(tiling: Tiling, tasks: Tasks) -> Ints:
    return tasks.head * tiling.num_q + tasks.q


def _coming_down(tiling: Tiling, tasks: Tasks) -> Ints:
    return tasks.head * tiling.num_q + (tiling.num_q - 1 - tasks.q)


def _singles(chains: Ints, window: Ints | None = None) -> Rounds:
    """One chain a bundle, one round a window."""
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


def _hill(tiling: Tiling, width: int) -> Built:
    """The long half of the chains, shortest of them first, then the short half, longest first.

    A long chain climbs from its diagonal to the q tiles that all long chains share, and comes down these from the last
    one. A short chain comes down to its diagonal. In launch order the lengths go up and down again, so workers that
    begin together end together. Long chains never catch up with each other. A short chain follows the chain before it
    if it starts a step later, and so it does, because the chains before it end one by one.
    """
    tasks, longs, split = Tasks.of(tiling), tiling.num_kv // 2, shared_from(tiling)
    launch = np.concatenate([np.arange(longs)[::-1], np.arange(longs, tiling.num_kv)])
    down = (tasks.chain >= longs) | (tasks.q >= split)
    step = np.where(down, split + tiling.num_q - 1 - tasks.q, tasks.q)
    visit = 2 * tasks.head * tiling.num_q + step
    rounds = [each for part in (launch[:longs], launch[longs:]) for each in _singles(part)]
    return apply(tiling, tasks, Rules(visit, np.argsort(launch))), rounds


def _fold(tiling: Tiling, width: int) -> Built:
    """Some of the shortest chains of a group, then as many of the longest: all workers end at one time.

    So they begin the next chains together and stay at the same query head, whose tiles are then in cache.
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


def shared_from(tiling: Tiling) -> int:
    """The first q tile that all long chains of a triangle share."""
    n = tiling.num_kv
    return int(tiling.spans[n // 2, Span.FIRST]) if n else 0


def _symmetric_shift(tiling: Tiling, width: int) -> Built:
    """Long chain i, then its short partner n-1-i; an odd middle chain stays alone.

    Long chains rotate through the rectangle of q tiles that all of them share, then climb their own triangle from the
    diagonal. Short chains come down from the last q tile. All pairs rotate through one query head of the group at a
    time, so that its tiles stay in cache.
    """
    tasks, n, group = Tasks.of(tiling), tiling.num_kv, tiling.heads
    chains, longs = np.arange(n), n - n // 2
    length = tiling.spans[:, Span.COUNT] * group
    split = shared_from(tiling)
    circle = max(1, tiling.num_q - split)
    pair_window = windows(longs, min(width, circle))
    partner = np.minimum(chains, n - 1 - chains)

    rotated = tasks.head * circle + (tasks.q - split - offsets(pair_window, circle)[partner[tasks.chain]]) % circle
    climbing = group * circle + _ascending(tiling, tasks)
    is_long = tasks.chain < longs
    visit = np.where(is_long, np.where(tasks.q >= split, rotated, climbing), _coming_down(tiling, tasks))
    start = np.where(chains < longs, 0, length[partner])
    rules = Rules(visit, chains, pair_window[partner], by_arrival=True, start=start)
    rounds: Rounds = [[] for _ in range(int(pair_window.max(initial=-1)) + 1)]
    for i in range(longs):
        rounds[pair_window[i]].append((i, n - 1 - i) if i != n - 1 - i else (i,))
    return apply(tiling, tasks, rules), rounds


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
    "hill": Policy(
        _hill,
        "the long half, shortest first, up from the diagonal, then down the q tiles it shares; then the short half, "
        "longest first, coming down",
        applies=_is_causal,
        needs=TRIANGLE,
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

    One sequence decides it: its lengths, mask, group of q heads and tile. Batch, heads and GPU play no part, so a
    sequence keeps its bits in every batch.
    """
    if tiling.is_rectangle:
        return Choice("shift", auto_width(tiling))
    if _is_causal(tiling):
        return Choice("fold" if tiling.heads > 1 and tiling.num_kv >= 2 * LONG else "hill")
    return Choice("spt") if tiling.is_staircase else Choice("search", AUTO_WIDTH)


def cuts(tiling: Tiling) -> bool:
    """Does `auto` order each q head of a group by itself? Like `choose`, it looks at one sequence alone.

    A group has few chains where keys are few, and they are as long as the group is large: workers would be idle.
    Where keys are many, whole groups add to dK and dV once, and q heads find K and V in cache.
    """
    return tiling.heads > 1 and tiling.num_kv < 2 * LONG


def auto_width(tiling: Tiling) -> int:
    """How many chains go round the q tiles together: as many as have two tiles between neighbours.

    One tile between neighbours leaves little time to hand a turn on.
    """
    return min(AUTO_WIDTH, max(1, tiling.num_q // 2))


def parse(text: str) -> Choice:
    """'shift', 'shift:64' or 'shift:64@head'; 'auto', 'auto@head' or 'auto@group'."""
    named, at, panels = text.partition("@")
    name, colon, width = named.partition(":")
    if at and panels not in PANELS:
        raise ValueError(f"policy {text!r}: behind '@' comes {' or '.join(PANELS)}")
    if panels == GROUP and name != "auto":
        raise ValueError(f"policy {text!r}: '@{GROUP}' goes with auto; other policies keep groups together without it")
    if colon and not width.isdigit():
        raise ValueError(f"policy {text!r}: the width after ':' must be a whole number")
    return Choice(name, int(width) if width else None, panels or None)


def resolve(tiling: Tiling, policy: str | Choice) -> Choice:
    """The policy by its own name: what `auto` means for this tiling, and other policies as they are."""
    choice = parse(policy) if isinstance(policy, str) else policy
    if choice.policy != "auto":
        return choice
    if choice.width is not None:
        raise ValueError(f"policy 'auto' cannot take width {choice.width}: it sets its own")
    by_head = cuts(tiling) if choice.panels is None else choice.by_head
    return replace(choose(tiling.by_head() if by_head else tiling), panels=HEAD if by_head else None)


def arrange(tiling: Tiling, policy: str | Choice = "auto") -> Order:
    """Order a tiling by a policy: its name or 'name:width', each with '@head' behind it or not, or 'auto', with '@head'
    or '@group' behind it or not."""
    choice = resolve(tiling, policy)
    tiling = tiling.by_head() if choice.by_head else tiling
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
    return Order.of_one(tiling, choice, *rule.build(tiling, choice.width or DEFAULT_WIDTH))
