"""The ranks of a call: process groups by name, and the few collectives that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def _import_without_a_group() -> None:
    """Import a module of torch that must find no default group.

    Its functions have the default group of that moment as a default argument. So the group would outlive
    destroy_process_group(), and its threads would run into the end of Python and abort the process. Without this
    function torch imports the module at the first call of an operator.
    """
    group, c10d.GroupMember.WORLD = c10d.GroupMember.WORLD, None
    try:
        import_module("torch.distributed.nn.functional")
    finally:
        c10d.GroupMember.WORLD = group


_import_without_a_group()

Group = dist.ProcessGroup | DeviceMesh | None
# The newer name of the same function. Older versions of torch lack it, and newer ones warn of the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Arrival = Callable[[], Tensor]  # waits for a tensor that is under way


@dataclass(frozen=True)
class Axis:
    """Some ranks of a process group, in the order of their numbers there.

    name     the name of the group in torch
    members  the numbers of the ranks in the group
    number   this process among the members
    total    ranks of the group
    """

    name: str
    members: tuple[int, ...]
    number: int
    total: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Axis:
        return Axis(group.group_name, tuple(range(group.size())), group.rank(), group.size())

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def is_part(self) -> bool:
        """Not all ranks of the group are members."""
        return self.size < self.total

    @property
    def group(self) -> dist.ProcessGroup:
        return _group(self.name)

    def part(self, members: tuple[int, ...]) -> Axis:
        """The axis of some members, of which this process is one."""
        chosen = tuple(self.members[i] for i in members)
        return replace(self, members=chosen, number=members.index(self.number))

    def all_gather(self, x: Tensor) -> Arrival:
        """Start to gather the tensors of all members. They have the same shape and get a new first dimension."""
        if self.is_part:  # torch gathers from whole groups only
            arrival = self.exchange(x.flatten().repeat(self.size), [x.numel()] * self.size, [x.numel()] * self.size)
            return lambda: arrival().view(self.size, *x.shape)
        parts = x.new_empty(self.size * x.numel())
        work = _all_gather(parts, x.contiguous().view(-1), group=self.group, async_op=True)
        return _arrival(parts.view(self.size, *x.shape), work)

    def exchange(self, sent: Tensor, sizes: list[int], expected: list[int]) -> Arrival:
        """Start to send `sizes` numbers to the members, one part after the other, and to receive the expected ones."""
        parts = sent.new_empty(sum(expected))
        counts = self._of_group(expected), self._of_group(sizes)
        work = dist.all_to_all_single(parts, sent.contiguous(), *counts, group=self.group, async_op=True)
        return _arrival(parts, work)

    def _of_group(self, sizes: list[int]) -> list[int]:
        """One number for each rank of the group: 0 for those that are no members."""
        every = [0] * self.total
        for member, size in zip(self.members, sizes, strict=True):
            every[member] = size
        return every


def _group(name: str) -> dist.ProcessGroup:
    return c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]


def _arrival(parts: Tensor, work: dist.Work) -> Arrival:
    def finish() -> Tensor:
        work.wait()
        return parts

    return finish


@dataclass(frozen=True)
class Ranks:
    """All ranks of a call, as a grid of one or two dimensions. Neighbours differ in the last dimension only."""

    axes: tuple[Axis, ...]

    @staticmethod
    def named(names: tuple[str, ...]) -> Ranks:
        return Ranks(tuple(Axis.of(_group(name)) for name in names))

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

    @property
    def kinds(self) -> set[str]:
        """The types of the devices whose tensors all groups can send."""
        return set.intersection(*({device.type for device in axis.group._device_types} for axis in self.axes))

    def device(self, *places: torch.device) -> torch.device:
        """Where the ranks compare their calls: on the CPU if the groups serve it, so that the host waits for no GPU.

        Otherwise on the first of the given places that they serve. Without one: on any device that they serve.
        """
        kinds = self.kinds
        if "cpu" in kinds:
            return torch.device("cpu")
        served = [place for place in places if place.type in kinds]
        return served[0] if served else torch.device(min(kinds))

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
        """The axis over heads, which are `ways` neighbours, and the axis over tokens.

        No group is made here: ranks that belong to different numbers of groups would not agree on its name.
        """
        if len(self.axes) == 2:
            return self.axes[1], self.axes[0]
        (whole,) = self.axes
        first = whole.number - whole.number % ways
        heads = whole.part(tuple(range(first, first + ways)))
        return heads, whole.part(tuple(range(whole.number % ways, whole.size, ways)))


def ranks_of(group: Group) -> Ranks:
    """The ranks of a process group, of a mesh (its last dimension are neighbours), or of all processes."""
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(f"group must be a DeviceMesh of one or two dimensions, got {group.ndim}: slice it by name")
        if wrong := _wrong(group):
            raise ValueError(f"group must be a DeviceMesh {wrong}")
        groups = [group.get_group(dim) for dim in range(group.ndim)]
    else:
        given = dist.group.WORLD if group is None else group
        if not isinstance(given, dist.ProcessGroup):
            raise ValueError(
                "group must be a process group that this process belongs to, a DeviceMesh, or None after "
                f"torch.distributed.init_process_group(); got {given!r}"
            )
        groups = [given]
    return Ranks(tuple(map(Axis.of, groups)))


@torch.compiler.assume_constant_result
def _wrong(mesh: DeviceMesh) -> str:
    """What a mesh must be and is not. All its processes get the same answer, so that none of them waits for another."""
    if mesh.get_coordinate() is None:
        return f"that this process belongs to, got the ranks {mesh.mesh.tolist()}"
    if all(bool((mesh.mesh.diff(dim=dim) > 0).all()) for dim in range(mesh.ndim)):
        return ""
    # torch sorts the ranks of a group. Then the number of a process in a group is not its coordinate in the mesh.
    return (
        f"whose ranks ascend along every dimension, got {mesh.mesh.tolist()}: give the ranks in ascending order, as "
        "torch.distributed.device_mesh.init_device_mesh does"
    )
