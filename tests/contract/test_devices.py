"""Tensors that dash_attn makes are on the device that it means, whatever torch.set_default_device says."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from dash_attn import attention
from dash_attn.integrations.transformers.packing import CallShape, read
from tests.contract.test_layers import package_files, shown

FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")
FOR_DEVELOPERS = ("dash_attn/tools/", "dash_attn/integrations/transformers/sweep/")  # processes of their own


def without_device(source: str) -> Iterator[int]:
    """The lines that make a tensor on the default device."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of, name = node.func.value, node.func.attr
        makes = isinstance(of, ast.Name) and of.id == "torch" and name in FACTORIES
        if makes and not any(word.arg in ("device", None) for word in node.keywords):
            yield node.lineno


def test_new_tensors_name_their_device() -> None:
    files = [path for path in package_files() if not shown(path).startswith(FOR_DEVELOPERS)]
    assert len(files) > 100
    assert not [f"{shown(path)}:{line}" for path in files for line in without_device(path.read_text(encoding="utf-8"))]


def test_finds_tensors_without_a_device() -> None:
    source = "x = torch.zeros(3)\ny = torch.zeros(3, device=d)\nz = torch.full((3,),\n 1, **how)\nw = torch.randn(3)"
    assert list(without_device(source)) == [1, 5]


def test_attention_with_another_default_device() -> None:
    q, k, v = (torch.randn(1, 70, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    ways = ({}, {"cu_seqlens": [0, 30, 70]}, {"softcap": 5.0, "sinks": torch.randn(4)}, {"dropout": 0.5})
    for way in ways:
        results = []
        for default in ("cpu", "meta"):
            packed = "cu_seqlens" in way
            torch.manual_seed(0)
            with torch.device(default):
                out = attention(*(x[0] if packed else x for x in (q, k, v)), causal=True, **way)  # type: ignore[arg-type]
                grads = torch.autograd.grad(out.sum(), (q, k, v))
            results.append((out, *grads))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), way


def test_documents_of_transformers_with_another_default_device() -> None:
    positions, cpu = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), torch.device("cpu")
    with torch.device("meta"):
        packed = read(None, positions, CallShape(1, 7, 7, True, False), cpu)
        assert packed is not None and packed.cu_q == [0, 3, 7]
        assert read(None, positions[:, :3], CallShape(1, 3, 7, False, False), cpu) is None
        ends = torch.ops.dash_attn.pack(None, positions, [1, 7, 7], True, False)[2]
    assert ends[:3].tolist() == [0, 3, 7]
