"""Caches hold a number of bytes, whatever the number of values."""

from __future__ import annotations

import os
import threading
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch

from dash_attn import kept as module
from dash_attn.kept import ENTRY_BYTES, Kept, bytes_of, grown, kept
from dash_attn.plan import placement, plan
from dash_attn.problem import CAUSAL, Problem, documents
from dash_attn.tiling import TileShape

LIMIT = 20_000


def table(size: int) -> np.ndarray:
    return np.zeros(size, np.uint8)


def counted(cache: Kept) -> int:
    """The bytes of a cache, counted anew."""
    return sum(ENTRY_BYTES + bytes_of(key, entry.value) for key, entry in cache._entries.items())


def test_bytes_are_bounded_and_not_entries() -> None:
    small, large = Kept[np.ndarray](LIMIT), Kept[np.ndarray](LIMIT)
    for number in range(200):
        small.add(number, table(1))
        large.add(number, table(4000))
        assert counted(small) == small.nbytes <= LIMIT and counted(large) == large.nbytes <= LIMIT
    assert len(small) > 30 > 4 >= len(large) > 2


def test_what_is_used_stays_longest() -> None:
    cache = Kept[np.ndarray](LIMIT)
    first = cache.add("used", table(2000))
    for number in range(50):
        cache.add(number, table(2000))
        assert cache.get("used") is first
    assert cache.get(0) is None and cache.get(49) is not None


def test_the_newest_value_stays_even_if_it_is_too_large() -> None:
    cache = Kept[np.ndarray](LIMIT)
    cache.add("small", table(10))
    large = cache.add("large", table(2 * LIMIT))
    assert cache.get("large") is large and len(cache) == 1
    cache.add("small", table(10))
    assert cache.get("large") is None and cache.nbytes < LIMIT


def test_a_value_that_grows_is_counted_again() -> None:
    cache = Kept[dict](LIMIT, growing=lambda value: value)
    values = [cache.add(number, {}) for number in range(4)]
    before = cache.nbytes
    values[1]["table"] = table(5000)
    assert cache.nbytes == before
    grown(values[1])
    assert counted(cache) == cache.nbytes >= before + 5000
    for value in values[2:]:
        value["table"] = table(9000)
        grown(value)
        assert counted(cache) == cache.nbytes <= LIMIT
    assert len(cache) < 4
    grown(values[0])  # what is no longer there does no harm
    assert counted(cache) == cache.nbytes


def test_a_value_under_several_keys_grows_under_all() -> None:
    cache, value = Kept[dict](LIMIT, growing=lambda value: value), {}
    for key in "ab":
        cache.add(key, value)
    value["table"] = table(3000)
    grown(value)
    assert counted(cache) == cache.nbytes > 6000


def test_a_function_is_called_once() -> None:
    numbers = count()

    @kept()
    def made(a: int, b: int = 0) -> int | None:
        """Counts."""
        return next(numbers) or None

    assert made(1) is None and made(1) is None and made(2) == made(2) == 1 and made(2, b=3) == made(2, b=3) == 2
    assert made.__doc__ == "Counts." and made.cache.nbytes == counted(made.cache) and len(made.cache) == 3
    made.cache_clear()
    assert made(2) == 3 and len(made.cache) == 1


def test_what_counts() -> None:
    flat = torch.zeros(1000)
    views = torch.split(flat, 100)
    assert 4000 <= bytes_of(*views) < 4100 and bytes_of(torch.empty(10**6, device="meta")) < 200
    owned = table(5000)
    assert 5000 <= bytes_of(owned) < 5200 and 5000 <= bytes_of([owned, owned]) < 5300
    assert bytes_of(tuple(range(1000))) > 30_000
    assert bytes_of(partial(max, owned)) > 5000 and bytes_of(lambda: owned) > 5000
    pack = Problem(1, 2, 2, 1000, 1000, mask=documents(range(1001)))
    assert bytes_of(pack) > bytes_of(Problem(1, 2, 2, 1000, 1000)) + 30_000


def test_plans_and_placements_count_their_tables() -> None:
    for function in (plan, placement):
        function.cache_clear()
    planned = plan(Problem(1, 4, 4, 4096, 4096, mask=CAUSAL), TileShape(64, 64), "fa3")
    placement(planned, 7)
    size = planned.program.nbytes
    assert size < bytes_of(planned) < 10 * size
    for function in (plan, placement):
        assert function.cache.nbytes == pytest.approx(counted(function.cache), rel=0.1) and function.cache.nbytes > size


def test_threads_agree_on_a_value_and_on_the_bytes() -> None:
    cache, got = Kept[np.ndarray](10**6), dict[tuple[int, int], np.ndarray]()

    def add(thread: int) -> None:
        for number in range(300):
            got[thread, number] = cache.add(number % 60, table(number % 60))

    threads = [threading.Thread(target=add, args=(each,)) for each in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(cache) == 60 and counted(cache) == cache.nbytes
    assert all(value is cache.get(number % 60) for (_, number), value in got.items())


def test_a_repeated_call_waits_for_nobody() -> None:
    cache, done = Kept[str](LIMIT), list[str | None]()
    cache.add("key", "value")
    reader = threading.Thread(target=lambda: done.append(cache.get("key")))
    with module._lock:
        reader.start()
        reader.join(10)
    assert done == ["value"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_forked_child_can_keep_values() -> None:
    """The fork waits until no thread is at work on a cache."""
    cache, inside, go = Kept[int](LIMIT), threading.Event(), threading.Event()

    def hold() -> None:
        with module._lock:
            inside.set()
            go.wait(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        cache.add("key", 1)
        os._exit(17 if cache.get("key") == 1 else 1)
    go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
