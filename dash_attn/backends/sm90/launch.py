"""Launch: the backward of one plan or pack on a Hopper GPU. Everything that calls share is looked up once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from dash_attn.backends.base import Extras, Gradients, Operands
from dash_attn.lazily import cached_property

from .alignment import Strides, aligned, fits, maker
from .cache import Kernel, kernels, shared, side_kernel
from .config import LOG2_E, KernelConfig
from .tables import DeviceTables, PackedTables, Uploads
from .workspace import Keeper, Room, Workspace, converted


class SpecialBuffers(Protocol):
    """Additional tensors and host addresses for the kernel of a tracing or debug build."""

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def addresses(self) -> tuple[int, ...]: ...


class Launch:
    """dQ, dK, dV of softmax(scale Q K^T + mask) V.

    For a small problem the host takes longer than the GPU, so a call does as little as possible. A build with softcap
    gets its number. Sinks change nothing in the main kernel: lse includes them.
    """

    def __init__(
        self, cfg: KernelConfig, tables: DeviceTables | PackedTables, scale: float, softcap: float = 0.0
    ) -> None:
        assert cfg.softcap == (softcap > 0)
        self.cfg, self.tables, self.scale = cfg, tables, scale
        self.prepare, self.main, self.finish, self.finish_kv = kernels(cfg, tables.folds)
        factors = (scale, softcap * LOG2_E, scale / softcap) if softcap else (scale, scale * LOG2_E)
        self.program, self.facts = converted(tables.program), (*factors, *tables.facts)
        self.clears = tables.clears_dq or tables.clears_dkv or not cfg.ordered
        self.special = cfg.trace or cfg.debug
        self._uploads = Uploads(tables.runs)
        self._workspace = Keeper(cfg, tables.n_q, tables.n_kv)
        # The key has the strides of tensors that need no copy. The value makes new tensors like q, k and v.
        self._makers: dict[tuple[Strides, ...], Callable[[Tensor], Tensor]] = {}

    @cached_property
    def prepare_dlse(self) -> Kernel:
        """In place of `prepare` if there is a gradient of lse."""
        return side_kernel("prepare_dlse", shared(self.cfg))

    @cached_property
    def sink_sums(self) -> Kernel:
        """After `prepare`, if the gradient of the sinks is wanted."""
        return side_kernel("sink_sums", shared(self.cfg))

    def __call__(
        self,
        operands: Operands,
        into: Gradients | None = None,
        extras: Extras | None = None,
        workspace: Workspace | None = None,
        buffers: SpecialBuffers | None = None,
    ) -> Gradients:
        """Write the gradients to `into` or to new tensors. Tensors with an unsuitable alignment are copied."""
        if (buffers is None) is self.special:
            raise ValueError("a build that traces or debugs runs through builds.trace or builds.debug, no other does")
        dout, q, k, v, out, lse = operands
        strides: tuple[Strides, ...] = (dout.stride(), q.stride(), k.stride(), v.stride(), out.stride())
        starts = dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        if into is not None:
            dq, dk, dv = into
            strides += (dq.stride(), dk.stride(), dv.stride())
            starts |= dq.data_ptr() | dk.data_ptr() | dv.data_ptr()
        make = self._makers.get(strides)
        if make is None or starts % 16 or not lse.is_contiguous():
            return self._copied(operands, into, extras, workspace, buffers)
        if into is None:
            into = Gradients(make(q), make(k), make(v))
        self._launch(operands, into, extras, workspace, buffers)
        return into

    def _copied(
        self,
        operands: Operands,
        into: Gradients | None,
        extras: Extras | None,
        workspace: Workspace | None,
        buffers: SpecialBuffers | None,
    ) -> Gradients:
        """For strides that no call had before, and for tensors that must be copied."""
        dout, q, k, v, out, lse = operands
        strides = tuple([x.stride() for x in (*operands[:5], *(into or ()))])
        if all(map(fits, strides)):
            self._makers[strides] = maker(q, k, v)
        inputs = Operands(aligned(dout), aligned(q), aligned(k), aligned(v), aligned(out), lse.contiguous())
        grads = Gradients.room(inputs) if into is None else Gradients(*map(aligned, into))
        self._launch(inputs, grads, extras, workspace, buffers)
        if into is None:
            return grads
        for given, grad in zip(into, grads, strict=True):
            if given is not grad:
                given.copy_(grad)
        return into

    def _launch(
        self,
        operands: Operands,
        into: Gradients,
        extras: Extras | None,
        workspace: Workspace | None,
        buffers: SpecialBuffers | None,
    ) -> None:
        dout, q, k, v, out, lse = operands
        dq, dk, dv = into
        stream = self._uploads.used()
        if workspace is None:
            room = self._workspace(q, k, dq, stream)
        else:
            room = self._workspace.room(workspace, k)
        if self.clears:
            clear(self.cfg, self.tables, into, room)
        words, kv_sum = room.sums
        extra = self.tables.q_tiles if words is None else (words, *self.tables.q_tiles)
        if extras is None or extras.dlse is None:
            self.prepare((dout, out, lse), room.stats, extra)
        else:
            self.prepare_dlse((dout, out, lse, extras.dlse.contiguous()), room.stats, extra)
        if extras is not None and extras.dsinks is not None:
            assert extras.sinks is not None
            self.sink_sums(room.stats, extras.sinks.contiguous(), extras.dsinks)
        stats, facts = room.all, self.facts
        if buffers is not None:
            stats, facts = (*room.ws, *room.sums.tensors, *buffers.tensors), (*facts, *buffers.addresses)
        self.main((q, dout, k, v, dq, dk, dv), stats, self.program, facts)
        if self.finish is not None:
            self.finish(room.ws.dq_sum, dq, self.tables.q_tiles, self.scale)
        if self.finish_kv is not None:
            self.finish_kv(kv_sum, (dv, dk), self.tables.kv_tiles, self.scale)


def clear(cfg: KernelConfig, tables: DeviceTables | PackedTables, into: Gradients, room: Room) -> None:
    """Fill with zeros what the kernels read before they have written it, and what they never write."""
    if tables.clears_dq:
        into.dq.zero_()
    if tables.clears_dkv:
        into.dk.zero_()
        into.dv.zero_()
        if room.sums.kv_sum is not None:
            room.sums.kv_sum.zero_()
    if not cfg.ordered or (tables.clears_dq and not cfg.last_finishes):
        room.ws.dq_sum.zero_()
