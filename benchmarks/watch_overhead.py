"""How much longer a training step takes with `dash_attn.watch`, on a GPU. Also checks that watching never waits.

python benchmarks/watch_overhead.py [--layers 12] [--width 768] [--batch 16] [--length 1024] [--rounds 20]
python benchmarks/watch_overhead.py [--depth 2] [--share 1]
python benchmarks/watch_overhead.py --host

The GPT has bytes as tokens, as that of examples/train_gpt_twice.py; `--tokens 50304` gives it the vocabulary of GPT-2.
Plain and watched steps alternate in one process. A round times a few steps between two synchronisations. The row has
the median and the 20th and 80th percentile of a step in ms, without and with watching, and how much longer a watched
step takes. Without --depth all modules are watched. Of large tensors that a layer of torch.nn computes a sixteenth is
read; --share 1 reads all of them. What other code computes (attention, sums, their gradients) is read whole. The row
also has the number of tensors that a watched step reads, and the bytes that it reads: reading them takes at least the
time that the memory of the GPU needs for these bytes.

--host measures the Python code of the hooks alone, on a CPU: tensors are small, and fingerprints are not computed. The
row has the microseconds for each tensor that a step reads.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dash_attn
from dash_attn.watching import fingerprint
from dash_attn.watching.files import Step, load_run
from dash_attn.watching.scope import SHARE

HEAD_DIM = 64
STEPS, WARM = 5, 3  # of a round


@dataclass(frozen=True)
class Size:
    layers: int = 12
    width: int = 768
    batch: int = 16
    length: int = 1024
    tokens: int = 256


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, -1, HEAD_DIM).transpose(1, 3).unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(size.tokens, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position.weight)))


class Training:
    """A small GPT, and steps of it."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = GPT(size).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.tokens = torch.randint(size.tokens, (size.batch, size.length + 1), device=device)

    def steps(self, count: int) -> None:
        for _ in range(count):
            with torch.autocast(self.device, torch.bfloat16):
                logits = self.model(self.tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def timed(self) -> float:
        """Milliseconds of a step."""
        self.steps(WARM)
        self.wait()
        begin = time.perf_counter()
        self.steps(STEPS)
        self.wait()
        return (time.perf_counter() - begin) / STEPS * 1e3

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Operations of torch that wait for the GPU raise an error."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def measure(
    size: Size, depth: int | None = None, share: float = SHARE, rounds: int = 20, device: str = "cuda"
) -> dict[str, Any]:
    training = Training(size, device)
    plain, watched = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            plain.append(training.timed())
            to = f"{folder}/{number}"
            with dash_attn.watch(training.model, optimizer=training.optimizer, to=to, depth=depth, share=share):
                training.steps(1)  # the first step compiles kernels and takes memory
                with no_waiting(device):
                    training.steps(1)
                watched.append(training.timed())
        read = tensors_read(load_run(Path(to))[0].steps[1])
    del plain[0], watched[0]
    return {
        **asdict(size),
        "depth": depth,
        "share": share,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "none",
        "torch": torch.__version__,
        "dash_attn": dash_attn.__version__,
        "tensors": len(read),
        "bytes": sum(read),
        "plain_ms": spread(plain),
        "watched_ms": spread(watched),
        "overhead": statistics.median(watched) / statistics.median(plain) - 1,
    }


def tensors_read(step: Step) -> list[int]:
    """The bytes that a step read of each tensor. A row without a form is a value of the host."""
    forms = {row.place: step.form(row) for row in step.rows if step.form(row)}
    sizes = []
    for form in forms.values():
        whole, _, share = form.partition(", 1/")
        dtype, _, shape = whole.partition(" ")
        size = getattr(torch, dtype).itemsize * math.prod(json.loads(shape))
        sizes.append(size // int(share.removesuffix(" read") or 1))
    return sizes


def measure_host(rounds: int) -> dict[str, Any]:
    """Microseconds of the host for each tensor, with nothing in the place of the kernels."""
    add, fingerprint.add = fingerprint.add, lambda *_: None
    torch.set_num_threads(1)
    try:
        row = measure(Size(width=64, batch=1, length=8), rounds=rounds, device="cpu")
    finally:
        fingerprint.add = add
    longer = row["watched_ms"]["median"] - row["plain_ms"]["median"]
    return {**row, "us_for_a_tensor": longer * 1e3 / row["tensors"]}


def spread(values: list[float]) -> dict[str, float]:
    low, *_, high = statistics.quantiles(values, n=5) if len(values) > 1 else values * 2
    return {"median": statistics.median(values), "p20": low, "p80": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (*asdict(Size()).items(), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--depth", type=int, help="watch modules as deep as this; without it all modules")
    parser.add_argument(
        "--share", type=float, default=SHARE, help="part to read of what layers compute; 1 reads all of it"
    )
    parser.add_argument("--host", action="store_true", help="measure the Python code of the hooks alone, on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = vars(parser.parse_args())
    how = {name: given.pop(name) for name in ("depth", "share", "rounds", "device")}
    row = measure_host(how["rounds"]) if given.pop("host") else measure(Size(**given), **how)
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
