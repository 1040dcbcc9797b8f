"""Forks wait until no thread of this backend is inside the math library.

MKL has a lock around its memory. A thread takes it inside a product, and once more when it ends. If a process forks
meanwhile, the child inherits a lock that no thread releases, and its first product waits forever.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from threading import Lock, get_ident, get_native_id

POLL = 1e-4  # seconds
ENDING = 1.0  # seconds in which a thread that has left Python is gone

_forking = Lock()
_closed = False  # while a process forks
_inside: set[int] = set()  # threads that compute
_ended: deque[int] = deque(maxlen=256)  # threads that have left Python, but may not be gone


class Apart:
    """`with apart:` computes before or after a fork."""

    def __enter__(self) -> None:
        me = get_ident()
        # Each side first says what it does and then looks at the other side, so at least one of them sees the other.
        _inside.add(me)
        while _closed:
            _inside.discard(me)
            time.sleep(POLL)
            _inside.add(me)

    def __exit__(self, *error: object) -> None:
        _inside.discard(get_ident())


apart = Apart()


def ends() -> None:
    """The calling thread of this backend has nothing left to do but to end."""
    _ended.append(get_native_id())


def _before() -> None:
    global _closed
    _forking.acquire()
    _closed = True
    while _inside:
        time.sleep(POLL)
    deadline = time.monotonic() + ENDING  # a number may belong to a new thread by now
    while _ended:  # other threads add to it meanwhile, so it is taken apart and not iterated over
        thread = Path(f"/proc/self/task/{_ended.popleft()}")
        while thread.exists() and time.monotonic() < deadline:
            time.sleep(POLL)


def _reopen() -> None:
    global _closed
    _closed = False
    _forking.release()


def _after_in_child() -> None:
    _inside.clear()  # the child has none of these threads
    _reopen()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=lambda: _reopen(), after_in_child=_after_in_child)
