"""What lies behind the border: the checks of a policy, which know all policies, and `prepare`."""

from __future__ import annotations

from dash_attn.order import POLICIES, parse, require_alone
from dash_attn.prepare import prepare
from dash_attn.program import Program

__all__ = ["check_panels", "check_policy", "prepare"]


def check_policy(policy: str | Program) -> None:
    """The policy must have a known name, or be a program. Whether it fits is checked when the problem is ordered."""
    if isinstance(policy, Program):
        return
    if not isinstance(policy, str) or parse(policy).policy not in ("auto", *POLICIES):
        named = f"auto, {', '.join(POLICIES)}, or 'name:width', each with '@head' behind it or not, or auto@group"
        raise ValueError(f"policy must be {named}, or a Program; got {policy!r}")


def check_panels(panels: int, policy: str | Program) -> None:
    """The panels must be a number, and the policy must order each of them by itself."""
    if isinstance(panels, bool) or not isinstance(panels, int) or panels < 1:
        raise ValueError(f"panels must be a whole number from 1, got {panels!r}")
    if panels > 1 and not isinstance(policy, Program):
        require_alone(policy, f"panels={panels}")
