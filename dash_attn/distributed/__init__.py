"""Context parallel: attention over tokens that lie on the ranks of a process group, with the bits of one process."""

from dash_attn.distributed.attention import context_parallel_attention
from dash_attn.distributed.explain import explain
from dash_attn.distributed.sharding import shard, unshard

__all__ = ["context_parallel_attention", "explain", "shard", "unshard"]
