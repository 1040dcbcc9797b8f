"""Problems on the GPU: inputs, float64 gradients one (batch, head) plane at a time, and placed programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dash_attn.backends.sm90 import backend as hopper
from dash_attn.backends.sm90.config import KernelConfig
from dash_attn.backends.sm90.launch import DeviceTables, Grads, Inputs, Workspace, backward, resident_workers
from dash_attn.plan import plan
from dash_attn.problem import Problem
from dash_attn.tiling import TileShape

DEVICE = torch.device("cuda")


def sms() -> int:
    return resident_workers(DEVICE)


def config_of(problem: Problem, *, ordered: bool = True) -> KernelConfig:
    return hopper.config_of(problem, ordered)


def tables_of(problem: Problem, cfg: KernelConfig, policy: str, workers: int) -> DeviceTables:
    planned = plan(problem, TileShape(cfg.tile_m, cfg.tile_n), policy)
    return hopper.tables_of(planned, cfg, workers, DEVICE)


@dataclass(frozen=True, eq=False)
class Case:
    """Random inputs of a problem, with the forward's result in float64 rounded to the inputs' type."""

    problem: Problem
    inputs: Inputs

    @staticmethod
    def make(problem: Problem, seed: int = 0, gain: float = 1.0) -> Case:
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        dtype = getattr(torch, problem.dtype)

        def draw(length: int, heads: int) -> torch.Tensor:
            shape = (problem.batch, length, heads, problem.dim)
            return (torch.randn(shape, generator=generator, device=DEVICE) * gain).to(dtype)

        q, dout = draw(problem.len_q, problem.heads_q), draw(problem.len_q, problem.heads_q)
        k, v = draw(problem.len_k, problem.heads_kv), draw(problem.len_k, problem.heads_kv)
        out = torch.zeros_like(q)
        lse = torch.full((problem.batch, problem.heads_q, problem.len_q), -torch.inf, device=DEVICE)
        case = Case(problem, Inputs(dout, q, k, v, out, lse))
        for b, h, scores in case.planes():
            lse[b, h] = scores.logsumexp(-1).float()
            p = torch.nan_to_num(scores.softmax(-1))
            out[b, :, h] = (p @ v[b, :, h // problem.group].double()).to(dtype)
        return case

    def planes(self):
        """(batch, head, masked float64 scores)."""
        problem, (_, q, k, *_) = self.problem, self.inputs
        allowed = torch.from_numpy(problem.mask.dense(problem.len_q, problem.len_k)).to(DEVICE)
        for b in range(problem.batch):
            for h in range(problem.heads_q):
                scores = q[b, :, h].double() @ k[b, :, h // problem.group].double().T * problem.softmax_scale
                yield b, h, scores.masked_fill(~allowed, -torch.inf)

    def exact(self) -> Grads:
        """float64 dQ, dK, dV from the same 16-bit inputs."""
        problem, (dout, q, k, v, *_) = self.problem, self.inputs
        grads = Grads(*(torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v)))
        for b, h, scores in self.planes():
            g = h // problem.group
            do, p = dout[b, :, h].double(), torch.nan_to_num(scores.softmax(-1))
            ds = p * (do @ v[b, :, g].double().T - (p @ v[b, :, g].double() * do).sum(-1, keepdim=True))
            grads.dq[b, :, h] = ds @ k[b, :, g].double() * problem.softmax_scale
            grads.dk[b, :, g] += ds.T @ q[b, :, h].double() * problem.softmax_scale
            grads.dv[b, :, g] += p.T @ do
        return grads

    def run(self, cfg: KernelConfig, tables: DeviceTables) -> Grads:
        """One backward with every byte that the kernel should not trust poisoned."""
        inputs = self.inputs
        ws, into = Workspace.of(cfg, inputs.q), Grads(*(torch.empty_like(t) for t in inputs[1:4]))
        poison(ws, into)
        return backward(cfg, tables, inputs, scale=self.problem.softmax_scale, into=into, workspace=ws)

    def differing(self, cfg: KernelConfig, tables: DeviceTables, runs: int) -> int:
        """Gradients that did not repeat, of `runs` runs. Compared on the device: runs follow without a pause."""
        first, inputs = self.run(cfg, tables), self.inputs
        into = Grads(*(torch.empty_like(t) for t in inputs[1:4]))
        ws = Workspace.of(cfg, inputs.q, into.dq)  # which must not change bits either
        count = torch.zeros((), dtype=torch.int64, device=inputs.q.device)
        for _ in range(runs):
            poison(ws, into)
            backward(cfg, tables, inputs, scale=self.problem.softmax_scale, into=into, workspace=ws)
            count += changed(into, first)
        return int(count)


def poison(ws: Workspace, into: Grads) -> None:
    for t in (ws.lse2, ws.delta, ws.dq_sum, *into):
        t.fill_(float("nan"))
    ws.counters.fill_(7)


def changed(a, b) -> torch.Tensor:
    """How many tensors differ in some bit, on the device and not waited for. 16-bit types: NaNs compare too."""
    pairs = zip(a, b, strict=True)
    return sum((x.view(torch.int16) != y.view(torch.int16)).any().to(torch.int64) for x, y in pairs)


def errors(got: Grads, want: Grads) -> list[float]:
    """Relative error of each gradient; not a number if any element is none."""

    def one(a: torch.Tensor, b: torch.Tensor) -> float:
        a = a.double()
        if not torch.isfinite(a).all():
            return float("nan")
        return ((a - b).norm() / b.norm().clamp_min(1e-2 * b.numel() ** 0.5)).item() if a.numel() else 0.0

    return [one(a, b) for a, b in zip(got, want, strict=True)]


def same(a: Grads, b: Grads) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
