"""Rows without keys have out = 0, and lse = -inf or the sink of their head, whichever part of the code fills them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dash_attn.backends import Extras, Options
from dash_attn.prepare import prepare
from dash_attn.problem import FULL, Features, Mask, Problem, documents, window
from dash_attn.tools.bench.operands import draw

CPU = torch.device("cpu")
SINKS = torch.tensor([-1.5, 0.25, 3.0, -math.inf])
# What fills the rows: the call itself, the forward tile by tile, and the forward of a pack. Then the rows without keys.
CASES: dict[str, tuple[Mask, int, slice]] = {
    "no keys": (FULL, 0, slice(None)),
    "a blind window": (Mask(-7, 3), 6, slice(None)),
    "more queries than keys": (window(None, 0), 4, slice(0, 5)),
    "a document without keys": (documents([0, 4, 9], [0, 0, 6]), 6, slice(0, 4)),
    "documents without keys": (documents([0, 4, 9], [0, 0, 0]), 0, slice(None)),
}


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize(("mask", "len_k", "blind"), CASES.values(), ids=CASES)
def test_rows_without_keys(mask: Mask, len_k: int, blind: slice, sinks: Tensor | None) -> None:
    problem = Problem(2, 4, 2, 9, len_k, 16, "float32", mask=mask, features=Features(sinks=sinks is not None, dim_v=8))
    _, q, k, v = draw(problem, CPU)
    out, lse = prepare(problem, "auto", Options(), CPU).forward(q, k, v, Extras(sinks))
    assert out.shape == (2, 9, 4, 8) and lse.shape == (2, 4, 9) and lse.is_contiguous() and lse.dtype == torch.float32
    want = torch.full((4,), -math.inf) if sinks is None else sinks
    assert not out[:, blind].any() and torch.equal(lse[..., blind], want[:, None].expand_as(lse[..., blind]))
    assert blind == slice(None) or out[:, blind.stop :].all()
