"""Fingerprints on their way from devices to the record. Nothing here waits for a device, except `wait`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dash_attn.watching import fingerprint
from dash_attn.watching.files import Values
from dash_attn.watching.fingerprint import Share

SIZE = 1024  # fingerprints in a buffer; a step takes as many buffers as it needs


@dataclass
class Buffer:
    """Fingerprints on one stream of one device. All work on a buffer is in the order of its stream."""

    slots: Tensor
    stream: torch.cuda.Stream | None
    used: int = 0
    arrived: torch.cuda.Event | None = None

    def send(self) -> None:
        """Start the copy to the host."""
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                host = torch.empty(self.used, dtype=torch.int64, pin_memory=True)
                self.slots = host.copy_(self.slots[: self.used], non_blocking=True)
                self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self.arrived.record(self.stream)

    def values(self) -> Values:
        return self.slots[: self.used].cpu().numpy().view(np.uint64)


@dataclass
class Slots:
    """The fingerprints of one step. A place is the number of a buffer and a place in it."""

    buffers: list[Buffer] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    _open: dict[object, int] = field(default_factory=dict)

    def add(self, tensors: Sequence[Tensor], share: Share) -> list[tuple[int, int]]:
        """The places of the fingerprints of plain tensors of one device."""
        if len(tensors) == 1:
            number, buffer = self._buffer(tensors[0].device)
            fingerprint.add(tensors, buffer.slots, buffer.used, share)
            buffer.used += 1
            return [(number, buffer.used - 1)]
        places = list[tuple[int, int]]()
        while len(places) < len(tensors):
            number, buffer = self._buffer(tensors[0].device)
            part = tensors[len(places) : len(places) + SIZE - buffer.used]
            fingerprint.add(part, buffer.slots, buffer.used, share)
            places += [(number, buffer.used + i) for i in range(len(part))]
            buffer.used += len(part)
        return places

    def add_host(self, value: int) -> tuple[int, int]:
        """The place of a value that the host already has."""
        self.host.append(value % 2**64)
        return -1, len(self.host) - 1

    def send(self) -> None:
        for buffer in self.buffers:
            buffer.send()

    def arrived(self) -> bool:
        return all(buffer.arrived.query() for buffer in self.buffers if buffer.arrived)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        for buffer in self.buffers:
            if buffer.arrived is not None:
                buffer.arrived.synchronize()

    def starts(self) -> list[int]:
        """The place of the first value of each buffer in `values`, and of the host's values, last."""
        return [0, *accumulate(buffer.used for buffer in self.buffers)]

    def values(self) -> Values:
        return np.concatenate([*(buffer.values() for buffer in self.buffers), np.array(self.host, np.uint64)])

    def _buffer(self, device: torch.device) -> tuple[int, Buffer]:
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        number = self._open.get(stream or device, -1)
        if number < 0 or self.buffers[number].used == SIZE:
            number = self._open[stream or device] = len(self.buffers)
            self.buffers.append(Buffer(torch.zeros(SIZE, dtype=torch.int64, device=device), stream))
        return number, self.buffers[number]
