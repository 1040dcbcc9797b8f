"""Context parallel: attention over tokens that lie on the ranks of a process group, with the bits of one process.

attention         the function under autograd; ops has its operators
meeting           ranks compare their arguments
ranks             process groups and their collectives
layout, sharding  which rank has which tokens
heads             the exchange of tokens for heads
tokens            the panels of a rank
stages, gather    which keys travel together, and which panels can start then
routes            where dK and dV of a panel are added
explanation       explain: what a call would send and hold
scale             bytes and times of a call
"""

from dash_attn.distributed.attention import context_parallel_attention
from dash_attn.distributed.explanation import explain
from dash_attn.distributed.sharding import shard, unshard

__all__ = ["context_parallel_attention", "explain", "shard", "unshard"]
