"""The step that is being recorded: its rows, and the tensors that it has read.

Hooks run while the GPU waits for the host, so this code is short on purpose: a row is three entries in lists, and
whatever is the same in every step is made once. Few new objects also mean few collections of garbage.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dash_attn.watching.files import Row, Step, form_of
from dash_attn.watching.fingerprint import WHOLE, Share, plain
from dash_attn.watching.slots import Slots

# Phases in which a tensor may be seen again. In all others every tensor is read: `GradScaler`, reductions over
# processes and code that writes to `.data` do not raise the version of a tensor.
REMEMBERED = frozenset({"data", "script", "forward", "recompute", "backward"})
Named = tuple[str, str, Tensor]  # module, name in it, tensor
Name = tuple[str, str, str]  # phase, module, name in it


class Seen(weakref.ref[Tensor]):
    """A tensor of this step: it is known again while it lives and nothing has been written to it."""

    __slots__ = ("feeds_layer", "hooked", "place", "share", "version")
    version: int
    place: int
    share: Share  # how it was read
    hooked: bool
    feeds_layer: bool  # so a layer computes its gradient


def version(tensor: Tensor) -> int:
    """A count of writes to a tensor. A tensor of inference mode has none."""
    return -1 if tensor.is_inference() else tensor._version


class Reads:
    """The tensors that a step has read, by id. Those read whole are also in `whole`, if there is one."""

    __slots__ = ("seen", "whole")

    def __init__(self, whole: Reads | None = None) -> None:
        self.whole = whole
        self.seen: dict[int, Seen] = {}

    def known(self, tensor: Tensor, share: Share) -> Seen | None:
        """The entry of a tensor that was read and has the same values. A share is what would be read of a new one."""
        entry = self.seen.get(id(tensor))
        if entry is not None and entry() is tensor and entry.version == tensor._version:
            return entry
        if share is WHOLE and self.whole is not None and (entry := self.whole.known(tensor, share)) is not None:
            self.seen[id(tensor)] = entry
            return entry
        return None

    def remember(self, tensor: Tensor, place: int, share: Share) -> None:
        if not tensor.is_inference():  # such a tensor has no version
            entry = self.seen[id(tensor)] = Seen(tensor)
            entry.version, entry.place, entry.share = tensor._version, place, share
            entry.hooked = entry.feeds_layer = False
            if share is WHOLE and self.whole is not None:
                self.whole.seen[id(tensor)] = entry


class Texts:
    """Names and forms, made once for all steps."""

    def __init__(self) -> None:
        self.names: dict[Name, Name] = {}
        self._forms: dict[tuple[torch.dtype, torch.Size, int], str] = {}

    def form(self, tensor: Tensor, share: Share) -> str:
        key = tensor.dtype, tensor.shape, share.one_in
        form = self._forms.get(key)
        if form is None:
            whole = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            form = self._forms[key] = form_of(whole, share.of(tensor.nbytes).one_in)
        return form


class OpenStep:
    """Rows, forms and places are lists of one length."""

    def __init__(self, number: int, one_in: int, texts: Texts) -> None:
        self.number, self._texts = number, texts
        self.rows, self.forms, self.places = list[Name](), list[str](), list[int]()
        self.slots = Slots()
        self.share = WHOLE if one_in == 1 else Share.of_step(one_in, number)  # of what layers compute
        self.whole = Reads()
        # Tensors that pass modules. One that was read in part is read once more for `see`, before or after. So a
        # fingerprint never depends on what else the script has shown to `see`.
        self.passing = self.whole if one_in == 1 else Reads(self.whole)
        self.began = False

    def record(self, phase: str, tensors: Sequence[Named], reads: Reads, share: Share = WHOLE) -> None:
        """Append a row for each tensor, and read this share of it. A tensor that passes modules is not read again in
        this step."""
        if len(tensors) > 1:
            self._record(phase, tensors, reads, share)
            return
        remember = phase in REMEMBERED
        module, name, tensor = tensors[0]  # nearly always, so it has a shorter way
        entry = reads.known(tensor, share) if remember else None
        if entry is not None:
            place, share = entry.place, entry.share
        else:
            place = self.slots.add_one(plain(tensor), share)
            if remember:
                reads.remember(tensor, place, share)
        self._append((phase, module, name), tensor, place, share)

    def _append(self, name: Name, tensor: Tensor, place: int, share: Share) -> None:
        self.rows.append(self._texts.names.setdefault(name, name))
        self.forms.append(self._texts.form(tensor, share))
        self.places.append(place)

    def record_host(self, phase: str, name: str, value: int) -> None:
        """Append a row for a value that the host has."""
        self.rows.append((phase, "", name))
        self.forms.append("")
        self.places.append(self.slots.add_host(value))

    def _record(self, phase: str, tensors: Sequence[Named], reads: Reads, share: Share) -> None:
        """Tensors of one device take one launch."""
        known, seen = reads.known, reads.seen
        remember = phase in REMEMBERED
        fresh = {id(tensor): tensor for _, _, tensor in tensors if not remember or known(tensor, share) is None}
        groups = dict[torch.device, list[Tensor]]()
        for tensor in fresh.values():
            groups.setdefault(tensor.device, []).append(tensor)
        places = dict[int, int]()
        for group in groups.values():
            places.update(zip(map(id, group), self.slots.add([plain(each) for each in group], share), strict=True))
        for module, name, tensor in tensors:
            row, key = (phase, module, name), id(tensor)
            if key in places:
                self._append(row, tensor, places[key], share)
            else:
                self._append(row, tensor, seen[key].place, seen[key].share)
        if remember:
            for key, tensor in fresh.items():
                reads.remember(tensor, places[key], share)

    def step(self, before: tuple[OpenStep, Step] | None) -> Step:
        """The step as it is written, with the rows of the step before if they are the same. Its fingerprints have
        arrived."""
        if before is not None and self._is_like(before[0]):
            return replace(before[1], number=self.number, values=self.slots.values())
        places, forms = self.slots.flat(self.places), dict[str, int]()
        rows = tuple(
            Row(*name, forms.setdefault(form, len(forms)), place)
            for name, form, place in zip(self.rows, self.forms, places, strict=True)
        )
        return Step(self.number, rows, tuple(forms), self.slots.values())

    def _is_like(self, other: OpenStep) -> bool:
        same = self.rows == other.rows and self.forms == other.forms and self.places == other.places
        return same and self.slots.starts() == other.slots.starts()

    def end(self) -> None:
        """Forget the tensors."""
        for reads in (self.whole, self.passing):
            reads.seen.clear()
