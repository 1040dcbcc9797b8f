"""The producer warp: reads the Program, starts every load, and tells the other roles what each stage holds."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from dash_attn.program import Chain, Run

from ..cta import TILE_N, WRITERS
from ..smem_plan import Info
from .bundles import Cta
from .ptx import bulk_load
from .stamps import stamp
from .tasks import (
    BEGINS,
    END,
    ENDS,
    FIRST,
    GRAD,
    LAST,
    ODD,
    PARTIAL,
    chain_word,
    kv_place,
    my_chains,
    publish,
    run_word,
    stage_of,
)


@dataclass(frozen=True)
class Producer:
    cta: Cta

    @cute.jit
    def run(self):
        """Every run has at least one task, so a chain without runs is a chain without tasks."""
        cta, tables = self.cta, self.cta.tables
        lane = cute.arch.lane_idx()
        first, chains = my_chains(cta)
        task = Int32(0)
        for i in cutlass.range(chains, unroll=1):
            chain = tables.worker_chains[first + i]
            run, runs = chain_word(cta, chain, Chain.FIRST_RUN), chain_word(cta, chain, Chain.NUM_RUNS)
            if runs == 0:
                self.load_kv(i, chain, runs)
            begins = Int32(BEGINS)
            while runs > 0:
                batch = chain_word(cta, chain, Chain.BATCH)
                head = chain_word(cta, chain, Chain.KV_HEAD) * cta.facts.group + run_word(cta, run, Run.HEAD)
                q_tile, q_step = run_word(cta, run, Run.FIRST_Q), run_word(cta, run, Run.STEP)
                left = run_word(cta, run, Run.COUNT)
                turn, turn_step = run_word(cta, run, Run.TURN), run_word(cta, run, Run.TURN_STEP)
                run_flags = run_word(cta, run, Run.PARTIAL) + begins + (i & 1) * ODD
                begins = Int32(0)
                while left > 0:
                    flags = run_flags + self.turn_flags(q_tile, turn)
                    flags = flags + ENDS if (runs == 1 and left == 1) else flags
                    self.load_task(task, task + i, (flags, q_tile, turn), (head, batch))
                    # The first Q and dO of a chain are loaded while the chain before still uses its K and V.
                    if (run_flags & BEGINS) != 0:
                        self.load_kv(i, chain, runs)
                    run_flags = run_flags & (PARTIAL + ODD)
                    q_tile, turn, task, left = q_tile + q_step, turn + turn_step, task + 1, left - 1
                run, runs = run + 1, runs - 1
            if lane == 0:
                publish(cta, task + i, (GRAD, *kv_place(cta, i & 1)))
        if lane == 0:
            for w in cutlass.range_constexpr(WRITERS):
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
        """Loads Q, LSE, dO and delta of a task into its stage, after the consumers have left it."""
        cta, cfg, streams = self.cta, self.cta.cfg, self.cta.streams
        stage, phase = stage_of(task)
        free = phase ^ 1
        flags, q_tile, turn = words
        head, batch = place
        plane = batch * cta.facts.heads_q + head
        lane = cute.arch.lane_idx()
        tile_bytes, row_bytes = cfg.tile_m * cfg.dim * 2, cfg.tile_m * 4
        cta.bars.wait("q_empty", stage, free)
        if lane == 0:
            # Consumers read the entry after q_full, so it is written before the arrival there.
            publish(cta, entry, (flags, q_tile, plane, turn))
            if const_expr(cfg.trace):
                stamp(cta, entry, "loaded")
            cta.bars.expect("q_full", stage, tile_bytes + row_bytes)
            bulk_load(
                cta.views.lse[None, stage].iterator,
                streams.lse[plane, None].iterator + q_tile * cfg.tile_m,
                row_bytes,
                cta.bars.at("q_full", stage),
            )
        self.load_tile(streams.q, cta.views.q, (q_tile, head, batch, stage), cta.bars.at("q_full", stage))
        cta.bars.wait("do_empty", stage, free)
        if lane == 0:
            cta.bars.expect("do_full", stage, tile_bytes + row_bytes)
            bulk_load(
                cta.views.delta[None, stage].iterator,
                streams.delta[plane, None].iterator + q_tile * cfg.tile_m,
                row_bytes,
                cta.bars.at("do_full", stage),
            )
        self.load_tile(streams.do, cta.views.do, (q_tile, head, batch, stage), cta.bars.at("do_full", stage))

    def load_tile(self, stream, smem, where, mbar):
        """Starts the load of one tile of Q or dO."""
        atom, tensor = stream
        tile, head, batch, stage = where
        cfg = self.cta.cfg
        tiles = cute.local_tile(tensor, (cfg.tile_m, cfg.dim), (None, 0, None, None))
        dst, src = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        cute.copy(atom, src[None, tile, head, batch], dst[None, stage], tma_bar_ptr=mbar)

    @cute.jit
    def load_kv(self, i, chain, runs):
        """Loads V and K of a chain, and describes the chain in `info`. Without tasks nothing is loaded.

        V comes first, because the consumers leave the V of the chain before earlier than its K.
        """
        cta, streams, info = self.cta, self.cta.streams, self.cta.views.info
        place = tuple(chain_word(cta, chain, column) for column in (Chain.KV_TILE, Chain.KV_HEAD, Chain.BATCH))
        free = (i & 1) ^ 1
        lane = cute.arch.lane_idx()
        nbytes = TILE_N * cta.cfg.dim * 2
        cta.bars.wait("v_empty", 0, free)
        if runs > 0:
            if lane == 0:
                cta.bars.expect("v_full", 0, nbytes)
            self.load_stationary(streams.v, cta.views.v, place, cta.bars.at("v_full"))
        else:
            if lane == 0:
                cta.bars.arrive("v_full")
        cta.bars.wait("k_empty", 0, free)
        if lane == 0:
            info[int(Info.NUM_RUNS), i & 1] = runs
            info[int(Info.KV_TILE), i & 1] = place[0]
            info[int(Info.KV_HEAD), i & 1] = place[1]
            info[int(Info.BATCH), i & 1] = place[2]
        if runs > 0:
            if lane == 0:
                cta.bars.expect("k_full", 0, nbytes)
            self.load_stationary(streams.k, cta.views.k, place, cta.bars.at("k_full"))
        else:
            if lane == 0:
                cta.bars.arrive("k_full")

    def load_stationary(self, stream, smem, place, mbar):
        """Starts the load of one tile of K or V."""
        atom, tensor = stream
        kv_tile, kv_head, batch = place
        tiles = cute.local_tile(tensor, (TILE_N, self.cta.cfg.dim), (None, 0, None, None))
        dst, src = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        cute.copy(atom, src[None, kv_tile, kv_head, batch], dst[None], tma_bar_ptr=mbar)
