"""Which backend computes on which device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dash_attn import cpu
from dash_attn.cpu import Gradients, Operands
from dash_attn.plan import Plan, placement
from dash_attn.problem import Problem
from dash_attn.tiling import TileShape


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


class CpuBackend:
    """Order is always kept: it costs nothing that a CPU would notice."""

    name = "cpu"
    always_deterministic = True

    def tile_shape(self, problem: Problem) -> TileShape:
        return cpu.tile_shape(problem)

    def forward_provider(self, problem: Problem) -> str:
        return f"{cpu.PROVIDER} (torch {torch.__version__})"

    def software(self) -> str:
        kind = torch.backends.cpu.get_cpu_capability()
        return f"kernel {_sources()[:12]}, torch {torch.__version__}, {kind}"

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cpu.forward(problem, q, k, v)

    def bound(self, planned: Plan, options: Options, alike: Sequence[Tensor]) -> Backward:
        def gradients(operands: Operands, into: Gradients) -> None:
            placed = placement(planned, self.workers(planned))  # torch's number of threads may have changed
            cpu.backward(planned.problem, planned.program, placed, operands, into)

        return gradients

    def workers(self, planned: Plan) -> int:
        return max(torch.get_num_threads(), planned.co_resident)

    def workspace_bytes(self, planned: Plan) -> int:
        return cpu.workspace_bytes(planned.problem, planned.program, self.workers(planned), torch.get_num_threads())


def backend_for(device: torch.device) -> Backend:
    """The backend of a device, or an error that names the way out. Nothing falls back silently."""
    if device.type == "cpu":
        return CpuBackend()
    if device.type == "cuda":
        from dash_attn.api import hopper  # the kernel's modules are only for machines that can run it

        hopper.require(device)
        return hopper.HopperBackend()
    raise NotImplementedError(
        f"q is on {device}: dash_attn computes on cpu and cuda (Hopper) tensors. Move q, k and v with .cpu(), or use "
        "torch's scaled_dot_product_attention there"
    )


@lru_cache(maxsize=1)
def _sources() -> str:
    """Hash of what computes on the CPU, as the GPU kernel's cache has one of what it compiles."""
    digest = hashlib.sha256()
    for path in sorted(Path(cpu.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
