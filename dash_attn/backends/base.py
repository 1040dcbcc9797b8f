"""What a backend is: the interface that every device's implementation has, and the tensors that pass through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from dash_attn.plan import Plan
from dash_attn.problem import Problem
from dash_attn.tiling import TileShape


class Operands(NamedTuple):
    """Of the backward: tensors (batch, seqlen, heads, dim), and lse (batch, heads, seqlen), fp32, natural logarithm."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Of q, k and v, each like its tensor."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Options:
    """What does not change the problem: whether order must be kept, and processors to leave to others."""

    deterministic: bool
    sm_margin: int = 0


Backward = Callable[[Operands, Gradients], None]  # writes what it is given to write to


class Backend(Protocol):
    """Tensors are (batch, seqlen, heads, dim) and checked. A backward is bound to its plan once, with the tensors of
    its first call; those of later calls are like them in all but values and addresses."""

    name: str
    always_deterministic: bool

    def tile_shape(self, problem: Problem) -> TileShape: ...

    def forward_provider(self, problem: Problem) -> str: ...

    def software(self) -> str: ...

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def bound(self, planned: Plan, options: Options, alike: Sequence[Tensor]) -> Backward: ...

    def workers(self, planned: Plan) -> int: ...

    def workspace_bytes(self, planned: Plan) -> int: ...
