"""Packs on the GPU: the rows of a batch as one row after the other."""

from __future__ import annotations

from dash_attn.backends.base import Backward, Gradients, Operands
from dash_attn.problem import Problem


def flat(problem: Problem, run: Backward) -> Backward:
    """A backward for tensors (batch, seqlen, ...) from one for tensors (1, batch * seqlen, ...)."""
    if problem.batch == 1:
        return run

    def call(operands: Operands, into: Gradients | None = None) -> Gradients:
        dout, q, k, v, out = [x.flatten(0, 1)[None] for x in operands[:5]]
        grads = run(Operands(dout, q, k, v, out, operands.lse.transpose(0, 1).flatten(1, 2)[None]))
        into = Gradients.room(operands) if into is None else into
        for given, grad in zip(into, grads, strict=True):
            given.copy_(grad.view(given.shape))
        return into

    return call
