"""The border between the functions that users call and the planner. Nothing behind it loads before the first call.

The planner is `dash_attn.prepare` with all that orders, verifies, packs and runs a problem: most of the package. A
program that imports dash_attn should not wait for it. So no module of dash_attn.api that `attention` needs imports the
planner at its top. They call it through the functions here, and only for a call that is not like an earlier one.

All functions import the same module. If two threads make the first calls, one waits until the other has loaded it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dash_attn.backends import Options
from dash_attn.backends.cpu.forks import apart
from dash_attn.problem import Problem

if TYPE_CHECKING:
    from dash_attn.prepare import Prepared
    from dash_attn.program import Program


def check_order(policy: str | Program, panels: int) -> None:
    """Raise an error if the policy is not known, or does not go with the panels. torch.compile can trace it."""
    planner = loaded()
    planner.check_policy(policy)
    planner.check_panels(panels, policy)


def prepare(problem: Problem, policy: str | Program, options: Options, like: torch.device) -> Prepared:
    """dash_attn.prepare.prepare."""
    prepared: Prepared = loaded().prepare(problem, policy, options, like)
    return prepared


def loaded() -> Any:
    """The module behind the border.

    It loads before or after a fork: a child that is forked meanwhile would inherit a held lock that no thread releases.
    torch.compile cannot trace that, and traces the import alone.
    """
    if not torch.compiler.is_compiling():
        with apart:
            import dash_attn.api.planner  # noqa: F401
    from dash_attn.api import planner

    return planner
