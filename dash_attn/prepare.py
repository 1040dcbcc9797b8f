"""prepare: the one way from a problem to something that runs it. Every caller goes through it and plans once."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from dash_attn.backends import Backend, Backward, Forward, Gradients, Operands, Options, backend_for
from dash_attn.plan import Plan, plan
from dash_attn.problem import Problem

KEPT = 256  # prepared problems that stay ready


class Prepared:
    """A problem on a device, ready to run. The plan is made when a gradient or the plan itself is first asked for."""

    def __init__(self, problem: Problem, policy: str, options: Options, backend: Backend) -> None:
        self.problem, self.policy, self.options, self.backend = problem, policy, options, backend

    @cached_property
    def plan(self) -> Plan:
        return plan(self.problem, self.backend.tile_shape(self.problem), self.policy)

    @cached_property
    def run_forward(self) -> Forward:
        return self.backend.forward(self.problem)

    @cached_property
    def run_backward(self) -> Backward:
        return self.backend.backward(self.plan, self.options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out (batch, seqlen, heads, dim) and lse (batch, heads, seqlen), float32. Rows that see nothing have out = 0
        and lse = -inf. Packed tensors (tokens, heads, dim) give out (tokens, heads, dim) and lse (heads, tokens)."""
        if q.ndim == 3:
            out, lse = self.forward(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
            return out.squeeze(0), lse.squeeze(0)
        if self.is_empty:
            lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float32)
            return q.new_zeros(q.shape), lse
        self._stays_if_captured(q)
        with _without_autocast(q):
            return self.run_forward(q, k, v)

    def backward(self, operands: Operands, into: Gradients | None = None) -> Gradients:
        """The gradients, written to `into` if given. Packed tensors as in `forward`."""
        if into is None:
            into = Gradients(*[torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands[1:4]])
        if operands.q.ndim == 3:
            self.backward(Operands(*[x.unsqueeze(0) for x in operands]), Gradients(*[x.unsqueeze(0) for x in into]))
            return into
        if self.is_empty:
            for grad in into:
                grad.zero_()
            return into
        self._stays_if_captured(operands.q)
        with _without_autocast(operands.q):
            self.run_backward(operands, into)
        return into

    @cached_property
    def is_empty(self) -> bool:
        """There is no query or no key: nothing is launched."""
        return not (self.problem.len_q and self.problem.len_k)

    def _stays_if_captured(self, q: Tensor) -> None:
        """A CUDA graph reads the tables of what it captured at every replay, so they are never given back."""
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            _captured.add(self)


_captured: set[Prepared] = set()


@lru_cache(maxsize=KEPT)
def prepare(problem: Problem, policy: str, options: Options, like: torch.device) -> Prepared:
    """The problem made ready for tensors on the device `like`. Equal arguments give the same object."""
    return Prepared(problem, policy, options, backend_for(like))


def _without_autocast(x: Tensor) -> nullcontext[None] | torch.autocast:
    """Autocast would round what is computed in float32."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


_NOTHING = nullcontext()
