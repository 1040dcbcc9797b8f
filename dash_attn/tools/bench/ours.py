"""Our own backward under every policy, in order or not, as dash_attn.backward and autograd run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from dash_attn.backends import Extras, Operands, Options, backend_for
from dash_attn.order import POLICIES, applicable, parse, resolve
from dash_attn.prepare import Prepared, prepare
from dash_attn.problem import Problem
from dash_attn.tiling import Tiling, tile
from dash_attn.tools.bench.operands import sinks_for
from dash_attn.tools.bench.variants import Call, Variant

USUAL = {
    "full": ("auto", "shift:64", "descending", "spt", "fa3", "search:64"),
    "causal": ("auto", "symmetric_shift:64", "diagonal:64", "spt", "descending", "fa3", "search:64"),
}


@dataclass(frozen=True)
class Way:
    """One of our variants: an order, fields of the kernel's config that differ from the shipped ones, whether the
    order is kept, and the panels that the problem is cut into."""

    order: str
    config: Mapping[str, Any] = field(default_factory=dict)
    ordered: bool = True
    panels: int = 1

    @property
    def name(self) -> str:
        fields = {**self.config, **({"panels": self.panels} if self.panels > 1 else {})}
        words = " ".join([self.order, *(f"{name}={value}" for name, value in fields.items())])
        return words if self.ordered else f"any ({words})"

    def prepared(self, problem: Problem, device: torch.device) -> Prepared:
        kernel = dict(self.config)
        if not self.ordered and device.type == "cpu":
            kernel["order"] = "any"  # the CPU keeps the order even where it need not
        problem = replace(problem, panels=self.panels) if self.panels > 1 else problem
        return prepare(problem, self.order, Options(self.ordered, kernel=tuple(kernel.items())), device)

    def calls(self, problem: Problem, sets: Sequence[Operands]) -> list[Call]:
        device = sets[0].q.device
        run, sinks = self.prepared(problem, device).backward, sinks_for(problem, device)
        if sinks is None:
            return [partial(run, given) for given in sets]
        extras = Extras(sinks, dsinks=torch.empty_like(sinks))  # a training step has the gradient of the sinks too
        return [partial(run, given, None, extras) for given in sets]

    def variant(self) -> Variant:
        return Variant(self.name, self.ordered, self.calls)


@dataclass(frozen=True)
class Ours:
    """Which of our own variants run. Without `policies` the usual ones of each mask do. `configs` are fields of the
    kernel's config to change, a variant for each. With `panels` above 1, `auto` also runs in this number of panels."""

    policies: tuple[str, ...] = ()
    unordered: bool = True
    configs: tuple[Mapping[str, Any], ...] = ({},)
    panels: int = 1

    def orders(self, problem: Problem, device: torch.device) -> list[str]:
        """Policies for a problem: those asked for that apply to its mask, or the usual ones."""
        if problem.is_packed:
            return self._orders_of_pack(problem, device)
        tiling, usual = tiling_of(problem, device), USUAL["causal" if problem.mask.is_causal else "full"]
        barred = POLICIES.keys() - applicable(tiling)
        asked = [order for order in self.policies if parse(order).policy not in barred]
        named = asked or list(usual[:1] if self.policies else usual)
        return list(dict.fromkeys(str(resolve(tiling, order)) for order in named))

    def _orders_of_pack(self, problem: Problem, device: torch.device) -> list[str]:
        """Those asked for, by the names they were given: what `auto` means differs from document to document."""
        distinct = problem.distinct.values()
        tilings = [tiling_of(alone, device) for alone in distinct if alone.len_q and alone.len_k]
        barred = {name for name in POLICIES if any(not POLICIES[name].applies(tiling) for tiling in tilings)}
        asked = [choice for choice in map(parse, self.policies) if choice.policy not in barred]
        if problem.group == 1:  # a group of one q head is ordered in one way only
            asked = [replace(choice, panels=None) for choice in asked]
        return list(dict.fromkeys(map(str, asked))) or ["auto"]

    def ways(self, problem: Problem, device: torch.device) -> list[Way]:
        """One for each order and config."""
        return [Way(order, config) for order in self.orders(problem, device) for config in self.configs]

    def default(self, problem: Problem, device: torch.device) -> Way:
        """The variant that stands for us."""
        return self.ways(problem, device)[0]

    def variants(self, problem: Problem, device: torch.device) -> list[Variant]:
        """A variant for each order and config, and one without order that visits tiles as the first does."""
        ways = self.ways(problem, device)
        if self.panels > 1:
            ways.append(Way("auto", panels=self.panels))  # a panel has an order of its own
        if self.unordered:
            ways.append(replace(ways[0], ordered=False))
        return [way.variant() for way in ways]


def tiling_of(problem: Problem, device: torch.device) -> Tiling:
    """The tiles that the backend of the device cuts it into."""
    return tile(problem, backend_for(device).tile_shape(problem))
