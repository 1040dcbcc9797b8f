"""The child process that computes. It reads a file that says what to do, and writes its progress to standard output.

It may hang or die. The process that started it notices.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dash_attn.tools.bench.audit import step as steps
from dash_attn.tools.bench.audit.attempts import KINDS
from dash_attn.tools.bench.audit.compare import differences, in_bursts, merge
from dash_attn.tools.bench.audit.invariance import CHANGES, Scene, part
from dash_attn.tools.bench.audit.ranks import compare_ranks
from dash_attn.tools.bench.audit.stressors import CALLS, plain, stressors_on
from dash_attn.tools.bench.audit.targets import Conditions, target_of
from dash_attn.tools.bench.audit.whole import Bits, whole_of
from dash_attn.tools.bench.variants import reason

SILENCE = 0.1  # seconds between two words about repeats
MARK = "@audit "  # other lines on standard output are not for the parent


def say(**event: Any) -> None:
    print(MARK + json.dumps(event), flush=True)


def run(job: dict[str, Any]) -> None:
    """Repeat the target under each stressor, against the first result there ever was (kept in a file)."""
    device = torch.device(job["device"])
    say(at="start")
    step = steps.load(Path(job["step"]), device)
    reference = Path(job["reference"])
    try:
        target = target_of(job["target"], step)
        first = None if reference.exists() else tuple(x.clone() for x in target(Conditions()))
    except Exception as error:  # not installed, not built, not for this problem
        say(missing=reason(error))
        return
    if first is None:
        first = tuple(torch.load(reference, map_location=device, weights_only=True))
    else:
        torch.save(list(first), reference)
    for name in job["stressors"]:
        say(at=name)
        result: dict[str, Any] = {"stressor": name, "runs": 0, "differing": 0, "tensors": {}}
        runs = stressors_on(device.type).get(name, plain)  # of the others only where they run is different
        results, calls, said = runs(target, job["repeats"] * job["calls"]), job["calls"] * CALLS.get(name, 1), 0.0
        for number, got in enumerate(in_bursts(results, first, job["calls"]), 1):
            if device.type == "cuda":
                torch.cuda.synchronize()  # an error of a kernel comes here, and not under another stressor
            apart = differences(got, first)
            result["runs"], result["differing"] = number * calls, result["differing"] + bool(apart)
            merge(result["tensors"], apart)
            if time.monotonic() - said > SILENCE:
                said = time.monotonic()
                say(at=name, repeat=number)
        say(result=result)
    say(done=True)


def compare(job: dict[str, Any]) -> None:
    """Compute a sequence alone, then under each change or on each number of ranks."""
    say(at="start")
    problem = steps.problem_from(job["sequence"])
    if job.get("ranks"):
        compare_ranks(job, problem, lambda **event: say(**event))
        say(done=True)
        return
    scene = Scene(problem, torch.device(job["device"]))
    try:
        target = whole_of(job["target"])
        (alone,) = target(scene.alone())
    except Exception as error:  # not installed, not built, not for this problem
        say(missing=reason(error))
        return
    by_panels = {1: alone}
    for name in job["stressors"]:
        say(at=name)
        result: dict[str, Any] = {"stressor": name, "runs": 0, "differing": 0, "tensors": {}}
        for number, (inputs, place, kv_heads) in enumerate(CHANGES[name](scene), 1):
            if inputs.panels not in by_panels:
                (by_panels[inputs.panels],) = target(replace(scene.alone(), panels=inputs.panels))
            whole = part(by_panels[inputs.panels], scene.problem, kv_heads)
            apart = differences(target(inputs)[place], whole, Bits._fields)
            result["runs"], result["differing"] = number, result["differing"] + bool(apart)
            merge(result["tensors"], apart)
            say(at=name, repeat=number)
        say(result=result)
    say(done=True)


def attempt(job: dict[str, Any]) -> None:
    """Attempts of one kind until its seconds are over, and the counts so far, about once a second."""
    say(at="start")
    kind, outcomes = job["attempts"], Counter[str]()
    end = said = time.monotonic()
    end += job["seconds"]
    with contextlib.closing(KINDS[kind](job["seed"])) as made:
        for number, outcome in enumerate(made, 1):
            outcomes[outcome] += 1
            now = time.monotonic()
            if now - said > 1 or now >= end:
                said = now
                say(at=kind, repeat=number, outcomes=outcomes)
            if now >= end:
                break
    say(done=True)


def make(job: dict[str, Any]) -> None:
    """Draw a step once, so that every process gets the same, forward included."""
    say(at="start")
    problem, device = steps.problem_from(job["make"]), torch.device(job["device"])
    steps.made(problem, device, job["seed"], job["pack"]).save(Path(job["step"]))
    say(done=True)


def obey(job: dict[str, Any]) -> None:
    """Do what a job says."""
    (make if "make" in job else compare if "sequence" in job else attempt if "attempts" in job else run)(job)


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    obey(told)
