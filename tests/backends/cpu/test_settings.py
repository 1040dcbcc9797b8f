"""What a process sets for itself changes no bit and breaks nothing, and the backend sets nothing for others."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import dash_attn
from dash_attn.backends import Operands, Options
from dash_attn.backends.cpu import forks
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.plan import plan
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, tiles, window
from dash_attn.tiling import TileShape
from dash_attn.tools.bench.audit.attempts import LAYOUTS, threads_of_a_new_thread
from dash_attn.tools.bench.operands import draw
from tests.backends.cpu.reference import CPU, difference, operands, run

PROBLEM = Problem(1, 4, 2, 120, 120, 16, "float32", None, FULL)
PLAN = plan(PROBLEM, TileShape(16, 16))


def step(problem: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, policy: str = "auto") -> list[Tensor]:
    """out, lse, dq, dk and dv."""
    prepared = prepare(problem, policy, Options(), CPU)
    out, lse = prepared.forward(q, k, v)
    return [out, lse, *run(prepared.plan, Operands(dout, q, k, v, out, lse))]


def unequal(some: list[Tensor], others: list[Tensor]) -> list[str]:
    names = ("out", "lse", "dq", "dk", "dv")
    return [name for name, a, b in zip(names, some, others, strict=True) if not torch.equal(a, b)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("len_q", "mask"),
    [
        (17, FULL),
        (17, CAUSAL),
        (529, FULL),
        (529, window(100, 20)),
        (529, documents([0, 17, 300, 529], causal=True)),
        (530, tiles([[1, 0], [1, 1]], 265, 265)),
    ],
    ids=str,
)
def test_torchs_number_of_threads(len_q: int, mask: Mask, dtype: str) -> None:
    """One head, so that a library has nothing to split but the products themselves."""
    problem = Problem(1, 1, 1, len_q, len_q, 64, dtype, None, mask)
    drawn, results = draw(problem, CPU), []
    for count in (1, 4, 16):
        with threads(count):
            results.append(step(problem, *drawn))
    assert [unequal(results[0], other) for other in results[1:]] == [[], []]


@pytest.mark.parametrize("dim", [33, 64])
def test_layout_of_the_operands(dim: int) -> None:
    problem = Problem(2, 3, 3, 515, 515, dim, "float32", None, CAUSAL)
    drawn = draw(problem, CPU)
    first = step(problem, *drawn)
    for layout in LAYOUTS:
        assert not unequal(first, step(problem, *(layout(x) for x in drawn))), layout.__name__


def test_numbers_too_small_for_the_usual_format() -> None:
    """A thread inherits from its creator whether such numbers count as 0."""
    problem = Problem(1, 1, 1, 40, 40, 16, "float32", None, FULL)
    drawn = draw(problem, CPU)
    drawn = (drawn[0] * 1e-40, *drawn[1:])
    first = step(problem, *drawn)
    assert first[2].any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        again = step(problem, *drawn)
    finally:
        torch.set_flush_denormal(False)  # in this mode, a comparison takes such numbers for 0
    assert not unequal(first, again)


# ---- identity ----------------------------------------------------------------------------------------------


def test_identity_has_the_precision_of_products() -> None:
    before = CpuBackend().software()
    assert CpuBackend().software() == before
    torch.set_float32_matmul_precision("medium")
    try:
        assert CpuBackend().software() != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert CpuBackend().software() == before


def test_identity_has_the_code_path_of_the_math_library() -> None:
    if not torch.backends.mkl.is_available():
        pytest.skip("MKL_CBWR is a variable of MKL, and this torch has another library")
    print_it = "from dash_attn.backends.cpu.probe import probe; print(probe())"
    environments = [os.environ | {"MKL_CBWR": "COMPATIBLE"}, os.environ | {"OMP_NUM_THREADS": "3"}]
    other, same = (
        subprocess.run([sys.executable, "-c", print_it], env=env, capture_output=True, text=True, check=True).stdout
        for env in environments
    )
    assert other != same
    assert same.strip()[:12] in CpuBackend().software()


# ---- defaults of the process -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["auto", "spt@head"])
def test_default_dtype_and_device(policy: str) -> None:
    problem = Problem(1, 2, 1, 300, 300, 32, "float32", None, window(50, 0))
    drawn = draw(problem, CPU)
    first = step(problem, *drawn, policy)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        again, software = step(problem, *drawn, policy), CpuBackend().software()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert not unequal(first, again)
    assert software == CpuBackend().software()


def test_a_torch_that_keeps_its_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenMP no function sets the number of threads of one thread only."""
    monkeypatch.setattr("dash_attn.backends.cpu.threads.thread_local_setters", lambda: ())
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # a new thread begins with this number
    try:
        with pytest.raises(RuntimeError, match="needs a torch built with OpenMP"):
            dash_attn.attention(*(torch.randn(1, 40, 2, 16) for _ in range(3)))
    finally:
        torch.set_num_threads(before)


def test_inference_mode() -> None:
    drawn = draw(PROBLEM, CPU)
    first = step(PROBLEM, *drawn)
    with torch.inference_mode():
        assert not unequal(first, step(PROBLEM, *(x.clone() for x in drawn)))


# ---- other threads -----------------------------------------------------------------------------------------


def starts(monkeypatch: pytest.MonkeyPatch, after: Callable[[], None]) -> None:
    """`after` runs after each start of a thread of the backend."""

    def start(*given: Any) -> int:
        number = _thread.start_new_thread(*given)
        after()
        return number

    monkeypatch.setattr("dash_attn.backends.cpu.threads.start_new_thread", start)


def test_a_thread_born_meanwhile_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def look() -> None:
        time.sleep(0.01)
        seen.add(threads_of_a_new_thread())

    with threads(3):
        given = operands(PROBLEM)
        starts(monkeypatch, look)
        run(PLAN, given)
        assert seen == {3}
        assert torch.get_num_threads() == 3


has_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@has_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_fork_waits_for_products_and_products_wait_for_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, steps = threading.Event(), []

    def compute() -> None:
        with forks.apart:
            inside.set()
            time.sleep(0.1)
            steps.append("computed")
        forks.ends()
        time.sleep(0.1)
        with forks.apart:
            steps.append("computed later")

    def after() -> None:
        if os.getpid() == parent:
            steps.append("forked")
            time.sleep(0.3)
            steps.append("opened")
        original()

    parent, original, thread = os.getpid(), forks._reopen, threading.Thread(target=compute)
    monkeypatch.setattr(forks, "_reopen", after)
    thread.start()
    assert inside.wait(20)
    child = os.fork()
    if child == 0:
        os._exit(0)
    thread.join()
    os.waitpid(child, 0)
    assert steps == ["computed", "forked", "opened", "computed later"]


@pytest.mark.parametrize("features", [{}, {"softcap": 5.0}, {"panels": 2}], ids=str)
def test_every_product_is_apart_from_forks(features: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], torch.mm

    def mm(*given: Any, **how: Any) -> Tensor:
        seen.append(threading.get_ident() in forks._inside)
        return original(*given, **how)

    monkeypatch.setattr(torch, "mm", mm)
    q, k, v = (torch.randn(1, 300, 2, 16, requires_grad=True) for _ in range(3))
    dash_attn.attention(q, k, v, causal=True, **features).sum().backward()
    assert seen and all(seen)


@has_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_fork_waits_for_threads_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def compute() -> None:
        forks.ends()
        ended.set()
        time.sleep(0.2)

    thread = threading.Thread(target=compute)
    thread.start()
    assert ended.wait(20)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert not thread.is_alive() or not os.path.exists("/proc/self/task")
    thread.join()


def test_threads_may_end_while_a_process_begins_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints an error of this handler and goes on, and then the fork has waited for nobody."""
    ended, looked_at = deque([1, 2], maxlen=256), list[str]()

    class Thread:
        def __init__(self, path: str) -> None:
            looked_at.append(path.rpartition("/")[2])

        def exists(self) -> bool:
            if len(looked_at) == 1:
                ended.append(3)
            return False

    monkeypatch.setattr(forks, "_ended", ended)
    monkeypatch.setattr(forks, "Path", Thread)
    try:
        forks._before()
    finally:
        forks._reopen()
    assert looked_at == ["1", "2", "3"]


@has_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_fork_while_another_thread_starts_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(PROBLEM)
    starting, forked = threading.Event(), threading.Event()
    first = run(PLAN, given)

    def wait() -> None:
        starting.set()
        forked.wait(20)

    starts(monkeypatch, wait)
    other = threading.Thread(target=run, args=(PLAN, given))
    other.start()
    assert starting.wait(20)
    child = os.fork()
    if child == 0:
        status = 2
        try:
            signal.alarm(20)
            forked.set()
            status = 1 if difference(first, run(PLAN, given)) else 0
        finally:  # the child must not come back to pytest
            os._exit(status)
    forked.set()
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
