"""dash_attn in torch's registry of flash kernels: scaled_dot_product_attention runs it, and on CUDA varlen_attn too.

    dash_attn.integrations.torch_sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("dash")
    ...
    torch.nn.attention.restore_flash_attention_impl()

While "dash" is active, the calls that torch sends to its flash kernel run here, and torch never chooses cuDNN.
Other calls stay with torch, for instance on CUDA those with float32 tensors or with an attn_mask.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from dash_attn.api import backward
from dash_attn.api.arguments import Arguments, Words
from dash_attn.api.autograd import prepared_for

NAME = "dash"

# Arguments of torch's operators without a kernel here, and what to do instead.
WAY_OUT = {
    "attn_mask": "call dash_attn.attention with a mask",
    "dropout_p": "train with attention dropout 0",
    "return_debug_mask": "leave it False",
    "alibi_slopes": "use rotary positions, or flex_attention with a score_mod",
    "seqused_k": "leave unused tokens out of key, value and cu_seq_k",
    "block_table": "gather key and value first: paged caches are for inference",
}
RESTORE = "or call torch.nn.attention.restore_flash_attention_impl() first"
# Arguments that only change the speed of torch's forward.
WITHOUT_EFFECT = ("num_splits",)

inside = threading.local()


def register() -> None:
    """Make "dash" a name for torch.nn.attention.activate_flash_attention_impl. Only the activation changes anything. A
    second registration does no harm."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl") or not hasattr(torch.library, "get_kernel"):
        raise NotImplementedError(
            f"torch {torch.__version__} has no registry of flash kernels, torch 2.13 has: upgrade it, or call "
            "dash_attn.flash_attn_func and flash_attn_varlen_func where your model calls scaled_dot_product_attention"
        )
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=install)


@dataclass
class Handle:
    """What an activation changed, and how to undo it."""

    library: Library
    cudnn: bool

    def remove(self) -> None:
        self.library._destroy()  # type: ignore[no-untyped-call]
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn)


def install(key: str = "CUDA") -> Handle:
    """Put our functions in place of torch's flash kernels: those for a dispatch key, and the one for CPU tensors."""
    name = "aten::_flash_attention_forward"
    original = (
        torch.library.get_kernel(name, key) if torch._C._dispatch_has_kernel_for_dispatch_key(name, key) else None
    )

    def outer(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # Our own forward may call torch's flash kernel. That call must reach torch's kernel and not this function.
        if original is not None and getattr(inside, "ours", False):
            return original.call_boxed(keyset, *args, **kwargs)
        return flash_forward(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators|.*[Oo]verriding a previously registered")
        library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        library.impl("_flash_attention_forward", outer, key, with_keyset=True)
        library.impl("_flash_attention_backward", flash_backward, key)
        library.impl("_scaled_dot_product_flash_attention", sdpa_forward, key)
        library.impl("_scaled_dot_product_flash_attention_backward", sdpa_backward, key)
        library.impl("_scaled_dot_product_flash_attention_for_cpu", cpu_forward, "CPU")
        library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", cpu_backward, "CPU")
    handle = Handle(library, torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    return handle


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    """out, lse, and three values that only dropout uses. Tensors are (batch, seqlen, heads, dim), or packed (tokens,
    heads, dim)."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, **others)
    sides = (window_size_left, window_size_right)
    asked = Arguments(is_causal, sides, cum_seq_q, cum_seq_k, scale=scale, words=Words("cum_seq_q", "cum_seq_k"))
    prepared = prepared_for(query, key, value, asked)
    inside.ours = True
    try:
        out, lse = prepared.forward(query, key, value)
    finally:
        inside.ours = False
    return _laid_out(out, query), lse, *_unused(query)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse(dropout_p=dropout_p)
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        backward(
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            causal=is_causal,
            window=(window_size_left, window_size_right),
            cu_seqlens_q=cum_seq_q,
            cu_seqlens_k=cum_seq_k,
            scale=scale,
            deterministic=None,
            dq=dq,
            dk=dk,
            dv=dv,
            sm_margin=torch._C._get_sm_carveout_experimental() or 0,
        )
    return dq, dk, dv


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | int | None, ...]:
    """flash_forward for tensors (batch, heads, seqlen, dim)."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    lengths = (query.shape[2], key.shape[2])
    out, lse, *unused = flash_forward(q, k, v, None, None, *lengths, 0.0, is_causal, False, scale=scale)
    return _laid_out(out.transpose(1, 2), query), lse, None, None, *lengths, *unused


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    rest = (max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
    grads = flash_backward(dout, q, k, v, o, logsumexp, None, None, *rest, scale=scale)
    return tuple(x.transpose(1, 2) for x in grads)


def cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of CPU tensors (batch, heads, seqlen, dim). Torch also sends float32 tensors and masks here."""
    _refuse(attn_mask=attn_mask)
    lengths = query.shape[2], key.shape[2]
    if is_causal and lengths[0] != lengths[1]:
        # Torch aligns the first query with the first key, dash_attn the last with the last.
        raise NotImplementedError(
            f"is_causal with {lengths[0]} queries and {lengths[1]} keys, which dash_attn aligns in another way than "
            f"torch: call dash_attn.attention with a mask, {RESTORE}"
        )
    out, lse, *_ = sdpa_forward(query, key, value, dropout_p, is_causal, scale=scale)
    assert isinstance(out, Tensor) and isinstance(lse, Tensor)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)  # torch.compile expects these strides


def cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    unused = query.new_empty(0)
    rest = (None, None, query.shape[2], key.shape[2], dropout_p, is_causal, unused, unused)
    grads = sdpa_backward(grad_out, query, key, value, out, logsumexp, *rest, scale=scale)
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in grads)  # likewise


def _refuse(**arguments: Any) -> None:
    for name, given in arguments.items():
        if name not in WITHOUT_EFFECT and given is not None and (isinstance(given, Tensor) or given):
            way_out = WAY_OUT.get(name, "leave it out")
            raise NotImplementedError(f"{name} was given, for which dash_attn has no kernel: {way_out}, {RESTORE}")


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """The tensor with the strides that torch.compile expects: those of `like`."""
    if x.stride() == torch.empty_like(like, device="meta").stride():
        return x
    return torch.empty_like(like).copy_(x)


def _unused(query: Tensor) -> tuple[Tensor, ...]:
    """A random state and a debug mask, as torch's operators return them. Nothing reads them."""
    state = (query.new_zeros(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return *state, query.new_empty(0)
