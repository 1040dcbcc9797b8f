"""P and dS, computed in the registers of the transposed scores.

A thread's element i = c + 2h + 4j belongs to key `row + 8h` and query `col + 8j + c`, where row = 16 * warp + lane // 4
and col = 2 * (lane % 4).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..config import KernelConfig
from ..cta import TILE_N, WARP
from .bundles import element
from .gemms import PAIR, rounded_pair
from .ptx import fp16_pair
from .tasks import Lengths


@dataclass(frozen=True)
class ColumnPairs:
    """The LSE or delta of a thread's queries: pairs of floats, loaded `ahead` pairs before their use.

    The first pairs are loaded when the object is made. That is before the wait for the product that needs them, so
    these loads take no time of their own.
    """

    src: Any  # (2, tile_m / 8) in shared memory: pair j has the queries col + 8j and col + 8j + 1
    first: list[Any]  # the first pairs, in registers

    @staticmethod
    def of(stats, stage, tile_m: int, ahead: int) -> "ColumnPairs":
        """0 pairs ahead means all pairs."""
        col = cute.assume((cute.arch.lane_idx() % 4) * 2, divby=2)
        src = cute.make_tensor(stats[None, stage].iterator + col, cute.make_layout((2, tile_m // 8), stride=(1, 8)))
        return ColumnPairs(src, load_pairs(src, range(ahead or tile_m // 8)))

    def __iter__(self):
        """(j, pair) for every pair. While `ahead` pairs are used, the next `ahead` pairs are loaded."""
        loaded, ahead, count = self.first, len(self.first), cute.size(self.src.shape[1])
        for begin in range(0, count, ahead):
            following = load_pairs(self.src, range(begin + ahead, min(count, begin + 2 * ahead)))
            yield from enumerate(loaded, begin)
            loaded = following


def load_pairs(src, which: range):
    pairs = [cute.make_rmem_tensor(2, Float32) for _ in which]
    for j, pair in zip(which, pairs, strict=True):
        cute.autovec_copy(src[None, j], pair)
    return pairs


def exponentiate(s, lse: ColumnPairs, scale_log2):
    """s = exp2(s * scale_log2 - lse), in place."""
    for j, pair in lse:
        for h in range(2):
            for c in range(2):
                i = c + 2 * h + 4 * j
                s[i] = cute.math.exp2(s[i] * scale_log2 - pair[c], fastmath=True)


def score_gradient(dp, p, delta: ColumnPairs | None):
    """dp = p * (dp - delta), in place. Without delta: the product has subtracted it."""
    if delta is None:
        for i in range(cute.size(dp)):
            dp[i] = p[i] * dp[i]
        return
    for j, pair in delta:
        for h in range(2):
            for c in range(2):
                i = c + 2 * h + 4 * j
                dp[i] = p[i] * (dp[i] - pair[c])


def cap(s, inner):
    """s = tanh(s * inner), in place. The instruction has a relative error of 2^-11. The forward of FlashAttention-4 has
    the same instruction, so P is what that forward had."""
    for i in range(cute.size(s)):
        s[i] = cute.math.tanh(s[i] * inner, fastmath=True)


def slope(t):
    """The derivative of the cap, from t = tanh."""
    return Float32(1.0) - t * t


def exponentiate_capped(cfg: KernelConfig, t, lse: ColumnPairs, outer):
    """P = exp2(t * outer - lse). Returns P in 16 bits. t becomes P times its slope, in place.

    dV needs P in 16 bits, and dS needs P only together with the slope. So the slopes take no registers of their own.
    """
    p16 = cute.make_rmem_tensor_like(t, element(cfg))
    words = cute.recast_tensor(p16, Int32)
    for j, pair in lse:
        for h in range(2):
            i = 2 * h + 4 * j
            p = [cute.math.exp2(t[i + c] * outer - pair[c], fastmath=True) for c in range(2)]
            words[i // 2] = rounded_pair(PAIR[cfg.dtype], *p)
            t[i], t[i + 1] = [p[c] * slope(t[i + c]) for c in range(2)]
    return p16


def slopes16(cfg: KernelConfig, t):
    """The slopes in fp16, as bits of the element type."""
    slopes = cute.make_rmem_tensor_like(t, element(cfg))
    words = cute.recast_tensor(slopes, Int32)
    for i in range(cute.size(words)):
        words[i] = rounded_pair(PAIR["fp16"], slope(t[2 * i]), slope(t[2 * i + 1]))
    return slopes


class Scores(NamedTuple):
    """A task's P and dP, and room for P and dS in 16 bits."""

    p: Any
    dp: Any
    p16: Any
    ds16: Any


def round_with_slopes(gemms, scores: Scores, stage, pairs):
    """P and dS = P * slope * (dP - delta) in 16 bits, for some pairs of delta, an even number of them.

    The slopes lie in the dS buffer of this stage.
    """
    p, dp = scores.p, scores.dp
    p_words, ds_words = [cute.recast_tensor(x, Int32) for x in (scores.p16, scores.ds16)]
    slopes, kind = cute.make_rmem_tensor_like(dp, element(gemms.cfg)), PAIR[gemms.cfg.dtype]
    words = cute.recast_tensor(slopes, Int32)
    for j, pair in pairs:
        if j % 2 == 0:
            gemms.read_ds(slopes, stage, j // 2)
        for h in range(2):
            i = 2 * h + 4 * j
            factors = fp16_pair(words[i // 2])
            ds = [p[i + c] * factors[c] * (dp[i + c] - pair[c]) for c in range(2)]
            p_words[i // 2] = rounded_pair(kind, p[i], p[i + 1])
            ds_words[i // 2] = rounded_pair(kind, *ds)


@cute.jit
def mask_probabilities(cta, p, q_tile, kv_tile, lengths: Lengths, thread):
    """Zeroes P where the mask excludes a key. `lengths` are those of the sequence.

    P is masked, not S: masked scores would be -inf, and -inf times 0 is not a number. `p` is (P,) or, with softcap,
    (P in 16 bits, P times its slope).
    """
    cfg, facts = cta.cfg, cta.facts
    lane = cute.arch.lane_idx()
    first_key = kv_tile * TILE_N + (thread // WARP) * 16 + lane // 4
    first_q = q_tile * cfg.tile_m + (lane % 4) * 2
    if const_expr(cfg.mask == "interval" and cfg.packed):
        for h in cutlass.range_constexpr(2):
            key = first_key + 8 * h
            place = key - (lengths.k - lengths.q) - first_q  # the query at the key's position, counted from first_q
            low = place - facts.right
            high = place + facts.left if key < lengths.k else Int32(-1)  # queries low .. high see the key
            for j in cutlass.range_constexpr(cfg.tile_m // 8):
                for c in cutlass.range_constexpr(2):
                    hide(p, c + 2 * h + 4 * j, 8 * j + c >= low and 8 * j + c <= high)
    elif const_expr(cfg.mask == "interval"):
        for j in cutlass.range_constexpr(cfg.tile_m // 8):
            for c in cutlass.range_constexpr(2):
                row = cutlass.min(first_q + 8 * j + c, lengths.q - 1)  # beyond the sequence P is 0 already
                lo, hi = cta.streams.row_lo[row], cta.streams.row_hi[row]
                for h in cutlass.range_constexpr(2):
                    key = first_key + 8 * h
                    hide(p, c + 2 * h + 4 * j, key >= lo and key < hi)
    else:
        for h in cutlass.range_constexpr(2):
            key = first_key + 8 * h
            first_seen = Int32(0)  # queries before this one do not see the key
            if const_expr(cfg.mask == "causal"):
                first_seen = key - (lengths.k - lengths.q) - first_q
            first_seen = first_seen if key < lengths.k else Int32(cfg.tile_m)
            for j in cutlass.range_constexpr(cfg.tile_m // 8):
                for c in cutlass.range_constexpr(2):
                    hide(p, c + 2 * h + 4 * j, 8 * j + c >= first_seen)


@cute.jit
def hide(p, i: cutlass.Constexpr, seen):
    """Zeroes element i of the tensors, unless it is seen."""
    weights = p[-1]
    weights[i] = weights[i] if seen else Float32(0.0)
    if const_expr(len(p) == 2):
        words = cute.recast_tensor(p[0], Int32)
        other = Int32(-0x10000 if i % 2 == 0 else 0xFFFF)  # the other half of the word
        words[i // 2] = words[i // 2] if seen else words[i // 2] & other
