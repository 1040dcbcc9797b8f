"""Threads, forks, streams, graphs, several GPUs and large grids on a Hopper GPU: make gpu-test"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dash_attn
from dash_attn.api import calls
from dash_attn.backends import Gradients
from dash_attn.backends.sm90 import fa4, packing, tables
from dash_attn.backends.sm90.tables import _copying, uploaded
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, Problem
from tests.backends.sm90.cases import Case, errors, prepared

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CALLS = {
    "causal": {"causal": True},
    "documents": {"cu_seqlens": [0, 200, 473, 1000], "causal": True},
}
EVERY = pytest.mark.parametrize("how", CALLS.values(), ids=CALLS)


def tensors(*sizes: int, device: str = "cuda:0") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*sizes, heads, 64, generator=generator) for heads in (4, 2, 2)]
    return [x.to(device, torch.bfloat16) for x in drawn]


def inputs_for(how: dict[str, object], device: str = "cuda:0") -> list[Tensor]:
    return tensors(1000, device=device) if "cu_seqlens" in how else tensors(1, 1000, device=device)


def gradients(inputs: list[Tensor], function=dash_attn.attention, **how: object) -> list[Tensor]:
    """out and the gradients of all inputs. Nothing here waits for the GPU."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves, **how)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def forget() -> None:
    """The next call of any problem is its first."""
    calls._seen.clear()
    prepare.cache_clear()
    gc.collect()


def direct(inputs: Sequence[Tensor], out: Tensor, lse: Tensor, how: dict[str, object]) -> Gradients:
    """dash_attn.backward with the output as its own gradient."""
    return dash_attn.backward(out, *inputs, out, lse, causal=True, cu_seqlens_q=how.get("cu_seqlens"))


def blocks() -> list[Tensor]:
    """Small blocks of memory, filled with 255, from the stream that uploads tables."""
    with torch.cuda.stream(_copying(torch.device("cuda", 0))):
        return [torch.full((2**bits,), 255, dtype=torch.uint8, device="cuda") for bits in [9, 12, 15] * 200]


def every_free_block() -> list[Tensor]:
    """All free memory that `blocks` could have, and a little more."""
    found = list[Tensor]()
    with torch.cuda.stream(_copying(torch.device("cuda", 0))):
        for bits in (19, 15, 12, 9):
            reserved = torch.cuda.memory_reserved()
            while torch.cuda.memory_reserved() == reserved:
                found.append(torch.empty(2**bits, dtype=torch.uint8, device="cuda"))
    return found


def late(inputs: list[Tensor]) -> list[Tensor]:
    """Copies that are there only after a while. Who does not follow the current stream reads something else."""
    copies = [torch.full_like(x, float("nan")) for x in inputs]
    torch.cuda._sleep(5_000_000)  # cycles: some milliseconds
    for copy, x in zip(copies, inputs, strict=True):
        copy.copy_(x)
    return copies


# ---- streams and threads -------------------------------------------------------------------------------------


def test_two_streams_take_turns_with_two_problems() -> None:
    """Each stream runs both problems, whose tables and kernels the two streams share."""
    wants = {name: gradients(inputs_for(how), **how) for name, how in CALLS.items()}
    given = {name: inputs_for(how) for name, how in CALLS.items()}
    torch.cuda.synchronize()
    streams, runs = [torch.cuda.Stream() for _ in range(2)], []
    for lap in range(20):
        for number, stream in enumerate(streams):
            name = list(CALLS)[(lap + number) % 2]
            with torch.cuda.stream(stream):
                runs.append((name, gradients(late(given[name]), **CALLS[name])))
    torch.cuda.synchronize()
    assert all(same(got, wants[name]) for name, got in runs)


@pytest.mark.parametrize("own_stream", [False, True])
@EVERY
def test_threads(how: dict[str, object], own_stream: bool) -> None:
    """Threads that call at once, on the default stream or each on its own. The first call is theirs, too."""
    inputs, results, failed = inputs_for(how), [], []
    out, lse = dash_attn.attention(*inputs, return_lse=True, **how)
    want = [*gradients(inputs, **how), *direct(inputs, out, lse, how)]
    forget()
    torch.cuda.synchronize()

    def work() -> None:
        try:
            stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
            with torch.cuda.stream(stream):
                for _ in range(25):  # torch runs every backward of autograd in one thread, the direct one in this
                    results.append([*gradients(inputs, **how), *direct(inputs, out, lse, how)])
            stream.synchronize()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(results) == 100
    assert all(same(got, want) for got in results)


MASKS = {
    "empty documents": {"cu_seqlens": [0, 200, 473, 1000], "cu_seqlens_k": [0, 200, 200, 1000]},
    "sinks": {"cu_seqlens": [0, 200, 473, 1000], "sinks": True},
    "intervals": {"mask": dash_attn.intervals([row // 2 for row in range(1000)], [row + 1 for row in range(1000)])},
}
WAYS = {
    **{f"backward, {name}": (how, "backward") for name, how in CALLS.items()},
    **{f"forward, {name}": (how, "forward") for name, how in {**CALLS, **MASKS}.items() if name != "causal"},
}


@pytest.mark.alone  # the host must be faster than a kernel that sleeps for a second
@pytest.mark.parametrize(("how", "direction"), WAYS.values(), ids=WAYS)
def test_tables_stay_until_every_stream_has_used_them(
    how: dict[str, object], direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caches drop a problem that waits in the queue of a side stream. Its tables are not yet free."""
    places = dict[str, list[tuple[int, int]]](forward=[], backward=[])

    def noted(x: Tensor, device: torch.device) -> Tensor:
        copy = uploaded(x, device)
        places[now].append((copy.data_ptr(), copy.nbytes))
        return copy

    for module in (tables, packing, fa4):
        monkeypatch.setattr(module, "uploaded", noted)
    forget()  # a graph of another test may keep the tables
    packing.packing_of.cache_clear()
    packing.spread_of.cache_clear()
    others = every_free_block()  # so that the tables are the only small hole in the memory of their stream
    given, now = inputs_for(how), "forward"
    if "sinks" in how:
        how = {**how, "sinks": torch.zeros(4, device="cuda")}
    out, lse = dash_attn.attention(*given, return_lse=True, **how)
    now = "backward"

    def call() -> list[Tensor]:
        if direction == "forward":
            return list(dash_attn.attention(*given, return_lse=True, **how))
        return list(direct(given, out, lse, how))

    want, side = call(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    blocks()  # after these two, neither stream needs memory from the driver, which may wait for the GPU
    torch.cuda.synchronize()
    assert places[direction]

    def taken(some: list[Tensor]) -> bool:
        return any(
            x.data_ptr() < place + size and place < x.data_ptr() + x.nbytes
            for x in some
            for place, size in places[direction]
        )

    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        got = call()
        queued = torch.cuda.Event()
        queued.record()
    forget()
    packing.packing_of.cache_clear()
    packing.spread_of.cache_clear()
    early = blocks()
    assert not queued.query(), "the call is over too early to show anything"
    assert not taken(early)
    side.synchronize()
    assert same(got, want)
    del early
    torch.cuda.synchronize()
    assert taken(every_free_block()), "the control: memory that no stream uses any more is given out again"
    del others


# ---- CUDA graphs ---------------------------------------------------------------------------------------------


def said_by(task: str) -> list[str]:
    command = [sys.executable, "-m", "tests.api.gpu_alone", task]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()


def test_the_first_call_inside_a_capture() -> None:
    """It is captured and right, or an error. Either way the calls after it are right."""
    *said, later = said_by("capture")
    assert later == "later right"
    assert said == ["replay right"] * 3 or (len(said) == 1 and said[0].startswith("refused")), said


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
def test_reduce_overhead_with_changing_shapes(dynamic: bool, compiler: None) -> None:
    """torch.compile captures a graph for each length and replays it, also after the caches have dropped the problem."""
    run = torch.compile(dash_attn.attention, mode="reduce-overhead", dynamic=dynamic)
    lengths = (256, 300, 512)
    wants = {length: gradients(tensors(2, length), causal=True) for length in lengths}
    for lap in range(5):  # one warms up, one captures, three replay
        for length in lengths:
            torch.compiler.cudagraph_mark_step_begin()
            got = [x.clone() for x in gradients(tensors(2, length), run, causal=True)]
            assert same(got, wants[length]), length
        if lap == 2:
            forget()
            blocks()
            torch.cuda.synchronize()


# ---- processes and GPUs --------------------------------------------------------------------------------------


def test_a_forked_child() -> None:
    said = said_by("fork")
    assert said == ["child on the CPU right", "child on the GPU refused RuntimeError", "parent on the GPU right"], said


@EVERY
def test_a_gpu_that_is_not_current(how: dict[str, object]) -> None:
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability(1)[0] != 9:
        pytest.skip("needs two Hopper GPUs")
    want = gradients(inputs_for(how), **how)
    with torch.cuda.device(0):
        q, k, v = given = inputs_for(how, "cuda:1")
        got = gradients(given, **how)
        out, lse = dash_attn.attention(q, k, v, return_lse=True, **how)
        grads = direct((q, k, v), out, lse, how)
        assert torch.cuda.current_device() == 0 and all(x.device.index == 1 for x in (*got, *grads))
    with torch.cuda.device(1):
        assert same(got, gradients(given, **how)) and same(list(grads), list(direct(given, out, lse, how)))
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert same([x.to("cuda:0") for x in got], want)


# ---- determinism, memory and sizes ---------------------------------------------------------------------------


def test_no_order_under_strict_determinism(strict: None) -> None:
    inputs = tensors(1, 300)
    with pytest.raises(RuntimeError, match="deterministic=False"):
        gradients(inputs, deterministic=False)
    assert same(gradients(inputs, deterministic=True), gradients(inputs))
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="deterministic=False"):
        gradients(inputs, deterministic=False)


def test_results_that_share_memory_are_refused() -> None:
    q, k, v = tensors(1, 300)
    out, lse = dash_attn.attention(q, k, v, return_lse=True)
    for changes in ({"dq": out}, {"dq": q}, {"dk": v}, {"dk": (room := torch.empty_like(k)), "dv": room}):
        with pytest.raises(ValueError, match="share memory"):
            dash_attn.backward(out.clone(), q, k, v, out, lse, **changes)
    want = dash_attn.backward(out, q, k, v, out, lse)
    fused = torch.full((1, 300, 8, 64), float("nan"), dtype=q.dtype, device=q.device)
    dq, dk, dv = fused.split([4, 2, 2], dim=2)
    got = dash_attn.backward(out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
    assert same(list(got), list(want))


@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 65535, 65535, 5, 5, 64, mask=CAUSAL),
        Problem(1, 65535, 21845, 5, 5, 64, mask=CAUSAL),
        Problem(32767, 1, 1, 5, 5, 64, mask=CAUSAL),
    ],
    ids=["heads", "grouped heads", "batch"],
)
@pytest.mark.parametrize("finish", ["last", "postpass"])
def test_the_largest_grids(problem: Problem, finish: str) -> None:
    case = Case.make(problem)
    assert max(errors(case.run(prepared(problem, finish=finish)), case.want)) < 1e-2


def test_a_head_too_many_is_refused() -> None:
    x = torch.zeros(1, 5, 65536, 64, dtype=torch.bfloat16, device="cuda:0")
    with pytest.raises(NotImplementedError, match="65536 heads"):
        dash_attn.attention(x, x, x)
    with pytest.raises(NotImplementedError, match="batch size 32768"):
        dash_attn.attention(*[x[0].view(32768, 10, 1, 64)] * 3)
