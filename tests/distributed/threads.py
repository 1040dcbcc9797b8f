"""Ranks as threads of one process, which pass tensors in memory: many ranks on one CPU or one GPU.

Two collectives of torch are replaced, and the groups that they get. Everything else is the code that users run, from
the operators on: the ranks compare their calls, exchange heads, gather keys in chunks and stages, and add dK and dV.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dash_attn.api.arguments import Arguments
from dash_attn.api.extras import Given
from dash_attn.distributed import ops, ranks, tokens
from dash_attn.distributed.attention import Sharing, terms_of
from dash_attn.distributed.layout import Layout
from dash_attn.distributed.ranks import Ranks
from tests.distributed.jobs import Case

Grid = tuple[int, ...]  # ranks along one or two dimensions

LIMIT = 120.0  # seconds that a rank waits for the others


class Mail:
    """What the threads have sent. Who holds `changed` computes. A thread that waits for others lets go of it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[str, int], dict[int, list[Tensor]]] = {}
        self.error: BaseException | None = None


@dataclass(eq=False)
class Group:
    """A process group in the eyes of one thread: its `number` among the members."""

    mail: Mail
    group_name: str
    members: int
    number: int
    calls: int = 0
    _device_types: tuple[torch.device, ...] = field(default=(torch.device("cpu"), torch.device("cuda")))

    def size(self) -> int:
        return self.members

    def rank(self) -> int:
        return self.number

    def start(self, into: Tensor, parts: list[Tensor]) -> Work:
        """Send a part to each member. What is read from `into` before the wait is wrong."""
        into.fill_(float("nan") if into.is_floating_point() else 77)
        place, self.calls = (self.group_name, self.calls), self.calls + 1
        self.mail.sent.setdefault(place, {})[self.number] = [part.clone() for part in parts]
        self.mail.changed.notify_all()
        return Work(self, place, into)


@dataclass
class Work:
    group: Group
    place: tuple[str, int]
    into: Tensor

    def wait(self) -> None:
        group, mail = self.group, self.group.mail
        mail.changed.wait_for(lambda: mail.error or len(mail.sent[self.place]) == group.members, LIMIT)
        if mail.error or len(mail.sent[self.place]) < group.members:
            raise RuntimeError(f"rank {group.number} of {group.group_name!r} waits in vain") from mail.error
        arrived = mail.sent[self.place]
        parts = [arrived[source][group.number] for source in range(group.members)]
        self.into.copy_(torch.cat(parts).view_as(self.into))
        for source in range(group.members):
            arrived[source][group.number] = parts[0].new_empty(0)  # so that the memory is free


_own = threading.local()  # `groups` of this thread, by name


def _all_gather(into: Tensor, x: Tensor, group: Group, async_op: bool) -> Work:
    return group.start(into, [x] * group.members)


def _all_to_all(into: Tensor, x: Tensor, expected: list[int], sizes: list[int], group: Group, async_op: bool) -> Work:
    return group.start(into, list(torch.split(x, sizes)))


@contextmanager
def _in_memory() -> Iterator[None]:
    usual = ranks._all_gather, torch.distributed.all_to_all_single, ranks._group
    ranks._all_gather, torch.distributed.all_to_all_single = _all_gather, _all_to_all  # type: ignore[assignment]
    ranks._group = lambda name: _own.groups[name]  # type: ignore[assignment]
    try:
        yield
    finally:
        ranks._all_gather, torch.distributed.all_to_all_single, ranks._group = usual


def _groups(mail: Mail, grid: Grid, place: Grid) -> dict[str, Group]:
    """A group for each dimension, of the ranks that differ in this dimension alone."""
    every = list[Group]()
    for dim, members in enumerate(grid):
        others = " ".join(str(x) for i, x in enumerate(place) if i != dim)
        every.append(Group(mail, f"dimension {dim}, at {others or 0}", members, place[dim]))
    return {group.group_name: group for group in every}


def on_ranks(grid: Grid, job: Callable[[Ranks], Any]) -> list[Any]:
    """What the job gives on each rank."""
    mail, places = Mail(), list(product(*map(range, grid)))
    results: list[Any] = [None] * len(places)

    def work(number: int) -> None:
        with mail.changed:
            try:
                _own.groups = _groups(mail, grid, places[number])
                results[number] = job(Ranks.named(tuple(_own.groups)))
            except BaseException as error:
                mail.error = mail.error or error
                mail.changed.notify_all()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(places))]
    with _in_memory():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if mail.error:
        raise mail.error
    return results


def apart(
    case: Case, grid: Grid, mode: str, layout: str = "zigzag", chunk_bytes: int = tokens.CHUNK_BYTES
) -> list[Tensor]:
    """out, lse, dq, dk and dv, computed on the ranks of a grid and joined. Those of `case.alone` have the same bits."""
    named = dict(case.arguments)
    features = {"softcap": 0.0, "dropout": 0.0, "sinks": None, "seed": None}
    given = Given(*[named.pop(name, usual) for name, usual in features.items()])
    cu = {f"cu_{side}": named.pop(f"cu_seqlens{end}", None) for side, end in (("q", ""), ("k", "_k"))}
    asked = Arguments(**cu, **named, panels=case.panels)
    whole, dlse = case.tensors(), case.dlse() if case.with_lse else None

    def job(ranks: Ranks) -> list[Tensor]:
        cut = Layout(layout, ranks.size, case.panels)

        def own(x: Tensor, dim: int) -> Tensor:
            held = cut.held(x.shape[dim], ranks.number)
            return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in held or [(0, 0)]], dim).contiguous()

        q, k, v, dout = (own(x, case.dim_of_tokens) for x in whole)
        terms, around = terms_of(q, k, v, asked, given, Sharing(ranks, mode, layout))
        own_dlse = None if dlse is None else own(dlse, -1)
        if case.packed:
            q, k, v, dout = (x.unsqueeze(0) for x in (q, k, v, dout))
            own_dlse = None if own_dlse is None else own_dlse.unsqueeze(0)
        text, rows = terms.text(), (q.shape[1], k.shape[1])
        out, lse, turn, spread = ops.forward(q, k, v, *around, text)
        grads = ops.backward(dout, *(spread or (q, k, v, out, lse)), *around, text, rows, turn, own_dlse)
        results = [out, lse, *grads]
        return [x.squeeze(0) for x in results] if case.packed else results

    usual, tokens.CHUNK_BYTES = tokens.CHUNK_BYTES, chunk_bytes
    try:
        every = on_ranks(grid, job)
    finally:
        tokens.CHUNK_BYTES = usual
    cut = Layout(layout, len(every), case.panels)
    dims = [case.dim_of_tokens, -1, *[case.dim_of_tokens] * 3]
    return [_joined(list(parts), dim, cut) for parts, dim in zip(zip(*every, strict=True), dims, strict=True)]


def _joined(parts: list[Tensor], dim: int, cut: Layout) -> Tensor:
    pieces = cut.pieces(sum(part.shape[dim] for part in parts))
    return torch.cat([parts[rank].narrow(dim, begin, end - begin) for rank, (begin, end) in pieces], dim)
