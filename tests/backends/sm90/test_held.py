"""The panels of one rank on a GPU: tables, sums and folds, with the CPU as the device and kernels that only write."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn.backends import Extras, KeySums, Operands, Options
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.backends.sm90 import backend, forwards, launch, workspace
from dash_attn.backends.sm90.config import KernelConfig
from dash_attn.backends.sm90.held import Sm90Held, neighbours, rows_of_sums
from dash_attn.distributed.layout import Layout
from dash_attn.distributed.ranks import Axis
from dash_attn.distributed.routes import Routes
from dash_attn.distributed.stages import stages_of, trips
from dash_attn.distributed.tokens import Tokens
from dash_attn.pack import Doc, Pack, assemble
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Features, Panel, Problem, documents, window
from dash_attn.tiling import TileShape

CPU = torch.device("cpu")
TILE_N = 128

PROBLEMS = {
    "causal": Problem(2, 4, 2, 600, 600, 128, mask=CAUSAL, panels=8),
    "full, more keys": Problem(1, 2, 2, 300, 500, 64, mask=FULL, panels=8),
    "window, padded": Problem(1, 4, 2, 500, 500, 80, mask=window(100, 0), panels=8),
    "documents": Problem(
        1, 4, 2, 700, 700, 128, mask=documents([0, 30, 30, 200, 210, 640, 700], causal=True), panels=8
    ),
    "more queries": Problem(1, 2, 1, 600, 200, 64, mask=CAUSAL, panels=8),
}


@lru_cache
def places(half_floats: int) -> tuple[Tensor, Tensor]:
    """Row and column, in a block of 64 columns, of each number that the two warpgroups hand over. See FinishKv.load."""
    row, col = torch.zeros(2, 2 * half_floats, dtype=torch.int64)
    for wg, thread, piece, i in product(range(2), range(128), range(8), range(4)):
        at = wg * half_floats + piece * 512 + thread * 4 + i
        row[at] = wg * 64 + (thread // 32) * 16 + (thread % 32) // 4 + 8 * (i // 2)
        col[at] = 8 * piece + 2 * (thread % 4) + i % 2
    return row, col


def fragments(cfg: KernelConfig, dv: Tensor, dk: Tensor) -> Tensor:
    """The sums of one kv tile and head, from its rows, as consumer warpgroups hand them over."""
    row, col = places(cfg.half_floats)
    padded = [torch.nn.functional.pad(x, (0, cfg.dim - cfg.columns), value=float("nan")) for x in (dv, dk)]
    return torch.stack([x[row, 64 * block + col] for x in padded for block in range(cfg.part_entries)])


@pytest.mark.parametrize("columns", [64, 80, 128])
def test_fragments_become_rows(columns: int) -> None:
    cfg = KernelConfig(columns, cut=True, packed=True)
    dv, dk = torch.randn(2, 3, 2, TILE_N, columns)  # heads, tiles
    sums = torch.stack([torch.stack([fragments(cfg, dv[h, t], dk[h, t]) for t in range(2)]) for h in range(3)])
    rows = rows_of_sums(cfg, sums)
    assert rows.shape == (2, 2 * TILE_N, 3, columns)
    for which, x in enumerate((dv, dk)):
        assert torch.equal(rows[which], x.permute(1, 2, 0, 3).reshape(2 * TILE_N, 3, columns))


def held_by(problem: Problem, ranks: int, layout: str) -> list[Routes]:
    return [Routes.of(problem, Layout(layout, ranks, problem.panels), rank) for rank in range(ranks)]


def tasks_of(made: Any, doc: int) -> list[Any]:
    """The order of one panel: what its tickets run, counted from its own tiles."""
    bundle, count = made.docs[doc, Doc.BUNDLE], made.docs[doc, Doc.BUNDLES]
    if not count:
        return []
    first, last = made.bundles[bundle], made.bundles[bundle + count - 1]
    chains = made.chains[first[0] : last[0] + last[1]]
    return [(int(kv), made.runs[run : run + runs].tolist()) for kv, run, runs in chains.tolist()]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_panel_has_the_order_that_it_has_among_all(problem: Problem, layout: str) -> None:
    cfg = backend.config_of(problem)
    shape = TileShape(cfg.tile_m, cfg.tile_n)
    whole = assemble(problem, shape)
    panels = {panel.q_row: panel for panel in problem.panel_list if panel.len_q}
    # Panels of one sequence with as many queries and keys have the same order.
    orders = {
        panels[row[Doc.Q_ROW]][2:]: tasks_of(whole, number)
        for number, row in enumerate(whole.docs.tolist())
        if row[Doc.Q_ROWS]
    }
    seen = 0
    for routes in held_by(problem, 2, layout):
        made = assemble(problem, shape, held=routes.panels)
        assert made.sizes.apart and made.sizes.cut and not len(made.folds)
        for number, row in enumerate(made.docs):
            (mine,) = [panel for panel in routes.panels if panel.q_row == row[Doc.Q_ROW]]
            assert tasks_of(made, number) == orders[mine[2:]]
            seen += 1
    assert seen == len(panels)


class Kernels:
    """dQ = q, and for the sums of a panel numbers that its first query draws."""

    def __init__(self) -> None:
        self.made: Any = None
        self.names: dict[int, int] = {}  # of panels, by their first query in the tensors of the call
        self.prepared: list[tuple[str, tuple[Tensor, ...]]] = []  # the first kernels, and what they were given
        self.facts: tuple[Any, ...] = ()

    def prepare(self, name: str) -> Any:
        return lambda tensors, *_: self.prepared.append((name, tensors))

    def main(self, tensors: tuple[Tensor, ...], stats: tuple[Tensor, ...], _: object, facts: tuple[Any, ...]) -> None:
        q, *_, dq, _, _ = tensors
        self.facts = facts
        dq.copy_(q)
        sums = stats[-1]
        sums.fill_(float("nan"))
        for row in self.made.docs.tolist():
            drawn = drawn_sums(self.names[row[Doc.Q_ROW]], row[Doc.K_ROWS], q.shape[-1], sums.shape[0])
            for tile in range(-(-row[Doc.K_ROWS] // TILE_N)):
                for head in range(sums.shape[0]):
                    parts = [x[tile * TILE_N : (tile + 1) * TILE_N, head] for x in drawn]
                    padded = [torch.nn.functional.pad(x, (0, 0, 0, TILE_N - len(x)), value=float("nan")) for x in parts]
                    sums[head, row[Doc.KV_TILE] + tile] = fragments(self.cfg, *padded)

    cfg: KernelConfig


def drawn_sums(name: int, rows: int, dim: int, heads: int) -> tuple[Tensor, Tensor]:
    """dV and dK of a panel, (rows, heads, dim)."""
    noise = torch.Generator().manual_seed(name)
    return tuple(torch.randn(rows, heads, dim, generator=noise) for _ in range(2))  # type: ignore[return-value]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    stub = Kernels()

    def refused(*_: object) -> None:
        raise AssertionError("nothing is rounded before all panels are added")

    monkeypatch.setattr(backend, "resident_workers", lambda device: 132)
    monkeypatch.setattr(launch, "kernels", lambda *_: (stub.prepare("plain"), stub.main, None, refused))
    monkeypatch.setattr(launch, "side_kernel", lambda kind, cfg: stub.prepare(f"{kind} {cfg.packed}"))
    for module in (launch, workspace):
        monkeypatch.setattr(module, "converted", lambda tensors: tensors)
    monkeypatch.setattr(forwards, "choose", lambda problem: Reference())
    return stub


class Reference:
    """A forward that looks at one row at a time: FlashAttention-4 in the eyes of `held`."""

    key = "fa4"

    def label(self) -> str:
        return "reference"

    def bound(self, problem: Problem) -> Any:
        return CpuBackend().forward(problem)


@pytest.mark.parametrize("name", ["causal", "documents", "window, padded"])
def test_sums_are_folded_as_in_one_process(name: str, kernels: Kernels) -> None:
    """Against the last kernel of one process, step by step: adds from the last queries to the first, scale, round."""
    problem = PROBLEMS[name]
    names = {panel: number for number, panel in enumerate(problem.panel_list)}
    by_rank = []
    for routes in held_by(problem, 2, "zigzag"):
        held = held_of(problem, routes.panels)
        operands = given_to(held, kernels, routes)
        kernels.names = {panel.q_row: number_of(panel, problem, names) for panel in routes.panels}
        partials = held.backward(operands)
        assert torch.equal(partials.dq, operands.q)
        by_rank.append(dict(zip(kernels.names.values(), partials.sums, strict=True)))
    sums = by_rank[0] | by_rank[1]
    scale = torch.tensor(problem.softmax_scale, dtype=torch.float32)
    for number in range(len(problem.sequences)):
        parts = [i for i, panel in enumerate(problem.panel_list) if panel.sequence == number and panel.len_q][::-1]
        if not parts:
            continue
        lengths = [problem.panel_list[i].len_k for i in parts]
        want = [torch.zeros(lengths[0], problem.heads_kv, problem.dim) for _ in range(2)]
        for i, length in zip(parts, lengths, strict=True):
            for total, part in zip(want, drawn_sums(i, length, problem.dim, problem.heads_kv), strict=True):
                total[:length] += part
        shape = (1, lengths[0], problem.heads_kv, problem.dim)
        into = KeySums(*(torch.full(shape, float("nan"), dtype=torch.bfloat16) for _ in range(2)))
        held.fold((sums[i] for i in parts), into)
        assert torch.equal(into.dv[0], want[0].bfloat16())
        assert torch.equal(into.dk[0], (want[1] * scale).bfloat16())


def held_of(problem: Problem, panels: tuple[Panel, ...]) -> Sm90Held:
    sm90 = backend.Sm90Backend(CPU)
    held = sm90.held(Pack(problem, sm90.tile_shape, held=panels), Options())
    assert isinstance(held, Sm90Held)
    return held


def given_to(held: Sm90Held, kernels: Kernels, routes: Routes) -> Operands:
    """Random operands of the panels. The kernels learn what the panels are."""
    problem = held.pack.problem
    run, kernels.made = held.launched
    kernels.cfg = run.cfg
    kernels.names = {panel.q_row: number for number, panel in enumerate(routes.panels)}
    rows = sum(panel.len_q for panel in routes.panels)
    q = torch.randn(1, rows, problem.heads_q, problem.dim).bfloat16()
    k = torch.randn(1, problem.batch * problem.len_k, problem.heads_kv, problem.dim).bfloat16()
    return Operands(q, q, k, k, q, torch.zeros(1, problem.heads_q, rows))


def number_of(panel: Panel, problem: Problem, names: dict[Panel, int]) -> int:
    """The number of a held panel in the problem. Its keys and the number of its sequence say which it is."""
    (number,) = [n for p, n in names.items() if (p.sequence, p.len_q, p.len_k) == (panel.sequence, *panel[2:4])]
    return number


FORWARDS = {
    **PROBLEMS,
    "softcap": replace(PROBLEMS["causal"], features=Features(softcap=2.0)),
    "sinks": replace(PROBLEMS["documents"], features=Features(sinks=True)),
    "sinks without keys": replace(PROBLEMS["more queries"], features=Features(sinks=True)),
}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("problem", FORWARDS.values(), ids=FORWARDS)
def test_the_forward_of_a_rank_is_a_part_of_the_whole(problem: Problem, layout: str, kernels: Kernels) -> None:
    """In stages: keys that have not arrived hold NaN."""
    noise = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(problem.batch, length, heads, problem.dim, generator=noise).bfloat16()
        for length, heads in ((problem.len_q, problem.heads_q), *[(problem.len_k, problem.heads_kv)] * 2)
    )
    extras = Extras(sinks=torch.linspace(-1.0, 3.0, problem.heads_q)) if problem.features.sinks else None
    out, lse = CpuBackend().forward(problem)(q, k, v, extras)
    cut = Layout(layout, 2, problem.panels)
    for rank, routes in enumerate(held_by(problem, 2, layout)):
        mine = torch.cat([torch.arange(*rows) for rows in cut.held(problem.len_q, rank)])
        own = [torch.arange(*rows) for rows in cut.held(problem.len_k, rank)]
        queries = q[:, mine].flatten(0, 1)[None]
        for stage in stages_of(problem, cut, rank, routes.panels):
            there = torch.cat([*own, *(torch.arange(*trip) for trip in trips(problem, cut)[: stage.trips])])
            keys, values = (torch.full_like(x, float("nan")) for x in (k, v))
            keys[:, there], values[:, there] = k[:, there], v[:, there]
            held = held_of(problem, stage.panels)
            got, got_lse = held.forward(stage.cut(queries, 1), *(x.flatten(0, 1)[None] for x in (keys, values)), extras)
            want, want_lse = out[:, mine].flatten(0, 1), lse[:, :, mine].transpose(0, 1).flatten(1)
            torch.testing.assert_close(got[0], stage.cut(want, 0))
            torch.testing.assert_close(got_lse[0], stage.cut(want_lse, 1))


def test_neighbouring_queries_are_one_call() -> None:
    """A rank has two runs of neighbours of one sequence. In a pack, the documents between two cuts are one call."""

    def calls(problem: Problem) -> list[list[list[int]]]:
        routes = held_by(problem, 2, "zigzag")
        packs = [Pack(problem, lambda _: TileShape(64, 128), held=each.panels) for each in routes]
        return [[[panel.len_q for panel in run] for run in neighbours(pack)] for pack in packs]

    assert calls(Problem(1, 2, 2, 160, 160, 64, mask=CAUSAL, panels=8)) == [[[40], [40]], [[80]]]
    cu = [0, 10, 30, 100, 160]
    assert calls(Problem(1, 2, 2, 160, 160, 64, mask=documents(cu, causal=True), panels=8)) == [
        [[10, 20, 10], [40]],
        [[60, 20]],
    ]


def test_a_forward_that_looks_at_other_queries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forwards.VARIABLE, "torch")
    problem = Problem(1, 4, 2, 700, 700, 128, mask=CAUSAL, panels=2)
    sm90 = backend.Sm90Backend(torch.device("cuda"))
    with pytest.raises(NotImplementedError, match=r"bits may depend on the other queries.*FlashAttention-4"):
        sm90.held(Pack(problem, sm90.tile_shape, held=problem.panel_list[:1]), Options())


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_softcap_and_the_gradient_of_lse_reach_the_kernels(name: str, kernels: Kernels) -> None:
    problem = replace(PROBLEMS[name], features=Features(softcap=20.0, sinks=True))
    (routes, _), scale = held_by(problem, 2, "zigzag"), problem.softmax_scale
    held = held_of(problem, routes.panels)
    operands = given_to(held, kernels, routes)
    assert kernels.cfg.softcap and kernels.cfg.packed
    sinks, dlse = torch.zeros(problem.heads_q), torch.randn(operands.lse.shape)
    for extras in (None, Extras(sinks=sinks)):
        held.backward(operands, extras)
        assert kernels.prepared[-1][0] == "plain" and len(kernels.prepared[-1][1]) == 3
    for gradient in (dlse, torch.ones(()).expand(dlse.shape)):
        held.backward(operands, Extras(sinks=sinks, dlse=gradient))
        kernel, (*_, lse, passed) = kernels.prepared[-1]
        assert kernel == "prepare_dlse True" and passed.is_contiguous()
        assert lse.shape == passed.shape and torch.equal(passed, gradient[0])
    assert kernels.facts[:3] == pytest.approx((scale, 20.0 / math.log(2), scale / 20.0))


REFUSED = [
    (Features(dropout=0.1), r"dropout is 0\.1: on GPUs dash_attn has none"),
    (Features(dim_v=64), "v has head dim 64, and q has 128: on GPUs dash_attn takes one head dim"),
]


@pytest.mark.parametrize(("features", "says"), REFUSED, ids=["dropout", "dim_v"])
def test_features_are_refused(features: Features, says: str) -> None:
    """By name. Another mode has no such features either, so the error does not send the caller there."""
    problem, sm90 = replace(PROBLEMS["causal"], features=features), backend.Sm90Backend(CPU)
    with pytest.raises(NotImplementedError, match=says):
        sm90.held(Pack(problem, lambda _: TileShape(64, 128)), Options())
    whole = prepare(problem, "auto", Options(), sm90)
    for axis in (Axis("", (0, 1), 0, 2), Axis("", (0,), 0, 2)):  # ranks that share tokens, and ranks that do not
        with pytest.raises(NotImplementedError, match=says) as caught:
            Tokens(whole, axis, Layout("zigzag", axis.size, 8)).require_panels()
        assert "a2a" not in str(caught.value)


def test_a_rank_without_queries_gives_nothing(kernels: Kernels) -> None:
    problem = Problem(1, 4, 2, 3, 3, 128, mask=CAUSAL, panels=16)
    held = backend.Sm90Backend(CPU).held(Pack(problem, backend.Sm90Backend(CPU).tile_shape, held=()), Options())
    q, k = torch.randn(1, 0, 4, 128).bfloat16(), torch.randn(1, 3, 2, 128).bfloat16()
    out, lse = held.forward(q, k, k)
    partials = held.backward(Operands(q, q, k, k, out, lse))
    assert out.shape == partials.dq.shape == q.shape and lse.shape == (1, 4, 0) and partials.sums == ()


def test_keys_behind_the_end_are_refused() -> None:
    problem = Problem(1, 4, 2, 100, 100, 128, mask=CAUSAL, panels=2)
    with pytest.raises(ValueError, match="keys behind the last one"):
        assemble(problem, TileShape(64, 128), held=(Panel(0, 60, 50, 50),))
    made = assemble(problem, TileShape(64, 128), held=(Panel(0, 50, 50, 50),))
    assert made.docs[:, [Doc.Q_ROW, Doc.K_ROW]].tolist() == [[0, 50]]
