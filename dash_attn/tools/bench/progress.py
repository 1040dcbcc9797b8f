"""Progress on standard error: a bar on a terminal with rich, else a line for each step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Tell = Callable[[str, int], None]  # the label of the step that begins, and the number of finished steps


@contextmanager
def progress(total: int, what: str) -> Iterator[Tell]:
    """Yield a function to call when a step begins."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _plain(total, what)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain(total, what)
        return
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(what, total=total)
        yield lambda label, done: bars.update(bar, description=label or what, completed=done)


def steps(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items one by one and show how many are done."""
    with progress(len(items), what) as tell:
        for number, item in enumerate(items):
            tell(str(getattr(item, "name", "")), number)
            yield item


def _plain(total: int, what: str) -> Tell:
    began = time.perf_counter()

    def tell(label: str, done: int) -> None:
        seconds = time.perf_counter() - began
        print(f"[{done + 1}/{total}, {seconds:.0f} s] {what} {label}", file=sys.stderr, flush=True)

    return tell
