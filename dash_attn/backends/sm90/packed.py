"""The backward of a pack, for tensors with a batch and without."""

from __future__ import annotations

from torch import Tensor

from dash_attn.backends.base import Extras, Gradients, Operands

from .launch import Launch


class PackedBackward:
    """The kernel takes rows, (tokens, heads, dim), and lse as (heads, tokens). All entries of a batch are one pack."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def __call__(self, operands: Operands, into: Gradients | None = None, extras: Extras | None = None) -> Gradients:
        if operands.q.dim() == 3:
            return self.launch(operands, into, extras)
        if extras is not None and extras.dlse is not None:
            extras = extras._replace(dlse=lse_rows(extras.dlse))
        grads = self.launch(rows_of(operands), extras=extras)
        if into is None:
            return Gradients(*[grad.view(x.shape) for grad, x in zip(grads, operands.qkv, strict=True)])
        for given, grad in zip(into, grads, strict=True):
            given.copy_(grad.view(given.shape))
        return into


def rows_of(operands: Operands) -> Operands:
    """Operands with a batch as rows."""
    dout, q, k, v, out = [x.flatten(0, 1) for x in operands[:5]]
    return Operands(dout, q, k, v, out, lse_rows(operands.lse))


def lse_rows(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen) as (heads, rows)."""
    return lse.transpose(0, 1).flatten(1)
