"""Sinks by operations of torch: in rows without keys, and their gradient on CPUs, without a kernel, and of ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dash_attn.backends.base import Extras, Operands
from dash_attn.backends.cpu.threads import run_jobs


def write_without_keys(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Fill what rows without keys have: out = 0, and lse = -inf or the sink of the head. lse is (..., heads, rows)."""
    out.zero_()
    if sinks is None:
        lse.fill_(-math.inf)
    else:
        lse.copy_(sinks[:, None])


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, extras: Extras) -> Tensor:
    """float32 (heads of q): the sum over rows of exp(sink - lse) * (dlse - delta), delta = sum(out * dout).

    The rows are added in pairs, the pairs in pairs, and so on. This order depends on the number of rows alone. On a
    CPU one thread computes everything, because torch's results can follow the number of its threads.
    """
    if out.device.type != "cpu":
        return _summed(dout, out, lse, extras)
    results: list[Tensor] = []
    run_jobs([lambda: results.append(_summed(dout, out, lse, extras))], threads=1)
    return results[0].clone()  # a thread of run_jobs makes tensors of inference mode


def write_sink_gradient(operands: Operands, extras: Extras | None) -> None:
    """Fill `extras.dsinks`, if a call has it."""
    if extras is not None and extras.dsinks is not None:
        extras.dsinks.copy_(sink_gradient(operands.dout, operands.out, operands.lse, extras))


def _summed(dout: Tensor, out: Tensor, lse: Tensor, extras: Extras) -> Tensor:
    sinks, dlse = extras.sinks, extras.dlse
    assert sinks is not None
    product = torch.empty(out.shape, dtype=torch.float32, device=out.device).copy_(out).mul_(dout)
    heads_last = lse.transpose(-1, -2).contiguous()  # (..., rows, heads), as delta
    terms = product.sum(-1).neg_()
    if dlse is not None:
        terms.add_(dlse.transpose(-1, -2))
    # Without a key and with a sink of -inf, lse is -inf too. Such a row has no weight.
    weight = heads_last.neg().add_(sinks).exp_().masked_fill_(heads_last == -math.inf, 0.0)
    terms = terms.mul_(weight).view(-1, len(sinks))
    while len(terms) > 1:
        half = -(-len(terms) // 2)
        terms[: len(terms) - half].add_(terms[half:])
        terms = terms[:half]
    return terms.sum(0)  # of one row, or of none
