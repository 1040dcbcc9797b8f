"""Order: which q tile each chain visits at each step, and in which order each dQ tile is summed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dash_attn.tiling import Tiling

Ints = npt.NDArray[np.int64]
Bundle = tuple[int, ...]  # chains of one panel that one worker runs back to back
Rounds = list[list[Bundle]]
PANELS = HEAD, GROUP = "head", "group"  # behind the name of a policy and '@': what is ordered by itself


@dataclass(frozen=True, eq=False)
class Template:
    """The order of one panel: tasks chain by chain, in visit order.

    Chain n owns tasks first[n]:first[n+1]. Task t visits q tile q[t] of query head head[t] (counted inside the panel).
    Its turn at the dQ tile is turn[t].
    """

    first: Ints
    head: Ints
    q: Ints
    turn: Ints


@dataclass(frozen=True)
class Choice:
    """A policy by name, and the width of its windows (co-resident chains or pairs) if it has windows.

    If `panels` is HEAD, each q head is ordered by itself. Otherwise all q heads of a kv head are ordered together. With
    `auto`, None leaves this choice to `auto`, and GROUP asks for whole groups.
    """

    policy: str
    width: int | None = None
    panels: str | None = None

    @property
    def by_head(self) -> bool:
        return self.panels == HEAD

    def __str__(self) -> str:
        width = "" if self.width is None else f":{self.width}"
        return f"{self.policy}{width}{'' if self.panels is None else f'@{self.panels}'}"


@dataclass(frozen=True, eq=False)
class Order:
    """The order of a whole problem. It fixes every bit of the result and says nothing about workers.

    Panels are numbered over the whole batch, and chain n of panel p has the number p * num_kv + n. Panel p follows
    templates[template_of[p]], and its bundles come in rounds[template_of[p]]. Chains of one round may wait for each
    other. Otherwise chains wait only for chains of earlier rounds. `block_of` numbers blocks of neighbouring panels.
    All panels of a block follow one template.
    """

    tiling: Tiling
    choice: Choice
    templates: tuple[Template, ...]
    rounds: tuple[Rounds, ...]
    template_of: Ints
    block_of: Ints

    @staticmethod
    def of_one(tiling: Tiling, choice: Choice, template: Template, rounds: Rounds) -> Order:
        """All panels follow one template, in one block."""
        same = np.zeros(tiling.panels, np.int64)
        return Order(tiling, choice, (template,), (rounds,), same, same)
