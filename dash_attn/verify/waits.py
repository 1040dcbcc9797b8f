"""Which bundles wait for which: how many bundles must run at the same time, and which bundles form a round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dash_attn.program import Chain, Program
from dash_attn.program.program import Longs
from dash_attn.verify.panels import Bools, Numbers, PanelChains, Sums
from dash_attn.verify.tables import BLOCK

PASSES = 32  # over all tasks of a panel; orders of the policies need two or three


@dataclass(frozen=True, eq=False)
class Waits:
    """`held[b]` is the number of earlier bundles of a panel that cannot end before bundle b starts.

    If `orderly` is true, the panel has no cycle. A panel that is not orderly may have a cycle.
    """

    held: Longs
    orderly: bool


def waits(panel: PanelChains, sums: Sums) -> Waits | None:
    """The waits of a panel, or None if only a replay of the whole program can tell."""
    if not panel.starts[:1].all():
        return None  # its first bundle begins with a chain of another panel
    task, opens, count = sums.task, sums.opens, int(panel.starts.sum())
    if (opens[1:] | (task[1:] > task[:-1])).all():  # every task comes after all that it waits for
        return Waits(np.zeros(count, np.int64), True)
    number = np.cumsum(panel.starts) - 1
    bundle = np.repeat(number.astype(np.min_scalar_type(-1 - count)), panel.tasks)
    last = _last_needed(bundle, sums, count)
    if last is None:
        return None
    held: Longs = np.arange(count) - np.cumsum(np.bincount(last + 1, minlength=count + 1))[:count]
    # A task waits for tasks of earlier rounds, for the task before it in its bundle, and at its turnstile. If each task
    # that it waits for at the turnstile has no later place in its own bundle, no task waits for itself.
    begin, rounds, orderly = np.searchsorted(bundle, np.arange(count)), np.cumsum(held == 0), True
    for first in range(0, len(task), BLOCK):
        some = slice(max(0, first - 1), first + BLOCK)
        its = bundle[task[some]]
        place, of = task[some] - begin[its], rounds[its]
        orderly &= bool((opens[some][1:] | (of[1:] > of[:-1]) | (place[1:] >= place[:-1])).all())
    return Waits(held, orderly)


def _last_needed(bundle: Numbers, sums: Sums, count: int) -> Longs | None:
    """For each bundle the last bundle that must start before it can end. `bundle` is the bundle of each task.

    Later tasks of the same sum and of the same bundle need everything that a task needs. The result is None if it takes
    more than PASSES passes along sums and bundles.
    """
    needed, starts = bundle.copy(), np.ones(len(bundle), bool)
    starts[1:] = bundle[1:] != bundle[:-1]
    for _ in range(PASSES):
        more = _pass_on(needed, sums.task, sums.opens, count)
        if not _pass_on(needed, None, starts, count) and not more:
            last = np.arange(count)
            last[bundle] = needed  # the last task of each bundle is written last, and needs most
            return last
    return None


def _pass_on(needed: Numbers, order: Numbers | None, opens: Bools, count: int) -> bool:
    """Give each task what the tasks before it in its sequence need: a bundle, of `count` bundles. Returns whether any
    task needs more than before.

    `order` goes through the tasks sequence by sequence. `opens` marks the first task of each sequence.
    """
    more, before = False, 0
    for first in range(0, len(needed), BLOCK):
        some = slice(first, first + BLOCK)
        tasks = some if order is None else order[some]
        old = needed[tasks].astype(np.int64)
        new = old.copy()
        if not opens[first]:
            new[0] = max(old[0], before)
        # Each sequence adds an offset above all numbers of its predecessor. So no maximum of a predecessor reaches
        # into it.
        apart = np.cumsum(opens[some]) * count
        new = np.maximum.accumulate(new + apart) - apart
        needed[tasks], before = new, int(new[-1])
        more |= bool((new != old).any())
    return more


def rounds_of(program: Program, begins: list[Bools]) -> Longs | None:
    """The round of each bundle, if the launch queue goes round by round. `begins` marks, panel by panel, the bundles
    with which a round begins.

    Such a queue needs as many workers as the panel that needs most. Proof: let R workers be enough for each panel
    alone, and let the queue be stuck with R bundles at work. All rounds before the first unfinished round are done. If
    some bundles of that round have not started, all R bundles at work belong to that round, and R workers are enough
    for it. If all bundles of that round have started, they wait only for each other. In both cases some bundle moves.
    """
    group = program.groups[program.launch]
    of_bundle = group[program.bundle_first[:-1]]
    if (group != np.repeat(of_bundle, np.diff(program.bundle_first))).any():
        return None  # a bundle has chains of several panels
    if not _ends_in_sequence(program):
        return None  # a chain waits at the sums of dK and dV for a chain that is launched later
    begin = np.empty(len(of_bundle), bool)
    begin[np.argsort(of_bundle, kind="stable")] = np.concatenate(begins)
    if not begin[1:][of_bundle[1:] != of_bundle[:-1]].all():
        return None  # bundles of other panels come between the bundles of a round
    rounds: Longs = np.cumsum(begin)
    return rounds


def _ends_in_sequence(program: Program) -> bool:
    """Whether panels that add to the same dK and dV are launched in the order of their numbers, in which they add."""
    g = program.geometry
    if g.share == 1:
        return True
    place = np.empty(len(program.launch), np.int64)
    chains = program.groups * g.num_kv + program.chains[:, Chain.KV_TILE]
    place[chains[program.launch]] = np.arange(len(place))
    sums = place.reshape(g.num_groups // g.share, g.share, g.num_kv)
    return bool((sums[:, 1:] > sums[:, :-1]).all())
