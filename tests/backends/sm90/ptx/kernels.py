"""The compiled kernels as functions of CPU tensors, with the arguments that `Launch` gives them."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

from torch import Tensor

from dash_attn.backends.sm90.cache import Kernels, compile_kernel, shared
from dash_attn.backends.sm90.config import KernelConfig
from dash_attn.backends.sm90.cta import CONSUMER_WARPGROUPS, TILE_N
from dash_attn.backends.sm90.smem_plan import plan
from tests.backends.sm90.ptx.bulk import TensorMap
from tests.backends.sm90.ptx.machine import Chance, Machine
from tests.backends.sm90.ptx.memory import Global
from tests.backends.sm90.ptx.text import Text, read
from tests.backends.sm90.ptx.warp import World

FAR = 1 << 30  # the rows that a pack's descriptor has: FAR in device/rows.py, which needs the compiler
TOGETHER = 4  # CTAs of a side kernel that run at the same time
SIDE_BYTES = 256  # shared memory of a side kernel

Tensors = Sequence[Tensor]
Grid = tuple[int, int, int]


@lru_cache(None)
def source_of(kind: str, cfg: KernelConfig) -> str:
    """PTX for sm_90a. The compiler needs no GPU for it."""
    with tempfile.TemporaryDirectory() as folder:
        text: str = compile_kernel(kind, cfg, f"--keep-ptx --dump-dir {folder}").__ptx__  # type: ignore[attr-defined]
    return text


@lru_cache(None)
def text_of(kind: str, cfg: KernelConfig) -> Text:
    return read(source_of(kind, cfg))


class Call(NamedTuple):
    """What a kernel is launched with. A descriptor stands among the arguments as a TensorMap."""

    grid: Grid
    arguments: Sequence[Any]
    others: Tensors = ()  # tensors that only descriptors name


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel of any kind, on the machine."""

    kind: str
    cfg: KernelConfig
    chance: Chance

    def __call__(self, *given: Any) -> None:
        call: Call = getattr(self, f"_{self.kind}")(*given)
        text, memory = text_of(self.kind, self.cfg), Global()
        for x in (*call.arguments, *call.others):
            if isinstance(x, Tensor):
                memory.add(x)
        maps = [x for x in call.arguments if isinstance(x, TensorMap)]
        world = World(memory, maps, Random(self.chance.seed))
        machine = Machine(text, dict(bound(text, call.arguments)), world, self.chance)
        if self.kind == "main":
            machine.launch(call.grid, call.grid[0], plan(self.cfg).total)  # a cooperative launch
        else:
            machine.launch(call.grid, TOGETHER, SIDE_BYTES)

    def _prepare(self, inputs: Tensors, stats: Tensors, extra: Tensors) -> Call:
        lse2, delta, _, counters = stats[:4]
        rows = inputs[0].shape
        grid = rows[-2] * counters.shape[1], 1 if self.cfg.packed else rows[0], 1
        return Call(grid, [*inputs, lse2, delta, counters, *(extra if self.cfg.packed or self.cfg.cut else ())])

    _prepare_dlse = _prepare

    def _sink_sums(self, stats: Tensors, sinks: Tensor, dsinks: Tensor) -> Call:
        return Call((len(sinks), 1, 1), [*stats[:2], sinks, dsinks])

    def _main(self, tensors: Tensors, stats: Tensors, tables: Tensors, facts: Sequence[Any]) -> Call:
        cfg, (q, do, k, v, dq, dk, dv) = self.cfg, tensors
        heights = (q, cfg.tile_m), (do, cfg.tile_m), (k, TILE_N), (v, TILE_N), (dk, 64), (dv, 64), (dq, 64)
        maps = [x for each in heights for x in (self._described(*each), None)]
        factors, others = facts[: 2 + cfg.softcap], facts[2 + cfg.softcap :]
        if cfg.packed:
            workers, *limits = others
            rows = ()
        else:
            (workers, rows, limits), tables = (tables[2].numel() - 1, tables[5:], ()), tables[:5]
        sizes = q.shape[-3], k.shape[-3], q.shape[-2] // k.shape[-2], q.shape[-2], k.shape[-2]
        scalars = [*factors[:2], *sizes, *limits, *factors[2:]]
        return Call((workers, 1, 1), [*maps, *stats[:4], *rows, *stats[4:], *tables, *scalars], tensors)

    def _finish(self, sums: Tensor, dq: Tensor, tiles: Tensors, scale: float) -> Call:
        batch = 1 if self.cfg.packed else dq.shape[0]
        return Call((sums.shape[1], dq.shape[-2], 2 * batch), [sums, dq, *tiles, scale])

    def _finish_kv(self, sums: Tensor, grads: Tensors, tiles: Tensors, scale: float) -> Call:
        tiles = tiles if self.cfg.packed else ()
        count = tiles[0].shape[0] if self.kind == "fold_kv" else sums.shape[1]
        pieces, batch = count * self.cfg.chain_entries * CONSUMER_WARPGROUPS, 1 if self.cfg.packed else len(grads[0])
        return Call((pieces, grads[0].shape[-2], batch), [sums, *grads, *tiles, scale])

    _fold_kv = _finish_kv

    def _spread(self, sources: Tensors, copies: Tensors, pieces: Tensor) -> Call:
        return Call((2 * len(pieces), sources[0].shape[1], 1), [*sources, *copies, pieces])

    def _described(self, x: Tensor, rows: int) -> TensorMap:
        """The view that device/rows.py gives of a tensor."""
        *_, length, heads, dim = x.shape
        row, head = x.stride()[-3:-1]
        if self.cfg.packed:
            return TensorMap(x.data_ptr() - 2 * FAR * row, (dim, FAR, heads, FAR), (1, row, head, row), (64, rows))
        return TensorMap(x.data_ptr(), (dim, length, heads, len(x)), (1, row, head, x.stride(0)), (64, rows))


def kernels(cfg: KernelConfig, folds: bool, chance: Chance) -> Kernels:
    """In place of cache.kernels."""
    side = shared(cfg)
    finish = None if cfg.last_finishes else Kernel("finish", replace(side, cut=False), chance)
    finish_kv = Kernel("fold_kv" if folds else "finish_kv", side, chance) if cfg.cut else None
    return Kernels(Kernel("prepare", side, chance), Kernel("main", cfg, chance), finish, finish_kv)


def bound(text: Text, arguments: Sequence[Any]) -> Iterator[tuple[str, bytes]]:
    """The bytes of each parameter. The bytes of a descriptor are its number. No kernel reads the shape after it."""
    maps = 0
    for (name, size), value in zip(text.params.items(), arguments, strict=True):
        if isinstance(value, Tensor):
            yield name, tensor_bytes(value, size)
        elif isinstance(value, TensorMap):
            yield name, struct.pack("<q", maps)
            maps += 1
        elif value is not None:
            yield name, struct.pack("<f" if isinstance(value, float) else "<i", value)
        else:
            yield name, b"\xff" * size


def tensor_bytes(x: Tensor, size: int) -> bytes:
    """A tensor as kernels take it: its address, its sizes without the last ones that the kernel knows, and its strides
    without the last one."""
    for sizes in range(x.dim(), -1, -1):
        head = struct.pack(f"<q{sizes}i", x.data_ptr(), *x.shape[:sizes])
        whole = head.ljust(-(-len(head) // 8) * 8, b"\0") + struct.pack(f"<{x.dim() - 1}q", *x.stride()[:-1])
        if len(whole) == size:
            return whole
    raise AssertionError(f"a tensor of shape {tuple(x.shape)} does not fit into {size} bytes")
