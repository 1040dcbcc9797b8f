"""What may spoil the CUDA context, in a process of its own: python -m tests.api.gpu_alone capture|fork|share"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

import dash_attn


def tensors(device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 100, heads, 64, generator=generator).to(device, dtype) for heads in (4, 2, 2)]


def gradients(inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = dash_attn.attention(*leaves, causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def direct(inputs: list[Tensor]) -> list[Tensor]:
    """The same without autograd."""
    out, lse = dash_attn.attention(*inputs, causal=True, return_lse=True)
    return [out, *dash_attn.backward(torch.ones_like(out), *inputs, out, lse, causal=True)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def capture() -> None:
    """The first call of the process is captured. Prints whether that works, and whether later calls are right."""
    inputs, graph, captured = tensors("cuda", torch.bfloat16), torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            captured = gradients(inputs)
    except Exception as error:
        print("refused", type(error).__name__, " ".join(str(error).split())[:200])
    want = gradients(inputs)
    torch.cuda.synchronize()
    for _ in range(3 if captured else 0):
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        print("replay", "right" if same(captured, want) else "wrong")
    print("later", "right" if same(gradients(inputs), want) else "wrong")


def fork() -> None:
    """A child that is forked after a call on the GPU computes on the CPU, and torch refuses it the GPU.

    torch refuses the child its autograd too, because the autograd of the parent has threads.
    """
    on_gpu, on_cpu = tensors("cuda", torch.bfloat16), tensors("cpu", torch.float32)
    wants = gradients(on_gpu), direct(on_cpu)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # as torch's own loaders do: OpenMP has no threads after a fork
        print("child on the CPU", "right" if same(direct(on_cpu), wants[1]) else "wrong")
        try:
            direct(on_gpu)
            print("child on the GPU computed")
        except Exception as error:
            print("child on the GPU refused", type(error).__name__)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print("parent on the GPU", "right" if same(gradients(on_gpu), wants[0]) else "wrong")


def share(device: str = "cuda") -> None:
    """Backwards that each want every SM, while another process does the same. Says when it is ready, and waits for a
    line on standard input. Each launch succeeds, or fails with an error."""
    dtype, runs = (torch.bfloat16, 300) if device == "cuda" else (torch.float32, 3)
    generator = torch.Generator().manual_seed(0)
    size = 4096 if device == "cuda" else 100
    inputs = [torch.randn(1, size, 16, 64, generator=generator).to(device, dtype) for _ in range(3)]
    try:
        want = direct(inputs)
        print("ready", flush=True)
        sys.stdin.readline()
        wrong = sum(not same(direct(inputs), want) for _ in range(runs))
        print("right" if not wrong else f"wrong in {wrong} of {runs} runs")
    except Exception as error:
        print("refused", type(error).__name__, " ".join(str(error).split())[:200])


if __name__ == "__main__":
    {"capture": capture, "fork": fork, "share": share}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # what tidies up at exit may trip over a dead context
