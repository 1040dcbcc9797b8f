"""Ranks: sequences whose tokens lie on several processes, against one process. Their bits must stay.

Each number of ranks has processes of its own. Rank 0 also computes everything alone, and compares.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

from dash_attn.distributed import context_parallel_attention, shard, unshard
from dash_attn.distributed.layout import LAYOUTS, USUAL_PANELS
from dash_attn.problem import Problem
from dash_attn.tools.bench.audit.compare import differences, merge
from dash_attn.tools.bench.audit.invariance import Scene
from dash_attn.tools.bench.audit.targets import CONTROL, parse
from dash_attn.tools.bench.audit.whole import Bits, CallInputs, whole_of

Event = dict[str, Any]
MISTAKE = 2  # the control cuts the sequences on the ranks into this many times more panels


class Spot(NamedTuple):
    """One way to put the tokens on ranks."""

    ranks: int
    mode: str
    layout: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


@dataclass(frozen=True)
class Ranked:
    """What the processes of one number of ranks compute, and how: plain values, which travel to them."""

    problem: Problem
    target: str
    spots: tuple[Spot, ...]
    panels: int
    mistake: int
    device: str


def spots_of(numbers: Sequence[int]) -> dict[str, Spot]:
    """Every number of ranks with every mode and layout, by their names."""
    spots = [
        Spot(number, mode, layout)
        for number in dict.fromkeys(numbers)
        for mode in ("a2a", "all_gather", *(["a2a+all_gather"] if number > 2 and number % 2 == 0 else []))
        for layout in LAYOUTS
    ]
    return {str(spot): spot for spot in spots}


def panels_for(numbers: Sequence[int]) -> int:
    """A number of panels that every number of ranks can share: the bits follow from it."""
    step = 2 * math.lcm(*numbers)
    return -(-USUAL_PANELS // step) * step


def transport(device: str, ranks: int) -> tuple[str, list[torch.device]]:
    """The library that carries tensors, and the device of each rank. Every process asks here.

    NCCL needs a GPU for each rank. Otherwise all ranks share one GPU, or the CPU, and gloo carries the tensors.
    """
    if device == "cuda" and torch.cuda.device_count() >= ranks:
        return "nccl", [torch.device("cuda", number) for number in range(ranks)]
    return "gloo", [torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")] * ranks


def compare_ranks(job: dict[str, Any], problem: Problem, say: Callable[..., None]) -> None:
    """Do what a job says, number of ranks by number of ranks, and tell what the first rank tells."""
    numbers = job["ranks"]
    chosen = [spot for name, spot in spots_of(numbers).items() if name in job["stressors"]]
    panels, mistake = panels_for(numbers), MISTAKE if job["target"] == CONTROL else 1
    for number in dict.fromkeys(spot.ranks for spot in chosen):
        here = [spot for spot in chosen if spot.ranks == number]
        spots = tuple(spot for spot in here if applies(spot, problem))
        for spot in here:
            if spot not in spots:
                say(result=Comparison(str(spot)).event())
        if spots:
            for event in on_ranks(number, Ranked(problem, job["target"], spots, panels, mistake, job["device"])):
                say(**event)


def applies(spot: Spot, problem: Problem) -> bool:
    """The ranks of a mesh share the kv heads by twos."""
    return spot.mode != "a2a+all_gather" or problem.heads_kv % 2 == 0


def on_ranks(count: int, ranked: Ranked) -> Iterator[Event]:
    """Start the processes, and give what the first one tells. An error in one of them is an error here."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    told, tell = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="dash_attn_ranks_") as folder:
        started = start_processes(  # type: ignore[no-untyped-call]
            _rank, (count, ranked, f"{folder}/store", tell), count, join=False, start_method="forkserver"
        )
        ended = False
        while not ended:
            ended = started.join(timeout=0.1)
            while told.poll():
                yield told.recv()


def _rank(number: int, count: int, ranked: Ranked, store: str, tell: Connection) -> None:
    """One rank, from its start to its end."""
    if os.path.exists("/sys/class/net/lo"):  # all processes are on this machine, whatever its name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    library, devices = transport(ranked.device, count)
    device = devices[number]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(library, init_method=f"file://{store}", rank=number, world_size=count)
    kind = "cpu" if library == "gloo" else "cuda"  # what the groups of a mesh are made for
    cases, policy = company(Scene(ranked.problem, device), ranked.panels), policy_of(ranked.target)
    alone = [whole_of(f"ours:{policy}")(inputs) for inputs in cases] if number == 0 else []
    for spot in ranked.spots:
        group = init_device_mesh(kind, (count // 2, 2)) if spot.mode == "a2a+all_gather" else None
        comparison = Comparison(str(spot))
        if number == 0:
            tell.send({"at": str(spot)})
        for run, inputs in enumerate(cases):
            on_all = apart(replace(inputs, panels=ranked.panels * ranked.mistake), spot, group, policy)
            if number == 0:
                comparison.add(on_all, alone[run])
                tell.send({"at": str(spot), "repeat": run + 1})
        if number == 0:
            tell.send({"result": comparison.event()})
    dist.destroy_process_group()


class Comparison:
    """What differs in one spot, over all calls."""

    def __init__(self, name: str) -> None:
        self.name, self.runs, self.differing = name, 0, 0
        self.tensors: dict[str, dict[str, Any]] = {}

    def add(self, got: list[Bits], want: list[Bits]) -> None:
        """One call: the results of all its sequences."""
        differ: dict[str, dict[str, Any]] = {}
        for a, b in zip(got, want, strict=True):
            merge(differ, differences(a, b, Bits._fields))
        self.runs, self.differing = self.runs + 1, self.differing + bool(differ)
        for apart_here in differ.values():
            del apart_here["runs"]  # they count sequences, and a report counts calls
        merge(self.tensors, differ)

    def event(self) -> Event:
        return {"stressor": self.name, "runs": self.runs, "differing": self.differing, "tensors": self.tensors}


def policy_of(target: str) -> str:
    return "auto" if target == CONTROL else parse(target)[1]


def company(scene: Scene, panels: int) -> list[CallInputs]:
    """A batch of two, and a pack of three."""
    n = scene.problem.len_q
    same, shorter = [scene.other(length, seed) for seed, length in enumerate((n, n // 3 + 7), 1)]
    return [
        CallInputs((scene.subject, same), scene.mask, panels=panels),
        CallInputs((shorter, scene.subject, same), scene.mask, packed=True, panels=panels),
    ]


def apart(inputs: CallInputs, spot: Spot, group: Any, policy: str) -> list[Bits]:
    """What attention over the ranks computes of each sequence, joined on every rank."""
    how: dict[str, Any] = {"group": group, "layout": spot.layout, "panels": inputs.panels}
    ends = [0, *accumulate(len(each.q) for each in inputs.sequences)] if inputs.packed else None
    dim = 0 if inputs.packed else 1

    def part(x: Tensor) -> Tensor:
        return shard(x[0] if inputs.packed else x, dim=dim, **how)

    dout, *leaves = map(part, inputs.tensors())
    for leaf in leaves:
        leaf.requires_grad_()
    attend = how | {"causal": inputs.mask.is_causal, "cu_seqlens": ends, "mode": spot.mode, "policy": policy}
    out, lse = context_parallel_attention(*leaves, **attend, return_lse=True)
    grads = torch.autograd.grad(out, leaves, dout)
    joined = [unshard(x, dim=dim, **how) for x in (out.detach(), *grads)]
    results = (joined[0], unshard(lse.detach(), dim=-1, **how), *joined[1:])
    return inputs.apart(tuple(x.unsqueeze(0) for x in results) if inputs.packed else results)
