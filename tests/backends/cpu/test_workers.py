"""Workers and turnstiles: who waits, who is let through, and what happens when something breaks."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dash_attn.backends.cpu.backward import CpuConfig, workspace_bytes
from dash_attn.backends.cpu.shape import tile_shape
from dash_attn.backends.cpu.turnstile import Stopped, Turnstiles
from dash_attn.backends.cpu.worker import Worker
from dash_attn.plan import plan
from dash_attn.problem import CAUSAL, FULL, Problem, tiles, window
from dash_attn.tiling import TileShape
from dash_attn.tools.bench.audit.attempts import threads_left, threads_of_a_new_thread
from tests.backends.cpu.reference import difference, operands, run

PROBLEM = Problem(1, 4, 2, 120, 120, 16, "float32", None, FULL)
PLAN = plan(PROBLEM, TileShape(16, 16))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = _thread._count()
    yield
    assert threads_left(before) == 0


# ---- turnstiles --------------------------------------------------------------------------------------------


def test_turnstile_orders_a_fold_that_does_not_commute() -> None:
    turnstiles, text, waits = Turnstiles(1), [""], []

    def add(turn: int) -> None:
        time.sleep(0.002 * ((turn * 7) % 5))
        assert turnstiles.enter(0, turn, lambda: waits.append(turn)) == turn
        before = text[0]
        time.sleep(0.0005)
        text[0] = f"{before}{turn} "
        turnstiles.leave(0)

    threads = [threading.Thread(target=add, args=(turn,)) for turn in reversed(range(12))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert text[0].split() == [str(turn) for turn in range(12)]
    assert waits


def test_open_turnstile_still_admits_one_at_a_time() -> None:
    turnstiles, inside, most = Turnstiles(1, ordered=False), [0], [0]

    def add(turn: int) -> None:
        turnstiles.enter(0, turn, lambda: None)
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.001)
        inside[0] -= 1
        turnstiles.leave(0)

    threads = [threading.Thread(target=add, args=(turn,)) for turn in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1


def test_stop_wakes_who_waits_and_keeps_the_first_error() -> None:
    turnstiles, seen = Turnstiles(2), []

    def wait() -> None:
        with pytest.raises(Stopped):
            turnstiles.enter(1, 5, lambda: seen.append("waits"))
        seen.append("woken")

    thread = threading.Thread(target=wait)
    thread.start()
    while not seen:
        time.sleep(0.001)
    first = RuntimeError("first")
    turnstiles.stop(first)
    turnstiles.stop(RuntimeError("second"))
    thread.join(10)
    assert seen == ["waits", "woken"]
    assert turnstiles.error is first
    with pytest.raises(Stopped):
        turnstiles.enter(0, 0, lambda: None)


# ---- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["_compute", "_add", "_run_chain"])
@pytest.mark.parametrize("after", [0, 9])
def test_an_error_in_one_worker_stops_all(method: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = iter(range(10**6)), getattr(Worker, method)

    def broken(self: Worker, *args: object) -> object:
        if next(calls) == after:
            raise ZeroDivisionError("on purpose")
        return original(self, *args)

    given = operands(PROBLEM)
    before, fresh = torch.get_num_threads(), []
    monkeypatch.setattr(Worker, method, broken)
    for threads in (1, 4):
        calls = iter(range(10**6))
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            run(PLAN, given, threads=threads)
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *fresh] == [before, before]


def test_an_interrupt_stops_all() -> None:
    assert threading.current_thread() is threading.main_thread()
    given = operands(PROBLEM)
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    gc.collect()
    gc.disable()  # an interrupt that meets a callback of the collector, of some other test's objects, is lost there
    try:
        timer.start()
        began = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            run(PLAN, given, threads=2, jitter=1.0)  # minutes, if nothing stopped it
    finally:
        gc.enable()
    timer.join()
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_thread_that_cannot_start(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = iter(range(10**6))

    def start(*given: Any) -> int:
        if next(starts) == 3:
            raise error
        return _thread.start_new_thread(*given)

    before, given = torch.get_num_threads(), operands(PROBLEM)
    monkeypatch.setattr("dash_attn.backends.cpu.threads.start_new_thread", start)
    with pytest.raises(type(error)):
        run(PLAN, given)
    assert [torch.get_num_threads(), threads_of_a_new_thread()] == [before, before]
    monkeypatch.undo()
    assert not difference(run(PLAN, given), run(PLAN, given))


@pytest.mark.parametrize(("how", "message"), [({"threads": 0}, "threads"), ({"order": "none"}, "order must be one of")])
def test_arguments(how: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(PLAN, operands(PROBLEM), **how)


# ---- threads -----------------------------------------------------------------------------------------------


def test_workers_do_not_split_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside workers torch has one thread, also after the caller's number is put back; elsewhere nothing changes."""
    seen, original = set(), Worker._compute

    def spy(self: Worker, *args: object) -> object:
        time.sleep(0.001)
        seen.add(torch.get_num_threads())
        return original(self, *args)

    monkeypatch.setattr(Worker, "_compute", spy)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        run(PLAN, operands(PROBLEM))
        assert seen == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_no_more_compute_at_once_than_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    held, most, lock, original = [0], [0], threading.Lock(), torch.mm

    def mm(*args: object, **kwargs: object) -> torch.Tensor:
        with lock:
            held[0] += 1
            most[0] = max(most[0], held[0])
        time.sleep(0.0005)
        result = original(*args, **kwargs)
        with lock:
            held[0] -= 1
        return result

    monkeypatch.setattr(torch, "mm", mm)
    assert PLAN.co_resident > 3
    run(PLAN, operands(PROBLEM), threads=3)
    assert most[0] == 3


def test_two_callers_at_once() -> None:
    given, results = operands(PROBLEM), []
    before = torch.get_num_threads()
    first = run(PLAN, given)
    callers = [threading.Thread(target=lambda: results.append(run(PLAN, given, jitter=1e-3))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4
    assert not any(difference(first, result) for result in results)
    assert torch.get_num_threads() == before


# ---- tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "shape"),
    [
        (Problem(1, 1, 1, 100, 100), (256, 256)),
        (Problem(1, 1, 1, 0, 0), (256, 256)),
        (Problem(1, 1, 1, 4096, 4096, mask=CAUSAL), (512, 512)),
        (Problem(1, 1, 1, 4096, 4096, mask=window(300, 0)), (256, 256)),
        (Problem(1, 1, 1, 4096, 4096, mask=tiles([[True] * 32] * 64, 64, 128)), (64, 128)),
        (Problem(1, 1, 1, 4096, 4096, mask=tiles([[True] * 4] * 4, 1024, 1024)), (512, 512)),
        (Problem(1, 1, 1, 1042, 90, mask=tiles([[True] * 3] * 2, 521, 30)), (521, 30)),
    ],
    ids=str,
)
def test_tile_follows_the_problem(problem: Problem, shape: tuple[int, int]) -> None:
    assert tile_shape(problem) == TileShape(*shape)


def test_workspace_is_linear_in_the_tokens() -> None:
    sizes = []
    for length in (4096, 8192, 16384):
        planned = plan(Problem(1, 2, 2, length, length, 64), TileShape(512, 512), "fa3")
        sizes.append(workspace_bytes(planned, CpuConfig(threads=2, workers=2)))
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])
