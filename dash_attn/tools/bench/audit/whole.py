"""Targets as a whole: forward and backward of several sequences in one call, as a batch or packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_attn.backends import Operands, Options
from dash_attn.prepare import prepare
from dash_attn.problem import Mask, Problem, documents
from dash_attn.tools.bench import peers
from dash_attn.tools.bench.audit.targets import CONTROL, Conditions, parse
from dash_attn.tools.bench.operands import Drawn

UNDISTURBED = Conditions()
CONTROLS = ("descending", "spt")  # policies of the control: of a sequence alone, and of all others


class Bits(NamedTuple):
    """Everything that attention computes of one sequence: lse (heads, seqlen), the others (seqlen, heads, dim)."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True, eq=False)
class CallInputs:
    """One call. The tensors of each sequence are (seqlen, heads, dim). A batch has sequences of one length."""

    sequences: tuple[Drawn, ...]
    mask: Mask
    packed: bool = False
    conditions: Conditions = UNDISTURBED
    panels: int = 1

    def tensors(self) -> Drawn:
        """Of all sequences: (batch, seqlen, heads, dim), or packed (1, tokens, heads, dim)."""
        parts = zip(*self.sequences, strict=True)
        if self.packed:
            return Drawn(*(torch.cat(each).unsqueeze(0) for each in parts))
        return Drawn(*(torch.stack(each) for each in parts))

    def problem(self) -> Problem:
        q, k = self.tensors()[1:3]
        ends = [0, *accumulate(len(each.q) for each in self.sequences)]
        mask = self.mask & documents(ends) if self.packed else self.mask
        sizes = (q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3])
        return Problem(*sizes, dtype=str(q.dtype).removeprefix("torch."), mask=mask, panels=self.panels)

    def apart(self, results: tuple[Tensor, ...]) -> list[Bits]:
        """The results of each sequence. They have the shapes of `tensors`, and lse is (batch, heads, seqlen)."""
        out, lse, *grads = results
        rows_first = (out, lse.transpose(1, 2), *grads)
        if self.packed:
            sizes = [len(each.q) for each in self.sequences]
            each = zip(*(torch.split(x[0], sizes) for x in rows_first), strict=True)
        else:
            each = zip(*(x.unbind() for x in rows_first), strict=True)
        return [Bits(parts[0], parts[1].T, *parts[2:]) for parts in each]


Whole = Callable[[CallInputs], list[Bits]]


def whole_of(name: str) -> Whole:
    """A target by its name, or an error that says why it cannot run here."""
    if name == CONTROL:
        return _control
    kind, rest = parse(name)
    if kind in ("ours", "any"):
        return partial(_ours, rest, kind == "ours")
    if kind == "function":
        return partial(_function, rest)
    if rest not in ("fa4", "fa4 det"):
        raise NotImplementedError(f"{rest} takes no packed sequences: give fa4, fa4_det, ours or a function")
    return partial(_fa4, rest == "fa4 det")


def _ours(policy: str, ordered: bool, inputs: CallInputs) -> list[Bits]:
    problem, (dout, q, k, v) = inputs.problem(), inputs.tensors()
    kernel: tuple[tuple[str, object], ...] = ()
    if q.device.type == "cpu":
        undisturbed, given = prepare(problem, policy, Options(), q.device), inputs.conditions
        needed = undisturbed.backend.co_resident(undisturbed.plan)
        kernel = (("threads", given.threads), ("workers", given.workers and max(given.workers, needed)))
    prepared = prepare(problem, policy, Options(ordered, inputs.conditions.sm_margin, kernel), q.device)
    out, lse = prepared.forward(q, k, v)
    return inputs.apart((out, lse, *prepared.backward(Operands(dout, q, k, v, out, lse))))


def _control(inputs: CallInputs) -> list[Bits]:
    """Ours with a mistake: a sequence alone has another order than a sequence in company."""
    alone = len(inputs.sequences) == 1 and not inputs.packed and inputs.conditions == UNDISTURBED
    return _ours(CONTROLS[not alone], True, inputs)


def _fa4(deterministic: bool, inputs: CallInputs) -> list[Bits]:
    problem, (dout, *qkv) = inputs.problem(), inputs.tensors()
    peers.on_gpu(dout.device)
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    how: dict[str, Any] = {"deterministic": deterministic, "return_lse": True}
    if inputs.packed:
        dout, *qkv = (x[0] for x in (dout, *qkv))
        how |= peers.varlen(problem, dout.device)
    else:
        how["causal"] = peers.causal_or_full(problem)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out, lse = (flash_attn_varlen_func if inputs.packed else flash_attn_func)(*leaves, **how)
    results = (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))
    return inputs.apart(tuple(x.unsqueeze(0) for x in results) if inputs.packed else results)


def _function(name: str, inputs: CallInputs) -> list[Bits]:
    """Our forward, and a function with the arguments of dash_attn.backward."""
    module, _, attribute = name.partition(":")
    problem, (dout, q, k, v) = inputs.problem(), inputs.tensors()
    out, lse = prepare(problem, "auto", Options(), q.device).forward(q, k, v)
    how: dict[str, Any] = {"causal": inputs.mask.is_causal}
    if inputs.packed:
        assert problem.mask.documents is not None
        how["cu_seqlens_q"] = list(problem.mask.documents.cu_q)
    grads = getattr(import_module(module), attribute)(dout, q, k, v, out, lse, **how)
    return inputs.apart((out, lse, *grads))
