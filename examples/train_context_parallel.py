"""Trains a small GPT on 1, 2 and 4 ranks and compares every weight after every step, bit for bit. Downloads nothing.

python examples/train_context_parallel.py                  all runs are the same; about a minute on two cores
python examples/train_context_parallel.py --sum-by-rank    gradients are first summed on each rank: the runs differ

The tokens of each sequence lie on the ranks, which are processes of a gloo group on the CPU. Two parts make the bits
independent of the number of ranks:

- dash_attn.distributed computes attention. Its bits depend on the number of panels, not on the number of ranks.
- This file computes all other layers chunk by chunk. A chunk is one of the ranges that attention cuts the tokens into,
  so it has the same tokens on every number of ranks. Each chunk gives a gradient of the weights. These gradients are
  added in the order of the chunks.

The text is the source of dash_attn, one token a byte. Loss curves go into context_parallel.png. The exit status is 0 if
the runs agree or differ as the options say, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

import dash_attn
from dash_attn.distributed import context_parallel_attention, shard

HEADS, HEAD_DIM, PANELS = 4, 16, 8
WIDTH = HEADS * HEAD_DIM

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Setup:
    steps: int
    length: int
    layers: int
    sum_by_rank: bool


@dataclass(frozen=True)
class Run:
    """The loss of each step, and a digest of all weights after the step."""

    losses: list[float]
    digests: list[str]


def initial(setup: Setup) -> Weights:
    torch.manual_seed(0)
    shapes = {"token": (256, WIDTH), "position": (setup.length, WIDTH), "head": (256, WIDTH)}
    for layer in range(setup.layers):
        shapes |= {
            f"{layer}.qkv": (3 * WIDTH, WIDTH),
            f"{layer}.out": (WIDTH, WIDTH),
            f"{layer}.up": (4 * WIDTH, WIDTH),
            f"{layer}.down": (WIDTH, 4 * WIDTH),
        }
    return {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def losses_of(chunks: list[Weights], tokens: Tensor, targets: Tensor, positions: Tensor, setup: Setup) -> list[Tensor]:
    """The loss of each chunk of this rank. Each chunk has weights of its own, so it gets a gradient of its own."""
    size = setup.length // PANELS
    pieces = zip(chunks, tokens.split(size), positions.split(size), strict=True)
    xs = [w["token"][token] + w["position"][position] for w, token, position in pieces]
    for layer in range(setup.layers):
        qkv = torch.cat([normed(x) @ w[f"{layer}.qkv"].T for w, x in zip(chunks, xs, strict=True)])
        q, k, v = qkv.view(1, -1, 3, HEADS, HEAD_DIM).unbind(2)
        out = context_parallel_attention(q, k, v, causal=True, panels=PANELS, mode="all_gather")
        for i, (w, part) in enumerate(zip(chunks, out[0].flatten(1).split(size), strict=True)):
            x = xs[i] + part @ w[f"{layer}.out"].T
            xs[i] = x + F.gelu(normed(x) @ w[f"{layer}.up"].T) @ w[f"{layer}.down"].T
    logits = [normed(x) @ w["head"].T for w, x in zip(chunks, xs, strict=True)]
    return [
        F.cross_entropy(each, target, reduction="sum") / setup.length
        for each, target in zip(logits, targets.split(size), strict=True)
    ]


def summed(parts: Tensor, order: list[int], setup: Setup) -> Tensor:
    """The sum over all chunks, from one row for each chunk of this rank. `order` are the numbers of all chunks."""
    if setup.sum_by_rank:
        total = parts.sum(0)
        dist.all_reduce(total)
        return total
    rows = [torch.empty_like(parts) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, parts)
    every = torch.cat(rows)
    total = torch.zeros_like(every[0])
    for number in range(PANELS):
        total += every[order.index(number)]
    return total


def text() -> Tensor:
    files = sorted(Path(dash_attn.__file__).parent.rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def train(rank: int, size: int, setup: Setup, folder: str) -> None:
    torch.set_num_threads(1)  # the math library may split products among threads, and the split changes bits
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    cut = {"dim": 0, "panels": PANELS}
    mine = shard(torch.arange(PANELS), **cut)
    numbers = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(numbers, mine)
    order = torch.cat(numbers).tolist()
    weights, data, run = initial(setup), text(), Run([], [])
    optimiser = torch.optim.AdamW(weights.values(), lr=1e-3)
    for _ in range(setup.steps):
        start = int(torch.randint(len(data) - setup.length - 1, ()))
        tokens, targets = data[start : start + setup.length], data[start + 1 : start + setup.length + 1]
        chunks = [{name: w.clone().requires_grad_() for name, w in weights.items()} for _ in mine]
        own = (shard(x, **cut) for x in (tokens, targets, torch.arange(setup.length)))
        losses = losses_of(chunks, *own, setup)
        torch.stack(losses).sum().backward()
        run.losses.append(summed(torch.stack(losses).detach()[:, None], order, setup).item())
        for name, weight in weights.items():
            weight.grad = summed(torch.stack([chunk[name].grad for chunk in chunks]), order, setup)
        optimiser.step()
        everything = torch.cat([weight.flatten() for weight in weights.values()])
        run.digests.append(hashlib.sha256(everything.numpy().tobytes()).hexdigest())
    if rank == 0:
        torch.save((run.losses, run.digests), f"{folder}/run{size}")
    dist.destroy_process_group()


def parting(first: Run, second: Run) -> int | None:
    """The first step, from 1, after which weights differ. None if no weight ever differs."""
    pairs = enumerate(zip(first.digests, second.digests, strict=True), 1)
    return next((step for step, (a, b) in pairs if a != b), None)


def draw(runs: dict[int, Run], path: Path) -> None:
    """Draw the loss curves, and their distance from the curve of one rank."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    curves, distance = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for (size, run), width in zip(runs.items(), (6, 3.5, 1.2), strict=False):
        steps = range(1, len(run.losses) + 1)
        curves.plot(steps, run.losses, lw=width, label=f"{size} rank{'s' if size > 1 else ''}")
        distance.plot(steps, [abs(a - b) for a, b in zip(run.losses, runs[1].losses, strict=True)], ".-", lw=1)
    curves.legend(frameon=False)
    curves.set_title("loss", loc="left", fontsize=9)
    distance.set_title("difference from one rank", loc="left", fontsize=9)
    distance.set_xlabel("step")
    figure.savefig(path, dpi=120)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, the first of them 1")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=256, help=f"tokens of a sequence, a multiple of {PANELS}")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sum-by-rank", action="store_true", help="add the gradients of a rank first")
    parser.add_argument("--out", type=Path, default=Path("context_parallel.png"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    setup = Setup(given.steps, given.length, given.layers, given.sum_by_rank)
    runs = dict[int, Run]()
    with tempfile.TemporaryDirectory() as folder:
        for size in map(int, given.ranks.split(",")):
            mp.start_processes(train, (size, setup, folder), nprocs=size, start_method="forkserver")
            runs[size] = Run(*torch.load(f"{folder}/run{size}"))
            losses, last = runs[size].losses, runs[size].digests[-1][:16]
            print(f"{size} ranks: loss {losses[0]:.3f} to {losses[-1]:.3f}, weights {last}")
    parted = {size: parting(runs[1], run) for size, run in runs.items()}
    for size, step in parted.items():
        if size > 1:
            told = f"identical after each of {setup.steps} steps" if step is None else f"different from step {step} on"
            print(f"{size} ranks against 1: {told}")
    draw(runs, given.out)
    print(f"curves: {given.out}")
    return int(any(step is not None for step in parted.values()) != setup.sum_by_rank)


if __name__ == "__main__":
    raise SystemExit(main())
