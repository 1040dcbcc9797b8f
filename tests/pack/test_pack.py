"""Packs: plans of single sequences, and what they say together."""

from __future__ import annotations

import pytest
import torch

from dash_attn.api.autograd import attention
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.backends.sm90.backend import Sm90Backend
from dash_attn.pack import Pack
from dash_attn.plan import plan
from dash_attn.problem import CAUSAL, Problem, documents, window
from dash_attn.tiling import TileShape

SHAPE = TileShape(16, 16)


def pack(*cu: int, policy: str = "auto", batch: int = 1) -> Pack:
    mask = documents(cu, causal=True)
    return Pack(Problem(batch, 4, 2, cu[-1], cu[-1], 64, mask=mask), lambda _: SHAPE, policy)


def test_sequences_of_one_length_share_a_plan() -> None:
    made = pack(0, 40, 100, 140, 140, batch=2)
    assert list(made.plans) == [(40, 40, 0), (60, 60, 0), (0, 0, 0)] and len(made.panels) == 8
    for panel in made.panels:
        expected = plan(Problem(1, 4, 2, panel.len_q, panel.len_k, 64, mask=CAUSAL), SHAPE, "auto")
        assert made.plan_of(panel) is expected
    assert made.num_tasks == 2 * sum(4 * n * (n + 1) // 2 for n in (3, 4, 3))
    assert CpuBackend().co_resident(made) == max(each.co_resident for each in made.plans.values())


def test_the_fingerprint_covers_every_sequence_in_its_place() -> None:
    first = pack(0, 40, 100)
    assert first.fingerprint == pack(0, 40, 100).fingerprint
    others = (
        pack(0, 60, 100),
        pack(0, 41, 100),
        pack(0, 100),
        pack(0, 40, 100, policy="fa3"),
        pack(0, 40, 100, batch=2),
    )
    assert len({each.fingerprint for each in (first, *others)}) == 1 + len(others)


def test_a_pack_has_no_plan_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"documents\(2\) has documents.*dash_attn\.pack\.Pack"):
        plan(pack(0, 40, 100).problem, SHAPE)


@pytest.mark.parametrize("policy", ["shift", "shift@head"])
def test_a_policy_that_does_not_fit_one_of_the_documents_is_refused(policy: str) -> None:
    pack(0, 10, 20, policy=policy).require_order()  # one tile each, none empty
    pack(0, 10, 40).require_order()
    with pytest.raises(ValueError, match=r"policy 'shift' needs a mask without empty tiles"):
        pack(0, 10, 50, policy=policy).require_order()
    q = torch.zeros(700, 2, 16, requires_grad=True)
    with pytest.raises(ValueError, match=r"policy 'shift' needs a mask without empty tiles"):
        attention(q, q, q, cu_seqlens=[0, 100, 700], causal=True, policy=policy)
    attention(q, q, q, cu_seqlens=[0, 100, 700], policy=policy).sum().backward()


@pytest.mark.parametrize("backend", [CpuBackend(), Sm90Backend(torch.device("cuda"))], ids=lambda each: each.name)
def test_the_tile_of_a_document_is_that_of_the_document_alone(backend: CpuBackend | Sm90Backend) -> None:
    """Long neighbours do not change it."""
    cu = [0, 300, 3000]
    mask = documents(cu, causal=True) & window(2500, None)
    problem = Problem(1, 2, 2, 3000, 3000, 64, mask=mask)
    made = Pack(problem, backend.tile_shape)
    for panel in made.panels:
        g = made.plan_of(panel).program.geometry
        alone = Problem(1, 2, 2, panel.len_q, panel.len_k, 64, mask=CAUSAL & window(2500, None))
        assert TileShape(g.tile_m, g.tile_n) == backend.tile_shape(alone)
