"""What is timed and audited: a name, what it promises, and calls that compute gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dash_attn.backends import Operands
from dash_attn.problem import Problem

Call = Callable[[], tuple[Tensor, ...]]  # (dq, dk, dv), each (batch, seqlen, heads, dim)
Backward = Callable[[Operands], tuple[Tensor, ...]]
Prepare = Callable[[Problem, Sequence[Operands]], list[Call]]


@dataclass(frozen=True)
class Variant:
    """`prepare` gives a call for each set of operands, or raises an error that says why it cannot run here."""

    name: str
    deterministic: bool  # what it promises, not what it was seen to do
    prepare: Prepare


def reason(error: Exception) -> str:
    """The first line of an error, short enough for a table."""
    text = " ".join((str(error).strip() or type(error).__name__).splitlines()[0].split())
    return text if len(text) <= 200 else text[:197] + "..."
