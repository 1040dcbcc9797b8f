"""Policies: named rules that turn a tiling into a schedule. The only registry; a new order is a new entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dash_attn.order import search
from dash_attn.order.orders import Rules, Tasks, met_until, offsets, order, windows
from dash_attn.order.types import Choice, Ints, PlaceRule, Schedule, Template, every_group
from dash_attn.tiling import Tiling

# A named policy may span a whole head up to this many co-resident workers; `auto` stays below AUTO_WIDTH so that
# the same bits run on every Hopper part, and beside other kernels.
DEFAULT_WIDTH = 128
AUTO_WIDTH = 64
NARROW_WIDTH = 32
BUSY = 128  # chains, or pairs, that should be able to run at once
FAR = 256  # queries between neighbours of a rotation: longer heads would not stay in cache
SIDE_BY_SIDE = (128, 256)  # chains of the heads that `level` launches in turn: one or two for each worker of a GPU
SHORT, LONG = 16, 128  # kv tiles of a head: where `level` takes fewer heads in turn, and where one fills a whole GPU
TINY, NEAR = 6, 8  # kv tiles of a head that hardly stays in cache, and chains of the heads it then takes in turn

Rounds = list[list[tuple[int, ...]]]


@dataclass(frozen=True)
class Policy:
    """`build(tiling, width)` gives a template and its launch rounds; `applies` says for which tilings. With `last`, the
    last groups have an order of their own, and groups are launched a few at a time, chain by chain in turn."""

    build: Callable[[Tiling, int], tuple[Template, Rounds]]
    summary: str
    place: PlaceRule = "balanced"
    applies: Callable[[Tiling], bool] = lambda tiling: True
    needs: str = "any mask"
    windowed: bool = False
    rotates: bool = False  # bundles are of one length: windows of a head can follow each other while it is in cache
    last: Callable[[Tiling, int], tuple[Template, Rounds]] | None = None


def _is_banded(tiling: Tiling) -> bool:
    """Some tile is empty, or could be at another tile size: the mask has a window or is causal."""
    mask = tiling.problem.mask
    return not tiling.is_rectangle or mask.left is not None or mask.right is not None


def _is_band(tiling: Tiling) -> bool:
    return tiling.is_staircase and _is_banded(tiling)


def _is_causal(tiling: Tiling) -> bool:
    """As tiles: every chain goes on to the last q tile, and some tile is empty, or could be."""
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


def _fa3(tiling: Tiling, width: int) -> tuple[Template, Rounds]:
    tasks, chains = Tasks.of(tiling), np.arange(tiling.num_kv)
    return order(tiling, tasks, Rules(_ascending(tiling, tasks), chains)), _singles(chains)


def _descending(tiling: Tiling, width: int) -> tuple[Template, Rounds]:
    tasks, chains = Tasks.of(tiling), np.arange(tiling.num_kv)
    return order(tiling, tasks, Rules(_coming_down(tiling, tasks), chains)), _singles(chains)


def _spt(tiling: Tiling, width: int) -> tuple[Template, Rounds]:
    """The q tile in which a document begins is the last of the document before it. A chain that begins there would wait
    for the chains of that document that are launched before it, from the start to the end of them: it comes back to
    that tile when it is done with its own."""
    tasks, mask = Tasks.of(tiling), tiling.problem.mask
    launch = np.lexsort((-np.arange(tiling.num_kv), tiling.spans[:, 2]))
    rank = np.argsort(launch)
    visit = _ascending(tiling, tasks)
    if tiling.is_staircase and mask.documents is not None and mask.left is None:
        again = tasks.q < met_until(tiling.spans, rank)[tasks.chain]
        visit = visit + (tasks.head + again) * tiling.num_q  # heads are twice as far apart
    return order(tiling, tasks, Rules(visit, rank)), _singles(launch)


def _longest_first(tiling: Tiling, width: int) -> tuple[Template, Rounds]:
    tasks = Tasks.of(tiling)
    launch = np.lexsort((np.arange(tiling.num_kv), -tiling.spans[:, 2]))
    return order(tiling, tasks, Rules(_coming_down(tiling, tasks), np.argsort(launch))), _singles(launch)


def _fold(tiling: Tiling, width: int) -> tuple[Template, Rounds]:
    """Some of the shortest chains of a group, then as many of the longest, so that all workers are done at one time and
    begin the next together: they stay at one query head, which need not come from memory for each of them."""
    tasks, n, group = Tasks.of(tiling), tiling.num_kv, tiling.problem.group
    parts = np.array_split(np.lexsort((-np.arange(n), tiling.spans[:, 2])), 2 * max(1, n // (2 * LONG)))
    folded = [np.concatenate([parts[i], parts[-1 - i][::-1]]) for i in range(len(parts) // 2)]
    is_long = np.zeros(n, bool)
    is_long[np.concatenate(parts[len(parts) // 2 :])] = True
    # Those that began one by one end so: they come down to their diagonals in the last query head.
    down = is_long[tasks.chain] & (tasks.head == group - 1)
    visit = np.where(down, _coming_down(tiling, tasks), _ascending(tiling, tasks))
    rules = Rules(visit, np.argsort(np.concatenate(folded)))
    return order(tiling, tasks, rules), [each for part in folded for each in _singles(part)]


def _diagonal(tiling: Tiling, width: int) -> tuple[Template, Rounds]:
    tasks, chains = Tasks.of(tiling), np.arange(tiling.num_kv)
    window = windows(tiling.num_kv, width)
    rules = Rules(_ascending(tiling, tasks), chains[::-1].copy(), window)
    return order(tiling, tasks, rules), _singles(chains, window)


def _shift(tiling: Tiling, width: int) -> tuple[Template, Rounds]:
    """All chains of a window go through the same query head at the same time, so that its tiles stay in cache."""
    tasks, chains, circle = Tasks.of(tiling), np.arange(tiling.num_kv), max(1, tiling.num_q)
    window = windows(tiling.num_kv, min(width, circle))
    visit = tasks.head * circle + (tasks.q - offsets(window, circle)[tasks.chain]) % circle
    return order(tiling, tasks, Rules(visit, chains, window, by_arrival=True)), _singles(chains, window)


def shared_from(tiling: Tiling) -> int:
    """The first q tile that all long chains of a triangle share."""
    n = tiling.num_kv
    return int(tiling.spans[n // 2, 0]) if n else 0


def _symmetric_shift(tiling: Tiling, width: int) -> tuple[Template, Rounds]:
    """Long chain i, then its short partner n-1-i; an odd middle chain stays alone.

    Long chains rotate through the rectangle of q tiles that all of them share, then climb their own triangle
    from the diagonal; short chains come down from the last q tile. The rotation goes through one query head of the
    group at a time, all pairs together, so that its tiles stay in cache.
    """
    tasks, n, group = Tasks.of(tiling), tiling.num_kv, tiling.problem.group
    chains, longs = np.arange(n), n - n // 2
    length = tiling.spans[:, 2] * group
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
    return order(tiling, tasks, rules), rounds


def _search(tiling: Tiling, width: int) -> tuple[Template, Rounds]:
    template, launch, window = search.ranked(tiling, min(width, max(1, tiling.problem.group * tiling.num_q)))
    return template, _singles(launch, window)


POLICIES: dict[str, Policy] = {
    "fa3": Policy(_fa3, "ascending q tiles, turns by ascending kv tile (the paper's baseline)", place="dealt"),
    "spt": Policy(
        _spt, "shortest chain first, ascending q tiles (that of a document before last), turns in launch order"
    ),
    "descending": Policy(_descending, "descending q tiles, turns by ascending kv tile", place="faster"),
    "shift": Policy(
        _shift,
        "chains start evenly spread over the q tiles and wrap around",
        applies=lambda t: t.is_rectangle,
        needs="a mask without empty tiles (full)",
        windowed=True,
        rotates=True,
    ),
    "symmetric_shift": Policy(
        _symmetric_shift,
        "long and short chains paired; rotation in the rectangle, folded triangles",
        applies=_is_causal,
        needs=TRIANGLE,
        windowed=True,
        rotates=True,
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
        "shortest chain first, each from its diagonal upwards; in the last heads (every other few, if grouped) longest "
        "first, coming down",
        applies=_is_band,
        needs=BAND,
        last=_longest_first,
    ),
    "fold": Policy(
        _fold,
        "some of the shortest chains of a group, then as many of the longest, in the last query head coming down",
        applies=_is_causal,
        needs=TRIANGLE,
    ),
    "search": Policy(_search, "list scheduling, turns ranked by modelled time", windowed=True),
}


def applicable(tiling: Tiling) -> list[str]:
    """Names of the policies that can order this tiling."""
    return [name for name, policy in POLICIES.items() if policy.applies(tiling)]


def choose(tiling: Tiling) -> Choice:
    """What `auto` means: decided by the problem and this version of the package, never by the GPU at hand."""
    if tiling.is_rectangle:
        return Choice("shift", auto_width(tiling, tiling.num_q, apart=2))
    if _is_causal(tiling):
        if tiling.problem.group > 1 and tiling.num_kv >= 2 * LONG:
            return Choice("fold")
        at_once = tiling.problem.groups * tiling.num_kv <= BUSY  # where pairs would leave half of the workers idle
        if tiling.problem.group == 1 or tiling.num_kv > SHORT or at_once:
            return Choice("level")
        return Choice("symmetric_shift", auto_width(tiling, tiling.num_q - shared_from(tiling)))
    if tiling.is_staircase:
        return Choice("spt" if tiling.problem.mask.documents is None else "level")
    return Choice("search", AUTO_WIDTH)


def auto_width(tiling: Tiling, circle: int, apart: int = 1) -> int:
    """How many chains go round a circle of q tiles together, at least `apart` tiles between them: one step is little
    time to hand a turn on, though enough where triangles interrupt the rotation.

    Not more than NARROW_WIDTH: workers that are too few for the next window wait, and with narrow windows few of them
    do. But not FAR apart, and enough to keep a GPU busy.
    """
    busy = BUSY // max(1, tiling.problem.groups)
    near = circle // max(1, FAR // tiling.shape.m)
    return min(AUTO_WIDTH, max(1, near, min(NARROW_WIDTH, circle // apart), busy))


def parse(text: str) -> Choice:
    """'shift' or 'shift:64'."""
    name, colon, width = text.partition(":")
    if colon and not width.isdigit():
        raise ValueError(f"policy {text!r}: the width after ':' must be a whole number")
    return Choice(name, int(width) if width else None)


def schedule(tiling: Tiling, policy: str | Choice = "auto") -> Schedule:
    """Order a tiling by a policy: its name, 'name:width', or 'auto'."""
    choice = parse(policy) if isinstance(policy, str) else policy
    if choice.policy == "auto":
        if choice.width is not None:
            raise ValueError(f"policy 'auto' cannot take width {choice.width}: it sets its own")
        choice = choose(tiling)
    if choice.policy not in POLICIES:
        raise ValueError(f"unknown policy {choice.policy!r}: choose from auto, {', '.join(POLICIES)}")
    rule = POLICIES[choice.policy]
    if not rule.applies(tiling):
        raise ValueError(
            f"policy {choice.policy!r} needs {rule.needs}, not {tiling.problem.mask} cut into {tiling.shape} tiles: "
            f"choose from {', '.join(applicable(tiling))}"
        )
    width = rule.windowed and (choice.width or DEFAULT_WIDTH)
    if choice.width is not None and (not rule.windowed or choice.width < 1):
        takers = ", ".join(name for name, each in POLICIES.items() if each.windowed)
        raise ValueError(
            f"policy {choice.policy!r} cannot take width {choice.width}: a width of at least 1 goes with {takers}"
        )
    template, rounds = rule.build(tiling, int(width))
    if rule.last is not None:
        return _end_level(tiling, choice, rule.place, (template, rounds), rule.last(tiling, int(width)))
    launch, bundle_first = every_group(tiling, rounds, BUSY if rule.rotates else None)
    same = np.zeros(tiling.problem.groups, np.int64)
    return Schedule(tiling, choice, (template,), same, launch, bundle_first, rule.place)


def _end_level(
    tiling: Tiling, choice: Choice, place: PlaceRule, order: tuple[Template, Rounds], last: tuple[Template, Rounds]
) -> Schedule:
    """Chains one by one, and groups a few at a time: one chain of each, then the next of each. The last few groups
    follow `last`, so that all workers end together, however many they are.

    Going up from the diagonal, shortest first, no chain catches up with the one before it, whenever they start. Coming
    down, longest first, none does if they start a step apart: as they do after chains that end one by one, and where
    chains of other groups come between.

    Heads of few chains come and go so fast that their tiles would leave the cache between one chain and the next: of
    these, only a few are taken in turn before the last, if their chains are two steps apart even so.

    Chains over several query heads are at different heads at a time, more so the longer they run out of step: of
    these, every other few groups follow `last`, after which all begin together again, if they end at one q tile.
    """
    groups, grouped = tiling.problem.groups, tiling.problem.group > 1
    in_step = grouped and tiling.is_triangle and tiling.num_kv <= LONG
    side_by_side = SIDE_BY_SIDE[not grouped and tiling.num_kv > SHORT]
    few = min(-(-side_by_side // max(1, tiling.num_kv)), -(-groups // 2))
    block = windows(groups, max(1, few))
    from_end = block.max(initial=0) - block
    is_last = (from_end % 2 == 0 if in_step else from_end == 0).astype(np.int64)
    one_by_one = [
        np.array([chain for bundles in rounds for (chain,) in bundles], np.int64) for _, rounds in (order, last)
    ]
    parts = [np.flatnonzero(block == b) for b in range(int(block.max(initial=-1)) + 1)]
    if not grouped and tiling.num_kv <= TINY and tiling.shape.m < tiling.shape.n:
        near = -(-NEAR // max(1, tiling.num_kv))
        cuts = [1 if is_last[part[0]] else -(-len(part) // near) for part in parts]
        parts = [few for part, cut in zip(parts, cuts, strict=True) for few in np.array_split(part, cut)]
    launch = [(one_by_one[is_last[part[0]]][:, None] + part * tiling.num_kv).ravel() for part in parts]
    chains = np.concatenate([np.zeros(0, np.int64), *launch])
    unused = int(is_last.min(initial=1))  # a lone group is among the last
    templates = (order[0], last[0])[unused:]
    return Schedule(tiling, choice, templates, is_last - unused, chains, np.arange(len(chains) + 1), place)
