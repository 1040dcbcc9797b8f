"""Threads that compute with one math thread each. They change no setting of any other thread."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from threading import Thread
from threading import enumerate as enumerate_threads
from time import sleep

import torch

Job = Callable[[], object]


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


def run_threads(threads: Sequence[Thread], stop: Callable[[BaseException], None]) -> None:
    """Start all threads and wait for their end. If something interrupts this, call `stop` and wait for their end."""
    thread_local_setters()  # loads the libraries in the caller, where a failure can be raised
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt must not leave threads behind
        stop(error)
        # Python takes a thread whose join was interrupted for ended. So this waits until no thread is listed any more.
        started = {thread for thread in threads if thread.ident is not None}
        while started & set(enumerate_threads()):
            sleep(1e-3)
        raise


def run_jobs(jobs: Iterable[Job], threads: int) -> None:
    """Run every job once, on at most `threads` threads. A job that fails ends the run, and its error is raised."""
    waiting, errors = deque(jobs), list[BaseException]()

    def stop(error: BaseException) -> None:
        errors.append(error)
        waiting.clear()

    def work() -> None:
        try:
            compute_alone()
            # Only in this mode may a thread write to a tensor that its caller has made in this mode.
            with torch.inference_mode():
                while (job := _take(waiting)) is not None:
                    job()
        except BaseException as error:
            stop(error)

    count = min(threads, len(waiting))
    run_threads([Thread(target=work, name="dash_attn", daemon=True) for _ in range(count)], stop)
    if errors:
        raise errors[0]


def _take(waiting: deque[Job]) -> Job | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None
