"""The producer warp: walks the Program, feeds the stages, and tells the other roles what each stage holds."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .bundles import Cta
from .ptx import bulk_load
from .stamps import stamp
from .tasks import BEGINS, END, ENDS, FIRST, GRAD, LAST, ODD, PARTIAL, my_chains, publish


@dataclass(frozen=True)
class Producer:
    cta: Cta

    @cute.jit
    def run(self):
        """Runs hold at least one task each, so a chain is empty exactly when it has no runs.

        Entry numbers are task + chain: every chain adds one entry to those of its tasks.
        """
        cta, tab = self.cta, self.cta.tables
        lane = cute.arch.lane_idx()
        first, chains = my_chains(cta)
        task = Int32(0)
        for i in cutlass.range(chains, unroll=1):
            chain = tab.worker_chains[first + i]
            run, runs = tab.chains[chain, 3], tab.chains[chain, 4]
            if runs == 0:
                self.load_kv(i, chain, runs)
            begins = Int32(BEGINS)
            while runs > 0:
                batch = tab.chains[chain, 0]
                head = tab.chains[chain, 1] * cta.facts.group + tab.runs[run, 0]
                q_tile, q_step, left = tab.runs[run, 1], tab.runs[run, 2], tab.runs[run, 3]
                turn, turn_step = tab.runs[run, 4], tab.runs[run, 5]
                tag = tab.runs[run, 6] + begins + (i & 1) * ODD
                begins = Int32(0)
                while left > 0:
                    flags = tag + self.turn_flags(q_tile, turn)
                    flags = flags + ENDS if (runs == 1 and left == 1) else flags
                    self.load_task(task, task + i, (flags, q_tile, turn), (head, batch))
                    # The first Q and dO of a chain need no K, so they travel while the last chain still computes.
                    if (tag & BEGINS) != 0:
                        self.load_kv(i, chain, runs)
                    tag = tag & (PARTIAL + ODD)
                    q_tile, turn, task, left = q_tile + q_step, turn + turn_step, task + 1, left - 1
                run, runs = run + 1, runs - 1
            if lane == 0:
                info = cta.views.info
                publish(cta, task + i, (GRAD, info[1, i & 1], info[2, i & 1], info[3, i & 1]))
        if lane == 0:
            for w in cutlass.range_constexpr(cta.cfg.writers):
                publish(cta, task + chains + w, (END, 0, 0, 0))

    @cute.jit
    def turn_flags(self, q_tile, turn):
        cta, flags = self.cta, Int32(0)
        if const_expr(cta.cfg.ordered):
            flags = Int32(FIRST) if turn == 0 else flags
            if const_expr(cta.cfg.last_finishes):
                flags = flags + LAST if turn == cta.tables.contributors[q_tile] - 1 else flags
        return flags

    @cute.jit
    def load_task(self, task, entry, words, place):
        """Q, LSE, dO, delta of one task into the next stage, once the consumers have left it."""
        cta, cfg, s = self.cta, self.cta.cfg, self.cta.streams
        stage, free = task & 1, ((task >> 1) & 1) ^ 1
        flags, q_tile, turn = words
        head, batch = place
        plane = batch * cta.facts.heads_q + head
        lane = cute.arch.lane_idx()
        tile_bytes, row_bytes = cfg.tile_m * cfg.dim * 2, cfg.tile_m * 4
        cta.bars.wait("q_empty", stage, free)
        if lane == 0:
            # Before the arrival on q_full, which makes the entry visible to the consumers.
            publish(cta, entry, (flags, q_tile, plane, turn))
            if const_expr(cfg.trace):
                stamp(cta, entry, "loaded")
            cta.bars.expect("q_full", stage, tile_bytes + row_bytes)
            bulk_load(
                cta.views.lse[None, stage].iterator,
                s.lse[plane, None].iterator + q_tile * cfg.tile_m,
                row_bytes,
                cta.bars.at("q_full", stage),
            )
        self.load_tile(s.q, cta.views.q, (q_tile, head, batch, stage), cta.bars.at("q_full", stage))
        cta.bars.wait("do_empty", stage, free)
        if lane == 0:
            cta.bars.expect("do_full", stage, tile_bytes + row_bytes)
            bulk_load(
                cta.views.delta[None, stage].iterator,
                s.delta[plane, None].iterator + q_tile * cfg.tile_m,
                row_bytes,
                cta.bars.at("do_full", stage),
            )
        self.load_tile(s.do, cta.views.do, (q_tile, head, batch, stage), cta.bars.at("do_full", stage))

    def load_tile(self, stream, smem, where, mbar):
        atom, tensor = stream
        tile, head, batch, stage = where
        cfg = self.cta.cfg
        g = cute.local_tile(tensor, (cfg.tile_m, cfg.dim), (None, 0, None, None))
        dst, src = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2)
        )
        cute.copy(atom, src[None, tile, head, batch], dst[None, stage], tma_bar_ptr=mbar)

    @cute.jit
    def load_kv(self, i, chain, runs):
        """V first: the consumers give it back before K. A chain without tasks loads nothing, but is announced."""
        cta, s, info = self.cta, self.cta.streams, self.cta.views.info
        place = self.place(chain)
        free = (i & 1) ^ 1
        lane = cute.arch.lane_idx()
        nbytes = cta.cfg.tile_n * cta.cfg.dim * 2
        cta.bars.wait("v_empty", 0, free)
        if runs > 0:
            if lane == 0:
                cta.bars.expect("v_full", 0, nbytes)
            self.load_stationary(s.v, cta.views.v, place, cta.bars.at("v_full"))
        else:
            if lane == 0:
                cta.bars.arrive("v_full")
        cta.bars.wait("k_empty", 0, free)
        if lane == 0:
            info[0, i & 1] = runs
            for j in cutlass.range_constexpr(3):
                info[1 + j, i & 1] = place[j]
        if runs > 0:
            if lane == 0:
                cta.bars.expect("k_full", 0, nbytes)
            self.load_stationary(s.k, cta.views.k, place, cta.bars.at("k_full"))
        else:
            if lane == 0:
                cta.bars.arrive("k_full")

    def place(self, chain):
        tab = self.cta.tables
        return tab.chains[chain, 2], tab.chains[chain, 1], tab.chains[chain, 0]

    def load_stationary(self, stream, smem, place, mbar):
        atom, tensor = stream
        kv_tile, kv_head, batch = place
        cfg = self.cta.cfg
        g = cute.local_tile(tensor, (cfg.tile_n, cfg.dim), (None, 0, None, None))
        dst, src = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2)
        )
        cute.copy(atom, src[None, kv_tile, kv_head, batch], dst[None], tma_bar_ptr=mbar)
