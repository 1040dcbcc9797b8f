"""What the tests of the CPU backend and of the API compare with: torch's own attention, and bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dash_attn.backends import Gradients, Operands, Options
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.pack import Pack, Planned
from dash_attn.plan import plan
from dash_attn.problem import Problem
from dash_attn.tiling import TileShape
from dash_attn.tools.bench.operands import draw_operands

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def operands(problem: Problem, seed: int = 0) -> Operands:
    """Random inputs with the forward's result."""
    return draw_operands(problem, CPU, seed)


def by_torch(problem: Problem, given: Operands) -> tuple[Tensor, ...]:
    """Gradients by torch's own attention in the dtype of the inputs."""
    leaves = [x.detach().requires_grad_() for x in given.qkv]
    heads_first = (x.repeat_interleave(problem.heads_q // x.shape[2], 2).transpose(1, 2) for x in leaves)
    allowed = torch.from_numpy(problem.mask.dense(problem.len_q, problem.len_k))
    out = scaled_dot_product_attention(*heads_first, attn_mask=allowed, scale=problem.softmax_scale)
    return torch.autograd.grad(out.transpose(1, 2), leaves, given.dout)


def ordered(problem: Problem, shape: TileShape, policy: str = "auto") -> Planned:
    """The plan of a problem, or of each of its documents or panels, with tiles of any shape."""
    return Pack(problem, lambda _: shape, policy) if problem.has_parts else plan(problem, shape, policy)


def run(planned: Planned, given: Operands, *, workers: int | None = None, **config: object) -> Gradients:
    """The backward of a plan, into tensors full of NaN, on at least `workers` workers. Tests choose the tile shape,
    which `prepare` does not let them."""
    into = Gradients(*(torch.full_like(x, math.nan) for x in given.qkv))
    if workers is not None:
        config["workers"] = max(workers, CpuBackend().co_resident(planned))
    CpuBackend().backward(planned, Options(kernel=tuple(config.items())))(given, into)
    return into


def difference(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> str:
    """'' if all bits are equal, else the first coordinate that differs and its values."""
    for name, x, y in zip(("dq", "dk", "dv"), a, b, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        whole = torch.int32 if x.dtype == torch.float32 else torch.int16
        unequal = (x.contiguous().view(whole) != y.contiguous().view(whole)).nonzero()
        if len(unequal):
            at = tuple(unequal[0].tolist())
            return f"{name}{list(at)}: {x[at].item()!r} and {y[at].item()!r}, {len(unequal)} of {x.numel()} differ"
    return ""


def error(got: Tensor, expected: Tensor) -> float:
    """Root of the mean square error; infinite if anything is not a number."""
    square = (got.double() - expected).square().mean() if got.numel() else torch.zeros(())
    return math.inf if square.isnan() else float(square.sqrt())
