"""The errors of verification."""

from __future__ import annotations

import numpy as np

from dash_attn.program import Task


class VerifyError(ValueError):
    """A program that must not run. `tasks` are the tasks that the message names."""

    def __init__(self, message: str, tasks: tuple[Task, ...] = ()) -> None:
        super().__init__(message)
        self.tasks = tasks


class TooFewWorkers(VerifyError):
    """The program is right, but its chains wait for each other and need `needed` workers at the same time."""

    def __init__(self, policy: str, needed: int, workers: int) -> None:
        super().__init__(
            f"this order needs {needed} co-resident workers, {workers} are there "
            f"(policy {policy}; a smaller window width needs fewer)"
        )
        self.needed, self.workers = needed, workers


def require_workers(policy: str, co_resident: int, workers: int) -> None:
    """TooFewWorkers if there are fewer than `co_resident` workers, or none. Only this function decides it."""
    needed = max(1, co_resident)
    if workers < needed:
        raise TooFewWorkers(policy, needed, workers)


def require(holds: bool | np.bool_, otherwise: str) -> None:
    if not holds:
        raise VerifyError(otherwise)
