"""A transformer block, forward and backward: how much a faster backward of attention gains there.

The block has a model's real dimensions and random weights: norm, query/key/value projection, rotary positions where the
model has them, attention, projection, norm, MLP. It leaves out the conditioning of diffusion blocks and the window of
SAM's local blocks. One dense MLP stands for experts (see cases.Model). Variants share the forward and differ only in
attention's backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dash_attn.backends import Operands, Options
from dash_attn.prepare import Prepared, prepare
from dash_attn.problem import Problem
from dash_attn.tools.bench import peers
from dash_attn.tools.bench.cases import BenchCase, Model
from dash_attn.tools.bench.measure import Settings
from dash_attn.tools.bench.operands import TOLERANCE
from dash_attn.tools.bench.record import gpu_now, shape_of
from dash_attn.tools.bench.report import ResultRow
from dash_attn.tools.bench.timing import event, peak_bytes, sample, summary
from dash_attn.tools.bench.variants import Backward, reason

PARTS = ("attention forward", "attention backward")


@dataclass
class Stopwatch:
    """Sums time by label: on a GPU by events, which are only read at the end."""

    device: torch.device
    marks: list[tuple[str, Any, Any]] = field(default_factory=list)

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        mark = event()
        mark.record()
        return mark

    def totals(self) -> dict[str, float]:
        """Microseconds since the last call, by label."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total = dict.fromkeys(PARTS, 0.0)
        for label, begin, end in self.marks:
            total[label] += begin.elapsed_time(end) * 1e3 if self.device.type == "cuda" else (end - begin) * 1e6
        self.marks.clear()
        return total


@dataclass(frozen=True, eq=False)
class Core:
    """Attention with a chosen backward."""

    attention: Prepared
    backward: Backward
    watch: Stopwatch


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, core: Core, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begin = core.watch.now()
        out, lse = (x.contiguous() for x in core.attention.forward(q, k, v))
        core.watch.marks.append((PARTS[0], begin, core.watch.now()))
        ctx.core = core
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        core: Core = ctx.core
        dout = grads[0].contiguous()
        begin = core.watch.now()
        gradients = core.backward(Operands(dout, *ctx.saved_tensors))
        core.watch.marks.append((PARTS[1], begin, core.watch.now()))
        return None, *gradients


class Block(nn.Module):
    """One block of a model."""

    def __init__(self, model: Model, length: int, how: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        heads = model.heads + 2 * model.heads_kv
        self.norms = nn.ModuleList(
            nn.RMSNorm(model.hidden, **how) if model.gated else nn.LayerNorm(model.hidden, **how) for _ in range(2)
        )
        self.qkv = nn.Linear(model.hidden, heads * model.dim, bias=model.bias, **how)
        self.out = nn.Linear(model.heads * model.dim, model.hidden, bias=False, **how)
        width = model.mlp * model.experts
        self.up = nn.Linear(model.hidden, width * (2 if model.gated else 1), bias=False, **how)
        self.down = nn.Linear(width, model.hidden, bias=False, **how)
        angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, model.dim, 2) / model.dim)
        self.turn = [x.repeat(1, 2)[:, None].to(**how) for x in (angle.cos(), angle.sin())]

    def forward(self, x: Tensor, core: Core) -> Tensor:
        model = self.model
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, model.dim))
        q, k, v = qkv.split([model.heads, model.heads_kv, model.heads_kv], dim=2)
        if model.rotary:
            q, k = self._rotate(q), self._rotate(k)
        attended: Tensor = _Attend.apply(core, *(y.contiguous() for y in (q, k, v)))  # type: ignore[no-untyped-call]
        x = x + self.out(attended.flatten(2))
        up = self.up(self.norms[1](x))
        if model.gated:
            gate, up = up.chunk(2, -1)
            up = functional.silu(gate) * up
        else:
            up = functional.gelu(up)
        x = x + self.down(up)
        return x

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.turn
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin


def backwards(problem: Problem, settings: Settings) -> dict[str, Callable[[], Backward]]:
    """Attention's backward by name: FlashAttention-4's two modes, and ours in each order and config."""
    device = settings.timing.device
    theirs = {
        "fa4 det": lambda: peers.fa4(problem, device, True),
        "fa4": lambda: peers.fa4(problem, device, False),
    }
    ways = settings.ours.ways(problem, device)
    return theirs | {way.name: lambda way=way: way.prepared(problem, device).backward for way in ways}


def measure_block(model: Model, case: BenchCase, settings: Settings, dtype: torch.dtype = torch.bfloat16) -> ResultRow:
    """Forward and backward of a block, and how much of it is attention."""
    device, problem = settings.timing.device, case.problem
    attention = prepare(problem, "auto", Options(), device)
    torch.manual_seed(0)
    how: dict[str, Any] = {"device": device, "dtype": dtype}
    block = Block(model, problem.len_q, how)
    x = torch.randn(problem.batch, problem.len_q, model.hidden, **how).requires_grad_()
    dout, watch = torch.randn(x.shape, **how), Stopwatch(device)
    leaves = [x, *block.parameters()]
    row: ResultRow = {
        "cell": case.name,
        "model": model.name,
        "shape": shape_of(problem),
        "default": settings.ours.default(problem, device).name,
        "forward": attention.backend.forward_provider(problem),
        **{key: {} for key in ("us", "parts", "peak_bytes", "deviation", "same_bits", "missing", "failed")},
    }

    def stepper(core: Core) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(block(x, core), leaves, dout)

    ready: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    want: Tensor | None = None
    for name, make in backwards(problem, settings).items():
        try:
            step = stepper(Core(attention, make(), watch))
            first = step()
            want = first[0] if want is None else want
            row["deviation"][name] = float((first[0].double() - want.double()).norm() / want.double().norm())
            row["same_bits"][name] = all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))
            row["peak_bytes"][name] = peak_bytes(step, device)
            ready[name] = step
            if not row["deviation"][name] < TOLERANCE["bfloat16"]:
                row["failed"][name] = f"the block's gradient is {row['deviation'][name]:.1e} from {next(iter(ready))}'s"
        except Exception as error:  # a peer may fail in any way: it is reported, and the others still run
            row["missing"][name] = reason(error)
    _time(ready, watch, row, settings)
    row["gpu"] = gpu_now(device)
    return row


def _time(
    ready: dict[str, Callable[[], tuple[Tensor, ...]]], watch: Stopwatch, row: ResultRow, settings: Settings
) -> None:
    """Interleaved rounds of one or a few steps; attention is timed within the same steps."""
    whole: dict[str, list[float]] = {name: [] for name in ready}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
    for turn in range(settings.timing.rounds + 1):
        for name, step in ready.items():
            watch.totals()
            us, count = sample([step], 2, settings.timing.device), 2
            inside = watch.totals()
            if turn:  # the first round warms up
                whole[name].append(us)
                parts[name].append({label: inside[label] / count for label in PARTS})
    for name in ready:
        row["us"][name] = summary(whole[name])
        each = {label: summary([p[label] for p in parts[name]])["median"] for label in PARTS}
        row["parts"][name] = each | {"rest": row["us"][name]["median"] - sum(each.values())}
