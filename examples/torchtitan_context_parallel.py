"""Context parallel of dash_attn in torchtitan, as a config override. docs/torchtitan.md has the recipe.

Put this file on Python's path and take a config with flex attention. Add "torchtitan_context_parallel.dash_attention"
to its `override.imports`, set `parallelism.context_parallel_degree`, and set `parallelism.spmd_backend` to
"partial_dtensor". The documents of a sequence are not told apart: every token sees all tokens before it. So give a
sequence for each document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

import dash_attn
from dash_attn.distributed import context_parallel_attention


class DashContextParallel(ScaledDotProductAttention):
    """Causal attention over the tokens of all ranks.

    torchtitan knows the base class: it gives such a module no masks. With context parallel it wraps the tokens of a
    rank as DTensors, and so this module learns the group.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        mode: str = "auto"
        layout: str = "zigzag"  # as torchtitan's "headtail" cuts the tokens
        panels: int = 16  # it fixes the bits, also on one rank. It must divide the tokens of a sequence

    def __init__(self, config: Config) -> None:
        super(ScaledDotProductAttention, self).__init__()  # the base class chooses among torch's kernels
        self.mode, self.layout, self.panels = config.mode, config.layout, config.panels

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: object = None,
        scale: float | None = None,
        is_causal: bool = True,
        **kwargs: Any,  # enable_gqa is not needed: the shapes say it
    ) -> Tensor:
        if attention_masks is not None:
            raise ValueError("attention_masks were given: this module takes none, as ScaledDotProductAttention")
        if get_spmd_backend() != "partial_dtensor":  # others hand over plain tensors, which do not tell the group
            raise ValueError(f"parallelism.spmd_backend is {get_spmd_backend()!r}: set it to 'partial_dtensor'")
        how = {"causal": is_causal, "scale": scale, "panels": self.panels}
        if not isinstance(q_BLNH, DTensor):
            return dash_attn.attention(q_BLNH, k_BLNH, v_BLNH, **how)
        mine = (x.to_local() for x in (q_BLNH, k_BLNH, v_BLNH))
        spot = {"group": q_BLNH.device_mesh, "mode": self.mode, "layout": self.layout}
        return context_parallel_attention(*mine, **spot, **how)


@override(target=FlexAttention.Config, description="dash_attn: the same bits on every number of ranks")
def dash_attention(config: FlexAttention.Config, **fields: Any) -> DashContextParallel.Config:
    """`fields` are those of DashContextParallel.Config."""
    return derive(config, DashContextParallel.Config, **fields)
