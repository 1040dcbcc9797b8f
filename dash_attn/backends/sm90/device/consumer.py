"""A consumer warpgroup: computes the five products of every task, and holds dK and dV of its chain in registers.

Consumers read no table. Shared memory tells them which tile a stage holds, how it is masked and when a chain ends.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..barriers import NAMED_BARRIER_THREADS, NamedBarrier
from ..cta import WARPGROUP
from ..smem_plan import Info, TaskEntry, dk_piece
from .bundles import Cta, element, pieces_per_half
from .gemms import Gemms
from .pointwise import (
    ColumnPairs,
    Scores,
    cap,
    exponentiate,
    exponentiate_capped,
    mask_probabilities,
    round_with_slopes,
    score_gradient,
    slopes16,
)
from .ptx import fresh_thread_index
from .stamps import consumer_stamp, tie_clocks
from .tasks import (
    BEGINS,
    ENDS,
    FIRST,
    LAST,
    ODD,
    PARTIAL,
    entry_word,
    half_slot,
    info_word,
    lengths,
    my_chains,
    stage_of,
)


class ChainState(NamedTuple):
    """What a consumer holds in registers over a chain."""

    dk: Any
    dv: Any
    k: Any  # what keep_k returns


@dataclass(frozen=True)
class Consumer:
    cta: Cta

    @cute.jit
    def run(self):
        cta = self.cta
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        gemms = Gemms.bind(cta, wg, thread)
        dk, dv = gemms.grad_acc(), gemms.grad_acc()
        task, i = Int32(0), Int32(0)
        if const_expr(cta.cfg.packed):
            cta.bars.wait("k_full", 0, 0)
            runs = info_word(cta, 0, Info.NUM_RUNS)
            while runs >= 0:
                task = self.chain(gemms, dk, dv, task, i, runs)
                i = i + 1
                cta.bars.wait("k_full", 0, i & 1)
                runs = info_word(cta, i & 1, Info.NUM_RUNS)
            if const_expr(not cta.cfg.cut and not cta.cfg.delta_in_product):
                # The dK writer reads the end, too. It must have left the chain before.
                cta.bars.wait("dk_empty", 0, (i & 1) ^ 1)
                self.leave("dk_full", 0)
        else:
            _, chains = my_chains(cta)
            for i in cutlass.range(chains, unroll=1):
                cta.bars.wait("k_full", 0, i & 1)
                task = self.chain(gemms, dk, dv, task, i, info_word(cta, i & 1, Info.NUM_RUNS))

    @cute.jit
    def chain(self, gemms, dk, dv, task, i, runs):
        """Computes chain i, whose first task is `task`. Returns the number of the task after it."""
        cta, ends = self.cta, self.cta.cfg.chain_entries
        dk.fill(0.0)
        dv.fill(0.0)
        state = ChainState(dk, dv, gemms.keep_k(cta.views.k, fresh_thread_index() - WARPGROUP))
        done, arrived = Int32(0), Int32(0)
        if runs == 0:
            if const_expr(not cta.cfg.cut):
                cta.bars.wait("dk_empty", 0, (i & 1) ^ 1)
            self.leave("v_empty", 0)
            self.leave("k_empty", 0)
            done = Int32(1)
        while done == 0:
            flags, arrived = self.task(gemms, state, task, task + i * ends, arrived)
            task, done = task + 1, flags & ENDS
        if const_expr(cta.cfg.trace):
            tie_clocks(cta, task + i * ends)
        if const_expr(cta.cfg.cut):
            self.hand_over_parts(dk, dv, task + i * ends)
        else:
            self.hand_over_dk(gemms, dk)
            self.hand_over_dv(gemms, dv, task + i * ends)
        return task

    @cute.jit
    def task(self, gemms, state: ChainState, task, entry, arrived):
        cta, cfg = self.cta, self.cta.cfg
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        stage, phase = stage_of(task)

        # (1) S^T and dP^T
        if arrived == 0:
            cta.bars.wait("q_full", stage, phase)
        if const_expr(cfg.trace):
            consumer_stamp(cta, entry, "begun")
        flags = entry_word(cta, entry, TaskEntry.FLAGS)
        s = gemms.score_acc()
        gemms.issue_s(s, stage, state.k)
        lse = ColumnPairs.of(cta.views.lse, stage, cfg.tile_m, cfg.lse_ahead)
        odd = (flags & ODD) // ODD
        if (flags & BEGINS) != 0:
            cta.bars.wait("v_full", 0, odd)
        cta.bars.wait("do_full", stage, phase)
        dp = gemms.score_acc()
        gemms.issue_dp(dp, stage)
        # (2) P, while dP^T is computed
        warpgroup.wait_group(1)
        # With p_early, delta is loaded, P is rounded and the dS buffers are waited for while the product runs. This is
        # the fastest of 120 orders that were timed, by 2-4 % (docs/experiments.md).
        delta = None
        if const_expr(cfg.p_early and not cfg.delta_in_product):
            delta = ColumnPairs.of(cta.views.delta, stage, cfg.tile_m, cfg.delta_ahead)
        if const_expr(cfg.softcap):
            cap(s, cta.facts.inner)
        if const_expr(cfg.stores_slopes):
            self.await_ds_buffers(flags, odd)
            gemms.write_ds(slopes16(cfg, s), stage)
            cute.arch.sync_warp()  # a lane reads slopes of other lanes of its warp
        if const_expr(cfg.holds_slopes):
            p16 = exponentiate_capped(cfg, s, lse, cta.facts.scale_log2)
        else:
            exponentiate(s, lse, cta.facts.scale_log2)
            p16 = cute.make_rmem_tensor_like(s, element(cfg))
            gemms.round_now(s, p16, cfg.p_early)
        if (flags & PARTIAL) != 0:
            q_tile, kv_tile = entry_word(cta, entry, TaskEntry.Q_TILE), info_word(cta, odd, Info.KV_TILE)
            if const_expr(cfg.holds_slopes):
                mask_probabilities(cta, (p16, s), q_tile, kv_tile, lengths(cta, odd), thread)
            else:
                mask_probabilities(cta, (s,), q_tile, kv_tile, lengths(cta, odd), thread)
                gemms.round_now(s, p16, cfg.p_early)
        if const_expr(not cfg.softcap):
            gemms.round_rest(s, p16, cfg.p_early)
        if const_expr(cfg.p_early):
            self.await_ds_buffers(flags, odd)
        elif const_expr(not cfg.delta_in_product):
            delta = ColumnPairs.of(cta.views.delta, stage, cfg.tile_m, cfg.delta_ahead)
        # (3) dS
        warpgroup.wait_group(0)
        ds16 = cute.make_rmem_tensor_like(dp, element(cfg))
        if const_expr(cfg.stores_slopes):
            # The branch between the halves keeps the compiler from mixing them, for which it has no registers.
            scores, pairs = Scores(s, dp, p16, ds16), iter(delta)
            round_with_slopes(gemms, scores, stage, islice(pairs, cfg.tile_m // 16))
        if (flags & ENDS) != 0:
            self.leave("v_empty", 0)
        if const_expr(cfg.stores_slopes):
            round_with_slopes(gemms, scores, stage, pairs)
            cute.arch.sync_warp()  # dS takes the place of the slopes, which all lanes have read
        else:
            score_gradient(dp, s, delta)
            gemms.round_now(dp, ds16, cute.size(dp) // 2)
        if const_expr(not cfg.p_early and not cfg.stores_slopes):
            self.await_ds_buffers(flags, odd)
        gemms.write_ds(ds16, stage)
        # (4) dV. Issued before dS is computed, it makes the kernel 8 % slower.
        gemms.issue_dv(state.dv, p16, stage)
        # (5) dQ needs the dS rows of both warpgroups. Two buffers need only this one barrier: a warpgroup that
        # arrives here has completed dQ of the task before, so the other buffer is free.
        cute.arch.fence_view_async_shared()
        self.leave("ds_full", stage)
        cta.bars.wait("ds_full", stage, phase)
        dq = gemms.query_acc()
        gemms.issue_dq(dq, stage)
        warpgroup.wait_group(1)
        self.leave("do_empty", stage)
        # (6) dK
        gemms.issue_dk(state.dk, ds16, stage)
        warpgroup.wait_group(1)
        if (flags & ENDS) != 0:
            self.leave("k_empty", 0)
        # (7) dQ to its slot, while dK is computed. A test for the next Q costs no time here.
        if const_expr(cfg.peek):
            arrived = cta.bars.is_done("q_full", *stage_of(task + 1))
        self.stage_dq(gemms, dq, entry, flags)
        warpgroup.wait_group(0)
        if const_expr(cfg.trace):
            consumer_stamp(cta, entry, "left")
        self.leave("q_empty", stage)
        return flags, arrived

    @cute.jit
    def await_ds_buffers(self, flags, odd):
        if const_expr(not self.cta.cfg.cut):
            if (flags & BEGINS) != 0:
                self.cta.bars.wait("dk_empty", 0, odd ^ 1)  # the dK of the chain before lies in the buffers until then

    def sync_consumers(self):
        threads = NAMED_BARRIER_THREADS[NamedBarrier.CONSUMERS]
        cute.arch.barrier(barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=threads)

    @cute.jit
    def leave(self, name: cutlass.Constexpr, index):
        """The warp arrives once: it is done with its part of a buffer."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self.cta.bars.arrive(name, index)

    def half_slot(self, entry):
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        return half_slot(entry, cute.arch.make_warp_uniform(thread // WARPGROUP))

    @cute.jit
    def stage_dq(self, gemms, dq, entry, flags):
        cta, cfg = self.cta, self.cta.cfg
        half, phase = self.half_slot(entry)
        self.await_slot(entry, half, phase)
        slot = self.fragments(half, cute.arch.thread_idx()[0] % WARPGROUP)
        mine = cute.make_tensor(dq.iterator, cute.make_layout(slot.shape))
        if const_expr(cfg.last_finishes):
            if (flags & LAST) != 0:
                self.finish_dq(mine, slot, flags)
                self.write_finished(gemms, dq, half)
            else:
                cute.autovec_copy(mine, slot)
        else:
            cute.autovec_copy(mine, slot)
        self.leave("dq_full", half)
        if const_expr(cfg.trace):
            consumer_stamp(cta, entry, "staged")

    def fragments(self, half, thread):
        """A thread's part of half a dQ slot. Fragment order: 16-byte piece j of thread t lies at float
        (j * 128 + t) * 4, which has no bank conflicts."""
        layout = cute.make_layout((4, self.cta.cfg.half_floats // 512), stride=(1, 512))
        return cute.make_tensor(self.cta.views.dq[None, half].iterator + thread * 4, layout)

    @cute.jit
    def await_slot(self, entry, half, phase):
        cta = self.cta
        if const_expr(cta.cfg.trace):
            consumer_stamp(cta, entry, "computed")
        cta.bars.wait("dq_empty", half, phase)
        if const_expr(cta.cfg.trace):
            consumer_stamp(cta, entry, "slot")

    @cute.jit
    def finish_dq(self, mine, slot, flags):
        """Adds the partial sum in the slot, in the same order as a bulk add, and scales the result."""
        if (flags & FIRST) == 0:
            part = cute.make_rmem_tensor(4, Float32)
            for j in cutlass.range_constexpr(cute.size(mine.shape[1])):
                cute.autovec_copy(slot[None, j], part)
                for i in cutlass.range_constexpr(4):
                    mine[i, j] = part[i] + mine[i, j]
        for i in cutlass.range_constexpr(cute.size(mine)):
            mine[i] = mine[i] * self.cta.facts.scale

    @cute.jit
    def write_finished(self, gemms, dq, half):
        cfg = self.cta.cfg
        thread = fresh_thread_index() % WARPGROUP
        wg = half % 2
        # All threads must have read their partial sums before the 16-bit tile overwrites them.
        threads = NAMED_BARRIER_THREADS[NamedBarrier.GROUP_0]
        cute.arch.barrier(barrier_id=int(NamedBarrier.GROUP_0) + wg, number_of_threads=threads)
        out = gemms.rounded(dq)
        piece = half * pieces_per_half(cfg, 64 * 64)
        dst = gemms.store_dq.get_slice(thread).partition_D(self.cta.views.dq_out)
        cute.copy(gemms.store_dq, gemms.store_dq.retile(out), dst[None, None, None, piece])

    @cute.jit
    def hand_over_dk(self, gemms, dk):
        """Stages dK in the dS buffers. A dQ slot would be free only after its turn has come."""
        thread = fresh_thread_index() - WARPGROUP
        scaled = cute.make_rmem_tensor_like(dk)
        scaled.store(dk.load() * self.cta.facts.scale)
        out = gemms.rounded(scaled)
        self.sync_consumers()  # both warpgroups must have read the last dS
        dst = gemms.store_grad.get_slice(thread % WARPGROUP).partition_D(self.cta.views.dk)
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        piece = dk_piece(self.cta.cfg, wg)
        cute.copy(gemms.store_grad, gemms.store_grad.retile(out), dst[None, None, None, piece])
        cute.arch.fence_view_async_shared()
        self.leave("dk_full", 0)

    @cute.jit
    def hand_over_dv(self, gemms, dv, entry):
        """Stages one warpgroup's rows of dV in its half of a dQ slot. They are stored while the next chain runs."""
        cta, cfg = self.cta, self.cta.cfg
        half, phase = self.half_slot(entry)
        thread = fresh_thread_index() % WARPGROUP
        out = gemms.rounded(dv)
        self.await_slot(entry, half, phase)
        piece = half * pieces_per_half(cfg, 64 * cfg.dim)
        dst = gemms.store_grad.get_slice(thread).partition_D(cta.views.grad)
        cute.copy(gemms.store_grad, gemms.store_grad.retile(out), dst[None, None, None, piece])
        self.leave("dq_full", half)
        if const_expr(cfg.trace):
            consumer_stamp(cta, entry, "staged")

    @cute.jit
    def hand_over_parts(self, dk, dv, entry):
        """Stages dV, then dK, of a cut chain in fp32. A dQ slot holds 64 columns, in the order of fragments."""
        cfg = self.cta.cfg
        parts, floats = cfg.part_entries, cfg.half_floats // WARPGROUP  # of a thread, in a slot
        for part in cutlass.range_constexpr(2 * parts):
            half, phase = self.half_slot(entry + part)
            self.await_slot(entry + part, half, phase)
            slot = self.fragments(half, fresh_thread_index() % WARPGROUP)
            sums = dv if part < parts else dk
            mine = cute.make_tensor(sums.iterator + (part % parts) * floats, cute.make_layout(slot.shape))
            cute.autovec_copy(mine, slot)
            self.leave("dq_full", half)
            if const_expr(cfg.trace):
                consumer_stamp(self.cta, entry + part, "staged")
