"""The Hopper backend in place of that of the CPU: its own host code, with its kernels on the machine.

The forward is the float64 reference, rounded, because the package has no forward of its own for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from dash_attn.api import calls
from dash_attn.backends import Extras, Forward
from dash_attn.backends.cpu import backend as cpu
from dash_attn.backends.sm90 import backend, held, launch, workspace
from dash_attn.prepare import prepare, prepare_panels
from dash_attn.problem import Problem
from dash_attn.tools.bench.operands import exact
from tests.backends.sm90.ptx.kernels import Kernel, kernels
from tests.backends.sm90.ptx.machine import Chance


class MachineBackend(backend.Sm90Backend):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def software(self) -> str:
        return "the machine"

    def forward_provider(self, problem: Problem) -> str:
        return "float64"

    def forward(self, problem: Problem) -> Forward:
        backend.config_of(problem)
        return ExactForward(problem)


class ExactForward:
    """A row of the output depends on its query and its keys alone. Tensors may lack the batch dimension."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
        if q.dim() == 3:
            out, lse = self(*(x.unsqueeze(0) for x in (q, k, v)), extras)
            return out[0], lse[0]
        result = exact(self._problem, torch.zeros_like(q), q, k, v, extras=Extras() if extras is None else extras)
        return result.out.to(q.dtype), result.lse.float()


@contextmanager
def machine(chance: Chance, workers: int = 4) -> Iterator[None]:
    """Inside, tensors of the CPU are those of a GPU with `workers` SMs. New tensors hold NaN until they are written."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    replaced = [
        (cpu, "CpuBackend", MachineBackend),
        (backend, "resident_workers", lambda device: workers),
        (held, "LibraryForward", ExactForward),
        (held.Sm90Held, "_require_rows", lambda self: None),
        (launch, "kernels", lambda cfg, folds: kernels(cfg, folds, chance)),
        (launch, "side_kernel", lambda kind, cfg: Kernel(kind, cfg, chance)),
        (launch, "converted", lambda tensors: tensors),
        (workspace, "converted", lambda tensors: tensors),
        (workspace, "KEPT_FLOATS", -1),  # a kept workspace would not be filled with NaN
    ]
    with ExitStack() as stack:
        for place, name, value in replaced:
            stack.enter_context(patch.object(place, name, value))
        stack.callback(torch.use_deterministic_algorithms, was[0], warn_only=was[1])
        stack.callback(forget)
        forget()
        torch.use_deterministic_algorithms(True)
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        yield


def forget() -> None:
    """Forget what is prepared for tensors of the CPU: it belongs to the other backend."""
    calls._seen.clear()
    prepare.cache_clear()
    prepare_panels.cache_clear()
