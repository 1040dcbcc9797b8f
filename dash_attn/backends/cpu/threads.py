"""Threads that compute with one math thread each. They change no setting of any other thread."""

from __future__ import annotations

import ctypes
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from itertools import repeat
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

import torch

from dash_attn.backends.cpu import forks

Job = Callable[[], object]
P = ParamSpec("P")
R = TypeVar("R")


def without_grad(run: Callable[P, R]) -> Callable[P, R]:
    """Run a function without a graph of gradients.

    An interrupt can divide torch.no_grad, which is Python code, and leave the mode behind. The calls here are single
    calls into torch, and the first of them is inside `try`.
    """

    @wraps(run)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return run(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return inside


def compute_alone() -> None:
    """Give torch and its math library one thread in the calling thread, for as long as the thread lives.

    A library splits a product among its threads, and the split changes the bits. `torch.set_num_threads` is no cure:
    it also changes the number that new threads of the process begin with. The functions below are thread-local.
    """
    # The first call that needs the number of threads copies the process's number to this thread. The copy must happen
    # first, because it would undo the setting.
    torch.get_num_threads()
    for set_number in thread_local_setters():
        set_number(1)
    torch.set_flush_denormal(False)  # a new thread inherits this mode from its creator
    if torch.get_num_threads() != 1:
        raise RuntimeError("the CPU backend cannot hold torch to one thread: it needs a torch built with OpenMP")


@lru_cache(maxsize=1)
def thread_local_setters() -> tuple[Callable[[int], object], ...]:
    """Functions of torch's libraries that set the number of threads of the calling thread only."""
    libraries = ctypes.CDLL(torch._C.__file__)  # a lookup here also searches the libraries that torch is linked with
    names = ["omp_set_num_threads", *(["MKL_Set_Num_Threads_Local"] if torch._C.has_mkl else [])]
    for name in names:
        if not hasattr(libraries, name):
            raise RuntimeError(f"the CPU backend needs {name}, which this build of torch ({torch.__version__}) lacks")
    return tuple(getattr(libraries, name) for name in names)


def run_threads(works: Sequence[Callable[[], None]], stop: Callable[[BaseException], None]) -> None:
    """Run each function in a thread of its own, and wait for their end. An error of a function goes to `stop`.

    If something interrupts this, call `stop` and wait for their end. An interrupt can leave `threading.Thread.start`
    and `join` half done, and then nobody can say which threads run. So all threads are started in one call that an
    interrupt cannot divide.
    """
    thread_local_setters()  # loads the libraries in the caller, where a failure can be raised
    started, over = list[int](), list[None]()
    ended: SimpleQueue[None] = SimpleQueue()

    def whole(work: Callable[[], None]) -> None:
        try:
            compute_alone()
            # Only in this mode may a thread write to a tensor that its caller has made in this mode.
            with torch.inference_mode():
                work()
        except BaseException as error:
            stop(error)
        finally:
            forks.ends()
            over.append(None)
            ended.put(None)

    def wait() -> None:
        # A thread that is not over will put something in, however often this was interrupted before.
        while len(over) < len(started):
            ended.get()

    try:
        # Python looks for interrupts between its own instructions only: before this call, or after it.
        started.extend(map(start_new_thread, repeat(whole), [(work,) for work in works]))
        wait()
    except BaseException as error:  # an interrupt must not leave threads behind
        stop(error)
        wait()
        raise


def run_jobs(jobs: Iterable[Job], threads: int) -> None:
    """Run every job once, on at most `threads` threads. A job that fails ends the run, and its error is raised."""
    waiting, errors = deque(jobs), list[BaseException]()

    def stop(error: BaseException) -> None:
        errors.append(error)
        waiting.clear()

    def work() -> None:
        while (job := _take(waiting)) is not None:
            with forks.apart:
                job()

    run_threads([work] * min(threads, len(waiting)), stop)
    if errors:
        raise errors[0]


def _take(waiting: deque[Job]) -> Job | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None
