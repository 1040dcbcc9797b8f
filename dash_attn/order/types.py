"""Schedule: who visits which tile when, and in which order each dQ tile is summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dash_attn.tiling import Tiling

Ints = npt.NDArray[np.int64]
PlaceRule = Literal["dealt", "balanced", "faster"]


@dataclass(frozen=True, eq=False)
class Template:
    """The order of one key/value head: tasks chain by chain, in visit order.

    Chain n owns tasks first[n]:first[n+1]; task t visits q tile q[t] of query head head[t] (0-based inside the
    group) and adds its dQ contribution as number turn[t].
    """

    first: Ints
    head: Ints
    q: Ints
    turn: Ints


@dataclass(frozen=True)
class Choice:
    """A policy by name, and the width of its windows (co-resident chains or pairs) where it has windows."""

    policy: str
    width: int | None = None

    def __str__(self) -> str:
        return self.policy if self.width is None else f"{self.policy}:{self.width}"


@dataclass(frozen=True, eq=False)
class Schedule:
    """Order (templates, which fix the bits) and launch sequence (which fixes only the speed).

    Groups are the (batch, kv head) pairs; group g follows templates[template_of[g]]. Chain ids count
    group by group: g * num_kv + n. `launch` holds every chain id once; `bundle_first` cuts it into bundles, chains
    that one worker runs back to back.
    """

    tiling: Tiling
    choice: Choice
    templates: tuple[Template, ...]
    template_of: Ints
    launch: Ints
    bundle_first: Ints
    place: PlaceRule


def every_group(tiling: Tiling, rounds: list[list[tuple[int, ...]]], at_once: int | None = None) -> tuple[Ints, Ints]:
    """Launch the same bundles in every group: round by round, and inside a round group by group.

    Chains of one round may wait for each other, chains of a later round only for earlier rounds. Running a round of
    many groups before the next lets the windows that share the GPU belong to different heads. Many are as many as
    have `at_once` bundles in a round, else all: more would leave the cache between one round and the next.
    """
    groups = tiling.problem.groups
    each = [
        (np.array([chain for bundle in bundles for chain in bundle], np.int64), np.array(list(map(len, bundles))))
        for bundles in rounds
        if bundles
    ]
    fewest = min((len(sizes) for _, sizes in each), default=1)
    many = -(-at_once // fewest) if at_once else max(1, groups)
    launch, cuts = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    for part in np.array_split(np.arange(groups), max(1, groups // many)):
        launch += [(part[:, None] * tiling.num_kv + chains).ravel() for chains, _ in each]
        cuts += [np.tile(sizes, len(part)) for _, sizes in each]
    return np.concatenate(launch), np.cumsum(np.concatenate(cuts))
