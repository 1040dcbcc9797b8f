"""Attributes that are computed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class cached_property(Generic[Value]):
    """functools.cached_property as of Python 3.12, which takes no lock.

    In Python 3.11 a thread holds a lock while it computes. A child that is forked meanwhile would wait for it forever.
    If two threads ask at the same time, both compute, and one of the equal values stays.
    """

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object, owner: type) -> cached_property[Value] | Value:
        if instance is None:
            return self
        kept = instance.__dict__
        if self.name not in kept:
            kept[self.name] = self.function(instance)
        value: Value = kept[self.name]
        return value
