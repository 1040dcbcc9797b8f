"""A cache of calls: arguments that are like those of an earlier call are not checked again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dash_attn.kept import Kept

if TYPE_CHECKING:
    from dash_attn.prepare import Prepared

Boundaries = Tensor | Sequence[int]

_seen: Kept[Prepared] = Kept(growing=lambda prepared: prepared)
_values: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, ...]]] = {}


def recall(key: tuple[object, ...], checked: Callable[[], Prepared]) -> Prepared:
    """The result of `checked`, cached by the key. A key must hold everything that `checked` looks at."""
    try:
        prepared = _seen.get(key)
    except TypeError:  # an argument has no hash: the checks accept it or say what is wrong
        return checked()
    if prepared is None:
        prepared = _seen.add(key, checked())
    return prepared


def traits(x: Tensor) -> tuple[object, ...]:
    """Everything that the checks look at in a tensor. They do not look at values, address or strides."""
    return x.shape, x.dtype, x.device, x.layout


def values_of(x: Boundaries | None) -> object:
    """The values of cu_seqlens or seqused, for a key."""
    if isinstance(x, Tensor):
        return x.device, x.dtype, read(x) if x.ndim == 1 else x.shape
    return x if x is None else (tuple(map(index, x)), frozenset(map(type, x)))


def side_of(x: object) -> object:
    """A side of a window, for a key: a tensor of one number as its dtype and value, anything else as it is."""
    if isinstance(x, Tensor):
        return x.dtype, read(x) if x.ndim == 0 else x.shape
    return x


def is_remembered(x: Tensor) -> bool:
    """Not a tensor on the CPU: its memory may change without torch's knowledge.

    Nor a tensor made under torch.inference_mode: it has no version, so every call reads it.
    """
    return x.is_cuda and not x.is_inference()


def read(x: Tensor) -> tuple[int, ...]:
    """The values of a tensor. Reading from a GPU waits for it, so such a tensor is read again only after a change."""
    if not is_remembered(x):
        return tuple(x.flatten().tolist())
    kept = _values.get(id(x))
    if kept is not None and kept[0]() is x and kept[1] == x._version:
        return kept[2]
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "cu_seqlens, seqused or a side of the window is on a GPU, and its values cannot be read while a CUDA graph "
            "is captured: give plain numbers or a tensor on the CPU, or call once with the same tensor before the "
            "capture"
        )
    number, values = id(x), tuple(x.flatten().tolist())
    _values[number] = weakref.ref(x, lambda _: _values.pop(number, None)), x._version, values
    return values
