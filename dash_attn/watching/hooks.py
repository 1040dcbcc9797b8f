"""A hook of a watcher, and what it asks torch about the moment in which it runs."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from dash_attn.watching import environment

FAKE = torch._C._TorchDispatchModeKey.FAKE


class Guard:
    """What the hooks of a watcher share: they run one at a time, because a backward may run in several threads. The
    first error in one of them ends the record, and not the training. A forked child records nothing: the file belongs
    to its parent."""

    def __init__(self) -> None:
        self.stopped = self.is_forked = False
        self.lock = RLock()
        self.untraced: Callable[..., None] = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]
        GUARDS.add(self)

    def stop(self, error: Exception) -> None:
        if not self.stopped:
            self.stopped = True
            tell(f"dash_attn.watch stops, and the training continues: {type(error).__name__}: {error}")


def tell(text: str) -> None:
    """Warn. If warnings are errors, write to standard error: a hint ends neither the record nor the training."""
    try:
        warnings.warn(text, stacklevel=5)
    except Warning:
        print(text, file=sys.stderr)


GUARDS = WeakSet[Guard]()


def _leave() -> None:
    for guard in GUARDS:
        guard.stopped = guard.is_forked = True


if hasattr(os, "register_at_fork"):  # not on every system
    os.register_at_fork(after_in_child=_leave)


class Hook:
    """Calls a method of a watcher under its guard. torch.compile does not trace the method: a compiled model runs in
    graphs that end at every hook. A copy of a model, or a saved one, has hooks that do nothing: only the model itself
    is watched."""

    __slots__ = ("_guard", "_method")

    def __init__(self, guard: Guard, method: Callable[..., None]) -> None:
        self._guard, self._method = guard, method

    def __call__(self, *given: Any) -> None:
        if is_dynamo_compiling():  # true while torch.compile traces this. Else `untraced` would only take time
            if not torch.compiler.is_exporting():  # what an export traces has no graphs that could end here
                self._guard.untraced(self, *given)
            return
        guard = self._guard
        if not guard.stopped:
            try:
                with guard.lock:
                    self._method(*given)
            except Exception as error:
                guard.stop(error)

    def __reduce__(self) -> tuple[type[Idle], tuple[()]]:
        return Idle, ()


class Idle:
    """The hook of a copy."""

    def __call__(self, *given: Any) -> None:
        pass


def _call(hook: Hook, *given: Any) -> None:
    hook(*given)


def stack_depth() -> int:
    """The number of Python's frames that run."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def compile_again() -> None:
    """What torch.compile has compiled does not know of hooks that come or go."""
    if environment.compiled_frames():
        torch.compiler.reset()


def is_unreal() -> bool:
    """Do tensors have no values that a step could record? So it is while a CUDA graph is captured, whose kernels run
    later, and again: they must not write to buffers of this step. So it is in traces, exports and transforms."""
    return (
        captures()
        or torch._C._functorch.maybe_current_level() is not None
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or forward_ad._current_level >= 0
        or torch._C._get_dispatch_mode(FAKE) is not None
        or torch.compiler.is_exporting()
    )


def captures() -> bool:
    """Is a CUDA graph being captured?"""
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.is_current_stream_capturing()


def recomputes() -> bool:
    """Does a backward run? A forward inside it is that of gradient checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)
