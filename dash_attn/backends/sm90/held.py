"""Some panels of a problem on a GPU: those of one rank.

The main kernel leaves the fp32 sums of dK and dV of each panel in its workspace. In one process another kernel adds
them over panels (device/finish_kv.py). Here they are copied out, and travel to the ranks that hold the keys. There
`fold` adds them in the same order. It rounds as that kernel does: the total of dK is scaled in fp32, then both totals
are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dash_attn.backends.base import Extras, KeySums, Operands, Partials
from dash_attn.backends.sinks import write_without_keys
from dash_attn.kept import grown
from dash_attn.lazily import cached_property
from dash_attn.pack import Assembly, Doc, Pack
from dash_attn.problem import Panel, Problem, documents

from . import forwards
from .config import KernelConfig
from .cta import CONSUMER_WARPGROUPS, TILE_N
from .fa4 import sinks_of
from .forwards import LibraryForward
from .launch import Launch
from .packed import lse_rows, rows_of

# Forwards whose bits of a row follow from the row, its keys and the mask, whichever other queries are in the call.
ROW_BY_ROW = ("fa4",)


class Range(NamedTuple):
    """Neighbouring panels that one forward computes, and their rows. No forward if the panels see no key."""

    forward: LibraryForward | None
    q: slice
    k: slice


class Sm90Held:
    """See Held. `launch` makes the kernel of the panels and their tables, when the first backward needs them."""

    def __init__(self, pack: Pack, device: torch.device, launch: Callable[[], tuple[Launch, Assembly]]) -> None:
        self.pack, self.device, self._launch = pack, device, launch
        self._launched: tuple[Launch, Assembly] | None = None
        self.ranges = [_range(pack.problem, panels) for panels in neighbours(pack)]
        self._require_rows()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
        self._require_rows()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty((1, q.shape[2], q.shape[1]), dtype=torch.float32)
        sinks = sinks_of(extras) if self.pack.problem.features.sinks else None
        with self._here():
            for forward, rows, keys in self.ranges:
                if forward is None:
                    write_without_keys(out[:, rows], lse[:, :, rows], sinks)
                else:
                    out[:, rows], lse[:, :, rows] = forward(q[:, rows], k[:, keys], v[:, keys], extras)
        return out, lse

    def backward(self, operands: Operands, extras: Extras | None = None) -> Partials:
        if not any(panel.len_q and panel.len_k for panel in self.pack.panels):
            nothing = operands.k.new_zeros((1, 0, *operands.k.shape[2:]), dtype=torch.float32)
            return Partials(torch.zeros_like(operands.q), (KeySums(nothing, nothing),) * len(self.pack.panels))
        rows = list[Tensor]()
        launch, _ = self.launched
        here = copy(launch)  # with an end of its own, because two threads may call at the same time
        here.finish_kv = lambda sums, *_: rows.append(rows_of_sums(here.cfg, sums))
        dlse = None if extras is None else extras.dlse
        own = None if dlse is None else Extras(dlse=lse_rows(dlse))  # lse includes the sinks
        with self._here():
            dq = here(rows_of(operands), extras=own).dq
        dv, dk = rows[0].unsqueeze(1)
        places = zip(self.first_rows, self.pack.panels, strict=True)
        sums = [slice(first, first + panel.len_k) for first, panel in places]
        return Partials(dq.unsqueeze(0), tuple(KeySums(dk[:, here], dv[:, here]) for here in sums))

    def fold(self, sums: Iterable[KeySums], into: KeySums) -> None:
        total: KeySums | None = None
        for each in sums:
            if total is None:
                total = each
                continue
            for x, part in zip(total, each, strict=True):
                x[:, : part.shape[1]].add_(part)
        if total is not None:
            into.dk.copy_(total.dk.mul_(self.pack.problem.softmax_scale))
            into.dv.copy_(total.dv)

    @property
    def launched(self) -> tuple[Launch, Assembly]:
        if self._launched is None:
            self._launched = self._launch()
            grown(self.pack)
        return self._launched

    @cached_property
    def first_rows(self) -> list[int]:
        """The first row of each panel among the rows of the sums."""
        docs = self.launched[1].docs
        tiles = dict(zip(docs[:, Doc.Q_ROW].tolist(), docs[:, Doc.KV_TILE].tolist(), strict=True))
        return [TILE_N * tiles[panel.q_row] for panel in self.pack.panels]

    def _here(self) -> AbstractContextManager[object]:
        """Kernels are launched on the current GPU."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _require_rows(self) -> None:
        """Raise an error if the forward of a row may have other bits than among all queries of its sequence."""
        problem = self.pack.problem
        provider = forwards.choose(replace(problem, panels=1))
        if provider.key not in ROW_BY_ROW:
            raise NotImplementedError(
                f"the forward of some queries of a sequence would come from {provider.label()}, whose bits may depend "
                "on the other queries: install FlashAttention-4 (pip install 'dash-attn[cuda]') and leave "
                f"{forwards.VARIABLE} unset"
            )


def neighbours(pack: Pack) -> Iterator[list[Panel]]:
    """The queries in the least number of calls: neighbouring panels of a sequence are one panel to the forward.

    In a pack of documents a call has all panels whose queries and keys both follow those of the panel before.
    """
    run = list[Panel]()
    for panel in _joined(pack):
        if run:
            last = run[-1]
            ends = last.q_row + last.len_q, last.k_row + last.len_k
            if not pack.problem.is_packed or ends != (panel.q_row, panel.k_row):
                yield run
                run = []
        run.append(panel)
    if run:
        yield run


def _joined(pack: Pack) -> list[Panel]:
    """Panels of one sequence whose queries are neighbours, as one panel. Its last query stands at its last key."""
    joined, all_keys = list[Panel](), replace(pack.problem.mask, documents=None).is_full
    for panel in pack.panels:
        if joined:
            last = joined[-1]
            more = 0 if all_keys else panel.len_q  # keys that the next queries of the sequence see more
            follows = (last.sequence, last.q_row + last.len_q, last.len_k + more)
            if (panel.sequence, panel.q_row, panel.len_k) == follows:
                joined[-1] = last._replace(len_q=last.len_q + panel.len_q, len_k=panel.len_k)
                continue
        joined.append(panel)
    return joined


def _range(problem: Problem, panels: list[Panel]) -> Range:
    first, last = panels[0], panels[-1]
    q, k = slice(first.q_row, last.q_row + last.len_q), slice(first.k_row, last.k_row + last.len_k)
    if not any(panel.len_k for panel in panels):
        return Range(None, q, k)
    alone = problem.alone(first)
    if problem.is_packed:
        cu_q, cu_k = (
            [0, *accumulate(lengths)] for lengths in zip(*((each.len_q, each.len_k) for each in panels), strict=True)
        )
        alone = replace(alone, len_q=cu_q[-1], len_k=cu_k[-1], mask=alone.mask & documents(cu_q, cu_k))
    return Range(LibraryForward(alone), q, k)


def rows_of_sums(cfg: KernelConfig, sums: Tensor) -> Tensor:
    """The sums of dV and dK as rows, (2, rows of all kv tiles, kv heads, dim), from the order of fragments.

    A thread of a warpgroup has four numbers of each 16-byte piece: two neighbouring columns of a row, and the same
    columns of the row 8 below. Four threads have 8 columns, a warp 16 rows, and a warpgroup 64 rows of 64 columns.
    """
    heads, tiles = sums.shape[:2]
    pieces = cfg.half_floats // 512
    # Which gradient, 64 columns of it, warpgroup, piece, warp, eighth and quarter of a warp, row, column.
    parts = sums.view(heads, tiles, 2, cfg.part_entries, CONSUMER_WARPGROUPS, pieces, 4, 8, 4, 2, 2)
    rows = parts.permute(2, 1, 4, 6, 9, 7, 0, 3, 5, 8, 10)
    return rows.reshape(2, tiles * TILE_N, heads, cfg.dim)[..., : cfg.columns]
