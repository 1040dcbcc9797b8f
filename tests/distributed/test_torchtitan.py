"""The override for torchtitan's context parallel, on two ranks, with stand-ins for the classes that it touches."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.scripts import run_on_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/torchtitan_context_parallel.py"

# Class by class what torchtitan has, and its wrapper around the module of a rank.
SCRIPT = """
import runpy
import sys
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dash_attn
from dash_attn.distributed import shard, unshard


class ScaledDotProductAttention(torch.nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, config):
        raise AssertionError("would choose among torch's kernels")


class FlexAttention:
    class Config:
        pass


def override(*, target, description):
    def mark(factory):
        factory.target = target
        return factory

    return mark


titan = {
    "torchtitan": {},
    "torchtitan.config": {"override": override, "derive": lambda config, kind, **fields: kind(**fields)},
    "torchtitan.distributed": {},
    "torchtitan.distributed.utils": {"get_spmd_backend": lambda: backend},
    "torchtitan.models": {},
    "torchtitan.models.common": {},
    "torchtitan.models.common.attention": {
        "FlexAttention": FlexAttention,
        "ScaledDotProductAttention": ScaledDotProductAttention,
    },
}
for name, contents in titan.items():
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(contents)

backend = "partial_dtensor"
example = runpy.run_path(EXAMPLE)
assert example["dash_attention"].target is FlexAttention.Config
module = example["DashContextParallel"](example["dash_attention"](FlexAttention.Config(), mode="all_gather"))

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
whole = [torch.randn(1, 64, heads, 8) for heads in (4, 2, 2)]
mine = [shard(x, dim=1).requires_grad_() for x in whole]
out = module(*(DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in mine), enable_gqa=True)
out.sum().backward()
leaves = [x.requires_grad_() for x in whole]
alone = module(*leaves)  # one rank
alone.sum().backward()
plain = dash_attn.attention(*(x.detach() for x in whole), causal=True, panels=16)
print(torch.equal(unshard(out.detach(), dim=1), alone) and torch.equal(alone, plain))
print(all(torch.equal(unshard(a.grad, dim=1), b.grad) for a, b in zip(mine, leaves)))
for given, message in (({"attention_masks": object()}, "takes none"), ({}, "set it to 'partial_dtensor'")):
    try:
        module(*leaves, **given)
    except ValueError as error:
        print(message in str(error))
    backend = "spmd_types"
dist.destroy_process_group()
"""


def test_two_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    script = tmp_path / "titan.py"
    script.write_text(SCRIPT.replace("EXAMPLE", repr(str(EXAMPLE))), encoding="utf-8")
    assert run_on_ranks(script, 2).split() == ["True"] * 8
