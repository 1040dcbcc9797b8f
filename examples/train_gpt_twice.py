"""Trains a small GPT twice from one seed and compares every weight after every step, bit for bit. Downloads nothing.

python examples/train_gpt_twice.py                        both runs are the same; about a minute on a CPU
python examples/train_gpt_twice.py --second-policy fa3    the second run has another fixed order: the runs differ
python examples/train_gpt_twice.py --non-deterministic    gradients are added as they come: the runs differ by chance

The text is the source of dash_attn, one token a byte. Loss curves go into gpt_twice.png. The exit status is 0 if the
runs agree or differ as the options say, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import dash_attn
from dash_attn.backends import Operands, Options
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, Problem

HEAD_DIM = 64


@dataclass(frozen=True)
class Setup:
    """The settings of a run. With `any_order` contributions are added as they come, else in the order of `policy`."""

    device: str
    steps: int
    length: int
    layers: int
    batch: int
    heads: int
    policy: str = "auto"
    any_order: bool = False


@dataclass(frozen=True)
class Run:
    """The loss of each step, and a digest of each weight after the step."""

    losses: list[float]
    digests: list[dict[str, str]]


class AsTheyCome(torch.autograd.Function):
    """Causal attention on the CPU whose dQ is summed in the order in which threads happen to arrive.

    dash_attn.attention always keeps the order on the CPU. So this class asks the backend to open its turnstiles. Random
    delays of up to 5 ms act like other load on a busy machine.
    """

    options = Options(kernel=(("threads", 4), ("order", "any"), ("jitter", 5e-3)))

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, length, heads, dim = q.shape
        problem = Problem(batch, heads, heads, length, length, dim, dtype="float32", mask=CAUSAL)
        ctx.prepared = prepare(problem, "auto", AsTheyCome.options, q.device)
        out, lse = ctx.prepared.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return tuple(ctx.prepared.backward(Operands(dout, *ctx.saved_tensors)))


class Block(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        width = setup.heads * HEAD_DIM
        self.setup = setup
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.setup.heads, HEAD_DIM).unbind(2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.setup.any_order and q.device.type == "cpu":
            return AsTheyCome.apply(q, k, v)
        deterministic = False if self.setup.any_order else None
        return dash_attn.attention(q, k, v, causal=True, policy=self.setup.policy, deterministic=deterministic)


class GPT(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        width = setup.heads * HEAD_DIM
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(setup.length, width)
        self.blocks = nn.Sequential(*(Block(setup) for _ in range(setup.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position.weight)))


def text() -> Tensor:
    files = sorted(Path(dash_attn.__file__).parent.rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def digest(x: Tensor) -> str:
    # Hash bytes, because as numbers 0 equals -0, and NaN differs from itself.
    return hashlib.sha256(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def train(setup: Setup, data: Tensor) -> Run:
    torch.manual_seed(0)
    model = GPT(setup).to(setup.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, digests = list[float](), list[dict[str, str]]()
    for _ in range(setup.steps):
        starts = torch.randint(len(data) - setup.length - 1, (setup.batch,)).tolist()
        tokens = torch.stack([data[start : start + setup.length + 1] for start in starts]).to(setup.device)
        with torch.autocast(setup.device, torch.bfloat16, enabled=setup.device == "cuda"):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        digests.append({name: digest(weight) for name, weight in model.named_parameters()})
    return Run(losses, digests)


def parting(first: Run, second: Run) -> tuple[int, list[str]] | None:
    """The first step after which weights differ, and their names. None if no weight ever differs."""
    for step, (a, b) in enumerate(zip(first.digests, second.digests, strict=True)):
        different = [name for name in a if a[name] != b[name]]
        if different:
            return step, different
    return None


def draw(runs: Sequence[Run], names: Sequence[str], path: Path) -> None:
    """Draw both loss curves, their difference, and the number of weights that differ."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    curves, distance, count = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    first, second = runs
    steps = range(1, len(first.losses) + 1)
    curves.plot(steps, first.losses, lw=5, color="#9ecae1", label=names[0])
    curves.plot(steps, second.losses, lw=1.2, color="#08306b", label=names[1])
    curves.legend(frameon=False)
    gaps = [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]
    distance.plot(steps, gaps, ".-", color="#b2182b", lw=1)
    different = [sum(a[x] != b[x] for x in a) for a, b in zip(first.digests, second.digests, strict=True)]
    count.bar(steps, different, color="#b2182b")
    count.set_ylim(0, len(first.digests[0]))
    count.set_xlabel("step")
    for axes, label in ((curves, "loss"), (distance, "difference"), (count, "tensors that differ")):
        axes.set_title(label, loc="left", fontsize=9)
    figure.savefig(path, dpi=120)


def report(first: Run, second: Run, parted: tuple[int, list[str]] | None) -> str:
    tensors = len(first.digests[0])
    if parted is None:
        return f"identical: all {tensors} tensors, bit for bit, after each of {len(first.losses)} steps"
    step, different = parted
    gaps = [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]
    at = next((number for number, gap in enumerate(gaps, 1) if gap), None)
    seen = "losses do not yet" if at is None else f"losses differ first at step {at}, and by up to {max(gaps):.1e}"
    return (
        f"different: the runs part at step {step + 1}, in {len(different)} of {tensors} tensors, the first is "
        f"{different[0]}; {seen}"
    )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda if there is a Hopper GPU")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--length", type=int, help="tokens of a sequence; 1024 on the CPU, 4096 on a GPU")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("gpt_twice.png"))
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--non-deterministic", action="store_true", help="keep no order, in both runs")
    how.add_argument("--second-policy", help="the order of the second run, if not that of the first")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    device = given.device or ("cuda" if hopper else "cpu")
    # The rest of the model is torch's. With this setting only attention can make the runs differ.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=given.non_deterministic)
    sizes = {"batch": 1, "heads": 2} if device == "cpu" else {"batch": 4, "heads": 8}
    length = given.length or (1024 if device == "cpu" else 4096)
    setup = Setup(device, given.steps, length, given.layers, **sizes, any_order=given.non_deterministic)
    second = replace(setup, policy=given.second_policy or setup.policy)
    where = "float32 on the CPU" if device == "cpu" else f"bfloat16 on {torch.cuda.get_device_name()}"
    print(f"GPT of {setup.layers} layers, {setup.heads} heads of {HEAD_DIM}, {setup.batch} x {length} tokens, {where}")
    like = torch.empty(setup.batch, length, setup.heads, HEAD_DIM, device=device)
    like = like if device == "cpu" else like.bfloat16()
    data, runs, names = text(), list[Run](), list[str]()
    for number, each in enumerate((setup, second), 1):
        order = "any order"
        if not each.any_order:
            said = dash_attn.explain(like, like, like, causal=True, policy=each.policy)
            order = f"{said.policy}, fingerprint {said.fingerprint}"
        started = time.perf_counter()
        runs.append(train(each, data))
        names.append(f"run {number}: {order}")
        losses, seconds = runs[-1].losses, time.perf_counter() - started
        print(f"{names[-1]}: loss {losses[0]:.3f} to {losses[-1]:.3f} in {seconds:.0f} s")
    parted = parting(*runs)
    print(report(*runs, parted))
    draw(runs, names, given.out)
    print(f"curves: {given.out}")
    meant_to_part = setup.any_order or second.policy != setup.policy
    if meant_to_part and parted is None:
        print("they were meant to part: take more steps, or longer sequences (a sum of two has one order only)")
    return int((parted is not None) != meant_to_part)


if __name__ == "__main__":
    raise SystemExit(main())
