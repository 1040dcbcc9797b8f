"""Pack: a problem of several sequences, each planned by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dash_attn.order import parse
from dash_attn.pack.templates import Family, templates
from dash_attn.plan import Plan, plan
from dash_attn.problem import Problem, Sequence
from dash_attn.tiling import TileShape


@dataclass(frozen=True, eq=False)
class Pack:
    """The sequences of a problem with documents. The tiles and the order of a sequence follow from the sequence alone.

    `shape_of` gives the tile shape of a sequence from the problem of this sequence alone. A plan is made when it is
    first needed.
    """

    problem: Problem
    shape_of: Callable[[Problem], TileShape]
    policy: str = "auto"

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return self.problem.sequences

    @cached_property
    def plans(self) -> dict[tuple[int, int], Plan]:
        """The plans of single sequences with all heads, by their lengths of q and k."""
        return {key: plan(alone, self.shape_of(alone), self.policy) for key, alone in self.problem.distinct.items()}

    def plan_of(self, sequence: Sequence) -> Plan:
        return self.plans[sequence.len_q, sequence.len_k]

    def require_order(self) -> None:
        """ValueError if the policy cannot order one of the sequences. `auto` orders every sequence."""
        if parse(self.policy).policy == "auto":
            return
        for alone in self.problem.distinct.values():
            templates(family := Family.of(alone, self.shape_of(alone), self.policy)).of(family.code(alone))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the orders of all sequences, in their order in the pack."""
        digest = hashlib.sha256()
        for sequence in self.sequences:
            digest.update(self.plan_of(sequence).fingerprint.encode())
        return digest.hexdigest()[:16]

    @property
    def co_resident(self) -> int:
        """Workers that the sequences need at once."""
        return max(each.co_resident for each in self.plans.values())

    @property
    def num_tasks(self) -> int:
        return sum(self.plan_of(sequence).program.num_tasks for sequence in self.sequences)


Planned = Plan | Pack
