"""prepare: makes a problem ready to run on a device. Every caller uses it, and a problem is planned once."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from dash_attn.backends import Backend, Backward, Extras, Forward, Gradients, Held, Operands, Options, backend_for
from dash_attn.backends.sinks import write_sink_gradient, write_without_keys
from dash_attn.kept import grown, kept
from dash_attn.lazily import cached_property
from dash_attn.pack import Pack, Planned
from dash_attn.plan import plan
from dash_attn.problem import Panel, Problem, SequenceColumn
from dash_attn.program import Program


class Prepared:
    """A problem on a device, ready to run. The plan is made on first use: the forward needs none."""

    def __init__(self, problem: Problem, policy: str | Program, options: Options, backend: Backend) -> None:
        self.problem, self.policy, self.options, self.backend = problem, policy, options, backend
        # Nothing is launched if no sequence has both queries and keys, or if the window is empty.
        table = problem.sequence_table
        both = (table[:, SequenceColumn.LEN_Q] > 0) & (table[:, SequenceColumn.LEN_K] > 0)
        self.is_empty = not both.any() or problem.mask.is_blind
        self._takes_rows = backend.takes_rows and problem.is_packed
        self._is_unordered = not options.deterministic and not backend.always_deterministic
        self._kind = backend.device.type
        self._on_gpu = self._kind == "cuda"
        self._index = backend.device.index if self._on_gpu else None
        self._has_order = False
        self._counted: set[str] = set()  # the calls after which the caches know how large this object is

    @cached_property
    def plan(self) -> Planned:
        if self.problem.has_parts:
            if isinstance(self.policy, Program):
                raise ValueError(
                    "policy is a program, which orders whole sequences of one length, and packed sequences and panels "
                    "need an order for each length: give the name of a policy"
                )
            return Pack(self.problem, self.backend.tile_shape, self.policy)
        return plan(self.problem, self.backend.tile_shape(self.problem), self.policy)

    def require_order(self) -> None:
        """Raise an error if the policy cannot order the problem. Later calls of a problem in order cost nothing."""
        if self._has_order:
            return
        if isinstance(self.plan, Pack):
            self.plan.require_order()
        self._has_order = True

    @cached_property
    def run_forward(self) -> Forward:
        return self.backend.forward(self.problem)

    @cached_property
    def run_backward(self) -> Backward:
        return self.backend.backward(self.plan, self.options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
        """out (batch, seqlen, heads, dim), and lse (batch, heads, seqlen) in float32.

        Packed tensors (tokens, heads, dim) give out (tokens, heads, dim) and lse (heads, tokens). A row that sees no
        key has out = 0, and lse = -inf or its sink.
        """
        if q.dim() == 3 and not self._takes_rows:
            out, lse = self.forward(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), extras)
            return out.squeeze(0), lse.squeeze(0)
        if self._is_elsewhere():
            with torch.cuda.device(self._index):
                return self.forward(q, k, v, extras)
        if self.is_empty:
            *batch, rows, heads, _ = q.shape
            out = q.new_empty((*q.shape[:-1], v.shape[-1]))
            lse = q.new_empty((*batch, heads, rows), dtype=torch.float32)
            write_without_keys(out, lse, None if extras is None else extras.sinks)
            return out, lse
        if self._is_plain():
            attended = self.run_forward(q, k, v, extras)
        else:
            with torch.autocast(self._kind, enabled=False):
                attended = self.run_forward(q, k, v, extras)
        if "forward" not in self._counted:
            self._count("forward")
        return attended

    def backward(self, operands: Operands, into: Gradients | None = None, extras: Extras | None = None) -> Gradients:
        """The gradients, written to `into` if given. Shapes are as in `forward`. `extras.dsinks` is written too."""
        if operands.q.dim() == 3 and not self._takes_rows:
            into = Gradients.room(operands) if into is None else into
            if extras is not None and extras.dlse is not None:
                extras = extras._replace(dlse=extras.dlse.unsqueeze(0))
            inside = Gradients(*[x.unsqueeze(0) for x in into])
            self.backward(Operands(*[x.unsqueeze(0) for x in operands]), inside, extras)
            return into
        if self._is_elsewhere():
            with torch.cuda.device(self._index):
                return self.backward(operands, into, extras)
        if self.is_empty:
            into = Gradients.room(operands) if into is None else into
            for grad in into:
                grad.zero_()
            write_sink_gradient(operands, extras)
            return into
        self.alert()
        if self._is_plain():
            grads = self.run_backward(operands, into, extras)
        else:
            with torch.autocast(self._kind, enabled=False):
                grads = self.run_backward(operands, into, extras)
        if "backward" not in self._counted:
            self._count("backward")
        return grads

    def alert(self) -> None:
        """Raise an error, or warn, if torch asks for determinism and a backward of this problem has no order."""
        if self._is_unordered and torch.are_deterministic_algorithms_enabled():
            _alert()

    def _count(self, call: str) -> None:
        """The first call has made the plan and the tables. They are as large as they will ever be."""
        self._counted.add(call)
        grown(self)

    def _is_elsewhere(self) -> bool:
        """Whether another GPU is the current one. Kernels are launched on the current GPU."""
        return self._index is not None and torch.cuda.current_device() != self._index

    def _is_plain(self) -> bool:
        """False under autocast, which would round float32 sums and must be turned off.

        While a CUDA graph is captured, this object is kept for ever: the graph reads its tables at every replay.
        """
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            _captured.add(self)
        return not torch.is_autocast_enabled(self._kind)


_captured: set[Prepared] = set()


def _alert() -> None:
    """What torch's own operators do if they have no fixed order and torch asks for determinism."""
    said = (
        "the backward of dash_attn was called with deterministic=False, or with FLASH_ATTENTION_DETERMINISTIC=0, and "
        "torch.use_deterministic_algorithms(True) is set: leave deterministic out, or give deterministic=True"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(said)
    warnings.warn(said, stacklevel=3)


@kept(growing=lambda prepared: prepared)
def prepare(problem: Problem, policy: str | Program, options: Options, like: torch.device | Backend) -> Prepared:
    """Make the problem ready for tensors on the device `like`. Equal arguments give the same object.

    A backend takes the place of a device that is not here.
    """
    return Prepared(problem, policy, options, backend_for(like) if isinstance(like, torch.device) else like)


@kept(growing=lambda held: held.pack)
def prepare_panels(
    problem: Problem, held: tuple[Panel, ...], policy: str, options: Options, like: torch.device
) -> Held:
    """Make some panels of a problem ready to run, on tensors that have only their rows.

    `held` has panels of `problem.panel_list`. The q_row and k_row of each are replaced by its rows in those tensors.
    """
    backend = backend_for(like)
    return backend.held(Pack(problem, backend.tile_shape, policy, held), options)
