"""The Hopper backend: a forward from a library, the backward by the sm90 kernel."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from dash_attn.api.backends import Options
from dash_attn.cpu import Gradients, Operands
from dash_attn.kernels.sm90.config import HEAD_DIMS, KernelConfig, select
from dash_attn.plan import Plan, placement
from dash_attn.problem import Problem
from dash_attn.tiling import TileShape

DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


class HopperBackend:
    """bf16 and fp16, head dims that are multiples of 8 up to 128. Bits depend on the order and the kernel, never on
    the GPU's size."""

    name = "sm90"
    forward_provider = "aten._flash_attention_forward"
    always_deterministic = False

    def tile_shape(self, problem: Problem) -> TileShape:
        cfg = config_of(problem, True)
        return TileShape(cfg.tile_m, cfg.tile_n)

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """torch's flash kernel. It has no tile masks: for those the caller brings out and lse to `backward`."""
        config_of(problem, True)
        if problem.mask.tiles is not None:
            raise NotImplementedError(
                "mask has tiles, for which there is no forward on GPUs: call dash_attn.backward with out and lse of "
                "your own forward"
            )
        if q.numel() == 0 or k.numel() == 0:
            shape = problem.batch, problem.heads_q, problem.len_q
            return q.new_zeros(q.shape), q.new_full(shape, -torch.inf, dtype=torch.float32)
        q, k, v = (_aligned(x) for x in (q, k, v))
        left, right = problem.mask.left, problem.mask.right
        documents = problem.mask.documents
        keywords = {
            "scale": problem.softmax_scale,
            "window_size_left": -1 if left is None else left,
            "window_size_right": -1 if right is None else right,
        }
        if documents is None:
            out, lse, *_ = torch.ops.aten._flash_attention_forward(
                q, k, v, None, None, problem.len_q, problem.len_k, 0.0, right == 0, False, **keywords
            )
            return out, _unseen(problem, lse)
        # Rows of a batch are packed one behind the other, each with the same documents.
        starts = [
            torch.tensor([0, *(row * cu[-1] + x for row in range(problem.batch) for x in cu[1:])], dtype=torch.int32)
            for cu in (documents.cu_q, documents.cu_k)
        ]
        longest = [int(cu.diff().max()) for cu in starts]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(x.flatten(0, 1) for x in (q, k, v)),
            *(cu.to(q.device) for cu in starts),
            *longest,
            0.0,
            right == 0,
            False,
            **keywords,
        )
        lse = lse.view(problem.heads_q, problem.batch, problem.len_q).transpose(0, 1).contiguous()
        return out.view_as(q), _unseen(problem, lse)

    def backward(self, planned: Plan, operands: Operands, into: Gradients | None, options: Options) -> Gradients:
        from dash_attn.kernels.sm90.launch import Grads, Inputs, backward

        problem, device = planned.problem, operands.q.device
        cfg = config_of(problem, options.deterministic)
        workers = self.workers(planned) - options.sm_margin
        if workers < max(1, planned.co_resident):
            raise ValueError(
                f"sm_margin={options.sm_margin} leaves {workers} SMs, this order needs {planned.co_resident} "
                "co-resident workers: give a smaller margin, or a policy with a smaller width"
            )
        grads = None if into is None else Grads(*(_aligned(g) for g in into))
        dout, q, k, v, out = (_aligned(x) for x in _tensors(operands))
        inputs = Inputs(dout, q, k, v, out, operands.lse.contiguous())
        found = backward(cfg, tables_of(planned, cfg, workers, device), inputs, scale=problem.softmax_scale, into=grads)
        if into is not None:
            for given, got in zip(into, found, strict=True):
                if given.data_ptr() != got.data_ptr():
                    given.copy_(got)
            return into
        return Gradients(*found)

    def workers(self, planned: Plan) -> int:
        from dash_attn.kernels.sm90.launch import resident_workers

        return resident_workers(torch.device("cuda", torch.cuda.current_device()))

    def workspace_bytes(self, planned: Plan) -> int:
        from dash_attn.kernels.sm90.launch import Workspace

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
    mask = "full" if problem.mask.is_full else "causal" if problem.mask.is_causal else "interval"
    return select(problem.dim, DTYPES[problem.dtype], mask, ordered, problem.len_k)


@lru_cache(maxsize=256)
def tables_of(planned: Plan, cfg: KernelConfig, workers: int, device: torch.device):  # type: ignore[no-untyped-def]
    """Tables of a plan on a device, uploaded once."""
    from dash_attn.kernels.sm90.launch import DeviceTables

    problem = planned.problem
    rows = problem.mask.intervals(problem.len_q, problem.len_k) if cfg.mask == "interval" else ()
    return DeviceTables.of(planned.program, placement(planned, workers), rows, device)


def _unseen(problem: Problem, lse: Tensor) -> Tensor:
    """torch's kernel says inf for a row that sees no key; the log of a sum of nothing is -inf."""
    mask = problem.mask
    if mask.is_full or (mask.is_causal and problem.len_q <= problem.len_k):
        return lse  # every row sees some
    return torch.where(lse == torch.inf, -torch.inf, lse)


def _tensors(operands: Operands) -> tuple[Tensor, ...]:
    return operands.dout, operands.q, operands.k, operands.v, operands.out


def _aligned(x: Tensor) -> Tensor:
    """As the bulk loads need it: rows contiguous, the start and every stride, none of them 0, multiples of 16 bytes."""
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() keeps a tensor that only begins amiss
