"""The bits of a document are its own: the same alone, in any pack, at any place, beside any neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_attn.backends import Operands
from dash_attn.backends.cpu import forward as cpu_forward
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from dash_attn.tiling import TileShape
from tests.backends.cpu.reference import DTYPES, ordered, run
from tests.strategies import examples, plain_masks

SHAPE = TileShape(8, 16)  # small, so that short documents have several tiles
ANY_MASK = ("fa3", "spt", "descending", "search:2", "fa3@head")  # policies that order each head alike


@pytest.fixture(autouse=True, scope="module")
def small_tiles_in_the_forward() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_forward, "ROWS", 8)
        patch.setattr(cpu_forward, "KEYS", 16)
        yield


class Tensors(NamedTuple):
    """Inputs of one document, without a batch."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Layout:
    """Documents by their lengths (queries, keys), and what they have in common."""

    lengths: tuple[tuple[int, int], ...]
    mask: Mask
    heads: tuple[int, int]
    dtype: str = "float32"

    def tensors(self, seed: int) -> list[Tensors]:
        """Numbers for each document. Those of document i depend on the seed, on i and on its lengths."""
        kv_heads, group = self.heads
        drawn = []
        for i, (len_q, len_k) in enumerate(self.lengths):
            rng = np.random.default_rng([seed, i])
            sizes = [(len_q, kv_heads * group)] * 2 + [(len_k, kv_heads)] * 2
            numbers = (torch.from_numpy(rng.standard_normal((*size, 8), np.float32)) for size in sizes)
            drawn.append(Tensors(*(x.to(DTYPES[self.dtype]) for x in numbers)))
        return drawn

    def alone(self, number: int) -> Problem:
        return self._problem(1, *self.lengths[number], self.mask)

    def pack(self, order: list[int], batch: int = 1) -> Problem:
        """The documents in some order."""
        cu_q, cu_k = (np.cumsum([0, *(self.lengths[i][side] for i in order)]) for side in (0, 1))
        return self._problem(batch, int(cu_q[-1]), int(cu_k[-1]), self.mask & documents(cu_q, cu_k))

    def _problem(self, batch: int, len_q: int, len_k: int, mask: Mask) -> Problem:
        kv_heads, group = self.heads
        return Problem(batch, kv_heads * group, kv_heads, len_q, len_k, 8, self.dtype, None, mask)


Results = list[Tensor]  # out, lse, dq, dk, dv


def step(problem: Problem, policy: str, given: Tensors, shape: TileShape = SHAPE) -> Results:
    """Results for tensors with a batch."""
    forward = CpuBackend().forward(problem)
    out, lse = forward(*given[1:])
    return [out, lse, *run(ordered(problem, shape, policy), Operands(*given, out, lse), threads=2)]


def alone(layout: Layout, policy: str, given: list[Tensors]) -> list[Results]:
    """Results of each document in a call of its own. Where there are no keys or no queries, nothing runs."""
    results = []
    for number, tensors in enumerate(given):
        one = Tensors(*(x.unsqueeze(0) for x in tensors))
        if min(layout.lengths[number]):
            results.append(step(layout.alone(number), policy, one))
        else:
            lse = one.q.new_full((1, one.q.shape[2], one.q.shape[1]), -math.inf, dtype=torch.float32)
            results.append([torch.zeros_like(one.q), lse, *(torch.zeros_like(x) for x in one[1:])])
    return results


def together(layout: Layout, policy: str, entries: list[list[Tensors]], order: list[int]) -> list[list[Results]]:
    """Results of each document of each batch entry, out of a pack in the given order."""
    problem = layout.pack(order, len(entries))
    joined = Tensors(
        *(
            torch.stack([torch.cat([one[i][part] for i in order]) for one in entries])
            for part in range(len(Tensors._fields))
        )
    )
    out, lse, dq, dk, dv = step(problem, policy, joined)
    by_number: list[list[Results]] = [[[] for _ in order] for _ in entries]
    for number, each in zip(order * len(entries), problem.sequences, strict=True):
        batch, q_row = divmod(each.q_row, problem.len_q) if each.len_q else (None, 0)
        k_batch, k_row = divmod(each.k_row, problem.len_k) if each.len_k else (None, 0)
        entry = batch if batch is not None else k_batch
        if entry is None:  # no tokens
            continue
        rows, keys = slice(q_row, q_row + each.len_q), slice(k_row, k_row + each.len_k)
        one = slice(entry, entry + 1)
        by_number[entry][number] = [out[one, rows], lse[one, :, rows], dq[one, rows], dk[one, keys], dv[one, keys]]
    return by_number


def unequal(some: Results, others: Results) -> list[str]:
    """Names of the results in which any bit differs."""
    names, whole = ("out", "lse", "dq", "dk", "dv"), {4: torch.int32, 2: torch.int16}
    pairs = zip(names, some, others, strict=True)
    return [
        name
        for name, a, b in pairs
        if a.shape != b.shape or not torch.equal(*(x.contiguous().view(whole[x.element_size()]) for x in (a, b)))
    ]


lengths = st.sampled_from([0, 1, 8, 16, 17]) | st.integers(0, 45)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pairs = draw(st.lists(st.tuples(lengths, st.none() | lengths), min_size=1, max_size=4))
    mask = draw(st.just(CAUSAL) | plain_masks())
    heads = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]))
    both = tuple((len_q, len_q if len_k is None else len_k) for len_q, len_k in pairs)
    return Layout(both, mask, heads, draw(st.sampled_from(["float32", "float32", "bfloat16"])))


@examples(120)
@given(st.data(), st.sampled_from(["auto", "auto@head", *ANY_MASK]))
def test_bits_belong_to_the_document(data: st.DataObject, policy: str) -> None:
    layout = data.draw(layouts())
    given_, count = layout.tensors(seed=0), len(layout.lengths)
    expected = alone(layout, policy, given_)

    def check(got: list[Results], numbers: list[int]) -> None:
        for number in numbers:
            if any(layout.lengths[number]):
                assert not unequal(expected[number], got[number]), number

    everyone = list(range(count))
    check(together(layout, policy, [given_], everyone)[0], everyone)
    check(together(layout, policy, [given_], data.draw(st.permutations(everyone)))[0], everyone)

    # Other neighbours: other numbers, NaN among them, other lengths, other places.
    mine = data.draw(st.integers(0, count - 1))
    others = data.draw(st.lists(st.tuples(lengths, lengths), max_size=3))
    beside = replace(layout, lengths=(*others, layout.lengths[mine]))
    strangers = beside.tensors(seed=1)
    for stranger in strangers[: data.draw(st.integers(0, len(others)))]:
        for x in stranger:
            x.fill_(math.nan)
    order = data.draw(st.permutations(range(len(others) + 1)))
    got = together(beside, policy, [[*strangers[:-1], given_[mine]]], order)[0]
    check({mine: got[-1]}, [mine])  # type: ignore[arg-type]

    # In a batch beside other numbers, in both places.
    entries = [given_, layout.tensors(seed=2)]
    check(together(layout, policy, entries, everyone)[0], everyone)
    check(together(layout, policy, entries[::-1], everyone)[1], everyone)


@examples(120)
@given(st.data(), st.sampled_from(["auto", "auto@head", "auto@group", *ANY_MASK]))
def test_bits_belong_to_the_kv_head(data: st.DataObject, policy: str) -> None:
    """Fewer kv heads, with their query heads, give the same bits in a pack as all heads do."""
    layout = data.draw(layouts())
    kv_heads, group = layout.heads
    given_, order = layout.tensors(seed=0), list(range(len(layout.lengths)))
    whole = together(layout, policy, [given_], order)[0]
    kept = sorted(data.draw(st.sets(st.integers(0, kv_heads - 1), min_size=1)))
    queries = [head * group + i for head in kept for i in range(group)]
    fewer = [Tensors(*(x[:, queries] for x in each[:2]), *(x[:, kept] for x in each[2:])) for each in given_]
    part = together(replace(layout, heads=(len(kept), group)), policy, [fewer], order)[0]
    for number, lengths_ in enumerate(layout.lengths):
        if any(lengths_):
            out, lse, dq, dk, dv = whole[number]
            expected = [out[:, :, queries], lse[:, queries], dq[:, :, queries], dk[:, :, kept], dv[:, :, kept]]
            assert not unequal(expected, part[number]), number


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(20, 4)], ids=str)
def test_another_order_or_tile_would_be_noticed(mask: Mask) -> None:
    """The negative control: the same document in another order, or in other tiles, has other bits."""
    layout = Layout(((40, 40), (37, 45)), mask, (1, 2))
    given_ = layout.tensors(seed=0)
    expected = alone(layout, "fa3", given_)
    for number in range(2):
        one = Tensors(*(x.unsqueeze(0) for x in given_[number]))
        for shape, policy, other in ((SHAPE, "descending", "dk"), (TileShape(8, 24), "fa3", "dq")):
            assert other in unequal(expected[number], step(layout.alone(number), policy, one, shape))


def test_many_short_documents() -> None:
    rng = np.random.default_rng(0)
    layout = Layout(tuple((int(n), int(n)) for n in rng.integers(0, 5, 100)), CAUSAL, (2, 1))
    given_ = layout.tensors(seed=0)
    expected, order = alone(layout, "auto", given_), rng.permutation(100).tolist()
    got = together(layout, "auto", [given_], order)[0]
    assert not any(unequal(expected[i], got[i]) for i in order if layout.lengths[i][0])
