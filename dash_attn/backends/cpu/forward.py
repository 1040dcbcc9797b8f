"""forward: torch's flash kernel for the CPU, with every mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dash_attn.problem import Problem, TileMask

PROVIDER = "aten._scaled_dot_product_flash_attention_for_cpu"

# The kernel takes an additive mask with an element for each pair. So rows are cut into bands, and each band gets only
# the keys that it sees. Memory and work for windows and documents are then proportional to the number of tokens.
BAND = 512


@torch.no_grad()
def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen, heads, dim) and lse (batch, heads, seqlen), fp32, natural logarithm.

    A row that sees no key has out = 0 and lse = -inf.
    """
    # The kernel assumes a last stride of 1 and does not check it.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    k, v = (x.repeat_interleave(problem.group, dim=2) if problem.group > 1 else x for x in (k, v))
    mask, len_q, len_k = problem.mask, problem.len_q, problem.len_k
    # The kernel's own causal mask is aligned at the start. It is also scaled, so a scale of 0 or less would break it.
    plain_causal = mask.is_causal and len_q == len_k and problem.softmax_scale > 0
    if len_q and len_k and (mask.is_full or plain_causal):
        return _kernel(problem, (q, k, v), is_causal=mask.is_causal)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full((problem.batch, problem.heads_q, len_q), -math.inf, dtype=torch.float32)
    row_lo, row_hi = (torch.from_numpy(x).unsqueeze(-1) for x in mask.intervals(len_q, len_k))
    for begin in range(0, len_q, BAND):
        rows = slice(begin, min(begin + BAND, len_q))
        lo, hi = row_lo[rows], row_hi[rows]
        keys = slice(int(lo.min()), int(hi.max()))
        if keys.start >= keys.stop:
            continue
        column = torch.arange(keys.start, keys.stop)
        allowed = (column >= lo) & (column < hi)
        if mask.tiles is not None:
            allowed &= _cells(mask.tiles, rows, keys)
        sees = allowed.any(1)
        bias = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill_(~allowed, -math.inf)
        band_out, band_lse = _kernel(problem, (q[:, rows], k[:, keys], v[:, keys]), attn_mask=bias)
        # The kernel's values for fully masked rows have no meaning. Such rows keep out = 0 and lse = -inf.
        out[:, rows][:, sees] = band_out[:, sees]
        lse[:, :, rows][:, :, sees] = band_lse[:, :, sees]
    return out, lse


def _kernel(
    problem: Problem, qkv: tuple[Tensor, Tensor, Tensor], *, is_causal: bool = False, attn_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in qkv)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=is_causal, attn_mask=attn_mask, scale=problem.softmax_scale
    )
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def _cells(tiles: TileMask, rows: slice, keys: slice) -> Tensor:
    """These rows and keys of a tile mask, element by element."""
    cells = torch.from_numpy(tiles.cells())
    row, key = torch.arange(rows.start, rows.stop), torch.arange(keys.start, keys.stop)
    return cells[(row // tiles.cell_m)[:, None], key // tiles.cell_n]
