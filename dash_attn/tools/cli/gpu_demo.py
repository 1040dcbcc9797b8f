"""The part of the demo that wants a Hopper GPU: bits, errors and times of the kernel."""

from __future__ import annotations

import torch
from rich.table import Table
from torch import Tensor

import dash_attn
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
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(4, length, 8, dim, generator=generator).to(device, torch.bfloat16) for _ in range(4))
    q, k, v, dout = (x.requires_grad_(i < 3) for i, x in enumerate(tensors))

    def ours(deterministic: bool = True) -> list[Tensor]:
        out = dash_attn.attention(q, k, v, causal=causal, deterministic=deterministic)
        return list(torch.autograd.grad(out, (q, k, v), dout))

    def torchs(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        q_, k_, v_ = (x.transpose(1, 2) for x in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, is_causal=causal)
        return out, dout.transpose(1, 2).to(out.dtype)

    first = ours()
    same = all(torch.equal(a, b) for _ in range(repeats) for a, b in zip(ours(), first, strict=True))
    loose = [ours(deterministic=False) for _ in range(repeats)]
    apart = sum(any(not torch.equal(a, b) for a, b in zip(run, loose[0], strict=True)) for run in loose[1:])
    # One sequence in float64, which torch computes plainly.
    exact = [x[:1].detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = torchs(*exact)
    want = torch.autograd.grad(out, exact, dout[:1].transpose(1, 2).double())
    out, dout_t = torchs(q, k, v)
    plain = torch.autograd.grad(out, (q, k, v), dout_t)
    saved_out, lse = dash_attn.attention(q, k, v, causal=causal, return_lse=True)
    given = [x.detach() for x in (dout, q, k, v, saved_out, lse)]
    mine = sample([lambda: dash_attn.backward(*given, causal=causal)], 10, device)
    out, dout_t = torchs(q, k, v)
    peer = sample([lambda: torch.autograd.grad(out, (q, k, v), dout_t, retain_graph=True)], 10, device)
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
