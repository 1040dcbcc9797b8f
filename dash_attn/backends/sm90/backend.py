"""The Hopper backend: a forward from a library, the backward by the sm90 kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from dash_attn.backends.base import Backward, Gradients, Operands, Options
from dash_attn.backends.sm90 import forwards
from dash_attn.backends.sm90.config import HEAD_DIMS, KernelConfig, select
from dash_attn.backends.sm90.launch import DeviceTables, Launch, Workspace, resident_workers
from dash_attn.plan import Plan, placement
from dash_attn.problem import Problem
from dash_attn.tiling import TileShape

DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
MOST_BATCHES = 32767  # a launch has two CTAs for each in a dimension of at most 65,535


class HopperBackend:
    """bf16 and fp16, head dims that are multiples of 8 up to 128. Bits depend on the order and the kernel, never on
    the GPU's size."""

    name = "sm90"
    always_deterministic = False

    def tile_shape(self, problem: Problem) -> TileShape:
        cfg = config_of(problem, True)
        return TileShape(cfg.tile_m, cfg.tile_n)

    def forward_provider(self, problem: Problem) -> str:
        if problem.mask.tiles is not None:
            return f"none for tile masks: {forwards.OWN_FORWARD}"
        return forwards.choose(problem).label()

    def software(self) -> str:
        from dash_attn.backends.sm90.cache import toolchain

        gpu = torch.cuda.get_device_name(torch.cuda.current_device())
        return f"kernel {toolchain()[:12]}, torch {torch.__version__}, {gpu}"

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        config_of(problem, True)
        return forwards.forward(problem, *(_aligned(x) for x in (q, k, v)))

    def bound(self, planned: Plan, options: Options, alike: Sequence[Tensor]) -> Backward:
        ready = launchable(planned, options, alike[0].device)
        if any(x.numel() == 0 for x in alike):
            return _zero
        launch = Launch(*ready)
        fit = _fit(*[x.stride() for x in (*alike[:5], *alike[6:])])  # all but lse

        def gradients(operands: Operands, into: Gradients) -> None:
            dout, q, k, v, out, lse = operands
            starts = dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
            for grad in into:
                starts |= grad.data_ptr()
            lse = lse.contiguous()
            if fit and starts % 16 == 0:
                launch((dout, q, k, v, out, lse), into)
                return
            found = tuple(_aligned(x) for x in into)
            launch((*(_aligned(x) for x in operands[:5]), lse), found)
            for given, got in zip(into, found, strict=True):
                if given is not got:
                    given.copy_(got)

        return gradients

    def workers(self, planned: Plan) -> int:
        return resident_workers(torch.device("cuda", torch.cuda.current_device()))

    def workspace_bytes(self, planned: Plan) -> int:
        problem = planned.problem
        return Workspace.nbytes(config_of(problem, True), problem.batch * problem.heads_q, problem.len_q)


def require(device: torch.device) -> None:
    """What the kernel needs of a machine, or an error that says what is missing."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        name = torch.cuda.get_device_name(device)
        raise NotImplementedError(
            f"q is on {name} (compute capability {major}.{minor}): the kernel is written for Hopper (9.0). "
            "Move q, k and v with .cpu(), or use torch's scaled_dot_product_attention there"
        )
    if find_spec("cutlass") is None or find_spec("tvm_ffi") is None:
        raise NotImplementedError("the Hopper backend needs the kernel compiler: pip install 'dash-attn[cuda]'")


def config_of(problem: Problem, ordered: bool) -> KernelConfig:
    """The kernel for a problem, or an error that says which problems have one."""
    if problem.dtype not in DTYPES:
        raise NotImplementedError(f"q is {problem.dtype}: on GPUs dash_attn takes {' and '.join(DTYPES)}")
    if problem.dim not in HEAD_DIMS:
        pad = "pad q, k and v with zeros to the next of them (and keep scale at the true dim ** -0.5)"
        raise NotImplementedError(
            f"q has head dim {problem.dim}: on GPUs dash_attn takes multiples of 8 up to {max(HEAD_DIMS)}; "
            + (pad if problem.dim < max(HEAD_DIMS) else "use torch's scaled_dot_product_attention there")
        )
    if problem.batch > MOST_BATCHES:
        raise NotImplementedError(
            f"q has batch size {problem.batch}: on GPUs dash_attn takes up to {MOST_BATCHES}; give it parts of the "
            "batch, or the sequences packed, with cu_seqlens_q and cu_seqlens_k"
        )
    mask = "full" if problem.mask.is_full else "causal" if problem.mask.is_causal else "interval"
    return select(problem.dim, DTYPES[problem.dtype], mask, ordered, problem.len_k)


def _zero(operands: Operands, into: Gradients) -> None:
    for grad in into:
        grad.zero_()


def launchable(planned: Plan, options: Options, device: torch.device) -> tuple[KernelConfig, DeviceTables, float]:
    """The kernel, its tables and the softmax scale, or an error if too few processors are left."""
    workers = resident_workers(device) - options.sm_margin
    if workers < max(1, planned.co_resident):
        raise ValueError(
            f"sm_margin={options.sm_margin} leaves {workers} SMs, this order needs {planned.co_resident} "
            "co-resident workers: give a smaller margin, or a policy with a smaller width"
        )
    cfg = config_of(planned.problem, options.deterministic)
    return cfg, tables_of(planned, cfg, workers, device), planned.problem.softmax_scale


@lru_cache(maxsize=256)
def tables_of(planned: Plan, cfg: KernelConfig, workers: int, device: torch.device) -> DeviceTables:
    """Tables of a plan on a device, uploaded once."""
    problem = planned.problem
    rows = problem.mask.intervals(problem.len_q, problem.len_k) if cfg.mask == "interval" else ()
    return DeviceTables.of(planned.program, placement(planned, workers), rows, device)


def _aligned(x: Tensor) -> Tensor:
    """As the bulk loads need it: rows contiguous, the start and every stride, none of them 0, multiples of 16 bytes."""
    if x.data_ptr() % 16 == 0 and _fit(x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() keeps a tensor that only begins amiss


def _fit(*strides: tuple[int, ...]) -> bool:
    return all(last == 1 and all(s > 0 and s % 8 == 0 for s in others) for *others, last in strides)
