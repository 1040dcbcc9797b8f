"""The CPU as a backend."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import torch

from dash_attn.backends.base import Backward, Forward, Held, Options
from dash_attn.backends.cpu.backward import CpuConfig, backward, kv_sum_bytes, workspace_bytes
from dash_attn.backends.cpu.forward import PROVIDER, forward
from dash_attn.backends.cpu.packed import CpuHeld, backward_pack, forward_pack, pack_kv_sum_bytes, pack_workspace_bytes
from dash_attn.backends.cpu.probe import probe
from dash_attn.backends.cpu.shape import tile_shape
from dash_attn.backends.sources import source_hash
from dash_attn.pack import Pack, Planned
from dash_attn.problem import Problem
from dash_attn.tiling import TileShape


class CpuBackend:
    """The CPU backend. It always adds contributions in order, because the order costs no time worth saving."""

    name = "cpu"
    device = torch.device("cpu")
    always_deterministic = True
    takes_rows = False

    def tile_shape(self, problem: Problem) -> TileShape:
        return tile_shape(problem)

    def forward_provider(self, problem: Problem) -> str:
        return f"{PROVIDER} (torch {torch.__version__})"

    def software(self) -> str:
        kind = torch.backends.cpu.get_cpu_capability()
        precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        products = "ieee" if precision == "none" else precision
        code = f"kernel {_sources()[:12]}, torch {torch.__version__}, {kind}"
        return f"{code}, float32 products {products}, arithmetic {probe()[:12]}"

    def forward(self, problem: Problem) -> Forward:
        if problem.has_parts:
            return partial(forward_pack, Pack(problem, tile_shape))
        return partial(forward, problem)

    def backward(self, plan: Planned, options: Options) -> Backward:
        config = CpuConfig(**dict(options.kernel))  # type: ignore[arg-type]
        if isinstance(plan, Pack):
            return partial(backward_pack, plan, config)
        return partial(backward, plan, config)

    def workers(self, plan: Planned) -> int:
        return max(CpuConfig().thread_count(), self.co_resident(plan))

    def co_resident(self, plan: Planned) -> int:
        if isinstance(plan, Pack):  # its panels run one after the other
            return max((each.co_resident for each in plan.plans.values()), default=0)
        return plan.co_resident

    def workspace_bytes(self, plan: Planned) -> int:
        if isinstance(plan, Pack):
            return pack_workspace_bytes(plan, CpuConfig())
        return workspace_bytes(plan, CpuConfig())

    def kv_sum_bytes(self, plan: Planned) -> int:
        return pack_kv_sum_bytes(plan, CpuConfig()) if isinstance(plan, Pack) else kv_sum_bytes(plan)

    def held(self, pack: Pack, options: Options) -> Held:
        return CpuHeld(pack, CpuConfig(**dict(options.kernel)))  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def _sources() -> str:
    """Hash of the code in this folder, and of what it shares with other backends."""
    folder = Path(__file__).parent
    return source_hash([*folder.glob("*.py"), folder.parent / "dropout.py", folder.parent / "sinks.py"])
