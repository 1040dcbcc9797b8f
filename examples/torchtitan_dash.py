"""dash_attn in torchtitan, as config overrides. docs/torchtitan.md has the recipe.

Put this file on Python's path and take a config with varlen attention. Add "torchtitan_dash.dash_attention" to its
`override.imports`. For selective checkpointing add "torchtitan_dash.keep_attention" too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

import dash_attn


class DashAttention(VarlenAttention):
    """VarlenAttention with dash_attn's kernel. It does not need FlashAttention 3."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        policy: str = "auto"

    def __init__(self, config: Config) -> None:
        super(VarlenAttention, self).__init__()  # VarlenAttention.__init__ would activate FlashAttention 3
        self.window_size, self.policy = config.window_size, config.policy

    def forward(
        self,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = False,  # not needed: the shapes say it
    ) -> Tensor:
        if out_transform is not None:
            # out_transform needs the gradient of the log-sum-exp, which attention does not give.
            raise NotImplementedError("out_transform was given (attention sinks): use varlen attention as it is")
        with spmd.no_typecheck():
            out = dash_attn.attention(
                *(x.to(torch.bfloat16) for x in (q_TNH, k_TNH, v_TNH)),
                cu_seqlens=attention_masks.cu_seq_q,
                cu_seqlens_k=attention_masks.cu_seq_k,
                window=self.window_size,
                scale=scale,
                policy=self.policy,
            )
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            spmd.assert_type(out, spmd.get_local_type(q_TNH), get_partition_spec(q_TNH))
        return out.to(q_TNH.dtype)


class KeepAttention(SelectiveAC):
    """Selective checkpointing that keeps the output of attention instead of recomputing it."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        # super() without arguments fails here, because slots=True makes a second class of this name.
        return SelectiveAC.get_save_ops(self) | {torch.ops.dash_attn.forward.default}


@override(target=VarlenAttention.Config, description="dash_attn: attention with a fixed order of sums")
def dash_attention(config: VarlenAttention.Config, *, policy: str = "auto") -> DashAttention.Config:
    return derive(config, DashAttention.Config, policy=policy)


@override(target=SelectiveAC.Config, description="keep dash_attn's forward")
def keep_attention(config: SelectiveAC.Config) -> KeepAttention.Config:
    return derive(config, KeepAttention.Config)
