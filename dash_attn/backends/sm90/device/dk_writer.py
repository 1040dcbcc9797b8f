"""The dK writer: stores dK, unless chains are cut. If the product dP^T subtracts delta, it also makes that operand."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..cta import CONSUMER_WARPGROUPS, WARP
from ..smem_plan import Info, TaskEntry, dk_piece
from .bundles import Cta
from .dq_writer import store_rows
from .ptx import bf16_parts
from .tasks import END, GRAD, PART, await_entry, entry_word, info_word, kv_coords, my_chains, stage_of


@dataclass(frozen=True)
class DkWriter:
    cta: Cta

    @cute.jit
    def run(self):
        cta = self.cta
        if const_expr(cta.cfg.delta_in_product):
            self.follow()
        elif const_expr(cta.cfg.packed):
            i = Int32(0)
            cta.bars.wait("dk_full", 0, 0)
            while info_word(cta, i & 1, Info.NUM_RUNS) >= 0:
                self.store(i)
                i = i + 1
                cta.bars.wait("dk_full", 0, i & 1)
        else:
            _, chains = my_chains(cta)
            for i in cutlass.range(chains, unroll=1):
                cta.bars.wait("dk_full", 0, i & 1)
                self.store(i)

    @cute.jit
    def follow(self):
        """Splits the delta of every task of the ring, and stores the dK of every chain.

        The dK of a chain is stored after the first delta of the next chain is split: consumers wait for that sooner.
        """
        cta = self.cta
        entry, task, i = Int32(0), Int32(0), Int32(0)
        late, done = Int32(0), Int32(0)  # late: dK of chain i is not stored yet
        while done == 0:
            await_entry(cta, entry)
            flags = entry_word(cta, entry, TaskEntry.FLAGS)
            if (flags & (GRAD + END)) == 0:
                self.split_delta(task)
                task = task + 1
            if const_expr(cta.cfg.cut):
                if flags == GRAD + PART * (cta.cfg.chain_entries - 1):
                    self.read_end()
            else:
                if late != 0:
                    cta.bars.wait("dk_full", 0, i & 1)
                    self.store(i)
                    i = i + 1
                late = flags & GRAD
            entry, done = entry + 1, flags & END

    @cute.jit
    def read_end(self):
        """The producer may go on: the last entry of a cut chain is read."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self.cta.bars.arrive("k_empty")

    @cute.jit
    def split_delta(self, task):
        """Writes delta as an operand of dP^T, for each warpgroup: three parts, whose sum it is, and zeros.

        The consumers have read what lies there, because they have left this stage of Q.
        """
        cta = self.cta
        stage, phase = stage_of(task)
        cta.bars.wait("q_full", stage, phase)
        words = cute.make_rmem_tensor(4, Int32)
        words.fill(0)
        for j in cutlass.range_constexpr(cta.cfg.tile_m // WARP):
            row = j * WARP + cute.arch.lane_idx()
            words[0], words[1] = bf16_parts(cta.views.delta[row, stage])
            for wg in cutlass.range_constexpr(CONSUMER_WARPGROUPS):
                cute.autovec_copy(words, cta.views.parts[None, row, wg, stage])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cta.bars.arrive("do_full", stage)

    @cute.jit
    def store(self, i):
        cta = self.cta
        coords = kv_coords(cta, i & 1)
        for wg in cutlass.range_constexpr(CONSUMER_WARPGROUPS):
            store_rows(cta, cta.streams.dk, cta.views.dk[None, None, dk_piece(cta.cfg, wg)], coords, wg)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cta.bars.arrive("dk_empty")
