"""Stressors: the conditions of a call. Each yields the gradients of every call, and does not wait for the GPU.

The current stream waits for what is yielded. So the GPU can compare results, and calls follow each other closely.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice

import torch

from dash_attn.tools.bench.audit.compare import note
from dash_attn.tools.bench.audit.targets import Conditions, Gradients, Target

Stressor = Callable[[Target, int], Iterator[Gradients]]
BURST = 64  # calls of a burst
MARGINS, THREADS, WORKERS = (4, 16, 1), (1, 3, 2, 5), (3, 8, 1, 5)


def plain(target: Target, repeats: int) -> Iterator[Gradients]:
    """Nothing but again."""
    for _ in range(repeats):
        yield target(Conditions())


def load(target: Target, repeats: int) -> Iterator[Gradients]:
    """Matrix products of changing size on two other streams, begun before and still running."""
    streams, chance = [_stream() for _ in range(2)], random.Random(0)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(repeats):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(chance.randint(1, 12)):
                    size = chance.choice((256, 1024, 4096))
                    torch.mm(a[:size], a)
        yield target(Conditions())


def stream(target: Target, repeats: int) -> Iterator[Gradients]:
    """On a stream of its own each time."""
    for _ in range(repeats):
        side = _stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            gradients = target(Conditions())
        torch.cuda.current_stream().wait_stream(side)
        yield gradients
        del gradients


def graph(target: Target, repeats: int) -> Iterator[Gradients]:
    """Captured once in a CUDA graph and replayed; results are poisoned before each replay."""
    _warm_up(target)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        gradients = target(Conditions())
    for _ in range(repeats):
        for x in gradients:
            x.fill_(float("nan"))
        captured.replay()
        yield gradients


def burst(target: Target, repeats: int) -> Iterator[Gradients]:
    """BURST calls in one CUDA graph, which compares them too: nothing of the host comes between them. Results are
    poisoned as soon as they are compared. Yields the first result, with each element that ever differed replaced."""
    _warm_up(target)
    first = tuple(x.clone() for x in target(Conditions()))
    kept = tuple(x.clone() for x in first)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(BURST):
            gradients = target(Conditions())
            note(gradients, first, kept)
            for x in gradients:
                x.fill_(float("nan"))
    for _ in range(repeats):
        captured.replay()
        yield kept


def poison(target: Target, repeats: int) -> Iterator[Gradients]:
    """Whatever memory a call gets is full of NaN (and of -1, read as integers). On the default stream a workspace would
    stay from call to call, so the calls are on another one."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    target(Conditions())
    torch.cuda.synchronize()
    large, side = 2 * (torch.cuda.max_memory_allocated() - before) + 2**21, _stream()
    for _ in range(repeats):
        torch.cuda.empty_cache()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            blocks = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in (large, *[2**19] * 16)]
            del blocks
            gradients = target(Conditions())
        torch.cuda.current_stream().wait_stream(side)
        yield gradients
        del gradients


def margin(target: Target, repeats: int) -> Iterator[Gradients]:
    """With fewer processors."""
    for left_out in islice(cycle(MARGINS), repeats):
        yield target(Conditions(sm_margin=left_out))


def threads(target: Target, repeats: int) -> Iterator[Gradients]:
    """With other numbers of threads at once."""
    for count in islice(cycle(THREADS), repeats):
        yield target(Conditions(threads=count))


def workers(target: Target, repeats: int) -> Iterator[Gradients]:
    """Placed on other numbers of workers."""
    for count in islice(cycle(WORKERS), repeats):
        yield target(Conditions(workers=count, threads=4))


def jitter(target: Target, repeats: int) -> Iterator[Gradients]:
    """Every contribution late, at random."""
    for _ in range(repeats):
        yield target(Conditions(threads=4, jitter=1e-3))


PROCESSES = "processes"  # the same in processes of their own: started by the parent
ON_GPU: dict[str, Stressor] = {f.__name__: f for f in (plain, load, stream, graph, burst, poison, margin)}
CALLS = {"burst": BURST}  # calls of the backward in each result, where there are several
ON_CPU: dict[str, Stressor] = {f.__name__: f for f in (plain, threads, workers, jitter)}
NEED_CONDITIONS = ("margin", "threads", "workers", "jitter", "panels")


def stressors_on(device: str) -> dict[str, Stressor]:
    return ON_CPU if device == "cpu" else ON_GPU


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _warm_up(target: Target) -> None:
    """Calls on a side stream, as before every capture of a graph."""
    side = _stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            target(Conditions())
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
