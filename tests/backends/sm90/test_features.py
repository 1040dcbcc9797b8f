"""Features of a problem on the Hopper backend, without a GPU: what is refused, and what the kernels are given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn.backends import Operands, Options
from dash_attn.backends.base import Extras
from dash_attn.backends.sm90 import backend, launch, workspace
from dash_attn.backends.sm90.cache import shared
from dash_attn.backends.sm90.config import DEBUG, TRACE, select
from dash_attn.backends.sm90.packed import PackedBackward
from dash_attn.pack import Pack
from dash_attn.plan import plan
from dash_attn.problem import CAUSAL, FULL, Features, Mask, Problem, documents, window
from dash_attn.tools.bench.operands import draw, draw_extras, exact
from tests.backends.sm90 import featured

CPU = torch.device("cpu")
PLAIN = Problem(1, 4, 2, 300, 300, 128)


def posed(**features: object) -> Problem:
    return Problem(1, 4, 2, 300, 300, 128, features=Features(**features))


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (posed(dropout=0.1), r"dropout is 0\.1: on GPUs .*leave it at 0, or .*\.cpu\(\)"),
        (posed(dim_v=64), r"v has head dim 64, and q has 128: .*pad"),
    ],
)
def test_refused_before_the_forward_runs(problem: Problem, says: str) -> None:
    for ask in (backend.Sm90Backend(torch.device("cuda")).forward, backend.config_of):
        with pytest.raises(NotImplementedError, match=says):
            ask(problem)


def test_a_head_dim_of_v_that_is_that_of_q_changes_nothing() -> None:
    assert backend.config_of(posed(dim_v=128)) == backend.config_of(PLAIN)


def test_softcap_has_builds_of_its_own() -> None:
    for dim in (64, 128):
        capped, plain = (select(dim, "bf16", "causal", softcap=softcap) for softcap in (True, False))
        assert capped != plain and capped.softcap and not plain.softcap
        assert shared(capped) == shared(plain), "the kernels before and after the main one do not see scores"
        assert capped.holds_slopes == (dim == 128) and capped.stores_slopes == (dim == 64)
        assert not plain.holds_slopes and not plain.stores_slopes


def test_slopes_in_shared_memory_leave_no_choice_of_rounding() -> None:
    with pytest.raises(ValueError, match="P is rounded together with dS"):
        backend.config_of(capped_problem(64), Options(kernel=(("p_early", 4),)))


def capped_problem(dim: int, mask: Mask = CAUSAL, batch: int = 1) -> Problem:
    return Problem(batch, 4, 2, 300, 300, dim, mask=mask, features=Features(softcap=20.0))


class Given:
    """Kernels that only note their arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.prepared: list[tuple[Tensor, ...]] = []
        self.others: tuple[Any, ...] = ()  # later arguments of the last one
        self.facts: list[tuple[Any, ...]] = []
        monkeypatch.setattr(backend, "resident_workers", lambda device: 132)
        monkeypatch.setattr(launch, "kernels", lambda *_: (self.prepare("plain"), self.main, None, lambda *_: None))
        monkeypatch.setattr(launch, "side_kernel", lambda kind, cfg: self.prepare(f"{kind} {cfg.packed}"))
        for module in (launch, workspace):
            monkeypatch.setattr(module, "converted", lambda tensors: tensors)

    def prepare(self, name: str) -> Any:
        def noted(tensors: tuple[Tensor, ...], *others: Any) -> None:
            self.names.append(name)
            self.prepared.append(tensors)
            self.others = others

        return noted

    def main(self, tensors: object, stats: object, program: object, facts: tuple[Any, ...]) -> None:
        self.facts.append(facts)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    return Given(monkeypatch)


def made(problem: Problem, options: Options | None = None) -> Any:
    sm90, options = backend.Sm90Backend(CPU), options or Options()
    if problem.has_parts:
        return sm90.backward(Pack(problem, sm90.tile_shape), options)
    return sm90.backward(plan(problem, sm90.tile_shape(problem)), options)


def operands(problem: Problem) -> Operands:
    q, k = (torch.zeros(problem.batch, n, h, problem.dim).bfloat16() for n, h in ((300, 4), (300, 2)))
    return Operands(q, q, k, k, q, torch.zeros(problem.batch, 4, 300))


PACK = documents([0, 100, 300], causal=True)


@pytest.mark.parametrize("mask", [CAUSAL, PACK], ids=str)
def test_a_gradient_of_lse_goes_to_the_first_kernel(mask: Mask, given: Given) -> None:
    problem = Problem(2, 4, 2, 300, 300, 64, mask=mask)
    run, dlse = made(problem), torch.randn(2, 4, 300)
    for extras in (None, Extras(), Extras(sinks=torch.zeros(4))):
        run(operands(problem), None, extras)
        assert given.names[-1] == "plain" and len(given.prepared[-1]) == 3
    for gradient in (dlse, torch.ones(()).expand(2, 4, 300), dlse.transpose(0, 1).contiguous().transpose(0, 1)):
        run(operands(problem), None, Extras(dlse=gradient))
        *_, lse, passed = given.prepared[-1]
        assert given.names[-1] == f"prepare_dlse {problem.is_packed}" and passed.is_contiguous()
        assert lse.shape == passed.shape
        rows = gradient.transpose(0, 1).flatten(1) if problem.is_packed else gradient
        assert torch.equal(passed, rows)


@pytest.mark.parametrize("mask", [CAUSAL, PACK], ids=str)
def test_the_sums_of_sinks_follow_the_first_kernel(mask: Mask, given: Given) -> None:
    """They read what it has written, before anything else may write to that memory."""
    problem = Problem(2, 4, 2, 300, 300, 64, mask=mask, features=Features(sinks=True))
    run, sinks, dsinks = made(problem), torch.zeros(8)[::2], torch.zeros(4)
    run(operands(problem), None, Extras(sinks, dsinks=dsinks))
    assert given.names[-2:] == ["plain", f"sink_sums {problem.is_packed}"]
    passed, room = given.others
    assert passed.is_contiguous() and torch.equal(passed, sinks) and room is dsinks
    run(operands(problem), None, Extras(sinks))
    assert given.names[-1] == "plain", "no gradient is wanted"


def test_rows_of_a_pack_take_a_gradient_of_lse(given: Given) -> None:
    problem = Problem(1, 4, 2, 300, 300, 64, mask=PACK)
    run, dlse = made(problem), torch.randn(4, 300)
    assert isinstance(run, PackedBackward)
    run(Operands(*(x[0] for x in operands(problem))), None, Extras(dlse=dlse))
    assert torch.equal(given.prepared[-1][-1], dlse)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [CAUSAL, PACK], ids=str)
def test_softcap_is_an_argument(mask: Mask, dim: int, given: Given) -> None:
    problem, plain = capped_problem(dim, mask), Problem(1, 4, 2, 300, 300, dim, mask=mask)
    for each in (problem, plain):
        made(each)(operands(each))
    scale, log2_e = dim**-0.5, 1 / math.log(2)
    assert given.facts[0][:3] == pytest.approx((scale, 20.0 * log2_e, scale / 20.0))
    assert given.facts[1][:2] == pytest.approx((scale, scale * log2_e))
    assert given.facts[0][3:] == given.facts[1][2:], "the rest follows"


def test_special_builds_take_softcap(given: Given) -> None:
    for kind in (TRACE, DEBUG):
        run = made(Problem(1, 2, 2, 300, 300, 64, features=Features(softcap=20.0)), Options(kernel=kind))
        assert run.cfg.softcap and run.special and len(run.facts) == 3


@pytest.mark.parametrize("features", [Features(), Features(softcap=1.5), Features(1.5, sinks=True)], ids=str)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(20, 5), documents([0, 17, 50], [0, 30, 40])], ids=str)
def test_two_references_agree(mask: Mask, features: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of tests on a GPU, and that of the benchmarks. A causal mask hides all keys of 10 rows."""
    monkeypatch.setattr("dash_attn.tools.bench.operands.CHUNK", 1)  # bands of 16 rows
    problem = Problem(2, 4, 2, 50, 40, 8, "float32", mask=mask, features=features)
    drawn, extras = draw(problem, CPU), draw_extras(problem, CPU)
    mine = exact(problem, *drawn, extras=extras)
    theirs = (
        *featured.attend(problem, *drawn[1:], extras.sinks),
        *featured.gradients(problem, drawn[0], drawn[1:], extras),
    )
    for a, b in zip(mine, theirs, strict=False):  # featured has no gradient of the sinks
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
