"""The types that cross kernel and role boundaries."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ..barriers import mbarrier_count, mbarrier_offsets, mbarrier_specs
from ..config import CONSUMER_WARPGROUPS, RING, KernelConfig
from ..smem_plan import ENTRY_WORDS, INFO_WORDS
from .ptx import phase_done


class Tables(NamedTuple):
    """The Program on the device: int32, read-only."""

    chains: Any  # [C, 5]
    runs: Any  # [R, 8]
    worker_first: Any  # [W + 1]
    worker_chains: Any  # [C]
    contributors: Any  # [n_q]


class Debug(NamedTuple):
    """What the debug build writes."""

    contributions: Any  # (planes, n_q, turns, sum(cfg.sum_parts))
    reports: Any  # Int64 address of host memory: (workers, writers, len(REPORT)) int32


class Streams(NamedTuple):
    """TMA descriptors with their coordinate tensors, and the fp32 streams."""

    q: Any  # (atom, tensor (S, D, H, B))
    do: Any
    k: Any
    v: Any
    dk: Any
    dv: Any
    dq: Any
    lse: Any  # (planes, padded rows), times log2 e
    delta: Any
    dq_sum: Any  # (planes, n_q, sum(cfg.sum_parts)): one warpgroup's part behind the other's
    counters: Any  # (planes, n_q, *cfg.counters)
    row_lo: Any  # (Sq,) first key of a query row
    row_hi: Any  # (Sq,) one past its last key
    debug: Any = ()  # Debug, in a debug build
    events: Any = ()  # (workers, entries + 1, STAMPS) int64, in a tracing build


class Facts(NamedTuple):
    """Run-time scalars."""

    scale: Float32
    scale_log2: Float32
    seqlen_q: Int32
    seqlen_k: Int32
    group: Int32  # q heads per kv head
    heads_q: Int32


def element(cfg: KernelConfig):
    return BFloat16 if cfg.dtype == "bf16" else Float16


@dataclass(frozen=True)
class Layouts:
    """Swizzled shared-memory layouts. All tiles are K-major with 128-byte rows; transposed views reuse them."""

    q: Any
    kv: Any
    ds: Any
    grad: Any  # (64, D, pieces): one warpgroup's rows of dV in a dQ half-slot
    dk: Any  # (64, D, 2)
    dq_out: Any  # (64, 64, pieces): one warpgroup's part of finished dQ in a half-slot

    @staticmethod
    def of(cfg: KernelConfig) -> "Layouts":
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element(cfg))
        halves = cfg.dq_slots * CONSUMER_WARPGROUPS
        grad_pieces = halves * pieces_per_half(cfg, 64 * cfg.dim)
        out_pieces = halves * pieces_per_half(cfg, 64 * 64)
        return Layouts(
            q=cute.tile_to_shape(atom, (cfg.tile_m, cfg.dim, cfg.stages), order=(0, 1, 2)),
            kv=cute.tile_to_shape(atom, (cfg.tile_n, cfg.dim), order=(0, 1)),
            ds=cute.tile_to_shape(atom, (cfg.tile_m, cfg.tile_n, cfg.ds_stages), order=(0, 1, 2)),
            grad=cute.tile_to_shape(atom, (64, cfg.dim, grad_pieces), order=(0, 1, 2)),
            dk=cute.tile_to_shape(atom, (64, cfg.dim, CONSUMER_WARPGROUPS), order=(0, 1, 2)),
            dq_out=cute.tile_to_shape(atom, (64, 64, out_pieces), order=(0, 1, 2)),
        )


def pieces_per_half(cfg: KernelConfig, elements: int) -> int:
    """How many 16-bit pieces of that size a half-slot of fp32 dQ holds."""
    return cfg.half_floats * 2 // elements


def smem_struct(cfg: KernelConfig):
    """The struct behind `smem_plan.plan`; a test keeps the two equal."""
    t = element(cfg)
    m, n, d = cfg.tile_m, cfg.tile_n, cfg.dim
    mem, align = cute.struct.MemRange, cute.struct.Align
    barriers, words = mbarrier_count(cfg), RING * ENTRY_WORDS
    sums = cfg.half_floats * CONSUMER_WARPGROUPS * cfg.dq_slots

    @cute.struct
    class Shared:
        mbars: mem[cutlass.Int64, barriers]
        ring: align[mem[Int32, words], 16]
        info: align[mem[Int32, INFO_WORDS * 2], 16]
        lse: align[mem[Float32, m * cfg.stages], 128]
        delta: align[mem[Float32, m * cfg.stages], 128]
        q: align[mem[t, m * d * cfg.stages], 1024]
        do: align[mem[t, m * d * cfg.stages], 1024]
        k: align[mem[t, n * d], 1024]
        v: align[mem[t, n * d], 1024]
        ds: align[mem[t, m * n * cfg.ds_stages], 1024]
        dq: align[mem[Float32, sums], 1024]

    return Shared


@dataclass(frozen=True)
class Views:
    """Shared-memory tensors of one CTA."""

    q: Any
    do: Any
    k: Any
    v: Any
    ds: Any
    grad: Any
    dq_out: Any
    dq: Any  # (half_floats, 2 * slots) fp32, half-slot = slot * 2 + warpgroup
    lse: Any  # (M, stages)
    delta: Any
    ring: Any  # (ENTRY_WORDS, RING)
    info: Any  # (INFO_WORDS, 2): the chain running and the one after
    dk: Any  # (64, D, 2): dK rows of each warpgroup, over dS

    @staticmethod
    def of(cfg: KernelConfig, lay: Layouts, mem) -> "Views":
        t = element(cfg)

        def swizzled(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner, dtype=t)

        halves = cfg.dq_slots * CONSUMER_WARPGROUPS
        stats = cute.make_layout((cfg.tile_m, cfg.stages))
        return Views(
            q=swizzled(mem.q, lay.q),
            do=swizzled(mem.do, lay.q),
            k=swizzled(mem.k, lay.kv),
            v=swizzled(mem.v, lay.kv),
            ds=swizzled(mem.ds, lay.ds),
            grad=swizzled(mem.dq, lay.grad),
            dq_out=swizzled(mem.dq, lay.dq_out),
            dq=mem.dq.get_tensor(cute.make_layout((cfg.half_floats, halves))),
            lse=mem.lse.get_tensor(stats),
            delta=mem.delta.get_tensor(stats),
            ring=mem.ring.get_tensor(cute.make_layout((ENTRY_WORDS, RING))),
            info=mem.info.get_tensor(cute.make_layout((INFO_WORDS, 2))),
            dk=swizzled(mem.ds, lay.dk),
        )


@dataclass(frozen=True)
class Barriers:
    """mbarriers by name; roles never see a count or an address."""

    cfg: KernelConfig
    base: Any

    def at(self, name: str, index=0):
        return self.base + (mbarrier_offsets(self.cfg)[name] + index)

    def init(self):
        """Called by one thread."""
        for spec in mbarrier_specs(self.cfg):
            for i in range(spec.count):
                cute.arch.mbarrier_init(self.at(spec.name, i), spec.arrivals)

    def wait(self, name: str, index, phase):
        cute.arch.mbarrier_wait(self.at(name, index), phase)

    def is_done(self, name: str, index, phase):
        """As `wait`, but does not: 1 or 0."""
        return phase_done(self.at(name, index), phase)

    def arrive(self, name: str, index=0):
        cute.arch.mbarrier_arrive(self.at(name, index))

    def expect(self, name: str, index, nbytes: int):
        cute.arch.mbarrier_arrive_and_expect_tx(self.at(name, index), nbytes)


@dataclass(frozen=True)
class Cta:
    """What every role is given."""

    cfg: KernelConfig
    views: Views
    bars: Barriers
    streams: Streams
    tables: Tables
    facts: Facts
