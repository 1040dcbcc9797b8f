"""The CPU as a backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from dash_attn.backends import cpu
from dash_attn.backends.base import Backward, Gradients, Operands, Options
from dash_attn.backends.sources import source_hash
from dash_attn.plan import Plan, placement
from dash_attn.problem import Problem
from dash_attn.tiling import TileShape


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


@lru_cache(maxsize=1)
def _sources() -> str:
    """Hash of the code in this folder."""
    return source_hash(Path(__file__).parent.glob("*.py"))
