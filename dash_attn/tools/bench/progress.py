"""How far along: a bar where there is a terminal and rich, else a line for each step on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Tell = Callable[[str, int], None]  # what is done now, and how many steps were finished before


@contextmanager
def progress(total: int, what: str) -> Iterator[Tell]:
    """A function to call whenever something new begins."""
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
    """The items, one by one, while it is shown how many are done."""
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
