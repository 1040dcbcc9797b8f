"""The Hopper backend where there is no Hopper GPU: what follows from the problem alone is known, the rest is not."""

from __future__ import annotations

import torch

from dash_attn.backends import Backend, backend_for
from dash_attn.backends.sm90.backend import Sm90Backend
from dash_attn.pack import Planned
from dash_attn.problem import Problem
from dash_attn.simulate import H200_SMS

UNKNOWN = "unknown: no Hopper GPU here"


class AbsentSm90(Sm90Backend):
    """Tiles, order and workspace as on a GPU. Which forward is installed there and which GPU it is are unknown."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))

    def forward_provider(self, problem: Problem) -> str:
        return UNKNOWN

    def software(self) -> str:
        return UNKNOWN

    def workers(self, plan: Planned) -> int:
        return H200_SMS


def sm90() -> Backend:
    """The backend of this machine's Hopper GPU, or the absent one."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        return backend_for(torch.device("cuda", torch.cuda.current_device()))
    return AbsentSm90()
