"""plan: from a problem to a verified Program, by way of its tiling and order. Results are cached."""

from __future__ import annotations

from dataclasses import dataclass

from dash_attn.kept import kept
from dash_attn.launch import compose
from dash_attn.problem import Problem
from dash_attn.program import Program, Sequences
from dash_attn.tiling import TileShape, tile
from dash_attn.verify import Verified, matches, verify


@dataclass(frozen=True, eq=False)
class Plan:
    """A verified program, ready to be placed on workers and run."""

    problem: Problem
    verified: Verified

    @property
    def program(self) -> Program:
        return self.verified.program

    @property
    def co_resident(self) -> int:
        return self.verified.co_resident

    @property
    def num_tasks(self) -> int:
        return self.program.num_tasks

    @property
    def fingerprint(self) -> str:
        return self.program.fingerprint


@kept()
def plan(problem: Problem, shape: TileShape, policy: str | Program = "auto") -> Plan:
    """Order a problem by a policy and verify the result.

    The policy is 'name', 'name:width' or 'auto', each with '@head' or not, or 'auto@group'. A Program takes the
    place of a policy if it is one for this problem and these tiles, else VerifyError says what differs.

    A problem with documents has a plan for each sequence: see dash_attn.pack.
    """
    if isinstance(policy, Program):
        matches(policy, problem, shape)
        return Plan(problem, _verified(policy))
    return Plan(problem, verify(compose(tile(problem, shape), policy)))


_verified = kept()(verify)  # a program can be given for many problems


@kept()
def placement(planned: Plan, workers: int) -> Sequences:
    """A verified placement on `workers` co-resident workers. TooFewWorkers says how many are needed."""
    return planned.verified.on(workers).placement
