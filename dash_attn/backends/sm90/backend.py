"""The backend of Hopper GPUs: the forward from a library, the backward by the sm90 kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec

import torch

from dash_attn.backends.base import Backward, Forward, Held, Options
from dash_attn.pack import Assembly, Fact, Pack, Planned, assemble, needed_workers
from dash_attn.plan import Plan, placement
from dash_attn.problem import Problem, SequenceColumn
from dash_attn.tiling import TileShape
from dash_attn.verify import TooFewWorkers, require_workers

from . import forwards
from .config import DTYPE_OF, HEAD_DIMS, KernelConfig, select
from .held import Sm90Held
from .launch import Launch
from .packed import PackedBackward
from .tables import DeviceTables, PackedTables
from .workspace import Workspace, kv_sum_shape

MOST_BATCHES = 32767  # a grid dimension of at most 65,535 holds two CTAs for each batch entry
MOST_HEADS = 65535  # another grid dimension holds one CTA for each q head


class Sm90Backend:
    """bf16 and fp16, and head dims that are multiples of 8 up to 128. Bits depend on the order and the kernel, never on
    the number of SMs."""

    name = "sm90"
    always_deterministic = False
    takes_rows = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def tile_shape(self, problem: Problem) -> TileShape:
        cfg = config_of(problem)
        return TileShape(cfg.tile_m, cfg.tile_n)

    def forward_provider(self, problem: Problem) -> str:
        return forwards.described(problem)

    def software(self) -> str:
        from .cache import toolchain

        return f"kernel {toolchain()[:12]}, torch {torch.__version__}, {torch.cuda.get_device_name(self.device)}"

    def forward(self, problem: Problem) -> Forward:
        config_of(problem)  # a problem without a backward is refused before its forward runs
        return forwards.LibraryForward(problem)

    def backward(self, plan: Planned, options: Options) -> Backward:
        if isinstance(plan, Pack):
            return PackedBackward(pack_launch_of(plan, options, self.device))
        return launch_of(plan, options, self.device)

    def workers(self, plan: Planned) -> int:
        return resident_workers(self.device)

    def co_resident(self, plan: Planned) -> int:
        return needed_workers(plan.templates()) if isinstance(plan, Pack) else plan.co_resident

    def workspace_bytes(self, plan: Planned) -> int:
        if not isinstance(plan, Pack):
            return _own_bytes(plan.problem) + self.kv_sum_bytes(plan)
        sizes = {kind: _own_bytes(alone) for kind, alone in plan.problems.items()}
        whole = sum(sizes[panel.kind] for panel in plan.panels) + self.kv_sum_bytes(plan)
        if plan.held is None:
            return whole
        keys = plan.problem.batch * plan.problem.len_k * plan.problem.heads_kv
        return whole + 2 * 2 * keys * plan.problem.dim  # dK and dV in 16 bits, which only a whole problem uses

    def kv_sum_bytes(self, plan: Planned) -> int:
        if not isinstance(plan, Pack):
            return _kv_sum_bytes(plan.problem) if plan.program.geometry.share > 1 else 0
        # With ranges dK and dV have sums, whatever the order is. So a problem of a million tokens is not planned here.
        if plan.problem.panels == 1 and not any(each.facts[Fact.SHARE] > 1 for each in plan.templates()):
            return 0
        sizes = {kind: _kv_sum_bytes(alone) for kind, alone in plan.problems.items()}
        return sum(sizes[panel.kind] for panel in plan.panels)

    def held(self, pack: Pack, options: Options) -> Held:
        """The panels of one rank. Each panel has the tables, and so the bits, that it has among all panels."""
        config_of(pack.problem)  # a problem without a backward is refused before its forward runs
        return Sm90Held(pack, self.device, partial(_held_launch, pack, options, self.device))


def _own_bytes(problem: Problem) -> int:
    """Without sums of dK and dV."""
    return Workspace.nbytes(config_of(problem), problem.batch * problem.heads_q, problem.len_q)


def _kv_sum_bytes(problem: Problem) -> int:
    """The fp32 dK and dV of cut chains, or of a panel."""
    cut = replace(config_of(problem), cut=True)
    return 4 * math.prod(kv_sum_shape(cut, problem.groups, -(-problem.len_k // cut.tile_n)))


def launch_of(plan: Plan, options: Options, device: torch.device) -> Launch:
    """The kernel of a plan, with its tables on the device."""
    problem = plan.problem
    with _workers_left(options, device) as workers:
        placed = placement(plan, workers)
    cfg = replace(config_of(problem, options), cut=plan.program.geometry.share > 1)
    rows = problem.mask.intervals(problem.len_q, problem.len_k) if cfg.mask == "interval" else ()
    tables = DeviceTables.of(plan.program, placed, rows, device)
    return Launch(cfg, tables, problem.softmax_scale, problem.features.softcap)


def pack_launch_of(pack: Pack, options: Options, device: torch.device) -> Launch:
    """The kernel of a pack, with its tables on the device."""
    cfg = config_of(pack.problem, options)
    made = assemble(pack.problem, TileShape(cfg.tile_m, cfg.tile_n), pack.policy)
    return assembled_launch(pack, made, options, device)


def _held_launch(pack: Pack, options: Options, device: torch.device) -> tuple[Launch, Assembly]:
    """The kernel of some panels, and their tables."""
    cfg = config_of(pack.problem, options)
    made = assemble(pack.problem, TileShape(cfg.tile_m, cfg.tile_n), pack.policy, pack.held)
    # The templates are checked, and are kept where other panels find them.
    return assembled_launch(pack, made, options, device), replace(made, templates=())


def assembled_launch(pack: Pack, made: Assembly, options: Options, device: torch.device) -> Launch:
    problem = pack.problem
    with _workers_left(options, device) as workers:
        require_workers(pack.policy, made.co_resident, workers)
    sides = problem.mask.left, problem.mask.right
    cfg = replace(config_of(problem, options), cut=made.sizes.cut, packed=True)
    tables = PackedTables.of(made, workers, sides, device)
    return Launch(cfg, tables, problem.softmax_scale, problem.features.softcap)


@contextmanager
def _workers_left(options: Options, device: torch.device) -> Iterator[int]:
    """The workers that `sm_margin` leaves. If they are too few inside the block, the error names `sm_margin`."""
    workers = resident_workers(device) - options.sm_margin
    try:
        yield workers
    except TooFewWorkers as error:
        if not options.sm_margin:
            raise
        raise ValueError(f"sm_margin={options.sm_margin} leaves {workers} SMs: {error}") from error


@lru_cache(None)
def resident_workers(device: torch.device) -> int:
    """The number of SMs. One CTA fills the shared memory of an SM, so each SM runs one worker."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def require(device: torch.device) -> None:
    """Raise an error that says what is missing, if the kernel cannot run on this machine."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        name = torch.cuda.get_device_name(device)
        raise NotImplementedError(
            f"q is on {name} (compute capability {major}.{minor}): the kernel is written for Hopper (9.0). "
            "Move q, k and v with .cpu(), or use torch's scaled_dot_product_attention there"
        )
    if find_spec("cutlass") is None or find_spec("tvm_ffi") is None:
        raise NotImplementedError("the Hopper backend needs the kernel compiler: pip install 'dash-attn[cuda]'")


def config_of(problem: Problem, options: Options | None = None) -> KernelConfig:
    """The kernel config of a problem, or an error that says which problems have one."""
    if problem.dtype not in DTYPE_OF:
        raise NotImplementedError(f"q is {problem.dtype}: on GPUs dash_attn takes {' and '.join(DTYPE_OF)}")
    if problem.dim not in HEAD_DIMS:
        pad = "pad q, k and v with zeros to the next of them (and keep scale at the true dim ** -0.5)"
        raise NotImplementedError(
            f"q has head dim {problem.dim}: on GPUs dash_attn takes multiples of 8 up to {max(HEAD_DIMS)}; "
            + (pad if problem.dim < max(HEAD_DIMS) else "use torch's scaled_dot_product_attention there")
        )
    features = problem.features
    if features.dropout:
        raise NotImplementedError(
            f"dropout is {features.dropout}: on GPUs dash_attn has none; leave it at 0, or move q, k and v with .cpu()"
        )
    if features.dim_v not in (None, problem.dim):
        raise NotImplementedError(
            f"v has head dim {features.dim_v}, and q has {problem.dim}: on GPUs dash_attn takes one head dim; pad the "
            "narrower tensors with zeros (and keep scale at the true dim of q ** -0.5)"
        )
    if problem.batch > MOST_BATCHES:
        raise NotImplementedError(
            f"q has batch size {problem.batch}: on GPUs dash_attn takes up to {MOST_BATCHES}; give it parts of the "
            "batch, or the sequences packed, with cu_seqlens_q and cu_seqlens_k"
        )
    if problem.heads_q > MOST_HEADS:
        raise NotImplementedError(
            f"q has {problem.heads_q} heads: on GPUs dash_attn takes up to {MOST_HEADS}; give it parts of the heads"
        )
    if problem.panels > 1 and any(panel.after for panel in problem.panel_list):
        raise NotImplementedError(
            f"panels is {problem.panels}, and mask {problem.mask} lets queries see keys after their position: on GPUs "
            "dash_attn cuts full masks, causal masks and windows that end at the query; leave panels at 1"
        )
    kind = replace(problem.mask, documents=None)
    mask = "full" if kind.is_full else "causal" if kind.is_causal else "interval"
    longest = int(problem.sequence_table[:, SequenceColumn.LEN_K].max(initial=0))
    options = Options() if options is None else options
    capped = features.softcap > 0
    cfg = select(problem.dim, DTYPE_OF[problem.dtype], mask, options.deterministic, longest, capped)
    return replace(cfg, **dict(options.kernel)) if options.kernel else cfg  # type: ignore[arg-type]
