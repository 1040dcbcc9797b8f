"""A batch of packs: the kernel takes all batch entries as one pack."""

from __future__ import annotations

from dash_attn.backends.base import Gradients, Operands

from .launch import Launch


class Flat:
    """A backward for tensors (batch, seqlen, ...) from one for tensors (1, batch * seqlen, ...)."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def __call__(self, operands: Operands, into: Gradients | None = None) -> Gradients:
        dout, q, k, v, out = [x.flatten(0, 1)[None] for x in operands[:5]]
        lse = operands.lse.transpose(0, 1).flatten(1, 2)[None]
        grads = self.launch(Operands(dout, q, k, v, out, lse))
        if into is None:
            return Gradients(*[grad.view(x.shape) for grad, x in zip(grads, operands[1:4], strict=True)])
        for given, grad in zip(into, grads, strict=True):
            given.copy_(grad.view(given.shape))
        return into
