"""Runs of two processes on the CPU, with records: python -m tests.watching.two_processes FOLDER RANK"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dash_attn
from tests.watching.small import GPT, batch, loss_of

STEPS = 3


def ddp(model: GPT) -> nn.Module:
    return DistributedDataParallel(model)


def bucket_views(model: GPT) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: GPT) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrong_sum(model: GPT) -> nn.Module:
    """A reduction that gives other bits than the usual one."""

    def hook(state, bucket):  # DDP compares annotations with types
        reduced = dist.all_reduce(bucket.buffer().mul_(0.5 + 2**-20), async_op=True).get_future()
        return reduced.then(lambda done: done.value()[0])

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    return wrapped


RUNS = {
    "ddp": (ddp, -1),
    "ddp again": (ddp, -1),
    "ddp with another batch": (ddp, 1),
    "ddp with a wrong sum": (wrong_sum, -1),
    "views": (bucket_views, -1),
    "fsdp": (fsdp, -1),
    "fsdp again": (fsdp, -1),
    "fsdp with another batch": (fsdp, 1),
}


def run(to: Path, name: str, rank: int) -> None:
    """Train. From step 1 on the second process may have another batch."""
    wrap, other = RUNS[name]
    torch.manual_seed(0)
    model = wrap(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    with dash_attn.watch(model, optimizer=optimizer, to=to / name):
        for step in range(STEPS):
            tokens = batch()
            loss_of(model, tokens.flip(0) if step == 1 and rank == other else tokens).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    for each in RUNS:
        run(folder, each, number)
    dist.destroy_process_group()
