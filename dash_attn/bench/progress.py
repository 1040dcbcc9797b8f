"""How far along: a bar where there is a terminal and rich, else a line for each step on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def steps(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, one by one, while it is shown how many are done."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield from _plain(items, what)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _plain(items, what)
        return
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(what, total=len(items))
        for item in items:
            progress.update(bar, description=str(getattr(item, "name", what)))
            yield item
            progress.advance(bar)


def _plain(items: Sequence[T], what: str) -> Iterator[T]:
    began = time.perf_counter()
    for number, item in enumerate(items, 1):
        label = getattr(item, "name", "")
        print(
            f"[{number}/{len(items)}, {time.perf_counter() - began:.0f} s] {what} {label}", file=sys.stderr, flush=True
        )
        yield item
