"""Turnstiles: counters that admit the contributions to each dQ tile in turn."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Lock


class Stopped(Exception):
    """Another worker has failed or the caller was interrupted, so waiting is useless."""


class Turnstiles:
    """One counter for each dQ tile. A contribution enters when the counter shows its turn, and adds 1 when it leaves.

    Unordered turnstiles admit contributions as they come, still one at a time. One lock guards all counters. No worker
    holds it during arithmetic.
    """

    def __init__(self, count: int, *, ordered: bool = True) -> None:
        self.error: BaseException | None = None
        self._ordered = ordered
        self._lock = Lock()
        self._served = [0] * count
        self._busy = bytearray(count)
        self._moved: dict[int, Condition] = {}  # only for tiles where a worker has waited

    def enter(self, target: int, turn: int, before_waiting: Callable[[], None]) -> int:
        """Wait until the contribution may be added. Returns the number of contributions before it."""
        with self._lock:
            if not self._admits(target, turn):
                before_waiting()
                moved = self._moved.setdefault(target, Condition(self._lock))
                while not self._admits(target, turn):
                    moved.wait()
            self._busy[target] = True
            return self._served[target]

    def leave(self, target: int) -> None:
        """The contribution is added: admit the next turn."""
        with self._lock:
            self._served[target] += 1
            self._busy[target] = False
            if target in self._moved:
                self._moved[target].notify_all()

    def stop(self, error: BaseException) -> None:
        """Admit no contribution any more, and wake all waiting workers. The first error is kept."""
        with self._lock:
            self.error = self.error or error
            for moved in self._moved.values():
                moved.notify_all()

    def check(self) -> None:
        """Raise Stopped if no contribution is admitted any more."""
        if self.error is not None:
            raise Stopped

    def _admits(self, target: int, turn: int) -> bool:
        self.check()
        return not self._busy[target] and (not self._ordered or self._served[target] == turn)
