"""Time of the CPU backward beside that of torch's scaled_dot_product_attention, on the same cores.

    python benchmarks/cpu_backward.py

Both sides run through autograd on the same random inputs, in alternation, so that whatever else the machine does
falls on both. The ratio printed is that of the medians; the lowest times stand beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dash_attn.api import attention
from dash_attn.api.explain import explain

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)


def seconds(call: Callable[..., Tensor], tensors: list[Tensor], causal: bool) -> float:
    """Of the backward alone."""
    out = call(*tensors, causal=causal)
    dout = torch.randn_like(out)
    begin = time.perf_counter()
    torch.autograd.grad(out, tensors, dout)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", type=int, nargs=4, default=(2, 2048, 8, 64), metavar=("BATCH", "LEN", "HEADS", "DIM")
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    print(f"{tuple(arguments.shape)} {arguments.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'mask':8} {'tile':>8} {'policy':18} {'torch ms':>9} {'ours ms':>9} {'ratio':>6} {'of lowest':>10}")
    tensors = [torch.randn(*arguments.shape, dtype=DTYPES[arguments.dtype], requires_grad=True) for _ in range(3)]

    def ours(*qkv: Tensor, causal: bool) -> Tensor:
        return attention(*qkv, causal=causal, policy=arguments.policy)

    for causal in (False, True):
        chosen = explain(*tensors, causal=causal, policy=arguments.policy)
        times = [
            (seconds(torch_attention, tensors, causal), seconds(ours, tensors, causal))
            for _ in range(arguments.repeats + 1)
        ][1:]  # the first of each also warms up
        (theirs, mine), (their_best, my_best) = (
            [1e3 * reduce(column) for column in zip(*times, strict=True)] for reduce in (statistics.median, min)
        )
        print(
            f"{chosen.mask:8} {chosen.tile!s:>8} {chosen.policy:18} {theirs:9.1f} {mine:9.1f} "
            f"{mine / theirs:6.2f} {my_best / their_best:10.2f}"
        )


if __name__ == "__main__":
    main()
