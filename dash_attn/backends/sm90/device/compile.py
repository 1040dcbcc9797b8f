"""Compiles the kernels of a KernelConfig for tensors of any size."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dash_attn.pack import Doc, Fold, PackedBundle, PackedChain, Part, Round, TileRows
from dash_attn.program import RUN_WIDTH, Chain

from ..config import KernelConfig, Piece
from .bundles import element

OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"


def heads_tensor(cfg: KernelConfig, batch, rows, heads):
    """(batch, rows, heads, dim), in a pack (rows, heads, dim)."""

    def i64():
        return cute.sym_int64(divisibility=8)

    shape, strides = (rows, heads, cfg.columns), (i64(), i64(), 1)
    if not cfg.packed:
        shape, strides = (batch, *shape), (i64(), *strides)
    return cute.runtime.make_fake_tensor(element(cfg), shape, strides, assumed_align=16)


def rows_of(dtype, shape, align: int = 16):
    """A tensor with a contiguous last mode. Strides have 64 bits: the sums of long sequences pass 2^31 elements."""
    strides = (*tuple(cute.sym_int64(divisibility=max(1, align // 4)) for _ in shape[:-1]), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=align)


def stats_of(cfg: KernelConfig, planes, n_q, padded):
    """The tensors of workspace.Workspace."""
    return (
        rows_of(Float32, (planes, padded)),
        rows_of(Float32, (planes, padded)),
        rows_of(Float32, (planes, n_q, sum(cfg.sum_parts))),
        rows_of(Int32, (planes, n_q, *symbols(2)), 4),
    )


def kv_sum_of(cfg: KernelConfig):
    return rows_of(Float32, (*symbols(2), cfg.chain_entries, 2 * cfg.half_floats))


def table(*shape):
    return rows_of(Int32, shape, 4)


def words():
    return table(cute.sym_int32())


def tiles(cfg: KernelConfig):
    """Rows of the tiles of a pack: first row, number of rows."""
    return (table(cute.sym_int32(), len(TileRows)),) if cfg.packed else ()


def symbols(n: int):
    return [cute.sym_int32() for _ in range(n)]


def stream():
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


def compile_main(cfg: KernelConfig, options: str = ""):
    from .kernel import BackwardSm90

    batch, sq, sk, hq, hk, planes, n_q, padded = symbols(8)
    chains, runs, first, intervals = symbols(4)
    q, dq, do = [heads_tensor(cfg, batch, sq, hq) for _ in range(3)]
    k, v, dk, dv = [heads_tensor(cfg, batch, sk, hk) for _ in range(4)]
    stats = stats_of(cfg, planes, n_q, padded)
    facts = (Float32(1.0),) * (3 if cfg.softcap else 2)
    if cfg.cut or cfg.packed:
        stats = (*stats, words())
    if cfg.cut:
        stats = (*stats, kv_sum_of(cfg))
    if cfg.debug:
        stats = (*stats, rows_of(Float32, (planes, n_q, cute.sym_int32(), sum(cfg.sum_parts))))
    if cfg.trace:
        workers, entries = symbols(2)
        shape, strides = (workers, entries, cfg.stamps), (cute.sym_int64(), cfg.stamps, 1)
        stats = (*stats, cute.runtime.make_fake_tensor(Int64, shape, strides, assumed_align=8))
    tables = (
        table(chains, len(Chain)),
        table(runs, RUN_WIDTH),
        table(first),
        table(chains),
        table(n_q),
        table(intervals),
        table(intervals),
    )
    if cfg.packed:
        facts = (*facts, *(Int32(0) for _ in range(4)))
        docs, bundles, contributors = symbols(3)
        tables = (
            table(docs, len(Round) + len(Doc)),
            table(bundles, len(PackedBundle)),
            table(chains, len(PackedChain)),
            table(runs, RUN_WIDTH),
            table(contributors),
        )
    if cfg.debug:
        facts = (*facts, Int64(0))
    return cute.compile(
        BackwardSm90(cfg),
        (q, do, k, v, dq, dk, dv),
        stats,
        tables,
        facts,
        stream(),
        options=f"{OPTIONS} {options}",
    )


def compile_prepare(cfg: KernelConfig, options: str = ""):
    return _prepare(cfg, False, options)


def compile_prepare_dlse(cfg: KernelConfig, options: str = ""):
    return _prepare(cfg, True, options)


def _prepare(cfg: KernelConfig, with_dlse: bool, options: str):
    from .prepare import Prepare

    batch, sq, hq, planes, n_q, padded = symbols(6)
    logs = [rows_of(Float32, (hq, sq) if cfg.packed else (batch, hq, sq), 4) for _ in range(1 + with_dlse)]
    inputs = (heads_tensor(cfg, batch, sq, hq), heads_tensor(cfg, batch, sq, hq), *logs)
    stats = stats_of(cfg, planes, n_q, padded)
    extra = (words(), *tiles(cfg)) if cfg.cut or cfg.packed else ()
    return cute.compile(Prepare(cfg, with_dlse), inputs, stats, extra, stream(), options=f"{OPTIONS} {options}")


def compile_sink_sums(cfg: KernelConfig, options: str = ""):
    from .sink_sums import SinkSums

    hq, planes, n_q, padded = symbols(4)
    sinks, dsinks = (rows_of(Float32, (hq,), 4) for _ in range(2))
    stats = stats_of(cfg, planes, n_q, padded)
    return cute.compile(SinkSums(cfg), stats, sinks, dsinks, stream(), options=f"{OPTIONS} {options}")


def compile_finish(cfg: KernelConfig, options: str = ""):
    from .finish import Finish

    batch, sq, hq, planes, n_q = symbols(5)
    sums = rows_of(Float32, (planes, n_q, sum(cfg.sum_parts)))
    dq = heads_tensor(cfg, batch, sq, hq)
    return cute.compile(Finish(cfg), sums, dq, tiles(cfg), Float32(1.0), stream(), options=f"{OPTIONS} {options}")


def compile_finish_kv(cfg: KernelConfig, options: str = ""):
    return _finish_kv(cfg, tiles(cfg), options)


def compile_fold_kv(cfg: KernelConfig, options: str = ""):
    return _finish_kv(cfg, (table(cute.sym_int32(), len(Fold)), table(cute.sym_int32(), len(Part))), options)


def _finish_kv(cfg: KernelConfig, rows: tuple, options: str):
    from .finish_kv import FinishKv

    batch, sk, hk = symbols(3)
    grads = tuple(heads_tensor(cfg, batch, sk, hk) for _ in range(2))
    sums = kv_sum_of(cfg)
    return cute.compile(FinishKv(cfg), sums, grads, rows, Float32(1.0), stream(), options=f"{OPTIONS} {options}")


def compile_spread(cfg: KernelConfig, options: str = ""):
    from .spread import Spread

    heads, rows, roomy = symbols(3)
    sources, copies = (tuple(heads_tensor(cfg, 1, count, heads) for _ in range(2)) for count in (rows, roomy))
    pieces = table(cute.sym_int32(), len(Piece))
    return cute.compile(Spread(cfg), sources, copies, pieces, stream(), options=f"{OPTIONS} {options}")


COMPILERS = {
    "main": compile_main,
    "prepare": compile_prepare,
    "prepare_dlse": compile_prepare_dlse,
    "sink_sums": compile_sink_sums,
    "finish": compile_finish,
    "finish_kv": compile_finish_kv,
    "fold_kv": compile_fold_kv,
    "spread": compile_spread,
}
