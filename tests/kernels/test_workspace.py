"""Workspaces that are kept between calls, without a GPU."""

import threading

import pytest
import torch

from dash_attn.kernels.sm90 import launch
from dash_attn.kernels.sm90.config import select
from dash_attn.kernels.sm90.launch import Workspace

CFG = select(64, "bf16", "full")


def q(tokens: int = 100) -> torch.Tensor:
    return torch.empty(1, tokens, 2, 64)


def kept(like: torch.Tensor) -> Workspace:
    return Workspace.kept(CFG, like)[0]


@pytest.fixture(autouse=True)
def default_stream(monkeypatch):
    monkeypatch.setattr(launch, "on_default_stream", lambda device: True)
    monkeypatch.setattr(launch, "_kept", launch._Kept())


def test_the_next_call_of_a_size_uses_it_again():
    first = kept(q())
    assert kept(q()).dq_sum is first.dq_sum
    assert kept(q(200)).dq_sum.shape != first.dq_sum.shape
    assert kept(q()).dq_sum is not first.dq_sum  # only the last is kept


def test_not_on_other_streams_nor_large(monkeypatch):
    monkeypatch.setattr(launch, "KEPT_FLOATS", 100 * 2 * 64)
    assert kept(q()).dq_sum is kept(q()).dq_sum
    assert kept(q(101)).dq_sum is not kept(q(101)).dq_sum
    monkeypatch.setattr(launch, "on_default_stream", lambda device: False)
    assert kept(q()).dq_sum is not kept(q()).dq_sum


def test_each_thread_has_its_own():
    mine, others = kept(q()), []
    thread = threading.Thread(target=lambda: others.append(kept(q())))
    thread.start()
    thread.join()
    assert others[0].dq_sum is not mine.dq_sum


def test_bytes():
    ws = Workspace.of(CFG, q())
    assert sum(x.numel() * x.element_size() for x in ws) == Workspace.nbytes(CFG, 2, 100)
