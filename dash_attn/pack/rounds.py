"""Rounds: which bundles of a template run at the same time, and when the rounds of all sequences start."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from dash_attn.jit import compiled
from dash_attn.launch.queue import IN_FLIGHT
from dash_attn.pack.tables import Doc, Round
from dash_attn.program.program import Longs


class Due(IntEnum):
    """Columns of the rounds that wait to start: a sequence, its round and bundle, the first ticket at which the round
    may start."""

    DOC = 0
    ROUND = 1
    BUNDLE = 2
    TICKET = 3


COLUMNS, DUE_COLUMNS = len(Round), len(Due)  # compiled loops cannot count the names of an enum


def awaited(rounds: Longs) -> Longs:
    """For each bundle: how many of the following bundles must begin before its worker may begin another bundle.

    `rounds` has the round of each bundle of a panel, in launch order, as verification finds it. The bundles of a round
    wait for each other, so all of them must run at the same time, each on a worker of its own. If one worker took two
    of them, the first one could wait forever for the second.
    """
    later: Longs = np.searchsorted(rounds, rounds, side="right") - 1 - np.arange(len(rounds))
    return later


def rounds_of(later: Longs) -> Longs:
    """The number of bundles of each round. Bundles that wait for each other form a round. Neighbouring bundles that
    wait for no later bundle form a round too."""
    begins = np.append(True, later[:-1] == 0)
    single = begins & (later == 0)
    begins[1:] &= ~(single[1:] & single[:-1])
    sizes: Longs = np.diff(np.append(np.flatnonzero(begins), len(later)))
    return sizes


@compiled
def launch(docs, template_of, counts, sizes):  # type: ignore[no-untyped-def]
    """The table `rounds`, and the number of tickets. Template t has counts[t] rounds. `sizes` has the number of bundles
    of each round, template by template.

    A round waits for the round before it in its sequence. So rounds of other sequences come between the two, if there
    are any, with as many tickets as a GPU runs at a time (IN_FLIGHT).
    """
    first = np.zeros(len(counts) + 1, np.int64)
    for t in range(len(counts)):
        first[t + 1] = first[t] + counts[t]
    total = counts[template_of].sum()
    rounds = np.empty((total, COLUMNS), np.int32)
    due = np.empty((total, DUE_COLUMNS), np.int64)
    begin, end, doc, ticket = 0, 0, 0, 0
    for row in range(total):
        while doc < len(docs) and counts[template_of[doc]] == 0:
            doc += 1
        if begin < end and (doc == len(docs) or due[begin, Due.TICKET] <= ticket):
            d, r, bundle = due[begin, Due.DOC], due[begin, Due.ROUND], due[begin, Due.BUNDLE]
            begin += 1
        else:
            d, r, bundle = doc, first[template_of[doc]], np.int64(docs[doc, Doc.BUNDLE])
            doc += 1
        rounds[row, Round.TICKET], rounds[row, Round.DOC] = ticket, d
        rounds[row, Round.BUNDLE], rounds[row, Round.BUNDLES] = bundle, sizes[r]
        if r + 1 < first[template_of[d] + 1]:
            due[end, Due.DOC], due[end, Due.ROUND] = d, r + 1
            due[end, Due.BUNDLE], due[end, Due.TICKET] = bundle + sizes[r], ticket + IN_FLIGHT
            end += 1
        ticket += docs[d, Doc.PANELS] * sizes[r]
    return rounds, ticket
