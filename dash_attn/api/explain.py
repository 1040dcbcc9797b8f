"""explain: what a call would run, without running it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from dash_attn.api.arguments import Boundaries, Window, check_policy, problem_of, wants_determinism
from dash_attn.backends import backend_for
from dash_attn.order import POLICIES, parse
from dash_attn.plan import plan
from dash_attn.problem import Mask
from dash_attn.tiling import TileShape

# What bits depend on, beside the problem. The number of workers, for one, is not in it.
DECIDES = ("backend", "forward", "tile", "fingerprint", "deterministic", "software")


@dataclass(frozen=True)
class Explanation:
    """What would run. Equal identities and equal inputs give equal bits of results and gradients; equal fingerprints
    do for gradients, as long as forward and software are the same too."""

    backend: str
    forward: str
    mask: str
    tile: TileShape
    policy: str
    reason: str
    fingerprint: str
    tasks: int
    co_resident: int
    workers: int
    workspace_bytes: int
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
    policy: str = "auto",
    deterministic: bool | None = None,
) -> Explanation:
    """Arguments as of `attention`; nothing is computed but the plan."""
    problem = problem_of(
        q,
        k,
        v,
        causal=causal,
        window=window,
        boundaries={"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k},
        mask=mask,
        scale=scale,
    )
    check_policy(policy)
    backend = backend_for(q.device)
    shape = backend.tile_shape(problem)
    planned = plan(problem, shape, policy)
    chosen = planned.program.policy
    summary = POLICIES[parse(chosen).policy].summary
    said: dict[str, Any] = {
        "backend": backend.name,
        "forward": backend.forward_provider(problem),
        "mask": str(problem.mask),
        "tile": shape,
        "policy": chosen,
        "reason": f"{'chosen by auto' if policy == 'auto' else 'asked for'}: {summary}",
        "fingerprint": planned.fingerprint,
        "tasks": planned.program.num_tasks,
        "co_resident": planned.co_resident,
        "workers": backend.workers(planned),
        "workspace_bytes": backend.workspace_bytes(planned),
        "deterministic": backend.always_deterministic or wants_determinism(deterministic),
        "software": backend.software(),
    }
    decides = [str(said[name]) for name in DECIDES] + [repr(problem)]
    return Explanation(**said, identity=hashlib.sha256("\n".join(decides).encode()).hexdigest()[:16])
