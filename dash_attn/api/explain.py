"""explain: what a call would run, without running it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dash_attn.api.arguments import Arguments, Window
from dash_attn.api.autograd import autocast, prepared_for
from dash_attn.api.calls import Boundaries
from dash_attn.api.extras import Given, Seed
from dash_attn.kept import grown
from dash_attn.order import POLICIES, parse
from dash_attn.pack import Pack
from dash_attn.prepare import Prepared
from dash_attn.problem import Mask
from dash_attn.program import Program

# Fields that decide the bits, beside the problem. The number of workers is not one of them.
DECIDES = ("backend", "forward", "tile", "fingerprint", "deterministic", "software")


@dataclass(frozen=True)
class Explanation:
    """What a call runs. Packed sequences and panels of one length share a template; a batch has one.

    `panels` is the number of panels of all sequences. It equals `sequences` if no sequence is cut. A negative side of
    the window, and intervals that run as documents, cut a sequence too. `kv_sum_bytes` is the part of
    `workspace_bytes` that holds the fp32 dK and dV of cut chains and of panels.

    Equal identities and equal inputs give equal bits of the output and the gradients. Equal fingerprints give equal
    bits of the gradients if `forward` and `software` are equal too.
    """

    backend: str
    forward: str
    mask: str
    features: str
    sequences: int
    panels: int
    templates: int
    tile: str
    policy: str
    reason: str
    fingerprint: str
    tasks: int
    co_resident: int
    workers: int
    workspace_bytes: int
    kv_sum_bytes: int
    deterministic: bool
    software: str
    identity: str

    def __str__(self) -> str:
        return "\n".join(f"{field.name.replace('_', ' '):<16} {getattr(self, field.name)}" for field in fields(self))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    cu_seqlens: Boundaries | None = None,
    cu_seqlens_k: Boundaries | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: Seed | None = None,
    policy: str | Program = "auto",
    panels: int = 1,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Explanation:
    """Explain a call of `attention` with the same arguments. It computes the plan alone.

    `seed` and `return_lse` change nothing here.
    """
    asked = Arguments(causal, window, cu_seqlens, cu_seqlens_k, mask, scale, policy, deterministic, panels=panels)
    given = Given(softcap, dropout, sinks, seed=0 if seed is None else seed)
    if torch.compiler.is_compiling():  # a plan is no part of a graph
        said: Explanation = torch._dynamo.disable(_explained)(q, k, v, asked, given)  # type: ignore[no-untyped-call]
        return said
    return _explained(q, k, v, asked, given)


def _explained(q: Tensor, k: Tensor, v: Tensor, asked: Arguments, given: Given) -> Explanation:
    q, k, v = autocast(q, k, v)
    if not given.is_plain:
        given.extras(q)  # checks the sinks
        asked = asked._replace(features=given.features())
    return explanation(prepared_for(q, k, v, asked))


def explanation(prepared: Prepared) -> Explanation:
    """What a prepared problem runs."""
    problem, planned, backend = prepared.problem, prepared.plan, prepared.backend
    plans = list(planned.plans.values()) if isinstance(planned, Pack) else [planned]
    chosen = list(dict.fromkeys(each.program.policy for each in plans))
    said: dict[str, Any] = {
        "backend": backend.name,
        "forward": backend.forward_provider(problem),
        "mask": str(problem.mask),
        "features": str(problem.features),
        "sequences": problem.given_sequences,
        "panels": len(problem.panel_table),
        "templates": len(plans),
        "tile": ", ".join(dict.fromkeys(str(backend.tile_shape(each.problem)) for each in plans)),
        "policy": ", ".join(chosen),
        "reason": _reason(prepared.policy, chosen),
        "fingerprint": planned.fingerprint,
        "tasks": planned.num_tasks,
        "co_resident": backend.co_resident(planned),
        "workers": backend.workers(planned),
        "workspace_bytes": backend.workspace_bytes(planned),
        "kv_sum_bytes": backend.kv_sum_bytes(planned),
        "deterministic": backend.always_deterministic or prepared.options.deterministic,
        "software": backend.software(),
    }
    grown(prepared)  # by the plans of all panels
    decides = [str(said[name]) for name in DECIDES] + [repr(problem)]
    return Explanation(**said, identity=hashlib.sha256("\n".join(decides).encode()).hexdigest()[:16])


def _reason(asked: str | Program, chosen: list[str]) -> str:
    """Why the problem has this order, and what its policies do. A program can come from any policy."""
    if isinstance(asked, Program):
        return "given as a program"
    summaries = dict.fromkeys(POLICIES[parse(policy).policy].summary for policy in chosen)
    return f"{'chosen by auto' if asked == 'auto' else 'asked for'}: {' | '.join(summaries)}"
