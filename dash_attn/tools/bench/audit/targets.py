"""Targets: what is audited. Ours, a peer, or a function module:name with the arguments of dash_attn.backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from torch import Tensor

from dash_attn.api.planner import check_policy
from dash_attn.backends import Options
from dash_attn.prepare import prepare
from dash_attn.tools.bench.audit.step import SavedStep
from dash_attn.tools.bench.peers import peer

CONTROL = "control"  # of an audit of invariance: ours with a mistake, which the audit must notice
JITTER = 2e-3  # seconds by which an unordered contribution may be late, so that orders really differ


@dataclass(frozen=True)
class Conditions:
    """What must not matter to the bits. Only ours can be told all of them."""

    sm_margin: int = 0
    threads: int | None = None
    workers: int | None = None
    jitter: float = 0.0


Gradients = tuple[Tensor, ...]
Target = Callable[[Conditions], Gradients]


def parse(name: str) -> tuple[str, str]:
    """(kind, rest) of a target's name, checked as far as a name can be."""
    kind, _, rest = name.partition(":")
    if kind in ("ours", "any"):
        check_policy(rest or "auto")
        return kind, rest or "auto"
    if rest:
        return "function", name
    return "peer", peer(name).name


def target_of(name: str, step: SavedStep) -> Target:
    """A call for a step, or an error that says why it cannot run here."""
    kind, rest = parse(name)
    if kind in ("ours", "any"):
        return _ours(step, rest, ordered=kind == "ours")
    if kind == "function":
        module, _, attribute = rest.partition(":")
        run = partial(getattr(import_module(module), attribute), **step.operands._asdict(), **step.keywords)
        return lambda _: tuple(run())
    (call,) = peer(rest).prepare(step.problem(), [step.operands])
    return lambda _: call()


def takes_conditions(name: str) -> bool:
    return name == CONTROL or parse(name)[0] in ("ours", "any")


def _ours(step: SavedStep, policy: str, ordered: bool) -> Target:
    problem, device = step.problem(), step.operands.q.device

    def run(conditions: Conditions) -> Gradients:
        kernel: tuple[tuple[str, object], ...] = ()
        if device.type == "cpu":
            prepared = prepare(problem, policy, Options(), device)
            needed = prepared.backend.co_resident(prepared.plan)
            kernel = (
                ("threads", conditions.threads),
                ("workers", conditions.workers and max(conditions.workers, needed)),
                ("order", "program" if ordered else "any"),
                ("jitter", conditions.jitter if ordered else JITTER),
            )
        return prepare(problem, policy, Options(ordered, conditions.sm_margin, kernel), device).backward(step.operands)

    return run
