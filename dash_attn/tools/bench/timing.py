"""Time and memory of calls.

The clock of a GPU at its power limit changes during a run. So rounds are interleaved, and a change of the clock meets
all variants alike. A variant that always follows a slow one finds a cooler GPU and looks 5 to 9 % faster. So each
round has its own sequence of variants, and untimed calls of the same variant come before each sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil
from random import Random

import numpy as np
import torch

from dash_attn.tools.bench.variants import Call

SLOW = 2e5  # microseconds; calls as long as this are warm at once, and three of them say enough

PROFILED = 12  # calls, for the shares of kernels


@dataclass(frozen=True)
class Timing:
    """`budget_ms` of time for each variant, spent in `rounds` samples; a sample is the mean of many calls."""

    device: torch.device
    rounds: int = 15
    budget_ms: float = 100.0
    lead_ms: float = 10.0  # before each sample: the clocks shall be those of this variant
    most_calls: int = 40  # of a sample
    warm_up: int = 2


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def sample(run: Sequence[Callable[[], object]], count: int, device: torch.device) -> float:
    """Microseconds a call, over `count` calls that go round the given ones (which differ in their inputs)."""
    calls = list(islice(cycle(run), count))
    if device.type == "cuda":
        begin, end = (event() for _ in range(2))
        begin.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) * 1e3 / count
    started = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - started) * 1e6 / count


def time_all(variants: Mapping[str, Sequence[Call]], how: Timing) -> dict[str, dict[str, float]]:
    """Median, 20th and 80th percentile of each variant's microseconds."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    counts, rounds, leads = dict[str, int](), dict[str, int](), dict[str, int]()
    for name, calls in variants.items():
        calls[0]()
        us = sample(calls[:1], 1, how.device)
        if us < SLOW:
            us = sample(calls, how.warm_up * len(calls), how.device)
        counts[name] = max(1, min(how.most_calls, int(how.budget_ms * 1e3 / how.rounds / us)))
        rounds[name] = how.rounds if us < SLOW else min(3, how.rounds)
        # At least one: without it, calls a little longer than lead_ms were timed cold, and shorter ones were not.
        leads[name] = _lead(us, how) if how.device.type == "cuda" and us < SLOW else 0
    rng = Random()
    for turn in range(how.rounds):
        for name in rng.sample(list(variants), len(variants)):
            calls = variants[name]
            if turn < rounds[name]:
                for call in islice(cycle(calls), leads[name]):
                    call()
                first = turn * counts[name] % len(calls)  # go on where the last sample ended
                samples[name].append(sample([*calls[first:], *calls[:first]], counts[name], how.device))
    return {name: summary(values) for name, values in samples.items()}


def _lead(us: float, how: Timing) -> int:
    return ceil(how.lead_ms * 1e3 / us)


def summary(values: Sequence[float]) -> dict[str, float]:
    p20, median, p80 = np.percentile(values, [20, 50, 80]).tolist()
    return {"median": median, "p20": p20, "p80": p80}


def kernel_shares(call: Callable[[], object], device: torch.device) -> list[float]:
    """What each kernel takes of the time of a call that is called again and again, the longest first; shares, because
    a profiler sees other clocks than a clean run. Empty where none works."""
    from torch.profiler import ProfilerActivity, profile

    if device.type != "cuda":
        return []
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(PROFILED):
                call()
            torch.cuda.synchronize(device)
        spans = dict[str, list[tuple[float, float]]]()
        for each in profiled.events() or ():
            if each.device_type.name == "CUDA":
                spans.setdefault(each.name, []).append((each.time_range.start, each.time_range.end))
    except (RuntimeError, AttributeError):
        return []
    return shares_of([sorted(each) for each in spans.values()], PROFILED)


def shares_of(spans: Sequence[Sequence[tuple[float, float]]], calls: int) -> list[float]:
    """From the spans of each kernel over all calls. Medians: a host that falls behind once does not count."""
    once = [np.array(each).T for each in spans if len(each) == calls]
    if not once or calls < 2:
        return []
    took = [float(np.median(end - begin)) for begin, end in once]
    _, ends = once[int(np.argmax(took))]
    period = float(np.median(np.diff(ends)))
    return sorted((each / period for each in took), reverse=True)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Memory of a call at its peak beyond what was there before, results included; None where nothing counts it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before
