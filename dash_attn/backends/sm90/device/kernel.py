"""The backward kernel: one persistent CTA per worker, its warps in roles.

warps 0      producer: decodes the Program, TMA loads                      (worker_regs registers)
warps 1..2   dQ writers, one per slot                                      (worker_regs registers)
warp  3      dK writer                                                     (worker_regs registers)
warps 4..11  two consumer warpgroups                                       (consumer_regs registers)
"""

import cuda.bindings.driver as cu
import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from ..config import KernelConfig
from .bundles import Barriers, Cta, Debug, Facts, Layouts, Streams, Tables, Views, smem_struct
from .consumer import Consumer
from .dq_writer import DkWriter, DqWriter
from .producer import Producer
from .stamps import introduce


class BackwardSm90:
    def __init__(self, cfg: KernelConfig):
        self.cfg = cfg.validate()

    @cute.jit
    def __call__(self, tensors: tuple, stats: tuple, tables: tuple, facts: tuple, stream: cu.CUstream):
        """tensors: q, do, k, v, dq, dk, dv as (B, S, H, D); stats: lse, delta, dq_sum, counters; tables: those of
        Tables, row_lo, row_hi.

        A debug build takes contributions after the stats and an address after the facts, a tracing build the events.
        """
        cfg = self.cfg
        q, do, k, v, dq, dk, dv = [rows_first(t) for t in tensors]
        lay = Layouts.of(cfg)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def one(layout):
            return cute.select(layout, mode=[0, 1])

        m_tile, n_tile, rows = (cfg.tile_m, cfg.dim), (cfg.tile_n, cfg.dim), (64, cfg.dim)
        streams = Streams(
            q=cpasync.make_tiled_tma_atom(load, q, one(lay.q), m_tile),
            do=cpasync.make_tiled_tma_atom(load, do, one(lay.q), m_tile),
            k=cpasync.make_tiled_tma_atom(load, k, lay.kv, n_tile),
            v=cpasync.make_tiled_tma_atom(load, v, lay.kv, n_tile),
            dk=cpasync.make_tiled_tma_atom(store, dk, one(lay.grad), rows),
            dv=cpasync.make_tiled_tma_atom(store, dv, one(lay.grad), rows),
            dq=cpasync.make_tiled_tma_atom(store, dq, one(lay.dq_out), (64, 64)),
            lse=stats[0],
            delta=stats[1],
            dq_sum=stats[2],
            counters=stats[3],
            row_lo=tables[5],
            row_hi=tables[6],
            debug=Debug(stats[4], facts[2]) if cfg.debug else (),
            events=stats[4] if cfg.trace else (),
        )
        group = q.shape[2] // k.shape[2]
        facts = Facts(facts[0], facts[1], q.shape[0], k.shape[0], group, q.shape[2])
        tables = Tables(*tables[:5])
        workers = tables.worker_first.shape[0] - 1
        # Cooperative: all workers are resident together or the launch fails, so no turnstile can wait for an
        # absent worker.
        self.kernel(streams, tables, facts).launch(
            grid=[workers, 1, 1], block=[cfg.threads, 1, 1], stream=stream, min_blocks_per_mp=1, cooperative=True
        )

    @cute.kernel
    def kernel(self, streams: Streams, tables: Tables, facts: Facts):
        cfg = self.cfg
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mem = cutlass.memory.SmemAllocator().allocate(smem_struct(cfg))
        lay = Layouts.of(cfg)
        bars = Barriers(cfg, mem.mbars.data_ptr())
        cta = Cta(cfg, Views.of(cfg, lay, mem), bars, streams, tables, facts)
        if warp == 0:
            for atom in (streams.q, streams.do, streams.k, streams.v, streams.dk, streams.dv, streams.dq):
                cpasync.prefetch_descriptor(atom[0])
            with cute.arch.elect_one():
                bars.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(cfg.worker_regs)
            if warp == 0:
                if const_expr(cfg.trace):
                    with cute.arch.elect_one():
                        introduce(cta)
                Producer(cta).run()
            if warp >= 1 and warp <= cfg.writers:
                DqWriter(cta).run(warp - 1)
            if warp == 3:
                DkWriter(cta).run()
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_regs)
            Consumer(cta).run()


def rows_first(t):
    """(B, S, H, D) seen as (S, D, H, B): the two tiled modes first."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))
