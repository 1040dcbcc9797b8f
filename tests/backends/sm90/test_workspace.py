"""Workspaces that are kept between calls, without a GPU."""

import threading

import pytest
import torch

from dash_attn.backends.sm90 import tables, workspace
from dash_attn.backends.sm90.config import select
from dash_attn.backends.sm90.workspace import Keeper, Workspace

CFG = select(64, "bf16", "full")


def q(tokens: int = 100) -> torch.Tensor:
    return torch.empty(1, tokens, 2, 64)


def kept(like: torch.Tensor, stream: int = 0) -> Workspace:
    return Keeper(CFG)(like, like, torch.empty_like(like), stream).ws


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(workspace, "_kept", workspace._Kept())


def test_the_next_call_of_a_size_uses_it_again():
    first = kept(q())
    assert kept(q()).dq_sum is first.dq_sum
    assert kept(q(200)).dq_sum.shape != first.dq_sum.shape
    assert kept(q()).dq_sum is not first.dq_sum  # only the last is kept


def test_not_on_other_streams_nor_large(monkeypatch):
    monkeypatch.setattr(workspace, "KEPT_FLOATS", 100 * 2 * 64)
    assert kept(q()).dq_sum is kept(q()).dq_sum
    assert kept(q(101)).dq_sum is not kept(q(101)).dq_sum
    assert kept(q(), stream=7).dq_sum is not kept(q()).dq_sum


def test_a_keeper_takes_turns_with_another_of_a_different_size():
    one, two = Keeper(CFG), Keeper(CFG)
    for _ in range(2):
        for keeper, tokens in ((one, 100), (two, 300)):
            like = q(tokens)
            ws = keeper(like, like, torch.empty_like(like), 0).ws
            assert ws.lse2.shape == Workspace.of(CFG, like).lse2.shape


def test_each_thread_has_its_own():
    mine, others = kept(q()), []
    thread = threading.Thread(target=lambda: others.append(kept(q())))
    thread.start()
    thread.join()
    assert others[0].dq_sum is not mine.dq_sum


def size(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("keys", [100, 100_000])
def test_bytes(dim, keys, monkeypatch):
    cfg, like = select(dim, "bf16", "full", True, keys), torch.empty(1, 100, 2, dim, dtype=torch.bfloat16)
    assert size(*Workspace.of(cfg, like)) == Workspace.nbytes(cfg, 2, 100)
    monkeypatch.setattr(workspace, "KEPT_FLOATS", 0)
    ws = Workspace.of(cfg, like, torch.empty_like(like))
    assert Workspace.nbytes(cfg, 2, 100) == (size(*ws) if cfg.last_finishes else size(ws.dq_sum))


@pytest.mark.parametrize("dim", [8, 64, 80, 128])
@pytest.mark.parametrize("keys", [100, 100_000])
def test_what_lies_in_dq(dim, keys):
    cfg = select(dim, "bf16", "full", True, keys)
    dq = torch.zeros(2, 300, 3, dim, dtype=torch.bfloat16)
    ws = Workspace.of(cfg, dq, dq)
    small, room = (ws.lse2, ws.delta, ws.counters), dq.untyped_storage().data_ptr()
    assert all((x.untyped_storage().data_ptr() == room) == (not cfg.last_finishes) for x in small)
    assert ws.dq_sum.untyped_storage().data_ptr() != room
    for number, x in enumerate(small):
        assert x.data_ptr() % 16 == 0
        x.fill_(number + 1)
    assert [x.unique().tolist() for x in small] == [[1], [2], [3]], "they overlap"
    assert ws.counters.shape == (6, -(-300 // cfg.tile_m), *cfg.counters)


def test_what_does_not_fit_or_has_gaps_lends_nothing():
    cfg = select(64, "bf16", "full", True, 100_000)
    for dq in (torch.zeros(1, 1, 1, 64).bfloat16(), torch.zeros(2, 300, 6, 64).bfloat16()[:, :, ::2]):
        assert Workspace.of(cfg, dq, dq).lse2.untyped_storage().data_ptr() != dq.untyped_storage().data_ptr()


@pytest.mark.parametrize("keys", [100, 100_000])
@pytest.mark.parametrize(("dim", "tile"), [(64, 128), (80, 64), (96, 64), (128, 64)])
def test_no_larger_than_fa4s(dim, tile, keys):
    """Its own, for heads that are not grouped: sums, LSE, delta and a word a q tile, of 128 rows or 64. (Of head dim 80
    it sums 96 columns.)"""
    for planes, seqlen in ((64, 100), (64, 1024), (32, 16384)):
        n_q = -(-seqlen // tile)
        theirs = 4 * planes * n_q * (tile * dim + 2 * tile + 1)
        cfg = select(dim, "bf16", "causal", True, keys)
        if cfg.last_finishes or not workspace.keeps(cfg, planes, seqlen):
            assert Workspace.nbytes(cfg, planes, seqlen) <= theirs


def test_more_turns_than_a_counter_holds():
    from types import SimpleNamespace

    import numpy as np

    program = SimpleNamespace(contributors=np.array([tables.MOST_TURNS + 1]))
    with pytest.raises(ValueError, match="65536 kv tiles meet one q tile"):
        tables.DeviceTables.of(program, None, (), torch.device("cpu"))
