"""A consumer that computes the scores of the next task while the gradients of this one are in the tensor cores.

In consumer.py the exponentials overlap one product of five, and the tensor cores idle behind them. Here P of a task is
ready when the task begins:

    tensor cores   dP(t)       | dV(t)  S(t+1)  dQ(t)  dK(t) | dP(t+1) ...
    other units      dS(t)     |                exp(t+1)     |

Nothing is in flight where the loop goes round, which ptxas would not bear; P is merely carried over. dV is waited for
before the next scores are issued: beside P in 16 bit, which dV reads, their registers do not fit.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import warpgroup

from .config import WARPGROUP
from .consumer import Consumer
from .pointwise import column_pairs, exponentiate, mask_probabilities, score_gradient
from .stamps import consumer_stamp
from .tasks import BEGINS, ENDS, ODD, PARTIAL, flags_of, ring_slot

CHUNK = 4  # pairs of LSE loaded at a time: all would not fit


@dataclass(frozen=True)
class AheadConsumer(Consumer):
    @cute.jit
    def chain(self, gemms, grads, where):
        task, i, done = where
        if done == 0:
            p = gemms.score_acc()
            self.issue_scores(gemms, p, task)
            warpgroup.wait_group(0)
            flags = self.probabilities(p, task, task + i)
            while (flags & ENDS) == 0:
                flags = self.ahead_task(gemms, (*grads, p), (task, task + i, flags), True)
                task = task + 1
            self.ahead_task(gemms, (*grads, p), (task, task + i, flags), False)
            task = task + 1
        return task

    @cute.jit
    def issue_scores(self, gemms, s, task):
        self.cta.bars.wait("q_full", task & 1, (task >> 1) & 1)
        gemms.issue_s(s, task & 1)

    @cute.jit
    def probabilities(self, s, task, entry):
        """P from complete scores, in place; the task's flags."""
        cta, cfg = self.cta, self.cta.cfg
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        lane = cute.arch.lane_idx()
        flags = flags_of(cta, entry)
        for first in cutlass.range_constexpr(0, cfg.tile_m // 8, CHUNK):
            lse = column_pairs(cta.views.lse, task & 1, lane, CHUNK, first)
            exponentiate(s, lse, cta.facts.scale_log2, cfg.soft_exp, first)
        if (flags & PARTIAL) != 0:
            odd = (flags & ODD) // ODD
            mask_probabilities(cta, s, (cta.views.ring[1, ring_slot(entry)], cta.views.info[1, odd]), thread)
        return flags

    @cute.jit
    def ahead_task(self, gemms, carried, which, more: cutlass.Constexpr):
        """One task whose P is there; if there is `more` in the chain, P of the next, and its flags."""
        cta, cfg = self.cta, self.cta.cfg
        dk, dv, p = carried
        task, entry, flags = which
        lane = cute.arch.lane_idx()
        stage, phase = task & 1, (task >> 1) & 1
        odd = (flags & ODD) // ODD

        if const_expr(cfg.trace):
            consumer_stamp(cta, entry, "begun")
        # (1) dP^T and dS
        if (flags & BEGINS) != 0:
            cta.bars.wait("v_full", 0, odd)
        cta.bars.wait("do_full", stage, phase)
        dp = gemms.score_acc()
        gemms.issue_dp(dp, stage)
        delta = column_pairs(cta.views.delta, stage, lane, cfg.tile_m // 8)
        warpgroup.wait_group(0)
        if const_expr(not more):
            self.leave("v_empty", 0)
        score_gradient(dp, p, delta)
        ds16 = gemms.as_operand(dp)
        if (flags & BEGINS) != 0:
            cta.bars.wait("dk_empty", 0, odd ^ 1)  # the last chain's dK has left these buffers
        gemms.write_ds(ds16, stage)
        p16 = gemms.as_operand(p)
        # (2) dV
        gemms.issue_dv(dv, p16, stage)
        cute.arch.fence_view_async_shared()
        self.leave("ds_full", stage)
        warpgroup.wait_group(0)
        self.leave("do_empty", stage)
        # (3) the next scores, dQ and dK. The other dS buffer is free as in consumer.py.
        if const_expr(more):
            self.issue_scores(gemms, p, task + 1)
        cta.bars.wait("ds_full", stage, phase)
        dq = gemms.query_acc()
        gemms.issue_dq(dq, stage)
        gemms.issue_dk(dk, ds16, stage)
        # (4) P of the next task meanwhile
        after = flags
        if const_expr(more):
            warpgroup.wait_group(2)
            after = self.probabilities(p, task + 1, entry + 1)
        warpgroup.wait_group(1)
        if const_expr(not more):
            self.leave("k_empty", 0)
        self.stage_dq(gemms, dq, entry, flags)
        warpgroup.wait_group(0)
        self.leave("q_empty", stage)
        if const_expr(cfg.trace):
            consumer_stamp(cta, entry, "left")
        return after
