"""What is audited: the operands of one backward, drawn for a shape or saved from a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dash_attn.api import attention
from dash_attn.api.arguments import Arguments, problem_of
from dash_attn.backends import Operands
from dash_attn.problem import CAUSAL, FULL, Problem, documents
from dash_attn.tools.bench.operands import draw_operands

NEEDED, OPTIONAL = ("dout", "q", "k", "v"), ("out", "lse")
KEYWORDS = ("causal", "window", "cu_seqlens_q", "cu_seqlens_k", "scale")


@dataclass(frozen=True, eq=False)
class SavedStep:
    """Tensors as `dash_attn.backward` takes them, and its keywords."""

    operands: Operands
    keywords: dict[str, Any]

    def problem(self) -> Problem:
        fields = {"cu_seqlens_q": "cu_q", "cu_seqlens_k": "cu_k"}
        asked = Arguments(**{fields.get(name, name): value for name, value in self.keywords.items()})
        return problem_of(self.operands.q, self.operands.k, self.operands.v, asked)

    def save(self, path: Path) -> None:
        torch.save(self.operands._asdict() | {"kwargs": self.keywords}, path)


def problem_from(shape: Mapping[str, Any]) -> Problem:
    """From the words of a report: sizes, and full or causal."""
    return Problem(**{**shape, "mask": CAUSAL if shape["mask"] == "causal" else FULL})


def made(problem: Problem, device: torch.device, seed: int = 0, pack: Sequence[int] = ()) -> SavedStep:
    """Random operands of a shape; full and causal masks. With `pack`, its rows are sequences of these lengths."""
    keywords = {"causal": problem.mask.is_causal, "scale": problem.scale}
    if not pack:
        return SavedStep(draw_operands(problem, device, seed), keywords)
    cu = [0, *accumulate(pack)]
    drawn = draw_operands(replace(problem, mask=problem.mask & documents(cu)), device, seed)
    return SavedStep(Operands(*[x.squeeze(0) for x in drawn]), keywords | {"cu_seqlens_q": cu})


def load(path: Path, device: torch.device) -> SavedStep:
    """A dict written by torch.save: dout, q, k, v; out and lse, or they are computed; kwargs of dash_attn.backward."""
    if not path.is_file():
        raise ValueError(f"--step {path}: no such file")
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise ValueError(f"--step {path}: not a file of tensors ({error})") from None
    if not isinstance(saved, dict) or set(NEEDED) - set(saved):
        raise ValueError(f"--step {path}: expected a dict with {', '.join(NEEDED)}, and kwargs")
    keywords = dict(saved.get("kwargs", {}))
    unknown = [*(set(saved) - {*NEEDED, *OPTIONAL, "kwargs"}), *(set(keywords) - set(KEYWORDS))]
    if unknown:
        raise ValueError(
            f"--step {path}: {', '.join(sorted(unknown))} is not known; kwargs may be {', '.join(KEYWORDS)}"
        )
    tensors: list[Tensor] = [saved[name] for name in NEEDED]
    if all(isinstance(saved.get(name), Tensor) for name in OPTIONAL):
        tensors += [saved[name] for name in OPTIONAL]
    else:
        names = {"cu_seqlens_q": "cu_seqlens"}
        with torch.no_grad():
            tensors += attention(
                *tensors[1:], **{names.get(key, key): value for key, value in keywords.items()}, return_lse=True
            )
    return SavedStep(Operands(*tensors), keywords)
