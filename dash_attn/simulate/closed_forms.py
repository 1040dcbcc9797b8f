"""The paper's makespans in closed form: n tiles on n workers, m heads, compute c, reduce r.

`exact` says when the simulator gives exactly the formula. Otherwise the formula is an approximation, for three reasons.
Chains of `descending` with r > c collide again and again inside a head. An odd number of heads leaves half of the
workers idle at the end. An odd number of tiles leaves the middle chain of `symmetric_shift` without a partner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ClosedForm:
    """Makespan of a policy on a mask, and when it holds exactly: functions of (n, m, c, r)."""

    makespan: Callable[[int, int, float, float], float]
    exact: Callable[[int, int, float, float], bool]
    text: str


CLOSED_FORMS: dict[tuple[str, str], ClosedForm] = {
    ("full", "fa3"): ClosedForm(
        lambda n, m, c, r: m * n * (c + r) + (n - 1) * r, lambda n, m, c, r: True, "m n (c+r) + (n-1) r"
    ),
    ("full", "shift"): ClosedForm(lambda n, m, c, r: m * n * (c + r), lambda n, m, c, r: True, "m n (c+r)"),
    ("causal", "fa3"): ClosedForm(
        lambda n, m, c, r: m * n * (c + r) + (n - 1) * r, lambda n, m, c, r: True, "m n (c+r) + (n-1) r"
    ),
    ("causal", "descending"): ClosedForm(
        lambda n, m, c, r: m * (n + 1) * (c + r) / 2 + (n - 1) * r,
        lambda n, m, c, r: m % 2 == 0 and c >= r,
        "m (n+1) (c+r) / 2 + (n-1) r",
    ),
    ("causal", "symmetric_shift"): ClosedForm(
        lambda n, m, c, r: m * (n + 1) * (c + r) / 2,
        lambda n, m, c, r: m % 2 == 0 and n % 2 == 0,
        "m (n+1) (c+r) / 2",
    ),
}
