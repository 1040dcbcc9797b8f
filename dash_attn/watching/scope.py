"""What a watcher records of a run: which steps and modules, and how much of large tensors."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TypedDict

MOST_PIECES = 1024  # for one that is read
SHARE = 1 / 16  # of large tensors that layers compute: what it costs stands in docs/watch.md


class ScopeOptions(TypedDict, total=False):
    """The options of `watch` that make a Scope."""

    steps: Container[int] | None
    depth: int | None
    share: float
    first_step: int


@dataclass(frozen=True)
class Scope:
    steps: Container[int] | None = None
    depth: int | None = None
    share: float = SHARE
    first_step: int = 0

    def __post_init__(self) -> None:
        steps: object = self.steps
        if steps is not None and not isinstance(steps, Container):
            wanted = "give a range or another container of numbers of steps, or None for all"
            raise ValueError(f"steps={self.steps!r}: {wanted}")
        if self.depth is not None and (not isinstance(self.depth, int) or self.depth < 1):
            raise ValueError(f"depth={self.depth}: give 1 or more, or None for all modules")
        if not isinstance(self.first_step, int) or not 0 <= self.first_step < 2**32:
            raise ValueError(f"first_step={self.first_step}: give the number of steps before this run, 0 or more")
        count = self.one_in if 1 / (2 * MOST_PIECES) < self.share <= 1 else 0
        if not 1 <= count <= MOST_PIECES or abs(count * self.share - 1) > 1e-3:
            raise ValueError(f"share={self.share}: give 1, or 1 / n for a whole number n up to {MOST_PIECES}")

    @property
    def one_in(self) -> int:
        """The n of a share 1 / n."""
        return round(1 / self.share)

    def has_step(self, number: int) -> bool:
        return self.steps is None or number in self.steps

    def has_module(self, name: str) -> bool:
        return self.depth is None or len(name.split(".")) <= self.depth or not name
