"""Our own backward under every policy, in order or not, with programs made here or taken along in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dash_attn import __version__
from dash_attn.backends import Operands, cpu
from dash_attn.backends.sm90 import backend as hopper
from dash_attn.launch import compose
from dash_attn.order import POLICIES, applicable, choose, parse
from dash_attn.plan import placement, plan
from dash_attn.problem import Problem
from dash_attn.program import Program, Sequences, load, save
from dash_attn.tiling import TileShape, Tiling, tile
from dash_attn.tools.bench.variants import Backward, Call, Variant
from dash_attn.verify import verify

WORKERS = 132  # SMs of the GPUs that programs are prepared for
USUAL = {
    "full": ("auto", "shift:64", "descending", "spt", "fa3", "search:64"),
    "causal": ("auto", "symmetric_shift:64", "diagonal:64", "spt", "descending", "fa3", "search:64"),
}


@dataclass(frozen=True)
class Ours:
    """Which of our own variants run, and how. `policies` empty: the usual ones of each mask."""

    policies: tuple[str, ...] = ()
    unordered: bool = True
    programs: Path | None = None
    configs: tuple[Mapping[str, Any], ...] = ({},)  # fields of the kernel's config to change: a variant for each

    def orders(self, problem: Problem) -> list[str]:
        """Policies for a problem: those asked for that apply to its mask, or the usual ones."""
        tiling, usual = tiling_of(problem), USUAL["causal" if problem.mask.is_causal else "full"]
        barred = POLICIES.keys() - applicable(tiling)
        asked = [order for order in self.policies if parse(order).policy not in barred]
        named = asked or list(usual[:1] if self.policies else usual)
        return list(dict.fromkeys(str(choose(tiling)) if order == "auto" else order for order in named))

    def variants(self, problem: Problem) -> list[Variant]:
        """A variant for each order and config, and one without order, in the launch order of the first."""
        orders = self.orders(problem)
        made = [
            Variant(_named(order, config), True, partial(replace(self, configs=(config,)).prepare, order=order))
            for order in orders
            for config in self.configs
        ]
        if self.unordered:
            unordered = partial(self.prepare, order=orders[0], ordered=False)
            made.append(Variant(f"any ({_named(orders[0], self.configs[0])})", False, unordered))
        return made

    def default(self, problem: Problem) -> str:
        """The name of the variant that stands for us."""
        return _named(self.orders(problem)[0], self.configs[0])

    def prepare(self, problem: Problem, sets: Sequence[Operands], *, order: str, ordered: bool = True) -> list[Call]:
        run = self.function(problem, sets[0].q.device, order, ordered)
        return [partial(run, s) for s in sets]

    def function(self, problem: Problem, device: torch.device, order: str, ordered: bool = True) -> Backward:
        """The gradients as a function of the operands; planning and uploading happen here, once."""
        if device.type == "cpu":
            planned = plan(problem, cpu.tile_shape(problem), order)
            placed = placement(planned, max(planned.co_resident, torch.get_num_threads()))
            return partial(cpu.backward, problem, planned.program, placed, order="program" if ordered else "any")
        return self._kernel(problem, device, order, ordered)

    def _kernel(self, problem: Problem, device: torch.device, order: str, ordered: bool) -> Backward:
        from dash_attn.backends.sm90.launch import DeviceTables, Inputs, backward, resident_workers

        hopper.require(device)
        cfg = hopper.config_of(problem, ordered)
        cfg = replace(cfg, **self.configs[0])
        program, placed = self.placed(problem, TileShape(cfg.tile_m, cfg.tile_n), order, resident_workers(device))
        rows = problem.mask.intervals(problem.len_q, problem.len_k) if cfg.mask == "interval" else ()
        tables, scale = DeviceTables.of(program, placed, rows, device), problem.softmax_scale

        def run(s: Operands) -> tuple[Tensor, ...]:
            return backward(cfg, tables, Inputs(s.dout, s.q, s.k, s.v, s.out, s.lse), scale=scale)

        return run

    def placed(self, problem: Problem, shape: TileShape, order: str, workers: int) -> tuple[Program, Sequences]:
        """The verified program and its placement, from the folder if they are there, else made and kept there."""
        if self.programs is None:
            return _planned(problem, shape, order, workers)
        key = hashlib.sha256(repr((problem, shape, order, workers, __version__)).encode()).hexdigest()[:20]
        path = self.programs / f"{key}.npz"
        if path.exists():
            with np.load(path.with_suffix(".placement.npz")) as archive:
                return load(path), Sequences(archive["first"], archive["chains"])
        program, made = _planned(problem, shape, order, workers)
        self.programs.mkdir(parents=True, exist_ok=True)
        save(program, path)
        np.savez_compressed(path.with_suffix(".placement.npz"), first=made.first, chains=made.chains)
        return program, made

    def keep(self, problem: Problem) -> int:
        """Plan every order of a problem for a GPU and keep it in the folder; how many there are."""
        cfg = hopper.config_of(problem, True)
        for order in self.orders(problem):
            self.placed(problem, TileShape(cfg.tile_m, cfg.tile_n), order, WORKERS)
        return len(self.orders(problem))


def tiling_of(problem: Problem) -> Tiling:
    """The tiles that the backend for its dtype cuts it into."""
    on_gpu = problem.dtype in hopper.DTYPES
    return tile(problem, hopper.HopperBackend().tile_shape(problem) if on_gpu else cpu.tile_shape(problem))


def chosen(problem: Problem) -> str:
    """What `auto` means for a problem, by its own name."""
    return str(choose(tiling_of(problem)))


def _named(order: str, config: Mapping[str, Any]) -> str:
    return " ".join([order, *(f"{name}={value}" for name, value in config.items())])


@lru_cache(maxsize=16)
def _planned(problem: Problem, shape: TileShape, order: str, workers: int) -> tuple[Program, Sequences]:
    program = compose(tile(problem, shape), order)
    return program, verify(program).on(workers).placement
