"""Stand-ins: a package flash_attn with our own arithmetic, misbehaving functions, and audits without processes."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import dash_attn
from dash_attn.tools.bench import host, peers
from dash_attn.tools.bench.audit import audit as audits
from dash_attn.tools.bench.audit import child
from dash_attn.tools.bench.audit.watch import Hear, Heard, _note


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU peers may try the CPU."""
    monkeypatch.setattr(peers, "on_gpu", lambda device: None)
    monkeypatch.setattr(host, "on_gpu", lambda device: None)


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Installs a package with the arguments of FlashAttention-4. The result has the keywords of every call."""
    seen: list[dict[str, Any]] = []

    def note(max_seqlen_q=None, max_seqlen_k=None, **how: Any) -> dict[str, Any]:
        longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k} if "cu_seqlens_q" in how else {}
        seen.append(how | longest)
        return longest

    def bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, deterministic=False, **packing: Any):
        note(softmax_scale=softmax_scale, causal=causal, deterministic=deterministic, **packing)
        sides = {name: x for name, x in packing.items() if name.startswith("cu")}
        how = {"causal": causal, "scale": softmax_scale, "policy": "fa3", **sides}
        return (*dash_attn.backward(dout, q, k, v, out, lse, **how), None)

    def attend(q, k, v, causal=False, deterministic=False, return_lse=False, **packing: Any) -> Any:
        note(causal=causal, deterministic=deterministic, **packing)
        cu: Tensor | None = packing.get("cu_seqlens_q")
        out, lse = dash_attn.attention(q, k, v, causal=causal, cu_seqlens=cu, policy="fa3", return_lse=True)
        return (out, lse) if return_lse else (out, None)

    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_bwd = bwd
    interface.flash_attn_func = interface.flash_attn_varlen_func = attend
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    sys.modules["flash_attn.cute"].interface = interface
    sys.modules["flash_attn"].cute = sys.modules["flash_attn.cute"]
    return seen


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of misbehaving functions, where child processes find it too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import fakes

    monkeypatch.setattr(fakes, "_calls", 0)
    return "fakes"


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children as plain calls: a process takes seconds to import torch."""

    def run(jobs: list[dict], folder: Path, timeout: float, hear: Hear) -> list[Heard]:
        return [one(job, hear) for job in jobs]

    def one(job: dict, hear: Hear) -> Heard:
        heard = Heard()

        def say(**event: object) -> None:
            _note(heard, event)
            hear(job, event)

        monkeypatch.setattr(child, "say", say)
        child.obey(job)
        return heard

    monkeypatch.setattr(audits, "watched", run)
