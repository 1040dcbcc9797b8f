"""forward: attention tile by tile. The maximum and the sum of a row are kept up to date from tile to tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dash_attn.backends.base import Extras
from dash_attn.backends.cpu.planes import copies, planes
from dash_attn.backends.cpu.softmax import Softmax, keep
from dash_attn.backends.cpu.threads import Job, run_jobs, without_grad
from dash_attn.problem import Problem, TileMask

Bool = npt.NDArray[np.bool_]

PROVIDER = "dash_attn, tile by tile"

# The tile of the forward changes bits, so it is the same for every problem.
ROWS, KEYS = 256, 512

LOWEST = torch.finfo(torch.float32).min


@without_grad
def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen, heads, dim) and lse (batch, heads, seqlen), fp32, natural logarithm.

    A row that sees no key has out = 0, and lse = -inf or its sink. One thread with one math thread computes a tile of
    rows, from copies of the operands. So neither the number of threads nor the layout of the operands changes bits.
    """
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device="cpu")
    lse = torch.empty((problem.batch, problem.heads_q, problem.len_q), dtype=torch.float32, device="cpu")
    fill(problem, Attended(q, k, v, out, lse), Softmax.of(problem, extras))
    return out, lse


class Attended(NamedTuple):
    """What the forward reads, q, k and v, and what it writes, out and lse: of a whole problem, or of one tile of rows
    of one head."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def fill(problem: Problem, tensors: Attended, softmax: Softmax | None) -> None:
    """Write out and lse."""
    q, k, v, out, lse = tensors
    mine = [planes(x) for x in (q, k, v)]
    threads = torch.get_num_threads()
    features = problem.features
    # exp2 is faster than exp. Capped scores get their factor behind tanh.
    scales = (problem.softmax_scale / (features.softcap or math.log(2)), 1.0, 1.0)
    run_jobs(chain.from_iterable(copies(*each) for each in zip((q, k, v), mine, scales, strict=True)), threads)

    def jobs(stripe: Stripe) -> Iterator[Job]:
        for batch in range(problem.batch):
            for head in range(problem.heads_q):
                kv = batch, head // problem.group
                operands = mine[0][batch, head, stripe.rows], mine[1][kv], mine[2][kv]
                own = Attended(*operands, out[batch, stripe.rows, head], lse[batch, head, stripe.rows])
                yield partial(_attend, stripe, own, RowFeatures.of(problem, softmax, batch, head, stripe.rows))

    longest_first = sorted(_stripes(problem), key=lambda stripe: -len(stripe.visits))
    run_jobs(chain.from_iterable(map(jobs, longest_first)), threads)


@dataclass(frozen=True, eq=False)
class RowFeatures:
    """What the rows of one tile have beside their operands. The defaults are plain softmax.

    sink   where the softmax starts, for powers of 2
    words  of dropout, int32 (rows, 2)
    key    the place of the first key, for dropout
    """

    sink: float = -math.inf
    softcap: float = 0.0
    dropout: float = 0.0
    words: Tensor | None = None
    key: int = 0

    @staticmethod
    def of(problem: Problem, softmax: Softmax | None, batch: int, head: int, rows: slice) -> RowFeatures:
        softcap, dropout = problem.features.softcap, problem.features.dropout
        if softmax is None:
            return RowFeatures(softcap=softcap) if softcap else PLAIN
        sink = -math.inf if softmax.sinks is None else float(softmax.sinks[head]) / math.log(2)
        words = softmax.words(batch, head, rows) if dropout else None
        return RowFeatures(sink, softcap, dropout, words, softmax.key)


PLAIN = RowFeatures()


def _attend(stripe: Stripe, tensors: Attended, features: RowFeatures) -> None:
    """One tile of rows of one head. The queries are already scaled, for powers of 2 or for tanh."""
    q, k, v, out, lse = tensors
    rows, dim = len(q), v.shape[1]
    scores = q.new_empty(rows * KEYS)
    highest, total, sums = q.new_full((rows, 1), features.sink), q.new_zeros(rows, 1), q.new_zeros(rows, dim)
    if features.sink > -math.inf:
        total.fill_(1.0)
    for keys, is_partial in stripe.visits:
        columns = keys.stop - keys.start
        p = torch.mm(q, k[keys].t(), out=scores[: rows * columns].view(rows, columns))
        if features.softcap:
            p.tanh_().mul_(features.softcap / math.log(2))
        if is_partial:
            torch.minimum(p, stripe.limits(keys), out=p)
        before, highest = highest, torch.maximum(highest, p.amax(1, keepdim=True))
        base = highest.clamp(min=LOWEST)  # finite, also for a row that has seen no key
        p.sub_(base).exp2_()
        fade = before.sub_(base).exp2_()
        total.mul_(fade).add_(p.sum(1, keepdim=True))
        if features.words is not None:
            key = torch.arange(features.key + keys.start, features.key + keys.stop, dtype=torch.int32, device="cpu")
            p.mul_(keep(features.words, key, features.dropout, torch.empty_like(p)))
        sums.mul_(fade).addmm_(p, v[keys])
    sums.div_(total.clamp(min=1.0))  # the total is at least 1, unless the row sees no key
    out.copy_(sums.div_(1.0 - features.dropout) if features.dropout else sums)
    lse.copy_(total.log2_().add_(highest).mul_(math.log(2)).squeeze(1))


@dataclass(frozen=True, eq=False)
class Stripe:
    """One tile of rows. Row i sees keys `first[i]` up to `end[i] - 1`, if the tile mask shows them. `visits` has the
    keys of each visit, and whether the visit is partial: some row does not see all of its keys."""

    rows: slice
    first: Tensor
    end: Tensor
    shown: Callable[[slice, slice], Bool] | None
    visits: list[tuple[slice, bool]]

    def limits(self, keys: slice) -> Tensor:
        """What a score may be at most: -inf if the mask hides the pair, else inf. Limits are computed at each visit,
        because the limits of all visits can be quadratic in the tokens."""
        key = torch.arange(keys.stop - keys.start, dtype=torch.float32, device="cpu")
        first, end = ((bound - keys.start).to(torch.float32) for bound in (self.first, self.end))
        seen = key.new_empty(len(first), len(key))
        limits = torch.ge(key, first, out=torch.empty_like(seen)).mul_(torch.lt(key, end, out=seen))
        if self.shown is not None:
            limits.mul_(torch.from_numpy(self.shown(self.rows, keys)))
        return limits.sub_(0.5).mul_(math.inf)


def _stripes(problem: Problem) -> Iterator[Stripe]:
    first, end = problem.mask.intervals(problem.len_q, problem.len_k)
    tiles = problem.mask.tiles
    shown = None if tiles is None else partial(_shown, tiles, tiles.cells())
    for start in range(0, problem.len_q, ROWS):
        rows = slice(start, min(start + ROWS, problem.len_q))
        lo, hi = first[rows], end[rows]
        lo, hi = lo[lo < hi], hi[lo < hi]
        visits = []
        for key in range(int(lo.min(initial=problem.len_k)) // KEYS * KEYS, int(hi.max(initial=0)), KEYS):
            keys = slice(key, min(key + KEYS, problem.len_k))
            cells = np.True_ if shown is None else shown(rows, keys)
            if cells.any() and ((lo < keys.stop) & (hi > keys.start)).any():
                whole = len(lo) == rows.stop - rows.start and lo.max() <= keys.start and hi.min() >= keys.stop
                visits.append((keys, not (whole and cells.all())))
        lo, hi = first[rows, None], end[rows, None]
        yield Stripe(rows, torch.from_numpy(lo), torch.from_numpy(hi), shown, visits)


def _shown(tiles: TileMask, cells: Bool, rows: slice, keys: slice) -> Bool:
    """Rows and keys of a tile mask, element by element."""
    row, key = np.arange(rows.start, rows.stop), np.arange(keys.start, keys.stop)
    shown: Bool = cells[(row // tiles.cell_m)[:, None], key // tiles.cell_n]
    return shown
