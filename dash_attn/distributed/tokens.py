"""The attention over tokens: each rank computes the panels of its own queries.

Keys and values are gathered from all ranks, some heads at a time: while a rank computes with some heads, the next ones
are under way. With the first heads a rank starts with the panels whose keys have arrived. dQ of a panel is complete on
its rank. The dK and dV of each panel travel in float32 to the ranks that hold the keys, and are added there in the
order of the whole problem. No collective adds anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dash_attn.backends import Extras, Gradients, Held, KeySums, Operands
from dash_attn.distributed.gather import Gather
from dash_attn.distributed.layout import Layout
from dash_attn.distributed.ranks import Axis
from dash_attn.distributed.routes import Routes
from dash_attn.distributed.stages import Result, Stage, stages_of, trip_rows, trips
from dash_attn.lazily import cached_property
from dash_attn.pack import Pack
from dash_attn.prepare import Prepared, prepare_panels
from dash_attn.problem import Problem
from dash_attn.tiling import TileShape

# Bytes of gathered keys and values that are worth a collective of their own. The number changes no bit.
CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Chunk:
    """Some neighbouring kv heads, and the q heads of their groups."""

    q: slice
    k: slice

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.stop - self.q.start, self.k.stop - self.k.start

    def of(self, problem: Problem) -> Problem:
        """The problem with these heads alone."""
        return replace(problem, heads_q=self.heads[0], heads_kv=self.heads[1])

    def extras(self, given: Extras | None) -> Extras | None:
        """Of these heads, with rows as `Held` takes them."""
        if given is None:
            return None
        sinks = None if given.sinks is None else given.sinks[self.q]
        dlse = None if given.dlse is None else self.rows_of(given.dlse)
        return Extras(sinks=sinks, seed=given.seed, dlse=dlse, head=given.head + self.q.start)

    def rows_of(self, lse: Tensor) -> Tensor:
        """lse of these heads, the sequences of a batch one after the other: (1, heads, rows)."""
        return lse[:, self.q].transpose(0, 1).flatten(1).unsqueeze(0)


class Load(NamedTuple):
    """Bytes that a rank sends to others and holds at most: of gathered keys and values, of float32 dK and dV."""

    gathered_sent: int
    gathered: int
    sums_sent: int
    sums: int


def load_of(problem: Problem, layout: Layout, routes: Routes, rank: int, is_part: bool) -> Load:
    """What a rank sends and holds if the tokens lie on several ranks. `is_part`: its axis is part of a group."""
    chunks, item = chunks_of(problem), 4 if problem.dtype == "float32" else 2
    share = problem.batch * sum(trip_rows(problem, layout))
    # Rows that are gathered, and that are sent: once, or to each rank by itself. The next heads are under way too.
    moved = min(2, len(chunks)) * share * (layout.ranks + 1 + is_part * layout.ranks)
    to = [sum(addend.count for addend in addends) for addends in routes.sent]
    rows = sum(panel.len_k for panel in routes.panels) + sum(to) + sum(routes.received)
    width, at_once = ((problem.dim + problem.dim_v) * heads for heads in (problem.heads_kv, chunks[0].heads[1]))
    return Load(
        item * width * share * (layout.ranks - 1),
        item * at_once * (moved + problem.batch * problem.len_k),
        4 * width * (sum(to) - to[rank]),
        4 * at_once * rows,
    )


def held_pack(problem: Problem, routes: Routes, shape_of: Callable[[Problem], TileShape], policy: str) -> Pack:
    """The panels of a rank with the heads that it computes at a time."""
    return Pack(chunks_of(problem)[0].of(problem), shape_of, policy, routes.panels)


def chunks_of(problem: Problem) -> list[Chunk]:
    """The kv heads, cut into parts that are gathered one after the other."""
    bytes_a_head = 2 * problem.batch * problem.len_k * (problem.dim + problem.dim_v)
    count = min(problem.heads_kv, max(1, CHUNK_BYTES // max(1, bytes_a_head)))
    firsts = range(0, problem.heads_kv, count)
    kv = [slice(first, min(first + count, problem.heads_kv)) for first in firsts]
    return [Chunk(slice(each.start * problem.group, each.stop * problem.group), each) for each in kv]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A problem on the axis over tokens. Tensors have the tokens of this rank, (batch, seqlen, heads, dim)."""

    whole: Prepared
    axis: Axis
    layout: Layout

    @cached_property
    def routes(self) -> Routes:
        return Routes.of(self.whole.problem, self.layout, self.axis.number)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The panels of this rank, in the order in which the keys of the first heads arrive."""
        return stages_of(self.whole.problem, self.layout, self.axis.number, self.routes.panels)

    @cached_property
    def at_once(self) -> tuple[Stage, ...]:
        """All panels of this rank together. The keys of later heads are there when the rank needs them."""
        panels = self.routes.panels
        return (Stage.of(panels, range(len(panels)), len(trips(self.whole.problem, self.layout))),)

    @property
    def is_local(self) -> bool:
        """One rank holds the whole problem, or there is nothing to compute."""
        return self.axis.size == 1 or self.whole.is_empty

    def require_panels(self) -> None:
        """Raise an error if the device cannot compute the problem, or not in single panels.

        The error comes on all ranks, before tensors are sent.
        """
        if not self.whole.is_empty:
            self.whole.backend.tile_shape(self.whole.problem)  # it refuses what the device cannot compute
        if self.is_local:
            return
        try:
            self._held(chunks_of(self.whole.problem)[0], self.stages[0])
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{self.axis.size} ranks share the tokens of a kv head: {error}. Or use mode='a2a' with a number of "
                "ranks that divides the kv heads"
            ) from error

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
        """out, and lse (batch, heads, seqlen)."""
        if self.is_local:
            return self.whole.forward(q, k, v, extras)
        out, lse = Result(*q.shape[:3], v.shape[3]), Result(*q.shape[:3])
        for chunk, stages, gather in self._gathered(k, v):
            rows = _joined(q[:, :, chunk.q])
            for stage in stages:
                held, keys_and_values = self._held(chunk, stage), gather.after(stage.trips)
                own_out, own_lse = held.forward(stage.cut(rows, 1), *keys_and_values, chunk.extras(extras))
                out.put(stage, chunk.q, own_out)
                lse.put(stage, chunk.q, own_lse.transpose(1, 2))
                del keys_and_values, own_out, own_lse
            gather.finish()
        return out.whole().contiguous(), lse.whole().transpose(1, 2).contiguous()

    def backward(self, operands: Operands, extras: Extras | None = None) -> Gradients:
        if self.is_local:
            return self.whole.backward(operands, None, extras)
        self.whole.alert()
        dq, pending = Result(*operands.q.shape), None
        # Keys that no query sees have gradient 0.
        dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (operands.k, operands.v))
        for chunk, stages, gather in self._gathered(operands.k, operands.v):
            rows = [_joined(x[:, :, chunk.q]) for x in (operands.dout, operands.q, operands.out)]
            lse = chunk.rows_of(operands.lse)
            own_sums = dict[int, KeySums]()
            for stage in stages:
                held, (keys, values) = self._held(chunk, stage), gather.after(stage.trips)
                dout, q, out = (stage.cut(x, 1) for x in rows)
                own = Operands(dout, q, keys, values, out, stage.cut(lse, 2))
                partials = held.backward(own, stage.extras(chunk.extras(extras)))
                dq.put(stage, chunk.q, partials.dq)
                own_sums |= zip(stage.numbers, partials.sums, strict=True)
                del own, dout, q, out, keys, values, partials
            gather.finish()
            if pending is not None:  # the dK and dV of the heads before were under way while this rank computed
                pending()
                pending = None  # frees what has arrived before more is sent
            into = KeySums(*[_joined(x)[:, :, chunk.k] for x in (dk, dv)])
            pending = self._summed(held, own_sums, into)
            del own_sums  # they are copied, and the next heads need the memory
        if pending is not None:
            pending()
        return Gradients(dq.whole().contiguous(), dk, dv)

    def load(self) -> Load:
        """What this rank sends and holds."""
        if self.is_local:
            return Load(0, 0, 0, 0)
        return load_of(self.whole.problem, self.layout, self.routes, self.axis.number, self.axis.is_part)

    def workspace_bytes(self) -> int:
        """What the backward of this rank allocates beside its results and beside `load`."""
        whole = self.whole
        if whole.is_empty:
            return 0
        if self.is_local:
            return whole.backend.workspace_bytes(whole.plan)
        assert isinstance(whole.policy, str)
        own = held_pack(whole.problem, self.routes, whole.backend.tile_shape, whole.policy)
        return whole.backend.workspace_bytes(own)

    def _held(self, chunk: Chunk, stage: Stage) -> Held:
        problem, whole = chunk.of(self.whole.problem), self.whole
        assert isinstance(whole.policy, str)  # ranks agree on the name of a policy
        return prepare_panels(problem, stage.panels, whole.policy, whole.options, whole.backend.device)

    def _gathered(self, k: Tensor, v: Tensor) -> Iterator[tuple[Chunk, tuple[Stage, ...], Gather]]:
        """Some heads at a time: the panels of this rank in stages, and the keys and values that they wait for."""
        chunks = chunks_of(self.whole.problem)
        gathers = [self._gather(k, v, chunks[0])]
        for number, chunk in enumerate(chunks):
            if number + 1 < len(chunks):
                gathers.append(self._gather(k, v, chunks[number + 1]))
            # Not in variables: they would keep these heads until the next ones have come.
            yield chunk, self.at_once if number else self.stages, gathers.pop(0)

    def _gather(self, k: Tensor, v: Tensor, chunk: Chunk) -> Gather:
        return Gather(self.axis, self.layout, self.whole.problem, (k[:, :, chunk.k], v[:, :, chunk.k]))

    def _summed(self, held: Held, sums: Mapping[int, KeySums], into: KeySums) -> Callable[[], None]:
        """Start to exchange the dK and dV of panels, and give the function that adds those of this rank's keys.

        `into` is where the totals go, (1, rows, heads, dim).
        """
        routes, widths = self.routes, [x.shape[2] * x.shape[3] for x in into]
        # For each rank first the rows of dK, then those of dV.
        rows = [
            sums[addend.panel][which][0, slice(*addend.rows)].flatten()
            for addends in routes.sent
            for which in range(2)
            for addend in addends
        ]
        sent = torch.cat(rows) if rows else into.dk.new_empty(0, dtype=torch.float32)
        sizes = [sum(widths) * sum(addend.count for addend in addends) for addends in routes.sent]
        expected = [width * count for count in routes.received for width in widths]
        arrival = self.axis.exchange(sent, sizes, [sum(widths) * count for count in routes.received])

        def add() -> None:
            flat = torch.split(arrival(), expected)
            dks, dvs = (
                [part.view(1, count, *x.shape[2:]) for part, count in zip(flat[which::2], routes.received, strict=True)]
                for which, x in enumerate(into)
            )
            for each in routes.sums:
                places = [(addend.source, slice(addend.first, addend.first + addend.count)) for addend in each.addends]
                parts = (KeySums(dks[source][:, rows], dvs[source][:, rows]) for source, rows in places)
                held.fold(parts, KeySums(*[x[:, slice(*each.rows)] for x in into]))

        return add


def _joined(x: Tensor) -> Tensor:
    """The sequences of a batch one after the other: (1, rows, heads, dim)."""
    return x.flatten(0, 1).unsqueeze(0)
