"""The override for torchtitan, with stand-ins for the parts of torchtitan that it touches."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dash_attn
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.kept import Kept
from dash_attn.prepare import prepare
from dash_attn.problem import Problem

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/torchtitan_dash.py"


class VarlenMetadata(NamedTuple):
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class VarlenAttention(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        window_size: tuple[int, int] = (-1, 0)
        sharding_config: str | None = None

    def __init__(self, config: Config) -> None:
        raise AssertionError("would activate FlashAttention 3")


class SelectiveAC:
    @dataclass(kw_only=True, slots=True)
    class Config:
        preserve_rng_state: bool = True

    def get_save_ops(self) -> set:
        return {torch.ops.aten.mm.default}


def override(*, target: type, description: str) -> Any:
    def mark(factory: Any) -> Any:
        factory.target = target
        return factory

    return mark


def derive(source: Any, target: type, **deltas: Any) -> Any:
    shared = {field.name for field in fields(source)} & {field.name for field in fields(target)}
    return target(**{name: getattr(source, name) for name in shared} | deltas)


def package(**names: Any) -> ModuleType:
    module = ModuleType("stand-in")
    vars(module).update(names)
    return module


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    typed = []
    stand_ins = {
        "spmd_types": package(
            no_typecheck=contextlib.nullcontext,
            is_type_checking=lambda: True,
            get_local_type=lambda x: "local",
            assert_type=lambda x, *types: typed.append(types),
        ),
        "spmd_types.runtime": package(get_partition_spec=lambda x: "spec"),
        "torchtitan": package(),
        "torchtitan.config": package(derive=derive, override=override),
        "torchtitan.distributed": package(),
        "torchtitan.distributed.activation_checkpoint": package(SelectiveAC=SelectiveAC),
        "torchtitan.distributed.utils": package(get_spmd_backend=lambda: "spmd_types"),
        "torchtitan.models": package(),
        "torchtitan.models.common": package(),
        "torchtitan.models.common.attention": package(VarlenAttention=VarlenAttention, VarlenMetadata=VarlenMetadata),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("torchtitan_dash", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    module.typed = typed
    yield module


def metadata(*ends: int) -> VarlenMetadata:
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    longest = int(cu.diff().max())
    return VarlenMetadata(cu, cu, longest, longest)


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(50, heads, 16, requires_grad=True) for heads in (4, 2, 2)]


def test_attention_is_replaced(titan: Any) -> None:
    config = titan.dash_attention(VarlenAttention.Config(window_size=(9, 0), sharding_config="kept"), policy="fa3")
    assert titan.dash_attention.target is VarlenAttention.Config and isinstance(config, VarlenAttention.Config)
    assert (config.window_size, config.sharding_config, config.policy) == ((9, 0), "kept", "fa3")
    module, (q, k, v) = titan.DashAttention(config), tensors()
    out = module(q, k, v, attention_masks=metadata(20, 50), scale=0.3, enable_gqa=True)
    assert out.dtype == q.dtype and titan.typed == [("local", "spec")]
    expected = dash_attn.attention(
        *(x.bfloat16() for x in (q, k, v)), cu_seqlens=[0, 20, 50], window=(9, 0), scale=0.3, policy="fa3"
    )
    assert torch.equal(out, expected.float())
    out.sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in (q, k, v))
    with pytest.raises(NotImplementedError, match="out_transform"):
        module(q, k, v, attention_masks=metadata(50), out_transform=lambda out, lse: out)


def test_what_attention_gave_is_kept(titan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = titan.KeepAttention().get_save_ops()
    assert saved == {torch.ops.aten.mm.default, torch.ops.dash_attn.forward.default}
    assert titan.keep_attention(SelectiveAC.Config(preserve_rng_state=False)).preserve_rng_state is False
    module = titan.DashAttention(titan.dash_attention(VarlenAttention.Config()))
    forwards = []
    original = CpuBackend.forward

    def counted(backend: CpuBackend, problem: Problem) -> Any:
        run = original(backend, problem)
        return lambda *qkv: (forwards.append(1), run(*qkv))[1]

    monkeypatch.setattr(CpuBackend, "forward", counted)
    prepare.cache_clear()
    monkeypatch.setattr("dash_attn.api.calls._seen", Kept())

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    grads = []
    for keep in (False, True):
        q, k, v = tensors()
        extra = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if keep else {}
        forwards.clear()
        out = checkpoint(
            lambda q, k, v: module(q.sin(), k, v, attention_masks=metadata(20, 50)),
            q,
            k,
            v,
            use_reentrant=False,
            **extra,
        )
        out.sum().backward()
        grads.append([x.grad for x in (q, k, v)])
        assert len(forwards) == (1 if keep else 2)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
