"""Peers: the backwards of other libraries. Each is prepared once and then called.

A peer that is not installed, or that cannot run a problem, raises an error. The caller reports it with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dash_attn.backends import Operands
from dash_attn.problem import PLAIN, Problem, SequenceColumn
from dash_attn.tools.bench.operands import sinks_for
from dash_attn.tools.bench.variants import Backward, Call, Prepare, Variant


@contextmanager
def insist() -> Iterator[None]:
    """torch's deterministic algorithms, without the fill of every new tensor that would be timed with them."""
    settings: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fill


def causal_or_full(problem: Problem, ends_meet: bool = False) -> bool:
    """Whether the mask is causal; no other masks than these two are compared.

    With `ends_meet` the library puts the last query at the last key, as dash_attn does.
    """
    if not (problem.mask.is_full or problem.mask.is_causal):
        raise NotImplementedError(f"mask {problem.mask}: peers are called for full and causal masks only")
    if problem.mask.is_causal and problem.len_q != problem.len_k and not ends_meet:
        raise NotImplementedError("causal with len_q != len_k: libraries align it differently")
    return problem.mask.is_causal


def without_features(problem: Problem) -> None:
    if problem.features != PLAIN:
        raise NotImplementedError(f"{problem.features}: of the peers only FlashAttention-4 is called with it")


def on_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise NotImplementedError("runs on GPUs only")


def varlen(problem: Problem, device: torch.device) -> dict[str, Any]:
    """The keywords of FlashAttention's varlen functions for a problem with documents."""
    packing = problem.mask.documents
    assert packing is not None
    if problem.batch > 1:
        raise NotImplementedError("a batch of packs: FlashAttention takes one pack")
    kind = replace(problem, mask=replace(problem.mask, documents=None))
    if causal_or_full(kind) and packing.cu_q != packing.cu_k:
        raise NotImplementedError("causal with len_q != len_k: libraries align it differently")
    first = second = torch.tensor(packing.cu_q, dtype=torch.int32, device=device)
    if packing.cu_k != packing.cu_q:
        second = torch.tensor(packing.cu_k, dtype=torch.int32, device=device)
    longest = problem.sequence_table.max(0).tolist()
    longest_q, longest_k = longest[SequenceColumn.LEN_Q], longest[SequenceColumn.LEN_K]
    sides = {"cu_seqlens_q": first, "cu_seqlens_k": second, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    return sides | {"causal": kind.mask.is_causal}


def fa4(problem: Problem, device: torch.device, deterministic: bool) -> Backward:
    """FlashAttention-4's backward. Documents take its path for sequences of different lengths."""
    on_gpu(device)
    from flash_attn.cute.interface import _flash_attn_bwd

    scale = problem.softmax_scale
    if problem.is_packed:
        without_features(problem)
        sides = varlen(problem, device) | {"softmax_scale": scale, "deterministic": deterministic}

        def packed(s: Operands) -> tuple[Tensor, ...]:
            dout, q, k, v, out, lse = (x[0] for x in s)
            grads = _flash_attn_bwd(q, k, v, out, dout, lse, **sides)
            return tuple(x.unsqueeze(0) for x in grads[:3])

        return packed
    how: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": causal_or_full(problem, ends_meet=True),
        "deterministic": deterministic,
    }
    if problem.features.softcap:
        how["softcap"] = problem.features.softcap
    if problem.features.sinks:
        how["learnable_sink"] = sinks_for(problem, device)

    def run(s: Operands) -> tuple[Tensor, ...]:
        return tuple(_flash_attn_bwd(s.q, s.k, s.v, s.out, s.dout, s.lse, **how)[:3])

    return run


def _fa4(problem: Problem, sets: Sequence[Operands], deterministic: bool) -> list[Call]:
    run = fa4(problem, sets[0].q.device, deterministic)
    return [partial(run, s) for s in sets]


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # tensors (batch, heads, seqlen, dim)


def _through_autograd(sets: Sequence[Operands], attend: Attend, deterministic: bool = False) -> list[Call]:
    """Forward once, differentiate at every call, as a training step does."""
    calls: list[Call] = []

    def call(out: Tensor, leaves: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
        with insist() if deterministic else nullcontext():
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    for s in sets:
        leaves = [x.detach().requires_grad_() for x in (s.q, s.k, s.v)]
        with insist() if deterministic else nullcontext():
            out = attend(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
        calls.append(partial(call, out, leaves, s.dout))
    return calls


def _sdpa(backend: str, deterministic: bool) -> Prepare:
    def prepare(problem: Problem, sets: Sequence[Operands]) -> list[Call]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        without_features(problem)
        if backend != "MATH":
            on_gpu(sets[0].q.device)
        causal = causal_or_full(problem)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel([getattr(SDPBackend, backend)]):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, scale=problem.softmax_scale, enable_gqa=problem.group > 1
                )

        return _through_autograd(sets, attend, deterministic)

    return prepare


def _flex(problem: Problem, sets: Sequence[Operands]) -> list[Call]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    without_features(problem)
    on_gpu(sets[0].q.device)
    mask = None
    if causal_or_full(problem):

        def causal(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return row >= key

        mask = create_block_mask(causal, None, None, problem.len_q, problem.len_k, device=sets[0].q.device)
    torch._dynamo.reset()  # a compiled function gives up after a few shapes
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    how = {"block_mask": mask, "scale": problem.softmax_scale, "enable_gqa": problem.group > 1}
    return _through_autograd(sets, lambda q, k, v: compiled(q, k, v, **how))


def _triton(problem: Problem, sets: Sequence[Operands]) -> list[Call]:
    without_features(problem)
    on_gpu(sets[0].q.device)
    from dash_attn.tools.bench import triton_two_pass

    return [partial(triton_two_pass.backward, problem, s) for s in sets]


# FlexAttention adds without atomics, but promises nothing: its tiles may be tuned differently in another process.
PEERS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("fa4", False, partial(_fa4, deterministic=False)),
        Variant("fa4 det", True, partial(_fa4, deterministic=True)),
        Variant("fa2", False, _sdpa("FLASH_ATTENTION", False)),
        Variant("fa2 det", True, _sdpa("FLASH_ATTENTION", True)),
        Variant("cudnn", False, _sdpa("CUDNN_ATTENTION", False)),
        Variant("cudnn det", True, _sdpa("CUDNN_ATTENTION", True)),
        Variant("flex", False, _flex),
        Variant("triton two-pass", True, _triton),
        Variant("torch math", False, _sdpa("MATH", False)),
    )
}


def peer(name: str) -> Variant:
    """By name; underscores and blanks are the same."""
    known = {known.replace(" ", "_"): variant for known, variant in PEERS.items()}
    key = name.strip().replace(" ", "_")
    if key not in known:
        raise ValueError(f"unknown peer {name!r}: choose from {', '.join(known)}")
    return known[key]
