"""The producer warp: reads the Program, starts every load, and tells the other roles what each stage holds.

A worker of a batch runs the chains that the host has placed on it. A worker of a pack draws tickets.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from dash_attn.pack import Doc, PackedBundle, Round
from dash_attn.program import Chain, Run

from ..config import STAMPS
from ..cta import TILE_N, WARP, WRITERS
from ..smem_plan import Info
from .bundles import Cta
from .ptx import bulk_load
from .rows import FAR, Coords, tile_at
from .stamps import note, stamp
from .tasks import (
    BEGINS,
    END,
    ENDS,
    FIRST,
    GRAD,
    LAST,
    ODD,
    PART,
    PARTIAL,
    bundle_word,
    chain_word,
    doc_word,
    info_word,
    my_chains,
    publish,
    round_word,
    run_word,
    stage_of,
)


class ChainPlace(NamedTuple):
    """A chain as the producer names it.

    chain  its row in the table
    panel  its kv head. In a build for cut chains, the first q head of its panel
    owner  its batch entry, in a pack its row of the table `docs`
    """

    chain: Any
    panel: Any
    owner: Any


class TaskPlace(NamedTuple):
    """A task as the producer names it."""

    flags: Any
    q_tile: Any
    turn: Any
    head: Any
    owner: Any  # as in ChainPlace


@dataclass(frozen=True)
class Producer:
    cta: Cta

    @cute.jit
    def run(self):
        cta = self.cta
        if const_expr(cta.cfg.packed):
            self.take_tickets()
        else:
            first, chains = my_chains(cta)
            task = Int32(0)
            for i in cutlass.range(chains, unroll=1):
                chain = cta.tables.worker_chains[first + i]
                panel, batch = chain_word(cta, chain, Chain.KV_HEAD), chain_word(cta, chain, Chain.BATCH)
                task = self.walk(i, task, ChainPlace(chain, panel, batch))
            self.close(task + chains * cta.cfg.chain_entries)

    @cute.jit
    def take_tickets(self):
        """Runs the bundle of a ticket, then takes the next ticket, until there is none.

        Workers draw tickets in launch order. A chain waits for chains with earlier tickets, and for chains of bundles
        that its own bundle awaits: those run at the same time. The host has checked that there are workers for them.
        """
        cta, info = self.cta, self.cta.views.info
        ticket, i, task = Int32(cute.arch.block_idx()[0]), Int32(0), Int32(0)
        while ticket < cta.facts.tickets:
            row = self.find(ticket)
            self.keep(ticket)
            if const_expr(cta.cfg.trace):
                if cute.arch.lane_idx() == 0:
                    note(cta, task + i * cta.cfg.chain_entries + 1, len(STAMPS), ticket + 1)
            ticket = ticket - round_word(cta, row, Round.TICKET)
            panel = ticket // round_word(cta, row, Round.BUNDLES)
            bundle = round_word(cta, row, Round.BUNDLE) + ticket - panel * round_word(cta, row, Round.BUNDLES)
            if const_expr(cta.cfg.cut):
                # The first q head of each group, then the second of each: q heads of one group would end their chains
                # at the same time, and wait for their turns at dK and dV.
                panel = (panel % cta.facts.heads_kv) * cta.facts.group + panel // cta.facts.heads_kv
            self.keep(self.kept() + bundle_word(cta, bundle, PackedBundle.AWAITS))
            chain = bundle_word(cta, bundle, PackedBundle.FIRST_CHAIN)
            end = chain + bundle_word(cta, bundle, PackedBundle.NUM_CHAINS)
            while chain < end:
                task = self.walk(i, task, ChainPlace(chain, panel, row))
                i, chain = i + 1, chain + 1
            ticket = self.next_ticket()
        cta.bars.wait("k_empty", 0, (i & 1) ^ 1)
        if cute.arch.lane_idx() == 0:
            info[int(Info.NUM_RUNS), i & 1] = Int32(-1)
            cta.bars.arrive("k_full")
        self.close(task + i * cta.cfg.chain_entries)

    @cute.jit
    def keep(self, word):
        """Puts a word into shared memory: the producer has no register to spare."""
        info = self.cta.views.info
        if cute.arch.lane_idx() == 0:
            info[int(Info.BATCH), 0] = word

    def kept(self):
        """The word, for the lane that put it there."""
        return info_word(self.cta, 0, Info.BATCH)

    @cute.jit
    def next_ticket(self):
        """Draws a ticket after the ticket that this worker's bundle awaits has been drawn.

        A bundle may wait for one with a later ticket. This worker must not take both: it would run them one after the
        other.
        """
        taken, counter, workers = Int32(0), self.cta.streams.words.iterator, cute.arch.grid_dim()[0]
        if cute.arch.lane_idx() == 0:
            drawn, awaited = Int32(0), self.kept()
            while drawn + workers <= awaited:
                drawn = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")
            taken = cute.arch.atomic_add(counter, Int32(1))
        return cute.arch.shuffle_sync(taken, 0) + workers

    @cute.jit
    def find(self, ticket):
        """The row of `rounds` that has a ticket. Each step cuts the rows into as many parts as the warp has lanes."""
        cta, rows = self.cta, self.cta.tables.docs.shape[0]
        low, count = Int32(0), Int32(rows)
        while count > 1:
            part = (count + (WARP - 1)) // WARP
            at = low + cute.arch.lane_idx() * part
            begins = round_word(cta, cutlass.min(at, rows - 1), Round.TICKET)
            reached = cute.arch.popc(cute.arch.vote_ballot_sync(at < low + count and begins <= ticket))
            low = low + (reached - 1) * part
            count = cutlass.min(part, rows - low) if part > 1 else Int32(1)
        return low

    @cute.jit
    def walk(self, i, task, place: ChainPlace):
        """Starts the loads of chain i of this worker. Returns the number of the task after it.

        Every run has at least one task, so a chain without runs is a chain without tasks.
        """
        cta, ends = self.cta, self.cta.cfg.chain_entries
        chain = place.chain
        run, runs = chain_word(cta, chain, Chain.FIRST_RUN), chain_word(cta, chain, Chain.NUM_RUNS)
        if runs == 0:
            self.load_kv(i, place, runs)
        begins = Int32(BEGINS)
        while runs > 0:
            first = place.panel if const_expr(cta.cfg.cut) else place.panel * cta.facts.group
            head = first + run_word(cta, run, Run.HEAD)
            q_tile, q_step = run_word(cta, run, Run.FIRST_Q), run_word(cta, run, Run.STEP)
            left = run_word(cta, run, Run.COUNT)
            turn, turn_step = run_word(cta, run, Run.TURN), run_word(cta, run, Run.TURN_STEP)
            run_flags = run_word(cta, run, Run.PARTIAL) + begins + (i & 1) * ODD
            begins = Int32(0)
            while left > 0:
                flags = run_flags + self.turn_flags(place.owner, q_tile, turn)
                flags = flags + ENDS if (runs == 1 and left == 1) else flags
                self.load_task(task, task + i * ends, TaskPlace(flags, q_tile, turn, head, place.owner))
                # The first Q and dO of a chain are loaded while the chain before still uses its K and V.
                if (run_flags & BEGINS) != 0:
                    self.load_kv(i, place, runs)
                run_flags = run_flags & (PARTIAL + ODD)
                q_tile, turn, task, left = q_tile + q_step, turn + turn_step, task + 1, left - 1
            run, runs = run + 1, runs - 1
        if cute.arch.lane_idx() == 0:
            for part in cutlass.range_constexpr(ends):
                publish(cta, task + i * ends + part, (GRAD + PART * part, *self.grad_words(i & 1, place)))
        return task

    def grad_words(self, parity, place: ChainPlace):
        """The words of GradEntry after the flags."""
        cta = self.cta
        kv_tile, head = info_word(cta, parity, Info.KV_TILE), info_word(cta, parity, Info.KV_HEAD)
        if const_expr(not cta.cfg.packed):
            return kv_tile, head, info_word(cta, parity, Info.BATCH)
        if const_expr(cta.cfg.cut):
            return doc_word(cta, place.owner, Doc.KV_TILE) + kv_tile, place.panel, 0
        return kv_tile, head, 0, info_word(cta, parity, Info.ROW), info_word(cta, parity, Info.SHIFT)

    @cute.jit
    def close(self, entry):
        if cute.arch.lane_idx() == 0:
            for w in cutlass.range_constexpr(WRITERS):
                publish(self.cta, entry + w, (END, 0, 0, 0))

    @cute.jit
    def turn_flags(self, owner, q_tile, turn):
        cta, flags = self.cta, Int32(0)
        if const_expr(cta.cfg.ordered):
            flags = Int32(FIRST) if turn == 0 else flags
            if const_expr(cta.cfg.last_finishes):
                first = doc_word(cta, owner, Doc.CONTRIBUTORS) if const_expr(cta.cfg.packed) else 0
                flags = flags + LAST if turn == cta.tables.contributors[first + q_tile] - 1 else flags
        return flags

    @cute.jit
    def load_task(self, task, entry, place: TaskPlace):
        """Loads Q, LSE, dO and delta of a task into its stage, after the consumers have left it."""
        cta, cfg, streams = self.cta, self.cta.cfg, self.cta.streams
        stage, phase = stage_of(task)
        free = phase ^ 1
        lane = cute.arch.lane_idx()
        tile_bytes, row_bytes = cfg.tile_m * cfg.dim * 2, cfg.tile_m * 4
        split = row_bytes if const_expr(cfg.delta_in_product) else 0  # delta comes with Q, and the dK writer splits it
        if const_expr(cfg.packed):
            plane, sum_tile = place.head, place.q_tile + doc_word(cta, place.owner, Doc.Q_TILE)
            rows = doc_word(cta, place.owner, Doc.Q_ROWS)
            first, last = FAR - rows + place.q_tile * cfg.tile_m, doc_word(cta, place.owner, Doc.Q_ROW) + rows
            words = (place.flags, place.q_tile, plane, place.turn, sum_tile, first, last)
        else:
            plane = place.owner * cta.facts.heads_q + place.head
            sum_tile, first, last = place.q_tile, place.q_tile, place.owner
            words = (place.flags, place.q_tile, plane, place.turn)
        cta.bars.wait("q_empty", stage, free)
        if lane == 0:
            # Consumers read the entry after q_full, so it is written before the arrival there.
            publish(cta, entry, words)
            if const_expr(cfg.trace):
                stamp(cta, entry, "loaded")
            cta.bars.expect("q_full", stage, tile_bytes + row_bytes + split)
            self.load_row(streams.lse[plane, None], cta.views.lse, sum_tile, stage, "q_full")
            if const_expr(cfg.delta_in_product):
                self.load_row(streams.delta[plane, None], cta.views.delta, sum_tile, stage, "q_full")
        loaded = Coords(first, 0, place.head, last)
        self.load_tile(streams.q, cta.views.q[None, None, stage], loaded, cta.bars.at("q_full", stage))
        cta.bars.wait("do_empty", stage, free)
        if lane == 0:
            cta.bars.expect("do_full", stage, tile_bytes + row_bytes - split)
            if const_expr(not cfg.delta_in_product):
                self.load_row(streams.delta[plane, None], cta.views.delta, sum_tile, stage, "do_full")
        self.load_tile(streams.do, cta.views.do[None, None, stage], loaded, cta.bars.at("do_full", stage))

    def load_row(self, stats, smem, tile, stage, name):
        """Starts the load of a number for each query of a tile. One lane."""
        tile_m = self.cta.cfg.tile_m
        dst, src = smem[None, stage].iterator, stats.iterator + tile * tile_m
        bulk_load(dst, src, 4 * tile_m, self.cta.bars.at(name, stage))

    def load_tile(self, stream, smem, coords: Coords, mbar):
        """Starts the load of one tile of Q, dO, K or V."""
        src = tile_at(self.cta.cfg, stream.tma_tensor, smem, coords)
        dst, src = cpasync.tma_partition(stream.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), src)
        cute.copy(stream.atom, src, dst, tma_bar_ptr=mbar)

    @cute.jit
    def load_kv(self, i, place: ChainPlace, runs):
        """Loads V and K of a chain, and describes the chain in `info`. Without tasks nothing is loaded.

        V comes first, because the consumers leave the V of the chain before earlier than its K.
        """
        cta, cfg, streams, info = self.cta, self.cta.cfg, self.cta.streams, self.cta.views.info
        kv_tile = chain_word(cta, place.chain, Chain.KV_TILE)
        first, last = kv_tile, place.owner
        if const_expr(cfg.packed):
            rows = doc_word(cta, place.owner, Doc.K_ROWS)
            first, last = FAR - rows + kv_tile * TILE_N, doc_word(cta, place.owner, Doc.K_ROW) + rows
        # In a build for cut chains the panel is a q head.
        head = place.panel // cta.facts.group if const_expr(cfg.cut) else place.panel
        loaded = Coords(first, 0, head, last)
        free = (i & 1) ^ 1
        lane = cute.arch.lane_idx()
        nbytes = TILE_N * cfg.dim * 2
        cta.bars.wait("v_empty", 0, free)
        if runs > 0:
            if lane == 0:
                cta.bars.expect("v_full", 0, nbytes)
            self.load_tile(streams.v, cta.views.v, loaded, cta.bars.at("v_full"))
        else:
            if lane == 0:
                cta.bars.arrive("v_full")
        cta.bars.wait("k_empty", 0, free)
        if lane == 0:
            info[int(Info.NUM_RUNS), i & 1] = runs
            info[int(Info.KV_TILE), i & 1] = kv_tile
            info[int(Info.KV_HEAD), i & 1] = place.panel
            if const_expr(cfg.packed):
                info[int(Info.LEN_Q), i & 1] = doc_word(cta, place.owner, Doc.Q_ROWS)
                info[int(Info.LEN_K), i & 1] = rows
                info[int(Info.ROW), i & 1] = first
                info[int(Info.SHIFT), i & 1] = last
            else:
                info[int(Info.BATCH), i & 1] = place.owner
        if runs > 0:
            if lane == 0:
                cta.bars.expect("k_full", 0, nbytes)
            self.load_tile(streams.k, cta.views.k, loaded, cta.bars.at("k_full"))
        else:
            if lane == 0:
                cta.bars.arrive("k_full")
