"""The ranks of a call: process groups by name, and the few collectives that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None
# The newer name of the same function. Older versions of torch lack it, and newer ones warn of the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Arrival = Callable[[], Tensor]  # waits for a tensor that is under way


@dataclass(frozen=True)
class Axis:
    """A process group: its name in torch, its size and the number of this process in it. One rank has no name."""

    name: str = ""
    size: int = 1
    number: int = 0

    @staticmethod
    def of(group: dist.ProcessGroup) -> Axis:
        return Axis(group.group_name, group.size(), group.rank())

    @property
    def group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(self.name)  # type: ignore[arg-type]
        return group

    def all_gather(self, x: Tensor) -> Arrival:
        """Start to gather the tensors of all ranks. They have the same shape and get a new first dimension."""
        parts = x.new_empty(self.size * x.numel())
        work = _all_gather(parts, x.flatten(), group=self.group, async_op=True)
        return _arrival(parts.view(self.size, *x.shape), work)

    def exchange(self, sent: Tensor, sizes: list[int], expected: list[int]) -> Arrival:
        """Start to send `sizes` numbers to the ranks, one part after the other, and to receive the expected ones."""
        parts = sent.new_empty(sum(expected))
        work = dist.all_to_all_single(parts, sent, expected, sizes, group=self.group, async_op=True)
        return _arrival(parts, work)


def _arrival(parts: Tensor, work: dist.Work) -> Arrival:
    def finish() -> Tensor:
        work.wait()
        return parts

    return finish


ALONE = Axis()


@dataclass(frozen=True)
class Ranks:
    """All ranks of a call, as a grid of one or two dimensions. The numbers of neighbours differ in the last one."""

    axes: tuple[Axis, ...]

    @staticmethod
    def named(names: tuple[str, ...]) -> Ranks:
        return Ranks(tuple(Axis.of(Axis(name).group) for name in names))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def size(self) -> int:
        size = 1
        for axis in self.axes:
            size *= axis.size
        return size

    @property
    def number(self) -> int:
        number = 0
        for axis in self.axes:
            number = number * axis.size + axis.number
        return number

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, which have the same shape, under a new first dimension."""
        parts = x.unsqueeze(0)
        for axis in reversed(self.axes):
            parts = axis.all_gather(parts)().flatten(0, 1)
        return parts

    def texts(self, text: str, device: torch.device) -> list[str]:
        """One text of each rank."""
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
        lengths = self.all_gather(torch.tensor([len(mine)], device=device)).flatten().tolist()
        padded = mine.new_zeros(max(lengths))
        padded[: len(mine)] = mine
        parts = self.all_gather(padded).cpu()
        return [bytes(part[:length].tolist()).decode() for part, length in zip(parts, lengths, strict=True)]

    def split(self, ways: int) -> tuple[Axis, Axis]:
        """The axis over heads, `ways` neighbours, and the axis over tokens. It is a collective call the first time."""
        if len(self.axes) == 2:
            return self.axes[1], self.axes[0]
        whole = self.axes[0]
        if ways == 1:
            return ALONE, whole
        if ways == whole.size:
            return whole, ALONE
        return _subgroups(whole, ways)


@lru_cache(maxsize=16)
def _subgroups(whole: Axis, ways: int) -> tuple[Axis, Axis]:
    members = dist.get_process_group_ranks(whole.group)
    first = whole.number - whole.number % ways
    rows = members[first : first + ways], members[whole.number % ways :: ways]
    heads, tokens = (dist.new_group(list(row), use_local_synchronization=True) for row in rows)
    return Axis.of(heads), Axis.of(tokens)


def ranks_of(group: Group) -> Ranks:
    """The ranks of a process group, of a mesh (its last dimension are neighbours), or of all processes."""
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(f"group must be a DeviceMesh of one or two dimensions, got {group.ndim}: slice it by name")
        groups = [group.get_group(dim) for dim in range(group.ndim)]
    else:
        groups = [dist.group.WORLD if group is None else group]
    for each in groups:
        if not isinstance(each, dist.ProcessGroup):
            raise ValueError(
                "group must be a process group that this process belongs to, a DeviceMesh, or None after "
                f"torch.distributed.init_process_group(); got {each!r}"
            )
    return Ranks(tuple(map(Axis.of, groups)))
