"""The part of the demo that wants a Hopper GPU: bits, errors and times of the kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
from rich.table import Table
from torch import Tensor

import dash_attn
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.tools.bench.operands import draw, exact
from dash_attn.tools.bench.timing import sample

HEADER = ["mask", "head dim", "same bits", "without turns", "error", "torch's error", "backward", "torch's backward"]


def gpu_rows(device: torch.device, length: int = 2048, repeats: int = 20) -> list[list[str]]:
    return [_row(device, length, repeats, causal, dim) for causal in (False, True) for dim in (64, 128)]


def gpu_table(rows: list[list[str]], device: torch.device) -> Table:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    table = Table(title=f"Run on {name}", title_justify="left", header_style="bold")
    for column in HEADER:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    return table


def _row(device: torch.device, length: int, repeats: int, causal: bool, dim: int) -> list[str]:
    problem = Problem(4, 8, 8, length, length, dim, mask=CAUSAL if causal else FULL)
    dout, q, k, v = draw(problem, device)
    for x in (q, k, v):
        x.requires_grad_()

    def ours(deterministic: bool = True) -> list[Tensor]:
        out = dash_attn.attention(q, k, v, causal=causal, deterministic=deterministic)
        return list(torch.autograd.grad(out, (q, k, v), dout))

    def torchs() -> Tensor:
        queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
        return out.transpose(1, 2)

    first = ours()
    same = all(torch.equal(a, b) for _ in range(repeats) for a, b in zip(ours(), first, strict=True))
    loose = [ours(deterministic=False) for _ in range(repeats)]
    apart = sum(any(not torch.equal(a, b) for a, b in zip(run, loose[0], strict=True)) for run in loose[1:])
    # One sequence in float64.
    want = exact(replace(problem, batch=1), *(x[:1] for x in (dout, q, k, v))).gradients
    plain = torch.autograd.grad(torchs(), (q, k, v), dout)
    saved_out, lse = dash_attn.attention(q, k, v, causal=causal, return_lse=True)
    given = [x.detach() for x in (dout, q, k, v, saved_out, lse)]
    mine = sample([lambda: dash_attn.backward(*given, causal=causal)], 10, device)
    out = torchs()
    peer = sample([lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)], 10, device)
    return [
        "causal" if causal else "full",
        str(dim),
        "yes" if same else "NO",
        f"{apart} of {repeats - 1} differ",
        _deviation(first, want),
        _deviation(plain, want),
        f"{mine:.0f} us",
        f"{peer:.0f} us",
    ]


def _deviation(got: list[Tensor] | tuple[Tensor, ...], want: tuple[Tensor, ...]) -> str:
    worst = max(float((a[:1].double() - b).abs().max()) for a, b in zip(got, want, strict=True))
    return f"{worst:.1e}"
