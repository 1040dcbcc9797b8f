"""flash_attn_func and flash_attn_varlen_func, with the arguments of FlashAttention 2 and 3.

Positional arguments come in the order of FlashAttention 2. The arguments of FlashAttention 3 go by name. The
conventions are those of FlashAttention:

- q, k, v and the output are (batch, seqlen, heads, dim), or packed (tokens, heads, dim).
- The log-sum-exp is float32, natural logarithm, (batch, heads, seqlen) or packed (heads, tokens). It has a gradient.
- Causal masks and windows are aligned at the end of each sequence.
- Dropout draws a seed from torch's default generator on the CPU at each call.

Three things differ. `deterministic` is None by default, which means yes unless the process asks otherwise. A row that
sees no key has output 0 and log-sum-exp -inf, where FlashAttention 2 gives inf. A window side below -1 beside a side
that is not negative has the meaning of FlashAttention 4: FlashAttention 2 and 3 take it for no limit.
"""

from __future__ import annotations

from torch import Tensor

from dash_attn.api.arguments import FLASH, Arguments, Window
from dash_attn.api.autograd import attend
from dash_attn.api.calls import Boundaries
from dash_attn.api.extras import Given

Result = Tensor | tuple[Tensor, Tensor, None]

NO_LIMIT: Window = (-1, -1)
DENSE = FLASH._replace(cu_q="cu_seqlens_q of flash_attn_varlen_func")

# Arguments without a kernel, and what to do instead.
WAY_OUT = {
    "alibi_slopes": "use rotary positions, or torch's flex_attention with a score_mod",
    "qv": "compute q and k in full: the part that meets v is for absorbed decoding",
    "q_descale": "give q in bfloat16 or float16",
    "k_descale": "give k in bfloat16 or float16",
    "v_descale": "give v in bfloat16 or float16",
    "attention_chunk": "give the chunks as sequences to flash_attn_varlen_func",
    "block_table": "gather k and v first: paged caches are for inference",
}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = NO_LIMIT,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    learnable_sink: Tensor | None = None,
    panels: int = 1,
) -> Result:
    """Attention over (batch, seqlen, heads, dim): out, or (out, softmax_lse, None) with `return_attn_probs`.

    window_size    (left, right): keys before and after the position of a query that it sees, each an int, a 0-d
                   integer tensor, or None. -1 or None means no limit. One side below -1 is counted in the other
                   direction, as in FlashAttention 4: (10, -3) are the keys from 10 to 3 before the position. Two
                   negative sides, or sides with no key between them, mean no limits. With causal the right side is 0
    deterministic  None means yes, unless FLASH_ATTENTION_DETERMINISTIC=0 is set and torch does not ask for determinism
    sm_margin      SMs of a GPU that the backward leaves to other kernels; it never changes the bits
    panels         as in `dash_attn.attention`; FlashAttention has no such argument

    learnable_sink, softcap and dropout_p are `sinks`, `softcap` and `dropout` of `dash_attn.attention`. num_splits and
    pack_gqa tune FlashAttention's forward and have no effect here. alibi_slopes, qv, the descales and attention_chunk
    must be 0 or None.
    """
    _refuse(
        alibi_slopes=alibi_slopes,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
    )
    asked = Arguments(
        causal,
        window_size,
        scale=softmax_scale,
        deterministic=deterministic,
        sm_margin=sm_margin,
        words=DENSE,
        panels=panels,
    )
    return _attended(
        q, k, v, asked, Given(softcap, dropout_p, learnable_sink, None, "learnable_sink"), return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Boundaries,
    cu_seqlens_k: Boundaries,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = NO_LIMIT,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Boundaries | None = None,
    seqused_k: Boundaries | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    learnable_sink: Tensor | None = None,
    panels: int = 1,
) -> Result:
    """Attention over packed sequences, (tokens, heads, dim): out, or (out, softmax_lse, None) with `return_attn_probs`.

    `cu_seqlens_q` and `cu_seqlens_k` hold 0 and the end of each sequence, as int32 tensors or lists. `seqused_q` and
    `seqused_k` hold one number for each sequence: how many of its first rows take part. The last used query stands
    at the last used key. Unused rows have output 0, log-sum-exp -inf and gradient 0, and their values reach nothing.
    max_seqlen_q and max_seqlen_k have no effect. block_table must be None. The other arguments are as in
    flash_attn_func.
    """
    _refuse(
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
    )
    asked = Arguments(
        causal,
        window_size,
        cu_seqlens_q,
        cu_seqlens_k,
        scale=softmax_scale,
        deterministic=deterministic,
        sm_margin=sm_margin,
        words=FLASH,
        used_q=seqused_q,
        used_k=seqused_k,
        panels=panels,
    )
    return _attended(
        q, k, v, asked, Given(softcap, dropout_p, learnable_sink, None, "learnable_sink"), return_attn_probs
    )


def _attended(q: Tensor, k: Tensor, v: Tensor, asked: Arguments, given: Given, with_lse: bool) -> Result:
    extras = None
    if not given.is_plain:
        asked, extras = asked._replace(features=given.features()), given.extras(q)
    out, lse = attend(q, k, v, asked, extras, with_lse)
    return (out, lse, None) if with_lse else out


def _refuse(**arguments: object) -> None:
    for name, given in arguments.items():
        if given is not None and (isinstance(given, Tensor) or given != 0):
            shown = "a tensor" if isinstance(given, Tensor) else given
            raise NotImplementedError(f"{name} was given ({shown}), for which dash_attn has no kernel: {WAY_OUT[name]}")
