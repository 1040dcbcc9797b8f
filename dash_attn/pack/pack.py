"""Pack: a problem of several sequences or panels, each planned by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from dash_attn.lazily import cached_property
from dash_attn.order import parse
from dash_attn.pack.templates import Family, PackedTemplate, templates
from dash_attn.plan import Plan, plan
from dash_attn.problem import Panel, Problem
from dash_attn.tiling import TileShape


@dataclass(frozen=True, eq=False)
class Pack:
    """The sequences of a problem with documents, or its panels. Each has tiles and an order that follow from it alone.

    `shape_of` gives the tile shape of a panel from the problem of this panel alone. A plan is made when it is first
    needed. `held` lists some panels of the problem, whose rows of q are counted in a tensor of these panels alone.
    Without `held` the pack has all panels.
    """

    problem: Problem
    shape_of: Callable[[Problem], TileShape]
    policy: str = "auto"
    held: tuple[Panel, ...] | None = None

    @property
    def panels(self) -> tuple[Panel, ...]:
        """The panels of the pack. A sequence that is not cut is one panel."""
        return self.problem.panel_list if self.held is None else self.held

    @cached_property
    def problems(self) -> dict[tuple[int, int, int], Problem]:
        """The problems of single panels, by their kind."""
        if self.held is None:
            return self.problem.distinct
        return {panel.kind: self.problem.alone(panel) for panel in self.held}

    @cached_property
    def plans(self) -> dict[tuple[int, int, int], Plan]:
        """The plans of single panels with all heads, by their kind."""
        return {kind: plan(alone, self.shape_of(alone), self.policy) for kind, alone in self.problems.items()}

    def plan_of(self, panel: Panel) -> Plan:
        return self.plans[panel.kind]

    def require_order(self) -> None:
        """ValueError if the policy cannot order one of the panels. `auto` orders every panel."""
        if parse(self.policy).policy != "auto":
            self.templates()

    def templates(self) -> list[PackedTemplate]:
        """The orders of single panels as `assemble` joins them, by their kind."""
        families = [(alone, Family.of(alone, self.shape_of(alone), self.policy)) for alone in self.problems.values()]
        return [templates(family).of(family.code(alone)) for alone, family in families]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the orders of all panels, as they follow each other in the pack, and of which panels share keys."""
        digest = hashlib.sha256()
        for panel in self.panels:
            digest.update(self.plan_of(panel).fingerprint.encode())
            if self.problem.panels > 1:
                digest.update(f" {panel.sequence} ".encode())
        return digest.hexdigest()[:16]

    @property
    def num_tasks(self) -> int:
        return sum(self.plan_of(panel).program.num_tasks for panel in self.panels)


Planned = Plan | Pack
