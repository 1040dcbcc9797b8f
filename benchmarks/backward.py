"""Backward on a Hopper GPU, beside FlashAttention-4: every policy, unordered sums, and the peer's two modes.

    python benchmarks/backward.py --out benchmarks/results/backward_h200.json

Times are whole calls (everything the call does on the GPU), CUDA events, medians of interleaved rounds, because the
clocks of a power-limited GPU wander; inputs are random, out and lse come from a real forward. Every timed variant
is compared with the peer's gradients in the same run.

Planning needs numba to be quick. On a machine without it, take prepared programs along:
    python benchmarks/backward.py --prepare programs      (anywhere)
    python benchmarks/backward.py --programs programs     (on the GPU)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dash_attn import __version__
from dash_attn.kernels.sm90.config import KernelConfig, select
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.program import Sequences, build, load, save
from dash_attn.schedule import POLICIES, schedule
from dash_attn.tiling import TileShape, tile
from dash_attn.verify import verify

WORKERS = 132
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ORDERS = {  # first what policy="auto" takes, then the others that apply
    "full": ("shift:64", "fa3", "spt", "descending", "search:64"),
    "causal": ("symmetric_shift:64", "diagonal:64", "spt", "descending", "fa3", "search:64"),
}


@dataclass(frozen=True)
class Cell:
    name: str
    problem: Problem

    @property
    def causal(self) -> bool:
        return self.problem.mask.is_causal

    @property
    def flops(self) -> float:
        p = self.problem
        return 10 * p.batch * p.heads_q * p.len_q * p.len_k * p.dim * (0.5 if self.causal else 1.0)


def cells(dims: list[int], lengths: list[int]) -> list[Cell]:
    """The paper's grid: 16,384 tokens, hidden size 2,048."""
    return [
        Cell(f"d{dim} {mask} {n}", Problem(16384 // n, 2048 // dim, 2048 // dim, n, n, dim, mask=mask))
        for dim in dims
        for mask in (FULL, CAUSAL)
        for n in lengths
    ]


def models() -> list[Cell]:
    """Attention of known models at their real dimensions."""
    shapes = [("LLaMA3-8B", 1, 32, 8, n, CAUSAL) for n in (8192, 16384, 32768)]
    shapes += [("LLaMA3-8B", 4, 32, 8, 2048, CAUSAL)]
    shapes += [("Qwen2.5-7B", 1, 28, 4, n, CAUSAL) for n in (8192, 16384, 32768)]
    made = [Cell(f"{m} {b}x{n}", Problem(b, hq, hk, n, n, 128, mask=mask)) for m, b, hq, hk, n, mask in shapes]
    diffusion = (("SD3.5-medium", 24), ("LLaDA-1B", 32))
    return made + [Cell(f"{m} 16x4096", Problem(16, h, h, 4096, 4096, 64)) for m, h in diffusion]


def config(cell: Cell, ordered: bool = True, changes: dict | None = None) -> KernelConfig:
    mask = "causal" if cell.causal else "full"
    cfg = select(cell.problem.dim, "bf16", mask, ordered, cell.problem.len_k)
    return replace(cfg, **changes).validate() if changes else cfg


def orders_of(cell: Cell, asked: list[str]) -> list[str]:
    """Those asked for that apply to the mask, or the usual ones."""
    usual = ORDERS["causal" if cell.causal else "full"]
    wrong = "shift" if cell.causal else "symmetric_shift"
    return [order for order in asked if order.partition(":")[0] != wrong] or list(usual)


def placed(cell: Cell, policy: str, folder: Path | None):
    """The verified program and its placement, from the folder if it is there."""
    cfg = config(cell)
    shape = TileShape(cfg.tile_m, cfg.tile_n)
    key = hashlib.sha256(repr((cell.problem, shape, policy, WORKERS, __version__)).encode()).hexdigest()[:20]
    path = folder / f"{key}.npz" if folder else None
    if path is not None and path.exists():
        with np.load(path.with_suffix(".placement.npz")) as archive:
            return load(path), Sequences(archive["first"], archive["chains"])
    program = build(schedule(tile(cell.problem, shape), policy))
    placement = verify(program, WORKERS).placement
    if path is not None:
        save(program, path)
        np.savez_compressed(path.with_suffix(".placement.npz"), first=placement.first, chains=placement.chains)
    return program, placement


def measure(cell: Cell, args: argparse.Namespace) -> dict:
    import torch
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    from dash_attn.bench.timing import Timing, time_all
    from dash_attn.kernels.sm90.launch import DeviceTables, Grads, Inputs, Workspace, backward

    p = cell.problem
    device = torch.device("cuda")

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(p.batch, p.len_q, heads, p.dim, device=device, dtype=torch.bfloat16)

    q, k, v, dout = draw(p.heads_q), draw(p.heads_kv), draw(p.heads_kv), draw(p.heads_q)
    out, lse = _flash_attn_fwd(q, k, v, causal=cell.causal, return_lse=True)[:2]
    inputs = Inputs(dout, q, k, v, out, lse)

    def peer(deterministic: bool):
        return lambda: _flash_attn_bwd(q, k, v, out, dout, lse, causal=cell.causal, deterministic=deterministic)

    calls = {"fa4": peer(False), "fa4 det": peer(True)}
    want, worst, failed = calls["fa4 det"]()[:3], {}, {}
    orders = orders_of(cell, args.orders)
    variants = [(order, True, change) for order in orders for change in args.config]
    variants += [(orders[0], False, args.config[0])] if args.any else []
    for order, ordered, change in variants:
        name = (order if ordered else f"any ({order})") + (f" {json.dumps(change)}" if change else "")
        try:
            program, placement = placed(cell, order, args.programs)
            tables, cfg = DeviceTables.of(program, placement, (), device), config(cell, ordered, change)
            ws, into = Workspace.of(cfg, q), Grads(*(torch.full_like(t, float("nan")) for t in (q, k, v)))
            scale = p.softmax_scale
            call = lambda c=cfg, t=tables, w=ws, g=into, s=scale: backward(c, t, inputs, scale=s, into=g, workspace=w)  # noqa: E731
            got = call()
            worst[name] = max(
                float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, want, strict=True)
            )
            first = got.dq.clone()
            repeats = [torch.equal(call().dq, first) for _ in range(3)]
            if not worst[name] < 1e-2 or (ordered and not all(repeats)):
                failed[name] = f"deviates {worst[name]:.1e}, repeats {repeats}"
            calls[name] = call
        except ValueError as error:
            failed[name] = str(error)
    timed = calls if args.peers else {name: call for name, call in calls.items() if not name.startswith("fa4")}
    us = time_all({name: [call] for name, call in timed.items()}, Timing(device, args.rounds, args.budget_ms))
    return {"cell": cell.name, "flops": cell.flops, "failed": failed, "deviation": worst, "us": us}


def line(row: dict) -> str:
    parts = []
    for name, us in row["us"].items():
        tflops = row["flops"] / us["median"] / 1e6
        peer = row["us"].get("fa4 det")
        ratio = f" ({peer['median'] / us['median']:.2f}x)" if peer and not name.startswith("fa4") else ""
        parts.append(f"{name} {tflops:.0f}{ratio}")
    return f"{row['cell']:22} " + "  ".join(parts) + "".join(f"  FAILED {n}: {w}" for n, w in row["failed"].items())


def summary(rows: list[dict]) -> str:
    """Best and default order against the peer's modes."""

    def mean(peer: str, pick) -> float:
        ratios = [row["us"][peer]["median"] / pick(row) for row in rows]
        return float(np.exp(np.mean(np.log(ratios))))

    def ours(row: dict) -> list[float]:
        return [us["median"] for name, us in row["us"].items() if name.partition(":")[0] in POLICIES]

    def unordered(row: dict) -> float:
        return next(us["median"] for name, us in row["us"].items() if name.startswith("any"))

    text = []
    for label, pick in (("first order", lambda row: ours(row)[0]), ("best order", lambda row: min(ours(row)))):
        worst = min(rows, key=lambda row: row["us"]["fa4 det"]["median"] / pick(row))
        text.append(
            f"{label}: geometric mean {mean('fa4 det', pick):.3f}x fa4 det, {mean('fa4', pick):.3f}x fa4; worst "
            f"{worst['us']['fa4 det']['median'] / pick(worst):.3f}x fa4 det at {worst['cell']}"
        )
    priced = [row for row in rows if any(name.startswith("any") for name in row["us"])]
    if priced:
        price = {row["cell"]: ours(row)[0] / unordered(row) - 1 for row in priced}
        worst_cell = max(price, key=price.__getitem__)
        average = float(np.mean(list(price.values())))
        text.append(
            f"price of determinism (first order against our own unordered sums): mean {average:+.1%}, "
            f"worst {price[worst_cell]:+.1%} at {worst_cell}"
        )
    return "\n".join(text)


def environment() -> dict:
    import importlib.metadata as metadata

    import torch

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "unknown"

    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit",
        "--format=csv,noheader",
    ]
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "dash_attn": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "flash-attn-4": version("flash-attn-4"),
        "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--orders", nargs="*", default=[], help="policies to time instead of the usual ones")
    parser.add_argument(
        "--config", type=json.loads, nargs="+", default=[{}], help="JSON of kernel config fields to change, one or more"
    )
    parser.add_argument("--peers", type=int, default=1, help="0: leave the peer out of the timing")
    parser.add_argument("--any", action="store_true", help="also unordered sums, the price of determinism")
    parser.add_argument("--models", action="store_true", help="model shapes instead of the grid")
    parser.add_argument("--budget-ms", type=float, default=60.0, help="GPU time per variant")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--programs", type=Path, help="folder of prepared programs")
    parser.add_argument("--prepare", type=Path, help="only plan, and write the programs to this folder")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    chosen = models() if args.models else cells(args.dims, args.lengths)
    if args.prepare:
        args.prepare.mkdir(parents=True, exist_ok=True)
        for cell in chosen:
            for order in orders_of(cell, args.orders):
                placed(cell, order, args.prepare)
        print(f"prepared {len(list(args.prepare.glob('*.placement.npz')))} programs in {args.prepare}")
        return
    rows = []
    for cell in chosen:
        rows.append(measure(cell, args))
        print(line(rows[-1]), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    if args.peers:
        print(summary(rows))
    if any(row["failed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
