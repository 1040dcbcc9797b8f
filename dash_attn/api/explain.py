"""explain: what a call would run, without running it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from dash_attn.api.arguments import Arguments, Window
from dash_attn.api.attention import prepared_for
from dash_attn.api.calls import Boundaries
from dash_attn.order import POLICIES, parse
from dash_attn.prepare import Prepared
from dash_attn.problem import Mask
from dash_attn.tiling import TileShape

# Fields that decide the bits, beside the problem. The number of workers is not one of them.
DECIDES = ("backend", "forward", "tile", "fingerprint", "deterministic", "software")


@dataclass(frozen=True)
class Explanation:
    """What a call runs.

    Equal identities and equal inputs give equal bits of the output and the gradients. Equal fingerprints give equal
    bits of the gradients if `forward` and `software` are equal too.
    """

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
    """Explain a call of `attention` with the same arguments. It computes the plan and nothing else."""
    asked = Arguments(causal, window, cu_seqlens, cu_seqlens_k, mask, scale, policy, deterministic)
    return explanation(prepared_for(q, k, v, asked))


def explanation(prepared: Prepared) -> Explanation:
    """What a prepared problem runs."""
    problem, planned, backend = prepared.problem, prepared.plan, prepared.backend
    chosen = planned.program.policy
    summary = POLICIES[parse(chosen).policy].summary
    said: dict[str, Any] = {
        "backend": backend.name,
        "forward": backend.forward_provider(problem),
        "mask": str(problem.mask),
        "tile": backend.tile_shape(problem),
        "policy": chosen,
        "reason": f"{'chosen by auto' if prepared.policy == 'auto' else 'asked for'}: {summary}",
        "fingerprint": planned.fingerprint,
        "tasks": planned.program.num_tasks,
        "co_resident": planned.co_resident,
        "workers": backend.workers(planned),
        "workspace_bytes": backend.workspace_bytes(planned),
        "deterministic": backend.always_deterministic or prepared.options.deterministic,
        "software": backend.software(),
    }
    decides = [str(said[name]) for name in DECIDES] + [repr(problem)]
    return Explanation(**said, identity=hashlib.sha256("\n".join(decides).encode()).hexdigest()[:16])
