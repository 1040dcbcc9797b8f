"""The five products of a task, bound once to their operands in shared memory.

S^T = K Q^T and dP^T = V dO^T are computed transposed. Each warpgroup then owns whole kv rows, and P^T, rounded to 16
bits in registers, is already the operand of dV += P^T dO. The same holds for dS^T and dK += dS^T Q.
dQ = dS K adds over the kv rows of both warpgroups, so dS goes through shared memory.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from ..config import KernelConfig
from ..cta import TILE_N, WARPGROUP
from .bundles import Cta, delta_operand, element

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SMEM, RMEM = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
PAIR = {"bf16": "bf16x2", "fp16": "f16x2"}  # two numbers in a word


def tiled_mma(cfg: KernelConfig, a_from, b_major, inst_n: int, groups):
    return mma_of(element(cfg), a_from, b_major, inst_n, groups)


def mma_of(dtype, a_from, b_major, inst_n: int, groups):
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, inst_n, 16), a_from, K_MAJOR, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), groups)


def transposed(t):
    """The same memory with the first two modes exchanged."""
    shape = (t.shape[1], t.shape[0], *t.shape[2:])
    return cute.composition(t, cute.make_ordered_layout(shape, order=(1, 0, *range(2, cute.rank(t)))))


@dataclass(frozen=True)
class Gemms:
    cfg: KernelConfig
    score: Any  # tiled MMA of S^T and dP^T
    score_kept: Any  # the same with K from registers
    grad: Any  # tiled MMA of dV and dK
    query: Any  # tiled MMA of dQ
    k_a: Any  # operands, as descriptors of shared memory: _a left, _b right, _t transposed right
    v_a: Any
    q_b: Any
    do_b: Any
    q_t: Any
    do_t: Any
    ds_a: Any
    k_t: Any
    store_ds: Any  # copy of dS^T from registers
    ds_dst: Any  # its destination
    store_grad: Any  # copy of one warpgroup's 64 rows of dK or dV
    store_dq: Any  # copy of one warpgroup's part of finished dQ
    load_ds: Any  # the inverse of store_ds: a lane has the same addresses in both
    delta: Any  # tiled MMA of the step of dP^T that subtracts delta. None if there is none
    minus_a: Any  # its operands
    delta_b: Any

    @staticmethod
    def bind(cta: Cta, wg, thread) -> "Gemms":
        """For warpgroup `wg` and consumer thread `thread`, counted over both warpgroups."""
        cfg, v = cta.cfg, cta.views
        score, score_kept = (tiled_mma(cfg, a, K_MAJOR, cfg.tile_m, (2, 1, 1)) for a in (SMEM, RMEM))
        grad = tiled_mma(cfg, RMEM, MN_MAJOR, cfg.dim, (2, 1, 1))
        query = tiled_mma(cfg, SMEM, MN_MAJOR, 64, (2, 1, 1) if cfg.dq_split_rows else (1, 2, 1))
        g_score, g_grad, g_query = [x.get_slice(wg * WARPGROUP) for x in (score, grad, query)]

        def stmatrix(t):
            return cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=t, num_matrices=4), element(cfg))

        store_ds = cute.make_tiled_copy_C(stmatrix(True), score)
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), element(cfg))
        one = (1, 1, 1)
        delta, minus_a, delta_b = None, None, None
        if cfg.delta_in_product:  # in bf16 always: fp16 ends at 65,504
            delta = mma_of(BFloat16, SMEM, K_MAJOR, cfg.tile_m, (2, 1, 1))
            g_delta = delta.get_slice(wg * WARPGROUP)
            minus_a = g_delta.make_fragment_A(g_delta.partition_A(v.minus))
            delta_b = g_delta.make_fragment_B(g_delta.partition_B(delta_operand(v.parts)[None, None, wg, None]))
        return Gemms(
            cfg,
            score,
            score_kept,
            grad,
            query,
            k_a=g_score.make_fragment_A(g_score.partition_A(v.k)),
            v_a=g_score.make_fragment_A(g_score.partition_A(v.v)),
            q_b=g_score.make_fragment_B(g_score.partition_B(v.q)),
            do_b=g_score.make_fragment_B(g_score.partition_B(v.do)),
            q_t=g_grad.make_fragment_B(g_grad.partition_B(transposed(v.q))),
            do_t=g_grad.make_fragment_B(g_grad.partition_B(transposed(v.do))),
            ds_a=g_query.make_fragment_A(g_query.partition_A(v.ds)),
            k_t=g_query.make_fragment_B(g_query.partition_B(transposed(v.k))),
            store_ds=store_ds,
            ds_dst=store_ds.get_slice(thread).partition_D(transposed(v.ds)),
            store_grad=cute.make_tiled_copy_C(stmatrix(False), tiled_mma(cfg, RMEM, MN_MAJOR, cfg.dim, one)),
            store_dq=cute.make_tiled_copy_C(stmatrix(False), tiled_mma(cfg, SMEM, MN_MAJOR, 64, one)),
            load_ds=cute.make_tiled_copy_C(ldmatrix, score),
            delta=delta,
            minus_a=minus_a,
            delta_b=delta_b,
        )

    def keep_k(self, k, thread):
        """Loads the first `k_kept` steps of K into registers, as an operand of S^T. None if there are none."""
        cfg, mma = self.cfg, self.score_kept
        steps = min(cfg.k_kept, cfg.score_steps)
        if not steps:
            return None
        load = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(num_matrices=4), element(cfg)), mma)
        kept = cute.make_rmem_tensor(mma.partition_shape_A((TILE_N, 16 * steps)), element(cfg))
        src, dst = load.get_slice(thread).partition_S(k), load.retile(kept)
        for i in range(steps):
            cute.copy(load, src[None, None, i], dst[None, None, i])
        return kept

    def score_acc(self):
        shape = self.score.get_slice(0).partition_shape_C((TILE_N, self.cfg.tile_m))
        return cute.make_rmem_tensor(shape, Float32)

    def grad_acc(self):
        shape = self.grad.get_slice(0).partition_shape_C((TILE_N, self.cfg.dim))
        return cute.make_rmem_tensor(shape, Float32)

    def query_acc(self):
        shape = self.query.get_slice(0).partition_shape_C((self.cfg.tile_m, self.cfg.dim))
        return cute.make_rmem_tensor(shape, Float32)

    def rounded(self, acc):
        """The accumulator rounded to 16 bits."""
        half = cute.make_rmem_tensor_like(acc, element(self.cfg))
        self.round_rest(acc, half, 0)
        return half

    def round_now(self, acc, half, count: int):
        """Rounds the first `count` words at this point. The compiler moves a plain conversion to its first use."""
        words = cute.recast_tensor(half, Int32)
        for i in range(count):
            words[i] = rounded_pair(PAIR[self.cfg.dtype], acc[2 * i], acc[2 * i + 1])

    def round_rest(self, acc, half, count: int):
        """Rounds all words but the first `count`."""
        shape = cute.make_layout(cute.size(half) - 2 * count)
        rest, source = (cute.make_tensor(t.iterator + 2 * count, shape) for t in (half, acc))
        rest.store(source.load().to(element(self.cfg)))

    def operand_view(self, half):
        """Rounded scores as the left operand of a gradient product."""
        shape = self.grad.get_slice(0).partition_shape_A((TILE_N, self.cfg.tile_m))
        return cute.make_tensor(half.iterator, cute.make_layout(shape))

    def issue_s(self, acc, stage, kept):
        q = self.q_b[None, None, None, stage]
        warpgroup.fence()
        have = 0 if kept is None else cute.size(kept.shape[2])
        if have:
            add(self.score_kept, acc, kept, q, range(have), False)
        add(self.score, acc, self.k_a, q, range(have, self.cfg.score_steps), have > 0)
        warpgroup.commit_group()

    def issue_dp(self, acc, stage):
        warpgroup.fence()
        add(self.score, acc, self.v_a, self.do_b[None, None, None, stage], range(self.cfg.score_steps), False)
        if self.delta is not None:
            add(self.delta, acc, self.minus_a, self.delta_b[None, None, None, stage], range(1), True)
        warpgroup.commit_group()

    def issue_dv(self, acc, p, stage):
        issue(self.grad, acc, self.operand_view(p), self.do_t[None, None, None, stage], True)

    def issue_dk(self, acc, ds, stage):
        issue(self.grad, acc, self.operand_view(ds), self.q_t[None, None, None, stage], True)

    def issue_dq(self, acc, buffer):
        issue(self.query, acc, self.ds_a[None, None, None, buffer], self.k_t, False)

    def write_ds(self, ds, buffer):
        cute.copy(self.store_ds, self.store_ds.retile(ds), self.ds_dst[None, None, None, buffer])

    def read_ds(self, half, buffer, piece: int):
        """Reads elements 8 * piece .. 8 * piece + 7 of what write_ds has written."""
        src, dst = self.ds_dst[None, None, None, buffer], self.load_ds.retile(half)
        cute.copy(self.load_ds, src[(None, piece), None, None], dst[(None, piece), None, None])


def rounded_pair(kind: str, low, high):
    """Two numbers rounded to 16 bits, in one word."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[high, low]
    )


def issue(mma, acc, a, b, accumulate):
    """Issues one product asynchronously, as one wgmma group."""
    warpgroup.fence()
    add(mma, acc, a, b, range(cute.size(a.shape[2])), accumulate)
    warpgroup.commit_group()


def add(mma, acc, a, b, steps: range, accumulate):
    """Issues some k steps of a product. Each call has an atom of its own, because the atom holds the accumulate bit."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in steps:
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
