"""The writer warps: dQ writers admit each contribution in its turn and store dV; another warp stores dK.

Writer w serves slot w of the staged tiles: entries w, w + writers, ... With split turns it serves half w of every
entry instead, and each half of a dQ tile has its own counter.

Why the turnstile is sound. Release: the lane that issued the bulk add waits until it is *complete* (not merely
read), then adds 1 to the counter with release at gpu scope. Acquire: the next writer's lane loads the counter with
acquire at gpu scope; its bulk add runs in the async proxy, so a proxy fence orders it after that load.
Bulk groups belong to the issuing thread, hence lane 0 issues, waits and releases.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ..config import STAMPS
from .bundles import Cta, pieces_per_half
from .counters import pass_on, turns_taken
from .debug import await_turn, keep
from .ptx import bulk_add_f32, bulk_load, bulk_store
from .stamps import cycle, note
from .tasks import END, FIRST, GRAD, LAST, await_entry, my_chains, ring_slot


@dataclass(frozen=True)
class DqWriter:
    cta: Cta

    @cute.jit
    def run(self, writer):
        cfg = self.cta.cfg
        stride = 1 if cfg.split else cfg.writers
        entry = Int32(0) if cfg.split else Int32(writer)
        flags = Int32(0)
        if const_expr(not cfg.last_finishes):
            for slot in range(cfg.dq_slots) if cfg.split else (writer,):
                self.free(writer, slot)
        elif const_expr(cfg.split):
            self.offer(writer, entry)
        while (flags & END) == 0:
            if const_expr(cfg.last_finishes):
                # The entry whose slot has just been left: this one, or with split turns the next.
                self.offer(writer, entry + (cfg.dq_slots - stride))
            flags = self.flags(entry)
            if (flags & END) == 0:
                if (flags & GRAD) != 0:
                    self.store_dv(writer, entry)
                else:
                    self.contribute(writer, entry, flags)
            entry = entry + stride

    def halves(self, writer):
        """(warpgroup, ...) whose parts this writer serves."""
        return (writer,) if self.cta.cfg.split else (0, 1)

    def half_slot(self, entry, wg):
        return (entry & 1) * 2 + wg if self.cta.cfg.dq_slots == 2 else wg

    def phase(self, entry):
        return (entry >> 1) & 1 if self.cta.cfg.dq_slots == 2 else entry & 1

    @cute.jit
    def flags(self, entry):
        await_entry(self.cta, entry)
        return self.cta.views.ring[0, ring_slot(entry)]

    @cute.jit
    def offer(self, writer, entry):
        """Gives the entry's slot to the consumers, unless a partial sum must come into it first."""
        if not self.fetches(self.flags(entry)):
            self.free(writer, entry)

    @cute.jit
    def free(self, writer, entry):
        if cute.arch.lane_idx() == 0:
            for wg in self.halves(writer):
                self.cta.bars.arrive("dq_empty", self.half_slot(entry, wg))

    def fetches(self, flags):
        """The last contributor, unless it is also the first, adds to what the others have summed."""
        return (flags & (FIRST | LAST)) == LAST

    @cute.jit
    def contribute(self, writer, entry, flags):
        cta, cfg = self.cta, self.cta.cfg
        lane = cute.arch.lane_idx()
        at = ring_slot(entry)
        q_tile, plane, turn = cta.views.ring[1, at], cta.views.ring[2, at], cta.views.ring[3, at]
        counter = cta.streams.counters[plane, q_tile, writer if cfg.counters[0] == 2 else 0, None].iterator
        if const_expr(cfg.ordered):
            if (flags & FIRST) == 0:
                if lane == 0:
                    if const_expr(cfg.debug):
                        await_turn(cta, counter, entry, writer)
                    else:
                        seen = Int32(-1)
                        while seen != turn:
                            seen = turns_taken(cfg, counter, writer)
                    cute.arch.fence_proxy("async.global")
                cute.arch.sync_warp()
        if const_expr(cfg.trace):
            self.stamp(writer, entry, "turn", cycle(cta))
        if const_expr(cfg.last_finishes):
            if self.fetches(flags):
                self.fetch_sum(writer, entry, (q_tile, plane))
            if (flags & LAST) != 0:
                self.store_dq(writer, entry, (q_tile, plane))
            else:
                self.add_sum(writer, entry, (q_tile, plane), flags)
        else:
            self.add_sum(writer, entry, (q_tile, plane), flags)
        landed = cycle(cta)
        if const_expr(cfg.ordered):
            if lane == 0:
                pass_on(cfg, counter, writer)
        if const_expr(cfg.trace):
            self.stamp(writer, entry, "landed", landed)  # noted behind the release, which would wait for the store
        cute.arch.sync_warp()

    @cute.jit
    def stamp(self, writer, entry, name: cutlass.Constexpr, when):
        if cute.arch.lane_idx() == 0:
            column = STAMPS.index(name)
            note(self.cta, entry + 1, column + 2 * writer if self.cta.cfg.split else column, when)

    @cute.jit
    def fetch_sum(self, writer, entry, where):
        """The partial sum into the free slot; its arrival is what gives the slot to the consumers."""
        cta = self.cta
        if cute.arch.lane_idx() == 0:
            for wg in self.halves(writer):
                half, (_, nbytes) = self.half_slot(entry, wg), self.part(wg)
                cta.bars.expect("dq_empty", half, nbytes)
                slot, mbar = cta.views.dq[None, half].iterator, cta.bars.at("dq_empty", half)
                bulk_load(slot, self.sum_of(where, wg), nbytes, mbar)

    def part(self, wg):
        """Of a tile's sum, what one warpgroup has: the first float of it, and bytes."""
        first, second = self.cta.cfg.sum_parts  # equal, where `wg` is not known before the kernel runs
        return wg * first, 4 * (first if first == second else (first, second)[wg])

    def sum_of(self, where, wg):
        q_tile, plane = where
        return self.cta.streams.dq_sum[plane, q_tile, None].iterator + self.part(wg)[0]

    @cute.jit
    def add_sum(self, writer, entry, where, flags):
        cta = self.cta
        for wg in self.halves(writer):
            half, nbytes = self.half_slot(entry, wg), self.part(wg)[1]
            self.await_staged(entry, half)
            if cute.arch.lane_idx() == 0:
                src = cta.views.dq[None, half].iterator
                if const_expr(cta.cfg.debug):
                    keep(cta, entry, self.part(wg), src)
                    at = ring_slot(entry)  # once more, because the writers' registers do not hold it all
                    where = cta.views.ring[1, at], cta.views.ring[2, at]
                if (flags & FIRST) != 0:
                    bulk_store(self.sum_of(where, wg), src, nbytes)
                else:
                    bulk_add_f32(self.sum_of(where, wg), src, nbytes)
                cute.arch.cp_async_bulk_commit_group()
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=not cta.cfg.ordered)
        if const_expr(not cta.cfg.last_finishes):
            self.free(writer, entry)  # before the turn is passed on, which takes a fence

    @cute.jit
    def await_staged(self, entry, half):
        """The bulk engine reads what the consumers wrote: a proxy fence must come between. Behind the wait it is as
        sound as before the arrival (it lies on the path from the one to the other), and tensor cores do not idle."""
        self.cta.bars.wait("dq_full", half, self.phase(entry))
        cute.arch.fence_view_async_shared()

    @cute.jit
    def store_dq(self, writer, entry, where):
        cta, cfg = self.cta, self.cta.cfg
        q_tile, plane = where
        batch = plane // cta.facts.heads_q
        head = plane - batch * cta.facts.heads_q
        atom, tensor = cta.streams.dq
        g = cute.local_tile(tensor, (64, 64), (None, None, None, None))
        src, dst = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(cta.views.dq_out, 0, 2), cute.group_modes(g, 0, 2)
        )
        for wg in self.halves(writer):
            half = self.half_slot(entry, wg)
            self.await_staged(entry, half)
            tile = (q_tile * 2 + wg, 0) if cfg.dq_split_rows else (q_tile, wg)
            cute.copy(atom, src[None, half * pieces_per_half(cfg, 64 * 64)], dst[None, tile[0], tile[1], head, batch])
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def store_dv(self, writer, entry):
        cta, cfg = self.cta, self.cta.cfg
        at = ring_slot(entry)
        place = (cta.views.ring[1, at], cta.views.ring[2, at], cta.views.ring[3, at])
        for wg in self.halves(writer):
            half = self.half_slot(entry, wg)
            self.await_staged(entry, half)
            store_rows(cta, cta.streams.dv, (cta.views.grad, half * pieces_per_half(cfg, 64 * cfg.dim)), place, wg)
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(cfg.trace):
            self.stamp(writer, entry, "landed", cycle(cta))
        if const_expr(not cfg.last_finishes):
            self.free(writer, entry)
        cute.arch.sync_warp()


@dataclass(frozen=True)
class DkWriter:
    cta: Cta

    @cute.jit
    def run(self):
        cta = self.cta
        _, chains = my_chains(cta)
        for i in cutlass.range(chains, unroll=1):
            cta.bars.wait("dk_full", 0, i & 1)
            info = cta.views.info
            place = (info[1, i & 1], info[2, i & 1], info[3, i & 1])
            for wg in cutlass.range_constexpr(2):
                store_rows(cta, cta.streams.dk, (cta.views.dk, wg), place, wg)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cta.bars.arrive("dk_empty")


def store_rows(cta: Cta, stream, staged, place, wg):
    """One warpgroup's 64 rows of a dK or dV tile, from piece `staged[1]` of a shared-memory tensor."""
    atom, tensor = stream
    smem, piece = staged
    kv_tile, kv_head, batch = place
    g = cute.local_tile(tensor, (64, cta.cfg.dim), (None, 0, None, None))
    src, dst = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2)
    )
    cute.copy(atom, src[None, piece], dst[None, kv_tile * 2 + wg, kv_head, batch])
