"""The interface of a backend, and the tensors that pass through it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dash_attn.pack import Pack, Planned
    from dash_attn.problem import Problem
    from dash_attn.tiling import TileShape


class Operands(NamedTuple):
    """Inputs of the backward. Tensors are (batch, seqlen, heads, dim). lse is float32 (batch, heads, seqlen), natural
    logarithm."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


class Extras(NamedTuple):
    """What a call has beside the operands.

    sinks  float32 (heads of q), for a problem with sinks
    seed   of dropout: int64 without dimensions, or one for each sequence; dropout.seeds_of gives those of sequences
    dlse   the gradient of lse, float32 in its shape, or None for zeros. Only the backward takes it
    head   the number of the first q head, for dropout: other ranks may have the heads before it
    dsinks room for the gradient of the sinks, float32 (heads of q), contiguous, or None if it is not wanted. The
           backward writes it
    """

    sinks: Tensor | None = None
    seed: Tensor | None = None
    dlse: Tensor | None = None
    head: int = 0
    dsinks: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients of q, k and v, each with the shape and dtype of its tensor."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    @staticmethod
    def room(operands: Operands) -> Gradients:
        """New contiguous tensors, to be written to."""
        return Gradients(*[torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands.qkv])


class KeySums(NamedTuple):
    """dK and dV of the keys of one panel, (1, keys, kv heads, dim). Those of a single panel are float32."""

    dk: Tensor
    dv: Tensor


class Partials(NamedTuple):
    """What some panels give: all of dQ of their queries, and a share of dK and dV for each panel."""

    dq: Tensor
    sums: tuple[KeySums, ...]


@dataclass(frozen=True)
class Options:
    """How a problem runs. Only `deterministic=False` can change bits.

    deterministic  contributions are added in the order of the program, not as they arrive
    sm_margin      SMs of a GPU that the backward leaves to other kernels
    kernel         fields of the backend's config that replace the usual ones: for traces, debugging and experiments
    """

    deterministic: bool = True
    sm_margin: int = 0
    kernel: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        if self.sm_margin < 0:  # more workers than processors would wait for each other forever
            raise ValueError(f"sm_margin must be at least 0, got {self.sm_margin}")


class Forward(Protocol):
    """out and lse of q, k and v. lse includes the sinks."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]: ...


class Backward(Protocol):
    """Writes the gradients of `operands` to `into`, or to new tensors, and returns them. Every element is written."""

    def __call__(
        self, operands: Operands, into: Gradients | None = None, extras: Extras | None = None
    ) -> Gradients: ...


class Held(Protocol):
    """Some panels of a problem, ready to run. A rank of a process group holds such panels.

    The pack says where the rows of its panels lie. q, dout and out are (1, rows, heads, dim) with the queries of the
    panels, lse is (1, heads, rows), and k and v are (1, rows, kv heads, dim) with the keys that the panels see.
    """

    @property
    def pack(self) -> Pack: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
        """out and lse of the panels: the bits of the whole problem."""
        ...

    def backward(self, operands: Operands, extras: Extras | None = None) -> Partials:
        """dQ of the panels, and the fp32 dK and dV of each panel. Nothing is summed over panels."""
        ...

    def fold(self, sums: Iterable[KeySums], into: KeySums) -> None:
        """dK and dV of one sequence, from the sums of all its panels that have keys.

        The panel with the last queries comes first, and the panel with the first queries comes last. The sums are added
        in this order in fp32, and the total is rounded once to the dtype of `into`. The first sums serve as memory for
        the total.
        """
        ...


class Backend(Protocol):
    """The implementation for one device. Tensors are (batch, seqlen, heads, dim), and callers have checked them."""

    name: str
    device: torch.device
    always_deterministic: bool
    takes_rows: bool  # a pack of batch 1 may come as (tokens, heads, dim), with lse (heads, tokens)

    def tile_shape(self, problem: Problem) -> TileShape: ...

    def forward_provider(self, problem: Problem) -> str:
        """The library that computes the forward, with its version."""
        ...

    def software(self) -> str:
        """The code that computes the backward, with its version. It is part of a result's identity."""
        ...

    def forward(self, problem: Problem) -> Forward: ...

    def backward(self, plan: Planned, options: Options) -> Backward:
        """The backward of a plan, with its tables uploaded and its kernels compiled. If the options leave too few
        workers, a ValueError says so."""
        ...

    def workers(self, plan: Planned) -> int: ...

    def co_resident(self, plan: Planned) -> int:
        """The number of workers that must run at the same time. A backward with fewer is refused."""
        ...

    def workspace_bytes(self, plan: Planned) -> int:
        """What a backward allocates beside its results."""
        ...

    def kv_sum_bytes(self, plan: Planned) -> int:
        """The part of the workspace that holds fp32 dK and dV of cut chains and of panels."""
        ...

    def held(self, pack: Pack, options: Options) -> Held:
        """Some panels of a problem, which `pack.held` names."""
        ...
