"""The two dQ writer warps.

They add each dQ contribution in its turn. At the end of a chain they store dV. If chains are cut, they add dV and dK to
the sums of the kv tile, in the turn of the q head in its group.

dQ writer w serves slot w: entries w, w + WRITERS, and so on. With split turns it serves half w of every entry, and
each half of a tile has turns of its own.

Why a turnstile is sound, at dQ as well as at dV and dK:
- Release. The lane that issued a bulk add waits until the add is complete, not only until its source is read. Then the
  lane adds 1 to the counter, with release at gpu scope.
- Acquire. The lane of the next writer loads the counter, with acquire at gpu scope. Its own bulk add runs in the async
  proxy, and a proxy fence orders the add behind the load.
- Bulk groups belong to the thread that issued them. So lane 0 issues, waits and releases.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ..config import KV_COUNTERS, STAMPS
from ..cta import CONSUMER_WARPGROUPS, DQ_SLOTS, WRITERS
from ..smem_plan import GradEntry, TaskEntry
from .bundles import Cta, pieces_per_half
from .counters import pass_on, turns_taken
from .debug import await_turn, keep
from .ptx import bulk_add_f32, bulk_load, bulk_store
from .rows import Coords, tile_at
from .stamps import cycle, note
from .tasks import (
    END,
    FIRST,
    GRAD,
    LAST,
    PART,
    await_entry,
    entry_word,
    half_slot,
)


class Target(NamedTuple):
    """The tile that a contribution is added to."""

    q_tile: Any  # among the sums
    plane: Any


class SumPart(NamedTuple):
    """One warpgroup's part of a tile's sum."""

    first: Any  # its first float
    nbytes: Any


@dataclass(frozen=True)
class DqWriter:
    cta: Cta

    @cute.jit
    def run(self, writer):
        cfg = self.cta.cfg
        stride = 1 if cfg.split else WRITERS
        entry = Int32(0) if cfg.split else Int32(writer)
        flags = Int32(0)
        if const_expr(not cfg.last_finishes):
            for slot in range(DQ_SLOTS) if cfg.split else (writer,):
                self.free(writer, slot)
        elif const_expr(cfg.split):
            self.offer(writer, entry)
        while (flags & END) == 0:
            if const_expr(cfg.last_finishes):
                # This writer has just left a slot. The next entry there is this one, or with split turns the one after.
                self.offer(writer, entry + (DQ_SLOTS - stride))
            flags = self.flags(entry)
            if (flags & END) == 0:
                if (flags & GRAD) != 0:
                    if const_expr(cfg.cut):
                        self.add_part(writer, entry, flags)
                    else:
                        self.store_dv(writer, entry)
                else:
                    self.contribute(writer, entry, flags)
            entry = entry + stride

    def halves(self, writer):
        """The warpgroups whose halves this writer serves."""
        return (writer,) if self.cta.cfg.split else range(CONSUMER_WARPGROUPS)

    @cute.jit
    def flags(self, entry):
        await_entry(self.cta, entry)
        return entry_word(self.cta, entry, TaskEntry.FLAGS)

    @cute.jit
    def offer(self, writer, entry):
        """Gives the entry's slot to the consumers, unless the slot must receive a partial sum first."""
        if not self.fetches(self.flags(entry)):
            self.free(writer, entry)

    @cute.jit
    def free(self, writer, entry):
        if cute.arch.lane_idx() == 0:
            for wg in self.halves(writer):
                self.cta.bars.arrive("dq_empty", half_slot(entry, wg)[0])

    def fetches(self, flags):
        """True for the last contributor of a tile, unless it is also the first: it needs the sum of the others."""
        return (flags & (FIRST | LAST)) == LAST

    @cute.jit
    def contribute(self, writer, entry, flags):
        cta, cfg = self.cta, self.cta.cfg
        lane = cute.arch.lane_idx()
        target = self.target(entry)
        turn = entry_word(cta, entry, TaskEntry.TURN)
        column = writer if cfg.counters[0] == 2 else 0
        counter = cta.streams.counters[target.plane, target.q_tile, column, None].iterator
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
                self.fetch_sum(writer, entry, target)
            if (flags & LAST) != 0:
                self.store_dq(writer, entry)
            else:
                self.add_sum(writer, entry, target, flags)
        else:
            self.add_sum(writer, entry, target, flags)
        landed = cycle(cta)
        if const_expr(cfg.ordered):
            if lane == 0:
                pass_on(cfg, counter, writer)
        if const_expr(cfg.trace):
            self.stamp(writer, entry, "landed", landed)  # after the release, which would wait for this store
        cute.arch.sync_warp()

    @cute.jit
    def stamp(self, writer, entry, name: cutlass.Constexpr, when):
        if cute.arch.lane_idx() == 0:
            column = STAMPS.index(name)
            note(self.cta, entry + 1, column + 2 * writer if self.cta.cfg.split else column, when)

    @cute.jit
    def fetch_sum(self, writer, entry, target: Target):
        """Loads the partial sum into the free slot. Its arrival gives the slot to the consumers."""
        cta = self.cta
        if cute.arch.lane_idx() == 0:
            for wg in self.halves(writer):
                half, nbytes = half_slot(entry, wg)[0], self.part(wg).nbytes
                cta.bars.expect("dq_empty", half, nbytes)
                slot, mbar = cta.views.dq[None, half].iterator, cta.bars.at("dq_empty", half)
                bulk_load(slot, self.sum_of(target, wg), nbytes, mbar)

    def target(self, entry):
        tile = TaskEntry.SUM_TILE if const_expr(self.cta.cfg.packed) else TaskEntry.Q_TILE
        return Target(entry_word(self.cta, entry, tile), entry_word(self.cta, entry, TaskEntry.PLANE))

    def part(self, wg):
        parts = self.cta.cfg.sum_parts
        # With split turns `wg` is known only when the kernel runs, but then the parts are equal.
        return SumPart(wg * parts[0], 4 * (parts[0] if parts[0] == parts[1] else parts[wg]))

    def sum_of(self, target: Target, wg):
        return self.cta.streams.dq_sum[target.plane, target.q_tile, None].iterator + self.part(wg).first

    @cute.jit
    def add_sum(self, writer, entry, target: Target, flags):
        cta = self.cta
        for wg in self.halves(writer):
            half, nbytes = half_slot(entry, wg)[0], self.part(wg).nbytes
            self.await_staged(entry, wg)
            if cute.arch.lane_idx() == 0:
                src = cta.views.dq[None, half].iterator
                if const_expr(cta.cfg.debug):
                    keep(cta, entry, self.part(wg), src)
                    # Read again: the writers have too few registers to hold the words until here.
                    target = self.target(entry)
                if (flags & FIRST) != 0:
                    bulk_store(self.sum_of(target, wg), src, nbytes)
                else:
                    bulk_add_f32(self.sum_of(target, wg), src, nbytes)
                cute.arch.cp_async_bulk_commit_group()
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=not cta.cfg.ordered)
        if const_expr(not cta.cfg.last_finishes):
            self.free(writer, entry)  # before the turn is passed on, because that waits for a fence

    @cute.jit
    def await_staged(self, entry, wg):
        """Waits until a warpgroup has staged its half.

        The bulk engine reads what the consumers wrote, so a proxy fence must lie between the two. Here the fence costs
        the writer time; before the consumers' arrival it would cost time of the tensor cores.
        """
        self.cta.bars.wait("dq_full", *half_slot(entry, wg))
        cute.arch.fence_view_async_shared()

    @cute.jit
    def store_dq(self, writer, entry):
        cta, cfg = self.cta, self.cta.cfg
        if const_expr(cfg.packed):
            words = (TaskEntry.ROW, TaskEntry.PLANE, TaskEntry.SHIFT)
            first, head, last = [entry_word(cta, entry, word) for word in words]
            step = 64
        else:
            q_tile, plane = self.target(entry)
            last = plane // cta.facts.heads_q
            head, step = plane - last * cta.facts.heads_q, 1
            first = q_tile * 2 if const_expr(cfg.dq_split_rows) else q_tile
        for wg in self.halves(writer):
            half = half_slot(entry, wg)[0]
            self.await_staged(entry, wg)
            row, column = (first + step * wg, 0) if const_expr(cfg.dq_split_rows) else (first, wg)
            out = cta.views.dq_out[None, None, half * pieces_per_half(cfg, 64 * 64)]
            store_tile(cta, cta.streams.dq, out, Coords(row, column, head, last))
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def store_dv(self, writer, entry):
        cta, cfg = self.cta, self.cta.cfg
        if const_expr(cfg.packed):
            words = (GradEntry.ROW, GradEntry.KV_HEAD, GradEntry.SHIFT)
        else:
            words = (GradEntry.KV_TILE, GradEntry.KV_HEAD, GradEntry.BATCH)
        first, head, last = [entry_word(cta, entry, word) for word in words]
        coords = Coords(first, 0, head, last)
        for wg in self.halves(writer):
            half = half_slot(entry, wg)[0]
            self.await_staged(entry, wg)
            staged = cta.views.grad[None, None, half * pieces_per_half(cfg, 64 * cfg.dim)]
            store_rows(cta, cta.streams.dv, staged, coords, wg)
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(cfg.trace):
            self.stamp(writer, entry, "landed", cycle(cta))
        if const_expr(not cfg.last_finishes):
            self.free(writer, entry)
        cute.arch.sync_warp()

    @cute.jit
    def add_part(self, writer, entry, flags):
        """Adds 64 columns of a cut chain's dV or dK to their sum, in the turn of the q head in its group.

        The turns are kept in unordered builds too.
        """
        cta, cfg = self.cta, self.cta.cfg
        words = (GradEntry.KV_TILE, GradEntry.KV_HEAD, GradEntry.BATCH)
        kv_tile, head, batch = [entry_word(cta, entry, word) for word in words]
        plane = (batch * cta.facts.heads_q + head) // cta.facts.group
        turn = head % cta.facts.group
        sums = cta.streams.kv_sum
        dst = sums[plane, kv_tile, flags // PART, None].iterator
        at = (plane * sums.shape[1] + kv_tile) * cfg.chain_entries + flags // PART
        counter = cta.streams.words.iterator + (KV_COUNTERS + at * 2 + (writer if const_expr(cfg.split) else 0))
        if turn != 0:
            if cute.arch.lane_idx() == 0:
                seen = Int32(-1)
                while seen != turn:
                    seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
                cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()
        if const_expr(cfg.trace):
            self.stamp(writer, entry, "turn", cycle(cta))
        for wg in self.halves(writer):
            src, nbytes = cta.views.dq[None, half_slot(entry, wg)[0]].iterator, 4 * cfg.half_floats
            self.await_staged(entry, wg)
            if cute.arch.lane_idx() == 0:
                if turn == 0:
                    bulk_store(dst + wg * cfg.half_floats, src, nbytes)
                else:
                    bulk_add_f32(dst + wg * cfg.half_floats, src, nbytes)
                cute.arch.cp_async_bulk_commit_group()
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        landed = cycle(cta)
        if const_expr(not cfg.last_finishes):
            self.free(writer, entry)
        if cute.arch.lane_idx() == 0:
            cute.arch.red(counter, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")
        if const_expr(cfg.trace):
            self.stamp(writer, entry, "landed", landed)
        cute.arch.sync_warp()


def store_rows(cta: Cta, stream, staged, coords: Coords, wg):
    """Stores one warpgroup's 64 rows of a dK or dV tile."""
    row = coords.row + 64 * wg if const_expr(cta.cfg.packed) else coords.row * 2 + wg
    store_tile(cta, stream, staged, coords._replace(row=row))


def store_tile(cta: Cta, stream, staged, coords: Coords):
    """Stores a tile from shared memory."""
    src, dst = cute.group_modes(staged, 0, 2), tile_at(cta.cfg, stream.tma_tensor, staged, coords)
    src, dst = cpasync.tma_partition(stream.atom, 0, cute.make_layout(1), src, dst)
    cute.copy(stream.atom, src, dst)
