"""predict: how long attention takes on many GPUs, in a model of computing rates and links.

A prediction is no measurement. The bytes are those that the code sends. The rates and links are numbers of `Cluster`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from dash_attn.distributed.heads import Heads
from dash_attn.distributed.layout import MODES, Layout, usual_panels
from dash_attn.distributed.ranks import Axis
from dash_attn.distributed.routes import Routes
from dash_attn.distributed.stages import stages_of, trip_rows
from dash_attn.distributed.tokens import Load, chunks_of, held_pack, load_of
from dash_attn.lazily import cached_property
from dash_attn.pack import Pack
from dash_attn.problem import Problem
from dash_attn.problem.panels import Longs


@dataclass(frozen=True)
class Cluster:
    """Nodes of H200 GPUs. Rates are numbers a second.

    node               GPUs of a node
    forward, backward  flops of attention on one GPU, bf16, head dim 128, causal (measured: 8k tokens in the forward,
                       benchmarks/results/block_h200.json; 64k in the backward, length_h200.json)
    nvlink             bytes that a GPU sends inside its node (published: 900 GB/s, both directions together)
    network            bytes that a GPU sends to other nodes (published: InfiniBand NDR, 400 Gbit/s for each GPU)
    reached            share of the published rates that collectives reach (assumed)
    latency            seconds of a collective without bytes (assumed)
    """

    node: int = 8
    forward: float = 600e12
    backward: float = 580e12
    nvlink: float = 450e9
    network: float = 50e9
    reached: float = 0.8
    latency: float = 20e-6

    def exchange(self, rank: int, members: Sequence[int], sent: Sequence[int]) -> float:
        """Seconds in which a rank sends a number of bytes to each of the members."""
        pairs = [(member // self.node == rank // self.node, size) for member, size in zip(members, sent, strict=True)]
        near, far = (sum(size for is_near, size in pairs if is_near is which) for which in (True, False))
        return self._seconds(near, far)

    def gather(self, rank: int, members: Sequence[int], size: int) -> float:
        """Seconds in which all members get `size` bytes of each. What comes from other nodes enters a node once."""
        here = sum(member // self.node == rank // self.node for member in members)
        return self._seconds(size * (len(members) - 1) if here > 1 else 0, size * (len(members) - here) // here)

    def _seconds(self, near: int, far: int) -> float:
        return self.latency + max(near / self.nvlink, far / self.network) / self.reached


@dataclass(frozen=True)
class Prediction:
    """One forward and one backward of attention, on the slowest of the first, middle and last rank. Times are seconds.

    exposed          time in which the rank computes nothing
    sent_bytes       to other ranks, in forward and backward
    memory_bytes     beside the tensors of the call: gathered keys and values, float32 dK and dV that travel, and the
                     workspace of the backward
    workspace_bytes  the part of it that is workspace. It has float32 dK and dV of all panels. 0 for a problem that GPUs
                     refuse
    """

    mode: str
    layout: str
    ranks: int
    heads_over: int
    tokens_over: int
    panels: int
    forward: float
    backward: float
    exposed: float
    sent_bytes: int
    memory_bytes: int
    workspace_bytes: int


def ways_of(problem: Problem, ranks: int, mode: str) -> list[int]:
    """How many ranks may share the heads of a sequence.

    On a mesh of two dimensions the caller chooses it. `a2a` takes the largest number, so it is not listed twice.
    """
    most = math.gcd(problem.heads_kv, ranks)
    if mode == MODES[-1]:
        return [ways for ways in range(2, most) if most % ways == 0]
    return [most if mode == "a2a" else 1]


def predict(
    problem: Problem, ranks: int, mode: str, layout: str, ways: int, cluster: Cluster | None = None
) -> Prediction:
    """Predict a call of context_parallel_attention on `ranks` ranks. The problem is the whole one, without panels.

    `ways` is one of `ways_of`.
    """
    panels = usual_panels(ranks)
    own = replace(problem, heads_q=problem.heads_q // ways, heads_kv=problem.heads_kv // ways, panels=panels)
    # The ranks in the middle and at the ends differ most. Ranks that share heads have the same work.
    numbers = sorted({0, ranks // 2 // ways * ways, ranks - ways})
    every = [Rank(own, layout, ranks, ways, number, mode == MODES[-1]) for number in numbers]
    spans = [(each.spans(cluster or Cluster()), each) for each in every]
    worst, slowest = max(spans, key=lambda each: each[0].forward + each[0].backward)
    exposed = worst.forward + worst.backward - worst.computing
    times = worst.forward, worst.backward, exposed
    workspace = slowest.workspace()
    memory = worst.memory + workspace, workspace
    return Prediction(mode, layout, ranks, ways, ranks // ways, panels, *times, worst.sent, *memory)


class Spans(NamedTuple):
    """Seconds of one rank, the bytes that it sends, and those that it holds beside the workspace."""

    forward: float
    backward: float
    computing: float
    sent: int
    memory: int


class Traffic(NamedTuple):
    """Bytes of one rank: sent to others in forward and backward, and held beside the workspace."""

    forward: int
    backward: int
    gathered: int
    sums: int


@dataclass(frozen=True)
class Rank:
    """A rank of a predicted call. The problem has the heads of this rank, and all tokens.

    `on_mesh`: the ranks that share tokens have a group of their own.
    """

    problem: Problem
    layout: str
    ranks: int
    ways: int
    number: int
    on_mesh: bool = False

    def workspace(self) -> int:
        """Bytes of the backward on a GPU. Nothing is planned, and no GPU is needed."""
        from dash_attn.backends.sm90.backend import Sm90Backend  # most callers have no use for it

        gpu, problem = Sm90Backend(torch.device("cuda")), self.problem
        if self.ways < self.ranks:
            pack = held_pack(problem, self._routes, gpu.tile_shape, "auto")
        else:
            pack = Pack(problem, gpu.tile_shape)
        try:
            return gpu.workspace_bytes(pack)
        except NotImplementedError:
            return 0

    def traffic(self) -> Traffic:
        """What `explain` counts. Without ranks that share tokens, nothing is gathered."""
        forward, backward = self._exchanged()
        if self.ways == self.ranks:
            return Traffic(forward, backward, 0, 0)
        load, _ = self._load()
        sent = load.gathered_sent
        return Traffic(forward + sent, backward + sent + load.sums_sent, load.gathered, load.sums)

    def spans(self, machines: Cluster) -> Spans:
        problem = self.problem
        seen = self._seen()
        pairs, dim, dim_v = problem.heads_q * int(seen.sum()), problem.dim, problem.dim_v
        # Two products in the forward, of which one is as wide as v, and five in the backward, of which two are.
        computing = 2 * pairs * (dim + dim_v) / machines.forward, 2 * pairs * (3 * dim + 2 * dim_v) / machines.backward
        exchanged, traffic = self._exchanged(), self.traffic()
        first = self.number - self.number % self.ways
        near = range(first, first + self.ways)
        forward, backward = (
            seconds + (machines.exchange(self.number, near, self._to_others(near, size)) if self.ways > 1 else 0.0)
            for seconds, size in zip(computing, exchanged, strict=True)
        )
        if self.ways < self.ranks:
            load, to = self._load()
            count = len(chunks_of(self.problem))
            across = range(self.number % self.ways, self.ranks, self.ways)
            rows, each = trip_rows(problem, self._tokens()), load.gathered_sent // (len(across) - 1) // count
            gathers = [machines.gather(self.number, across, each * part // max(1, sum(rows))) for part in rows]
            add = machines.exchange(self.number, across, [size // count for size in to])
            begin = [0, *np.cumsum(seen).tolist()]
            stages = [
                (stage.trips, sum(begin[b] - begin[a] for a, b in stage.rows) / max(1, begin[-1]))
                for stage in stages_of(problem, self._tokens(), self.number // self.ways, self._routes.panels)
            ]
            forward += pipeline(count, computing[0] / count, gathers, 0.0, stages) - computing[0]
            backward += pipeline(count, computing[1] / count, gathers, add, stages) - computing[1]
        sent, held = traffic.forward + traffic.backward, traffic.gathered + traffic.sums
        return Spans(forward, backward, sum(computing), sent, held)

    def _seen(self) -> Longs:
        """The number of keys that each query of this rank sees."""
        first, end = self.problem.mask.intervals(self.problem.len_q, self.problem.len_k)
        held = self._tokens().held(self.problem.len_q, self.number // self.ways)
        own = [end[a:b] - first[a:b] for a, b in held] or [end[:0]]
        return np.tile(np.concatenate(own).astype(np.int64), self.problem.batch)

    def _tokens(self) -> Layout:
        return Layout(self.layout, self.ranks // self.ways, self.problem.panels)

    def _exchanged(self) -> tuple[int, int]:
        """Bytes that the exchange over heads sends to other ranks, in the forward and in the backward."""
        axis = Axis("", tuple(range(self.ways)), self.number % self.ways, self.ranks)
        whole = Layout(self.layout, self.ranks, self.problem.panels)
        lengths = self.problem.len_q, self.problem.len_k
        q, k = (Heads.of(axis, whole, length, self.number) for length in lengths)
        return exchanged(self.problem, (q, k), self.problem.batch)

    def _to_others(self, members: range, size: int) -> list[int]:
        """The same number of bytes to each other member."""
        return [0 if member == self.number else size // (len(members) - 1) for member in members]

    def _load(self) -> tuple[Load, list[int]]:
        """What the attention over tokens sends and holds, and the bytes of dK and dV to each rank."""
        number, routes, problem = self.number // self.ways, self._routes, self.problem
        row = 4 * (problem.dim + problem.dim_v) * problem.heads_kv
        to = [row * sum(addend.count for addend in addends) * (i != number) for i, addends in enumerate(routes.sent)]
        is_part = self.ways > 1 and not self.on_mesh
        return load_of(problem, self._tokens(), routes, number, is_part), to

    @cached_property
    def _routes(self) -> Routes:
        return Routes.of(self.problem, self._tokens(), self.number // self.ways)


def exchanged(problem: Problem, sides: tuple[Heads, Heads], batch: int) -> tuple[int, int]:
    """Bytes that the exchange over heads sends to other ranks, in the forward and in the backward.

    The problem has the heads of one rank. `sides` are the exchanges of q and of k.
    """
    (q, k), item = sides, 4 if problem.dtype == "float32" else 2
    heads_q, heads_kv = (heads * q.axis.size for heads in (problem.heads_q, problem.heads_kv))
    dims = problem.dim, problem.dim_v
    out_k, back_k = (sum(send(batch, heads_kv * x) for x in dims) for send in (k.spread_numbers, k.collect_numbers))
    # q there and out back; then dout there and dq back.
    forward, backward = (
        q.spread_numbers(batch, heads_q * there) + q.collect_numbers(batch, heads_q * back)
        for there, back in (dims, dims[::-1])
    )
    lse = 4 * q.collect_numbers(batch, heads_q)
    return item * (forward + out_k) + lse, item * (backward + back_k)


def pipeline(
    count: int, compute: float, gathers: Sequence[float], add: float, stages: Sequence[tuple[int, float]]
) -> float:
    """Seconds of `count` chunks of heads, each of which is gathered, computed and sent to be added.

    Collectives run one after the other, in the order in which Tokens starts them: a chunk is gathered while the chunk
    before is computed, and sums are sent when their chunk is computed.

    gathers  seconds of each trip
    stages   of the first chunk: the number of trips that each waits for, and its share of `compute`
    """
    link, done, arrived = 0.0, 0.0, list[list[float]]()
    for number in range(count):
        while len(arrived) < min(number + 2, count):
            _, *ends = accumulate(gathers, initial=max(link, done))
            arrived.append([0.0, *ends])  # after no trip, after the first, ...
            link = ends[-1]
        for trip, share in [(len(gathers), 1.0)] if number else stages:
            done = max(done, arrived[number][trip]) + share * compute
        done = max(done, arrived[number][-1])
        if add:
            link = max(link, done) + add
    return max(done, link if add else 0.0)
