"""Packed sequences: forward and backward run sequence by sequence, each as if it were alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dash_attn.backends.base import Gradients, Operands
from dash_attn.backends.cpu.backward import CpuConfig, backward
from dash_attn.backends.cpu.forward import fill
from dash_attn.pack import Pack
from dash_attn.problem import Problem, Sequence


@torch.no_grad()
def forward_pack(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, as in `forward`."""
    out = torch.empty(q.shape, dtype=q.dtype, device="cpu")
    lse = torch.empty((problem.batch, problem.heads_q, problem.len_q), dtype=torch.float32, device="cpu")
    for sequence in problem.sequences:
        rows = Rows(problem, sequence)
        if sequence.len_q and sequence.len_k:
            operands = rows.of_q(q), rows.of_k(k), rows.of_k(v)
            alone = problem.distinct[sequence.len_q, sequence.len_k]
            fill(alone, operands, (rows.of_q(out), rows.of_lse(lse)))
        elif sequence.len_q:
            rows.of_q(out).zero_()
            rows.of_lse(lse).fill_(-math.inf)
    return out, lse


@torch.no_grad()
def backward_pack(pack: Pack, config: CpuConfig, operands: Operands, into: Gradients | None = None) -> Gradients:
    """Write dQ, dK and dV. Each sequence follows its own plan."""
    into = Gradients.room(operands) if into is None else into
    for sequence in pack.sequences:
        rows = Rows(pack.problem, sequence)
        grads = Gradients(rows.of_q(into.dq), rows.of_k(into.dk), rows.of_k(into.dv))
        if sequence.len_q and sequence.len_k:
            backward(pack.plan_of(sequence), config, rows.of(operands), grads)
        else:
            for grad in grads:
                grad.zero_()
    return into


class Rows:
    """Views of the rows of one sequence, in tensors (batch, seqlen, ...). They have batch 1."""

    def __init__(self, problem: Problem, sequence: Sequence) -> None:
        self._q = _place(sequence.q_row, sequence.len_q, problem.len_q)
        self._k = _place(sequence.k_row, sequence.len_k, problem.len_k)

    def of(self, operands: Operands) -> Operands:
        dout, q, k, v, out, lse = operands
        return Operands(self.of_q(dout), self.of_q(q), self.of_k(k), self.of_k(v), self.of_q(out), self.of_lse(lse))

    def of_q(self, x: Tensor) -> Tensor:
        return x[self._q]

    def of_k(self, x: Tensor) -> Tensor:
        return x[self._k]

    def of_lse(self, lse: Tensor) -> Tensor:
        batch, rows = self._q
        return lse[batch, :, rows]


def _place(row: int, count: int, length: int) -> tuple[slice, slice]:
    """Batch entry and rows in it. An empty sequence at the end of the last batch entry has no batch entry."""
    batch, first = divmod(row, length) if length else (0, 0)
    return slice(batch, batch + 1), slice(first, first + count)
