"""The host's side of the tracing build, with the CPU as the device and no kernel behind it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from dash_attn.backends import Gradients, Operands, Options
from dash_attn.backends.sm90 import backend, builds, launch
from dash_attn.backends.sm90.config import DEBUG, STAMPS, TRACE
from dash_attn.pack import Pack
from dash_attn.plan import Plan, plan
from dash_attn.problem import CAUSAL, Problem, documents
from dash_attn.program import board_of
from dash_attn.simulate import Tickets
from dash_attn.tools.trace import run
from dash_attn.tools.trace.record import entries_of

PROBLEM = Problem(1, 4, 2, 1000, 1000, 128, mask=CAUSAL)
CPU = torch.device("cpu")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the main kernel is called with."""
    calls: list[Any] = []
    monkeypatch.setattr(backend, "resident_workers", lambda device: 7)
    monkeypatch.setattr(
        launch, "kernels", lambda *_: (lambda *args: None, lambda *args: calls.append(args), None, None)
    )
    return calls


def planned(policy: str = "auto@group") -> Plan:
    return plan(PROBLEM, backend.Sm90Backend(CPU).tile_shape(PROBLEM), policy)


def two_documents() -> Pack:
    problem = Problem(1, 4, 2, 1000, 1000, 128, mask=documents([0, 300, 1000], causal=True))
    return Pack(problem, backend.Sm90Backend(CPU).tile_shape, "auto")


def tensors() -> tuple[Operands, Gradients]:
    q, k = (torch.zeros(1, 1000, heads, 128, dtype=torch.bfloat16) for heads in (4, 2))
    return Operands(q, q, k, k, q, torch.zeros(1, 4, 1000)), Gradients(*(torch.empty_like(x) for x in (q, k, k)))


@pytest.mark.parametrize(("policy", "ends"), [("auto@group", 1), ("auto@head", 4)])
def test_the_buffer_has_a_row_for_every_entry(given: list[Any], policy: str, ends: int) -> None:
    """A cut chain ends with two parts of dV and two of dK, of 64 columns each."""
    this = planned(policy)
    tracing = backend.launch_of(this, Options(kernel=TRACE), CPU)
    trace = run.traced(tracing, this, *tensors())
    assert tracing.cfg.chain_entries == ends
    per_chain = entries_of(board_of(this.program))
    assert (per_chain == ends + board_of(this.program).task_first[1:] - board_of(this.program).task_first[:-1]).all()
    first, chains = trace.placement.first, trace.placement.chains
    most = max(per_chain[chains[a:b]].sum() for a, b in pairwise(first))
    (_, stats, _, facts), *others = given
    assert len(others) == builds.RUNS - 1 and len(facts) == 2
    assert stats[-1].shape == (7, 1 + most, len(STAMPS)) and stats[-1].dtype == torch.int64


def test_a_worker_of_a_pack_may_draw_all_tickets(given: list[Any]) -> None:
    pack = two_documents()
    tracing = backend.pack_launch_of(pack, Options(kernel=TRACE), CPU)
    operands, into = tensors()
    rows = Operands(*[x.squeeze(0) for x in operands])
    with pytest.raises(ValueError, match="incomplete"):  # no kernel has written a ticket
        run.traced(tracing, pack, rows, Gradients(*[x.squeeze(0) for x in into]))
    (_, stats, _, _), *_ = given
    assert stats[-1].shape == (7, 1 + entries_of(Tickets.of(pack).board).sum(), len(STAMPS) + 1)


def test_builds_are_not_mixed_up(given: list[Any]) -> None:
    plain, tracing = (backend.launch_of(planned(), Options(kernel=kind), CPU) for kind in ((), TRACE))
    with pytest.raises(ValueError, match=r"builds\.trace"):
        tracing(*tensors())
    with pytest.raises(ValueError, match=r"builds\.trace"):
        builds.trace(plain, *tensors(), entries=1)
    with pytest.raises(ValueError, match="choose one"):
        backend.launch_of(planned(), Options(kernel=(*TRACE, *DEBUG)), CPU)


def test_too_large_a_margin_is_named(given: list[Any]) -> None:
    with pytest.raises(ValueError, match="sm_margin=7 leaves 0 SMs: this order needs"):
        backend.launch_of(planned(), Options(sm_margin=7), CPU)
    with pytest.raises(ValueError, match="sm_margin=7 leaves 0 SMs: this order needs"):
        backend.pack_launch_of(two_documents(), Options(sm_margin=7), CPU)
