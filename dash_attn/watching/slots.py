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
class StreamBuffer:
    """Fingerprints on one stream of one device. All work on a buffer is in the order of its stream."""

    slots: Tensor
    stream: torch.cuda.Stream | None
    used: int = 0
    arrived: torch.cuda.Event | None = None

    def send(self) -> None:
        """Start the copy to the host."""
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                host = torch.empty(self.used, dtype=torch.int64, device="cpu", pin_memory=True)
                self.slots = host.copy_(self.slots[: self.used], non_blocking=True)
                self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self.arrived.record(self.stream)

    def values(self) -> Values:
        return self.slots[: self.used].cpu().numpy().view(np.uint64)


@dataclass
class Slots:
    """The fingerprints of one step. A place is `SIZE` times the number of a buffer, and a place in the buffer. The
    places of values that the host has are negative."""

    buffers: list[StreamBuffer] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    _open: dict[object, int] = field(default_factory=dict)

    def add_one(self, tensor: Tensor, share: Share) -> int:
        """The place of the fingerprint of a plain tensor."""
        number = self._buffer(tensor)
        buffer = self.buffers[number]
        used = buffer.used
        fingerprint.add((tensor,), buffer.slots, used, share)
        buffer.used = used + 1
        return number * SIZE + used

    def add(self, tensors: Sequence[Tensor], share: Share) -> list[int]:
        """The places of the fingerprints of plain tensors of one device."""
        places = list[int]()
        while len(places) < len(tensors):
            number = self._buffer(tensors[0])
            buffer = self.buffers[number]
            part = tensors[len(places) : len(places) + SIZE - buffer.used]
            fingerprint.add(part, buffer.slots, buffer.used, share)
            first = number * SIZE + buffer.used
            places += range(first, first + len(part))
            buffer.used += len(part)
        return places

    def add_host(self, value: int) -> int:
        """The place of a value that the host already has."""
        self.host.append(value % 2**64)
        return -len(self.host)

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

    def flat(self, places: Sequence[int]) -> list[int]:
        """Places in `values`."""
        starts = self.starts()
        return [starts[-1] - place - 1 if place < 0 else starts[place // SIZE] + place % SIZE for place in places]

    def values(self) -> Values:
        return np.concatenate([*(buffer.values() for buffer in self.buffers), np.array(self.host, np.uint64)])

    def _buffer(self, tensor: Tensor) -> int:
        """The number of a buffer for a tensor, on the current stream of its device."""
        device = tensor.get_device()  # the number of a GPU
        # A number for a stream: to make an object for it takes longer than all else here.
        key = (device, _raw_stream(device)) if tensor.is_cuda else tensor.device
        number = self._open.get(key, -1)
        if number < 0 or self.buffers[number].used == SIZE:
            number = self._open[key] = len(self.buffers)
            stream = torch.cuda.current_stream(device) if tensor.is_cuda else None
            with torch.inference_mode(False):  # else later writes outside of inference mode are refused
                slots = torch.zeros(SIZE, dtype=torch.int64, device=tensor.device)
            self.buffers.append(StreamBuffer(slots, stream))
        return number


def _raw_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)
