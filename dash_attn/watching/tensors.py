"""The tensors in what a module takes and gives, and the names of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils import _python_dispatch

from dash_attn.watching.recording import Named

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
PLAIN = (Tensor, nn.Parameter)
NUMBERS = frozenset({float, int, bool})
STRIDED = torch.strided


def named(module: str, value: Any, name: str) -> list[Named]:
    kind = type(value)
    if kind is tuple and len(value) == 1:
        (value,) = value
        kind = type(value)
    if (kind is Tensor or kind is nn.Parameter) and is_read(value):
        return [(module, name, value)]
    return [(module, each, tensor) for each, tensor in tensors_of(value, name)]


def is_read(tensor: Tensor) -> bool:
    """Has the tensor elements that a fingerprint can read?"""
    return tensor.layout is STRIDED and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def tensors_of(value: Any, name: str, around: tuple[Any, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value, by name. Of a DTensor and the like: what this process holds of it. A value that is inside
    itself is passed over: `around` are the values around it."""
    if isinstance(value, Tensor):
        if type(value) not in PLAIN and is_wrapper(value):
            parts = {part: getattr(value, part) for part in value.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
            tensors = {part: inner for part, inner in parts.items() if isinstance(inner, Tensor)}
            for part, inner in tensors.items():
                yield from tensors_of(inner, name if len(tensors) == 1 else f"{name}.{part}")
        elif is_plain(value) and is_read(value):
            yield name, value
    elif any(value is each for each in around):
        return
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_of(part, f"{name}.{key}" if name else str(key), (*around, value))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from tensors_of(part, f"{name}[{index}]" if len(value) > 1 else name, (*around, value))
    elif is_dataclass(value):
        for field in fields(value):
            part = getattr(value, field.name, None)  # a field may have no value yet
            yield from tensors_of(part, f"{name}.{field.name}", (*around, value))


def is_plain(value: Tensor) -> bool:
    """Not that of a lazy module before its first forward, and not of a class with operations of its own."""
    return not is_lazy(value) and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_wrapper(value: Tensor) -> bool:
    return _python_dispatch.is_traceable_wrapper_subclass(value)


def is_layer(module: nn.Module) -> bool:
    """Is it a module of torch.nn itself, without modules inside, such as Linear? Its kernels rarely are the culprit,
    and the gradients of its weights are read whole. So what it computes is read in part."""
    return type(module).__module__.startswith("torch.nn.modules.") and next(module.children(), None) is None


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile. Its modules have the same names with and without them."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def clean(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class KnownSettings:
    """The numbers and tensors in the param groups of an optimizer that are already recorded: learning rates, betas and
    the like. A model may have a group for each parameter, so texts are made only for what has changed."""

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] = []

    def changed(self, optimizer: Optimizer) -> Iterator[tuple[str, float | Tensor]]:
        """Numbers that were others in the last call, by name, and all tensors: code may write to them."""
        for place, group in enumerate(optimizer.param_groups):
            if place == len(self._groups):
                self._groups.append({})
            known, parts = self._groups[place], tuple[float | Tensor | None, ...]()
            for key, value in group.items():
                if value is None or key == "params":
                    continue
                if type(value) in NUMBERS:
                    if key in known and known[key] == value:
                        continue
                    parts, known[key] = (value,), value
                else:
                    given = value if isinstance(value, list | tuple) else (value,)
                    parts = tuple(part if isinstance(part, int | float | Tensor) else None for part in given)
                    plain = not any(isinstance(part, Tensor) for part in parts)  # else == may wait for a GPU
                    if plain and known.get(key) == parts:
                        continue
                    known[key] = parts if plain else None
                for index, part in enumerate(parts):
                    if part is not None and not is_beyond(part):
                        name = f"{key}[{index}]" if len(parts) > 1 else key
                        yield f"{name} of param group {place}", part


def is_beyond(value: float | Tensor) -> bool:
    """Is it a whole number that is too large for a float64?"""
    try:
        if isinstance(value, int):
            float(value)
    except OverflowError:
        return True
    return False
