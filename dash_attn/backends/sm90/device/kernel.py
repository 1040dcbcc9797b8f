"""The backward kernel: one persistent CTA for each worker, with its warps in roles (see ../cta.py)."""

import cuda.bindings.driver as cu
import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from ..config import KernelConfig
from ..cta import CONSUMER_REGS, THREADS, TILE_N, WORKER_REGS, WRITERS
from .bundles import Barriers, Cta, Debug, Facts, Layouts, PackTables, Streams, Tables, Views, smem_struct, write_minus
from .consumer import Consumer
from .dk_writer import DkWriter
from .dq_writer import DqWriter
from .producer import Producer
from .rows import batched, described
from .stamps import introduce


class BackwardSm90:
    def __init__(self, cfg: KernelConfig):
        self.cfg = cfg

    @cute.jit
    def __call__(self, tensors: tuple, stats: tuple, tables: tuple, facts: tuple, stream: cu.CUstream):
        """tensors: q, do, k, v, dq, dk, dv as (batch, seqlen, heads, dim), in a pack (rows, heads, dim)
        stats: lse, delta, dq_sum, counters; then `words` for packs and cut chains; then kv_sum for cut chains; then
        contributions in a debug build, or events in a tracing build
        tables: those of Tables, then row_lo and row_hi; for a pack those of PackTables
        facts: scale, scale_log2; then inner with softcap; then for a pack workers, tickets and the sides of the window;
        then in a debug build the address of the reports
        """
        cfg = self.cfg
        q, do, k, v, dq, dk, dv = [described(cfg, batched(cfg, t)) for t in tensors]
        lse, delta, dq_sum, counters, *extra = stats
        words, extra = (extra[0], extra[1:]) if cfg.cut or cfg.packed else ((), extra)
        kv_sum, extra = (extra[0], extra[1:]) if cfg.cut else ((), extra)
        scale, scale_log2, *others = facts
        inner, others = (others[0], others[1:]) if cfg.softcap else ((), others)
        if const_expr(cfg.packed):
            workers, tickets, left, right, *reports = others
            tables, row_lo, row_hi = PackTables(*tables), (), ()
        else:
            *program, row_lo, row_hi = tables
            tables, tickets, left, right, reports = Tables(*program), (), (), (), others
            workers = tables.worker_first.shape[0] - 1
        lay = Layouts.of(cfg)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def one(layout):
            return cute.select(layout, mode=[0, 1])

        m_tile, n_tile, rows = (cfg.tile_m, cfg.dim), (TILE_N, cfg.dim), (64, cfg.dim)
        streams = Streams(
            q=cpasync.make_tiled_tma_atom(load, q, one(lay.q), m_tile),
            do=cpasync.make_tiled_tma_atom(load, do, one(lay.q), m_tile),
            k=cpasync.make_tiled_tma_atom(load, k, lay.kv, n_tile),
            v=cpasync.make_tiled_tma_atom(load, v, lay.kv, n_tile),
            dk=cpasync.make_tiled_tma_atom(store, dk, one(lay.grad), rows),
            dv=cpasync.make_tiled_tma_atom(store, dv, one(lay.grad), rows),
            dq=cpasync.make_tiled_tma_atom(store, dq, one(lay.dq_out), (64, 64)),
            lse=lse,
            delta=delta,
            dq_sum=dq_sum,
            counters=counters,
            words=words,
            kv_sum=kv_sum,
            row_lo=row_lo,
            row_hi=row_hi,
            debug=Debug(*extra, *reports) if cfg.debug else (),
            events=extra[0] if cfg.trace else (),
        )
        group = q.shape[2] // k.shape[2]
        sizes = q.shape[0], k.shape[0], group, q.shape[2], k.shape[2]
        facts = Facts(scale, scale_log2, *sizes, tickets, left, right, inner)
        # A cooperative launch fails unless all workers are resident at once, so no turn waits for an absent worker.
        self.kernel(streams, tables, facts).launch(
            grid=[workers, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1, cooperative=True
        )

    @cute.kernel
    def kernel(self, streams: Streams, tables: Tables | PackTables, facts: Facts):
        cfg = self.cfg
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mem = cutlass.memory.SmemAllocator().allocate(smem_struct(cfg))
        lay = Layouts.of(cfg)
        bars = Barriers(mem.mbars.data_ptr())
        cta = Cta(cfg, Views.of(cfg, lay, mem), bars, streams, tables, facts)
        if warp == 0:
            for stream in (streams.q, streams.do, streams.k, streams.v, streams.dk, streams.dv, streams.dq):
                cpasync.prefetch_descriptor(stream.atom)
            with cute.arch.elect_one():
                bars.init(cfg)
            cute.arch.mbarrier_init_fence()
            if const_expr(cfg.delta_in_product):
                write_minus(cta.views.minus)
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(WORKER_REGS)
            if warp == 0:
                if const_expr(cfg.trace):
                    with cute.arch.elect_one():
                        introduce(cta)
                Producer(cta).run()
            if warp >= 1 and warp <= WRITERS:
                DqWriter(cta).run(warp - 1)
            if const_expr(not cfg.cut or cfg.delta_in_product):
                if warp == 3:
                    DkWriter(cta).run()
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGS)
            Consumer(cta).run()
