"""The types that the kernel hands to its roles: tensors, shared memory, barriers and scalars."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ..barriers import MBARRIER_COUNT, MBARRIER_OFFSETS, mbarriers
from ..config import KernelConfig
from ..cta import CHAINS_IN_FLIGHT, CONSUMER_WARPGROUPS, HALF_SLOTS, RING, STAGES, TILE_N
from ..smem_plan import DELTA_BYTES, ENTRY_WORDS, MINUS_BYTES, Info, delta_offset, dk_piece
from .ptx import phase_done


class Tables(NamedTuple):
    """The placed Program on the device: int32, read-only. W workers, C chains, R runs, n_q q tiles."""

    chains: Any  # [C, len(Chain)], columns of program.Chain
    runs: Any  # [R, 8], columns of program.Run and one of zeros
    worker_first: Any  # [W + 1], where each worker's chains begin in worker_chains
    worker_chains: Any  # [C], row numbers of chains
    contributors: Any  # [n_q], contributions to each dQ tile


class PackTables(NamedTuple):
    """The templates of a pack and its sequences, as pack.Assembly has them: int32, read-only."""

    docs: Any  # [rounds, len(Round) + len(Doc)], columns of pack.Round, then pack.Doc: each round with its sequence
    bundles: Any  # [B, len(PackedBundle)], columns of pack.PackedBundle
    chains: Any  # [C, len(PackedChain)], columns of pack.PackedChain
    runs: Any  # [R, 8], columns of program.Run and one of zeros
    contributors: Any  # contributions to each dQ tile, template by template


class Debug(NamedTuple):
    """The memory that the debug build writes to."""

    contributions: Any  # (planes, n_q, turns, sum(cfg.sum_parts))
    reports: Any  # Int64 address of host memory: (workers, WRITERS, len(REPORT)) int32


class Streams(NamedTuple):
    """Tensors in global memory: those that TMA moves, each with its descriptor, and the others."""

    q: Any  # TmaInfo, of a tensor (seqlen, dim, heads, batch); for a pack as in rows.py
    do: Any
    k: Any
    v: Any
    dk: Any
    dv: Any
    dq: Any
    lse: Any  # (planes, padded rows), in base 2
    delta: Any
    dq_sum: Any  # (planes, n_q, sum(cfg.sum_parts)): the part of warpgroup 0, then the part of warpgroup 1
    counters: Any  # (planes, n_q, *cfg.counters)
    row_lo: Any  # (Sq,) first key that a query sees
    row_hi: Any  # (Sq,) one past the last key that it sees
    words: Any = ()  # int32, zero when the kernel begins: the ticket counter of a pack, then the turnstiles of kv_sum
    kv_sum: Any = ()  # (kv planes, n_kv, chain_entries, 2 * half_floats) fp32: dV and dK of cut chains
    debug: Any = ()  # Debug, in a debug build
    events: Any = ()  # (workers, 1 + entries, cfg.stamps) int64, in a tracing build


class Facts(NamedTuple):
    """Scalars of one launch."""

    scale: Float32  # of the softmax
    scale_log2: Float32  # scale * log2(e)
    seqlen_q: Int32
    seqlen_k: Int32
    group: Int32  # q heads of a kv head
    heads_q: Int32
    heads_kv: Int32
    tickets: Any = ()  # of a pack: one for each bundle of each panel of each sequence
    left: Any = ()  # of a pack with mask "interval": how far a query sees before and after its position
    right: Any = ()
    inner: Any = ()  # with softcap: scale / softcap. scale_log2 is then softcap * log2(e)


def element(cfg: KernelConfig):
    return BFloat16 if cfg.dtype == "bf16" else Float16


@dataclass(frozen=True)
class Layouts:
    """Swizzled layouts in shared memory. Tiles are K-major with 128-byte rows. Transposed views use them too."""

    q: Any
    kv: Any
    ds: Any
    grad: Any  # (64, dim, pieces): dV rows of one warpgroup, in a half of a dQ slot
    dk: Any  # (64, dim, pieces): dK rows of each warpgroup, in the dS buffers
    dq_out: Any  # (64, 64, pieces): finished dQ of one warpgroup, in a half of a dQ slot

    @staticmethod
    def of(cfg: KernelConfig) -> "Layouts":
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element(cfg))
        grad_pieces = HALF_SLOTS * pieces_per_half(cfg, 64 * cfg.dim)
        out_pieces = HALF_SLOTS * pieces_per_half(cfg, 64 * 64)
        return Layouts(
            q=cute.tile_to_shape(atom, (cfg.tile_m, cfg.dim, STAGES), order=(0, 1, 2)),
            kv=cute.tile_to_shape(atom, (TILE_N, cfg.dim), order=(0, 1)),
            ds=cute.tile_to_shape(atom, (cfg.tile_m, TILE_N, STAGES), order=(0, 1, 2)),
            grad=cute.tile_to_shape(atom, (64, cfg.dim, grad_pieces), order=(0, 1, 2)),
            dk=cute.tile_to_shape(atom, (64, cfg.dim, dk_piece(cfg, CONSUMER_WARPGROUPS)), order=(0, 1, 2)),
            dq_out=cute.tile_to_shape(atom, (64, 64, out_pieces), order=(0, 1, 2)),
        )


def pieces_per_half(cfg: KernelConfig, elements: int) -> int:
    """Tiles of `elements` 16-bit values that fit into the fp32 values of half a dQ slot."""
    return cfg.half_floats * 2 // elements


def delta_parts(cfg: KernelConfig, ds):
    """Delta as an operand, in the memory of dS: (4 words, 128 rows, warpgroups, STAGES). A row is 8 columns in bf16."""
    start = cute.recast_ptr(ds.data_ptr() + delta_offset(cfg, 0, 0) // 2, dtype=Int32)
    copy, stage = [(delta_offset(cfg, *at) - delta_offset(cfg, 0, 0)) // 4 for at in ((1, 0), (0, 1))]
    shape = (4, DELTA_BYTES // 16, CONSUMER_WARPGROUPS, STAGES)
    return cute.make_tensor(start, cute.make_layout(shape, stride=(1, 4, copy, stage)))


def delta_operand(parts):
    """The same as the right operand of a step: (128 rows, 16 columns, warpgroups, STAGES). It has each column twice."""
    *_, copy, stage = parts.stride
    shape = ((8, DELTA_BYTES // 128), (8, 2), CONSUMER_WARPGROUPS, STAGES)
    start = cute.recast_ptr(parts.iterator, dtype=BFloat16)
    return cute.make_tensor(start, cute.make_layout(shape, stride=((8, 64), (1, 0), 2 * copy, 2 * stage)))


def minus_rows():
    """The left operand. All its rows are the same eight columns, twice, so 128 bytes hold it."""
    return cute.make_layout(((8, TILE_N // 8), (8, 2)), stride=((8, 0), (1, 0)))


@cute.jit
def write_minus(minus):
    """-1/2 in the three columns that hold delta, and 0 in the others: the product has each column twice. One warp."""
    lane = cute.arch.lane_idx()
    half = 0xBF00  # -1/2 in bf16
    word = Int32((half << 16 | half) - (1 << 32)) if lane % 4 == 0 else Int32(0)
    word = Int32(half) if lane % 4 == 1 else word
    cute.make_tensor(cute.recast_ptr(minus.iterator, dtype=Int32), cute.make_layout(32))[lane] = word
    cute.arch.fence_view_async_shared()


def smem_struct(cfg: KernelConfig):
    """The buffers of `smem_plan.plan` as a struct of the kernel language. A test compares their sizes."""
    t = element(cfg)
    m, n, d = cfg.tile_m, TILE_N, cfg.dim
    mem, align = cute.struct.MemRange, cute.struct.Align

    @cute.struct
    class Shared:
        mbars: mem[cutlass.Int64, MBARRIER_COUNT]
        ring: align[mem[Int32, ENTRY_WORDS * RING], 16]
        info: align[mem[Int32, len(Info) * CHAINS_IN_FLIGHT], 16]
        lse: align[mem[Float32, m * STAGES], 128]
        delta: align[mem[Float32, m * STAGES], 128]
        if cfg.delta_in_product:
            minus: align[mem[BFloat16, MINUS_BYTES // 2], 128]
        q: align[mem[t, m * d * STAGES], 1024]
        do: align[mem[t, m * d * STAGES], 1024]
        k: align[mem[t, n * d], 1024]
        v: align[mem[t, n * d], 1024]
        ds: align[mem[t, m * n * STAGES], 1024]
        dq: align[mem[Float32, cfg.half_floats * HALF_SLOTS], 1024]

    return Shared


@dataclass(frozen=True)
class Views:
    """The shared memory of one CTA as tensors."""

    q: Any
    do: Any
    k: Any
    v: Any
    ds: Any
    grad: Any
    dq_out: Any
    dq: Any  # (half_floats, HALF_SLOTS) fp32; half number = 2 * slot + warpgroup
    lse: Any  # (tile_m, STAGES)
    delta: Any
    parts: Any  # the operands in bf16 of the step that subtracts delta: delta_parts, and (TILE_N, 16)
    minus: Any
    ring: Any  # (words of an entry, RING)
    info: Any  # (words of Info, CHAINS_IN_FLIGHT); column = parity of the chain
    dk: Any  # (64, dim, pieces): dK rows of each warpgroup, in the memory of dS

    @staticmethod
    def of(cfg: KernelConfig, lay: Layouts, mem) -> "Views":
        t = element(cfg)

        def swizzled(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner, dtype=t)

        stats = cute.make_layout((cfg.tile_m, STAGES))
        return Views(
            q=swizzled(mem.q, lay.q),
            do=swizzled(mem.do, lay.q),
            k=swizzled(mem.k, lay.kv),
            v=swizzled(mem.v, lay.kv),
            ds=swizzled(mem.ds, lay.ds),
            grad=swizzled(mem.dq, lay.grad),
            dq_out=swizzled(mem.dq, lay.dq_out),
            dq=mem.dq.get_tensor(cute.make_layout((cfg.half_floats, HALF_SLOTS))),
            lse=mem.lse.get_tensor(stats),
            delta=mem.delta.get_tensor(stats),
            parts=delta_parts(cfg, mem.ds) if cfg.delta_in_product else None,
            minus=mem.minus.get_tensor(minus_rows()) if cfg.delta_in_product else None,
            ring=mem.ring.get_tensor(cute.make_layout((ENTRY_WORDS, RING))),
            info=mem.info.get_tensor(cute.make_layout((len(Info), CHAINS_IN_FLIGHT))),
            dk=swizzled(mem.ds, lay.dk),
        )


@dataclass(frozen=True)
class Barriers:
    """mbarriers by name. Roles never see an address or an arrival count."""

    base: Any  # address of the first barrier

    def at(self, name: str, index=0):
        return self.base + (MBARRIER_OFFSETS[name] + index)

    def init(self, cfg: KernelConfig):
        """Called by one thread."""
        for spec in mbarriers(cfg.delta_in_product, cfg.cut):
            for i in range(spec.count):
                cute.arch.mbarrier_init(self.at(spec.name, i), spec.arrivals)

    def wait(self, name: str, index, phase):
        cute.arch.mbarrier_wait(self.at(name, index), phase)

    def is_done(self, name: str, index, phase):
        """1 if `wait` would return at once, else 0."""
        return phase_done(self.at(name, index), phase)

    def arrive(self, name: str, index=0):
        cute.arch.mbarrier_arrive(self.at(name, index))

    def expect(self, name: str, index, nbytes: int):
        cute.arch.mbarrier_arrive_and_expect_tx(self.at(name, index), nbytes)


@dataclass(frozen=True)
class Cta:
    """Everything that a role works with."""

    cfg: KernelConfig
    views: Views
    bars: Barriers
    streams: Streams
    tables: Tables
    facts: Facts
