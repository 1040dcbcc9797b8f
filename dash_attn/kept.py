"""Caches that are bounded by bytes. `lru_cache` counts entries, and one plan may be larger than a thousand others."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from functools import partial, update_wrapper
from sys import getsizeof
from types import FunctionType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

KEPT_BYTES = 128 * 2**20  # of a cache. Plans of 32 heads have 0.3 MB at 16k tokens, 15 to 32 MB at 128k
ENTRY_BYTES = 512  # of an entry, beside its key and its value
NUMBER_BYTES = 32  # of a whole number
LOOKED_INTO = ("dash_attn.", "torch.nn.attention.flex_attention")  # modules whose objects are more than their own bytes

Given = ParamSpec("Given")
Value = TypeVar("Value")

# One lock for all caches. A fork waits for it, so that no child begins with a lock that nobody releases.
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class _Entry(Generic[Value]):
    __slots__ = ("nbytes", "used", "value")

    def __init__(self, value: Value, nbytes: int) -> None:
        self.value, self.nbytes, self.used = value, nbytes, False


class Kept(Generic[Value]):
    """Values by key, at most `limit` bytes of them with their keys.

    Above the limit the oldest values are dropped. A value that was used since the last look at it is spared once. The
    newest value stays, also if it is larger than the limit: the next equal call should not make it again.

    `growing` gives the part of a value that may become larger later. `grown` tells the caches.
    """

    def __init__(self, limit: int = KEPT_BYTES, growing: Callable[[Value], object] | None = None) -> None:
        self.limit, self.nbytes, self._growing = limit, 0, growing
        self._entries: dict[Hashable, _Entry[Value]] = {}
        self._places: dict[int, list[Hashable]] = {}  # the keys of the values that have a growing part, by its id
        if growing is not None:
            _growing_caches.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        """The value, or None. This is the path of a repeated call: it takes no lock."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = True
        return entry.value

    def add(self, key: Hashable, value: Value) -> Value:
        """Keep a value. If another thread was faster, its value is kept and returned."""
        nbytes = ENTRY_BYTES + bytes_of(key, value)
        with _lock:
            entry = self._entries.get(key)
            if entry is not None:
                return entry.value
            self._entries[key] = _Entry(value, nbytes)
            self.nbytes += nbytes
            if self._growing is not None:
                self._places.setdefault(id(self._growing(value)), []).append(key)
            dropped = self._shrunk(key)
        del dropped  # without the lock: the end of a value may run any code
        return value

    def recount(self, part: object) -> None:
        """Count the values again that have this growing part."""
        with _lock:
            sized = [(key, self._entries[key]) for key in self._places.get(id(part), ())]
        counts = [ENTRY_BYTES + bytes_of(key, entry.value) for key, entry in sized]
        with _lock:
            for (key, entry), nbytes in zip(sized, counts, strict=True):
                if self._entries.get(key) is entry:
                    self.nbytes += nbytes - entry.nbytes
                    entry.nbytes, entry.used = nbytes, True
            dropped = self._shrunk()
        del dropped

    def clear(self) -> None:
        with _lock:
            dropped, self._entries, self._places, self.nbytes = self._entries, {}, {}, 0
        del dropped

    def _shrunk(self, newest: Hashable = None) -> list[_Entry[Value]]:
        """Drop values until the rest is small enough."""
        dropped = []
        while self.nbytes > self.limit and len(self._entries) > 1:
            key = next(iter(self._entries))
            entry = self._entries.pop(key)
            if entry.used or key == newest:
                entry.used, self._entries[key] = False, entry
                continue
            self.nbytes -= entry.nbytes
            dropped.append(entry)
            if self._growing is not None:
                part = id(self._growing(entry.value))
                self._places[part].remove(key)
                if not self._places[part]:
                    del self._places[part]
        return dropped


class KeptFunction(Generic[Given, Value]):
    """A function that makes a value once, as long as the value is kept."""

    def __init__(self, function: Callable[Given, Value], cache: Kept[Value]) -> None:
        self._function, self.cache = function, cache
        update_wrapper(self, function)

    def __call__(self, *given: Given.args, **named: Given.kwargs) -> Value:
        key = (given, tuple(named.items())) if named else given
        entry = self.cache._entries.get(key)
        if entry is None:
            return self.cache.add(key, self._function(*given, **named))
        entry.used = True
        return entry.value

    def cache_clear(self) -> None:
        self.cache.clear()


class Decorator(Protocol):
    def __call__(self, function: Callable[Given, Value]) -> KeptFunction[Given, Value]: ...


def kept(limit: int = KEPT_BYTES, growing: Callable[[Any], object] | None = None) -> Decorator:
    """A decorator like lru_cache, whose cache is bounded by bytes."""

    def decorate(function: Callable[Given, Value]) -> KeptFunction[Given, Value]:
        return KeptFunction(function, Kept(limit, growing))

    return decorate


_growing_caches: weakref.WeakSet[Kept[Any]] = weakref.WeakSet()


def grown(part: object) -> None:
    """Tell the caches that an object has become larger."""
    for cache in tuple(_growing_caches):
        cache.recount(part)


def bytes_of(*values: object) -> int:
    """The memory of values and of all that they lead to: arrays, tensors, containers, objects of this package.

    What two values share counts once. Modules, devices and compiled kernels are shared by all, so only their own few
    bytes count.
    """
    total, todo, seen = 0, list[Any](values), set[object]()
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, type):
            continue
        seen.add(id(x))
        if hasattr(x, "untyped_storage"):
            storage = x.untyped_storage()  # views of one tensor share it
            if x.device.type != "meta" and ("storage", storage.data_ptr()) not in seen:
                seen.add(("storage", storage.data_ptr()))
                total += storage.nbytes()
            continue
        if hasattr(x, "__array_interface__"):
            total += x.nbytes  # getsizeof leaves out the numbers of a view
            continue
        total += getsizeof(x)
        if isinstance(x, tuple | list | set | frozenset):
            if x and type(next(iter(x))) is int:  # boundaries of documents, shapes
                total += NUMBER_BYTES * len(x)
            else:
                todo.extend(x)
        elif isinstance(x, dict):
            todo += [*x.keys(), *x.values()]
        elif isinstance(x, partial):
            todo += [x.args, x.keywords]
        elif isinstance(x, FunctionType):
            todo += [cell.cell_contents for cell in x.__closure__ or ()]
        elif type(x).__module__.startswith(LOOKED_INTO):
            todo.append(getattr(x, "__dict__", None))
    return total
